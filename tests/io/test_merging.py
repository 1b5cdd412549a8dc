"""Test `--shard` and `bass merge` on files of lines: assignment of prompts, merged content, refusals
and missing lines. tests/cli/test_shards.py uses models."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in

from bass_cli.errors import UserError
from bass_cli.io.prompts import Shard, held_by, parse_shard, read_prompts, shard_of
from bass_cli.io.readers import Source
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import PromptDigest

IDS = [f"p{number}" for number in range(12)]
N = 2


@pytest.fixture(autouse=True)
def place(here: Path) -> Path:
    lines = (json.dumps({"id": id_, "prompt": f"the {id_}"}) for id_ in IDS)
    (here / "p.jsonl").write_text("\n".join(lines))
    return here


def sample(id_: str, number: int, **given: Any) -> Completion:
    words = {"id": id_, "sample": number, "text": f"of {id_}", "finish_reason": "eos", "tokens": 5}
    zeros = {"rounds": 3, "drafted": 4, "accepted": 2, "seed": 0, "prompt_tokens": 2}
    none = {"mean_logprob": None, "sum_logprob": None, "seconds": 0.5}
    return Completion(**{**words, **zeros, **none, **given})  # type: ignore[arg-type]


def manifest(shard: str | None, **given: Any) -> dict[str, Any]:
    source = Source("p.jsonl", "jsonl")
    digest = PromptDigest(source)
    for prompt in read_prompts(source):
        digest.add(prompt)
    results = {"target": "m", "prompts": digest.record(), "limit": None}
    results |= {"prompt_column": "prompt", "n": N, "seed": 0, **given}
    return {"results": results | ({} if shard is None else {"shard": shard}), "source": "p.jsonl"}


def write(
    name: str, shard: str | None, lines: list[Completion] | None = None, **given: Any
) -> list[Completion]:
    """Write a part as a run leaves it, with samples in the order they ended; return its lines."""
    ids = [id_ for id_ in IDS if shard is None or parse_shard(shard).holds(id_)]
    expected = [sample(id_, number) for number in range(N) for id_ in reversed(ids)]
    with open_output(name, manifest(shard, **given), overwrite=True) as writer:
        for one in expected if lines is None else lines:
            writer.write(one)
        writer.add_run(1.5, {})
    return expected if lines is None else lines


def three() -> list[str]:
    """Write the three parts of a job; return the names of their files."""
    for number in (1, 2, 3):
        write(f"{number}.jsonl", f"{number}/3")
    return ["1.jsonl", "2.jsonl", "3.jsonl"]


def merge(*arguments: str, code: int = 0) -> str:
    found = cli("merge", *arguments, catch_exceptions=False)
    assert (found.exit_code, found.stdout) == (code, ""), found.stderr
    return " ".join(found.stderr.split())


def test_every_prompt_is_in_one_shard_and_stays_there() -> None:
    ids = [f"{number}" for number in range(4000)]
    parts = [[id_ for id_ in ids if Shard(number, 8).holds(id_)] for number in range(1, 9)]
    assert sorted(id_ for part in parts for id_ in part) == sorted(ids)
    assert all(400 < len(part) < 600 for part in parts)  # 500, four standard deviations are 84
    # written down, since a job's parts are drawn by processes of different days and machines
    found = [str(shard_of(id_, 8)) for id_ in ("0", "HumanEval/7", "ü", "half \ud800")]
    assert found == ["6/8", "3/8", "8/8", "8/8"]


def test_without_a_shard_all_prompts_are_drawn() -> None:
    prompts = [sample(id_, 0) for id_ in IDS]
    assert list(held_by(None, prompts)) == prompts
    counts = Counter(one.id for k in (1, 2, 3) for one in held_by(Shard(k, 3), prompts))
    assert counts == Counter(IDS)


@pytest.mark.parametrize("text", ["9/8", "0/8", "-1/8", "2/0", "2", "2/8/3", "half", "", "1.5/2"])
def test_invalid_shard_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r'`shard`: ".*" is not a part of a job; .* 1/8 to 8/8'):
        parse_shard(text)
    assert parse_shard(" 8 / 8 ") == (8, 8)


def test_merged_file_equals_single_run() -> None:
    merge("all.jsonl", *reversed(three()))
    write("single.jsonl", None)
    rows = Path("all.jsonl").read_text().splitlines()
    assert sorted(rows) == sorted(Path("single.jsonl").read_text().splitlines())
    order = [(row["id"], row["sample"]) for row in map(json.loads, rows)]
    assert order == [(id_, number) for id_ in IDS for number in range(N)], (
        "as the prompt file has it"
    )
    merged, single = (
        json.loads(Path(f"{name}.jsonl.manifest.json").read_text()) for name in ("all", "single")
    )
    assert merged.pop("totals") == single.pop("totals") | {"seconds": 4.5}
    dates = ("begun", "written")
    del single["last_run"]
    assert merged | dict.fromkeys(dates) == single | dict.fromkeys(dates)
    # and it can be continued as that run: nothing is missing
    with open_output("all.jsonl", manifest(None), resume=True) as writer:
        assert len(writer.done) == len(IDS) * N


@pytest.mark.parametrize("numbered", [True, False])
def test_without_the_prompt_file_order_is_by_number_or_part(
    place: Path, monkeypatch: pytest.MonkeyPatch, numbered: bool
) -> None:
    if not numbered:
        monkeypatch.setitem(globals(), "IDS", [f"{id_}x" for id_ in IDS])
    names, lines = three(), write("1.jsonl", "1/3")
    write("one less.jsonl", "1/3", lines[1:])
    (place / "p.jsonl").write_text('{"prompt": "another one"}')
    message = merge("all.jsonl", *reversed(names))
    assert "prompt file is not here or has changed" in message
    assert ("by the numbers in their ids" in message) == numbered
    rows = rows_in("all.jsonl")
    found = [row["id"] for row in rows]
    if numbered:  # 2 before 10
        assert found == [id_ for id_ in IDS for _ in range(N)]
    else:
        shards = [shard_of(id_, 3).number for id_ in found]
        assert shards == sorted(shard_of(id_, 3).number for id_ in IDS for _ in range(N))
    # a shard, and a sample of a prompt that has another, are missed all the same
    message = merge("all.jsonl", "one less.jsonl", "3.jsonl", "--overwrite", code=1)
    assert "missing: shard 2/3" in message
    assert f'missing: 1 samples of 1 prompts: "{lines[0].id}" (0)' in message


def test_merged_manifest_has_the_dates_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (2, 1, 3):
        monkeypatch.setattr("bass_cli.io.results.now", lambda number=number: f"day {number}")
        write(f"part-{number}.jsonl", f"{number}/3")
    monkeypatch.setattr("bass_cli.io.results.now", lambda: "day 9")
    parts = [f"part-{number}.jsonl" for number in (1, 2, 3)]
    merge("out.jsonl", *parts)
    merged = json.loads(Path("out.jsonl.manifest.json").read_text())
    assert (merged["begun"], merged["written"]) == ("day 1", "day 3")
    old = Path("part-2.jsonl.manifest.json")
    known = json.loads(old.read_text())
    old.write_text(json.dumps({key: value for key, value in known.items() if key != "begun"}))
    merge("again.jsonl", *parts)
    merged = json.loads(Path("again.jsonl.manifest.json").read_text())
    assert (merged["begun"], merged["written"]) == (None, "day 3")


def test_missing_lines_are_named_and_can_be_drawn(place: Path) -> None:
    names = three()
    mine = [id_ for id_ in IDS if Shard(2, 3).holds(id_)]
    kept = [sample(id_, 1) for id_ in mine[1:]]
    write("2.jsonl", "2/3", kept)
    with (place / "2.jsonl").open("a") as file:
        file.write('{"id": "torn')
    message = merge("all.jsonl", *names, code=1)
    assert "2.jsonl: leaving out 12 bytes of torn lines" in message
    assert f"missing: {len(mine) + 1} samples of {len(mine)} prompts: " in message
    assert f'"{mine[0]}" (0, 1), "{mine[1]}" (0)' in message
    with open_output("all.jsonl", manifest(None), resume=True) as writer:
        assert {(id_, s) for id_ in IDS for s in range(N)} - writer.done == {
            (mine[0], 1), *((id_, 0) for id_ in mine)}  # fmt: skip
    message = merge("all.jsonl", "1.jsonl", "--overwrite", code=1)
    assert "missing: shards 2/3, 3/3" in message
    assert "samples" not in message.replace("samples of", "", 1).partition("all.jsonl")[0]


def test_merge_of_a_killed_part_is_unfinished(place: Path) -> None:
    """This holds without the prompt file, too: prompts without any line are then unknown."""

    def finished() -> bool:
        found: bool = json.loads(Path("all.jsonl.manifest.json").read_text())["finished"]
        return found

    names = three()
    merge("all.jsonl", *names)
    assert finished()
    lines = write("2.jsonl", "2/3")
    killed = open_output("2.jsonl", manifest("2/3"), overwrite=True)
    for line in lines:
        if line.id != lines[0].id:
            killed.write(line)
    killed.close(finished=False)
    assert "missing: 2 samples of 1 prompts" in merge("all.jsonl", *names, "--overwrite", code=1)
    assert not finished()
    (place / "p.jsonl").unlink()
    message = merge("all.jsonl", *names, "--overwrite", code=1)
    assert "2.jsonl: the run that wrote it did not finish" in message
    assert "missing" not in message
    assert not finished()


def test_shard_without_prompts_may_be_left_out() -> None:
    of = next(of for of in range(2, 99) if len({shard_of(id_, of) for id_ in IDS}) < of)
    held = sorted({shard_of(id_, of) for id_ in IDS})
    for shard in held:
        write(f"{shard.number}.jsonl", str(shard))
    assert "missing" not in merge("all.jsonl", *(f"{shard.number}.jsonl" for shard in held))


def test_merge_copies_failures_and_exits_with_1() -> None:
    names = three()
    lines = write("1.jsonl", "1/3")
    failed = Completion.failed(lines[0].id, "too long", seed=0, meta={})
    write("1.jsonl", "1/3", [failed, *(one for one in lines if one.id != failed.id)])
    message = merge("all.jsonl", *names, code=1)
    assert "missing" not in message
    assert "lines with an error: 1" in message
    assert Path("all.jsonl").read_text().count("too long") == 1


def test_parts_of_different_jobs_are_refused_with_differences(place: Path) -> None:
    names = three()
    write("2.jsonl", "2/3", seed=7, temperature=0.5)
    message = merge("all.jsonl", *names, code=2)
    assert "2.jsonl: it is part of another job than 1.jsonl" in message
    assert "seed: 0 in " in message
    assert "temperature: not given in 1.jsonl, 0.5 here" in message
    write("2.jsonl", "2/4")
    assert 'shard: "one of 3" in 1.jsonl, "one of 4" here' in merge("all.jsonl", *names, code=2)
    write("2.jsonl", None)
    assert "2.jsonl: it is not a part of a job" in merge("all.jsonl", *names, code=2)
    write("2.jsonl", "1/3")
    assert "2.jsonl: 1.jsonl is also shard 1/3" in merge("all.jsonl", *names, code=2)
    Path("2.jsonl.manifest.json").write_text("{}")
    assert "2.jsonl.manifest.json: the manifest cannot be read" in merge(
        "all.jsonl", *names, code=2
    )
    assert "9.jsonl: this part is missing" in merge("all.jsonl", "9.jsonl", code=2)
    Path("2.jsonl.manifest.json").unlink()
    assert "2.jsonl.manifest.json: this manifest is missing" in merge("all.jsonl", *names, code=2)
    assert not Path("all.jsonl").exists()


def test_foreign_and_duplicate_lines_are_refused() -> None:
    names = three()
    lines = write("2.jsonl", "2/3")
    write("2.jsonl", "2/3", [*lines, lines[0]])
    message = merge("all.jsonl", *names, code=2)
    assert f'2.jsonl:{len(lines) + 1}: sample 0 of "{lines[0].id}" occurs twice' in message
    other = next(id_ for id_ in IDS if Shard(1, 3).holds(id_))
    write("2.jsonl", "2/3", [sample(other, 0)])
    assert f'2.jsonl:1: "{other}" belongs to shard 1/3, not to 2/3' in merge(
        "all.jsonl", *names, code=2
    )
    unknown = next(f"q{k}" for k in range(99) if Shard(2, 3).holds(f"q{k}"))
    write("2.jsonl", "2/3", [*lines, sample(unknown, 0)])
    assert f'2.jsonl: there is no prompt "{unknown}"' in merge("all.jsonl", *names, code=2)


def test_merge_never_replaces_other_files(place: Path) -> None:
    names = three()
    (place / "all.jsonl").write_text("something else\n")
    assert "all.jsonl: it exists; use --overwrite" in merge("all.jsonl", *names, code=2)
    assert (place / "all.jsonl").read_text() == "something else\n"
    merge("all.jsonl", *names, "--overwrite")
    assert "this is a part" in merge("2.jsonl", *names, "--overwrite", code=2)
    assert "name a file" in merge("-", *names, code=2)
    with (place / "2.jsonl").open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "2.jsonl: another process is writing" in merge("new.jsonl", *names, code=2)
