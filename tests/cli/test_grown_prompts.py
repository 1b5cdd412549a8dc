"""Test resuming after prompts were added to a file; any other change is refused with its place.

A stand-in replaces the engine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from command_line import cli, rows_in
from stand_in import loaded

from bass_cli.io.prompts import prompts_of
from bass_cli.io.readers import Source
from bass_cli.io.resume import PromptDigest

LINES = [{"prompt": f"p{number}", "level": number} for number in range(5)]


@pytest.fixture
def place(stand_in: Any, tmp_path: Path) -> Path:
    (tmp_path / "pair.yaml").write_text("target: t\ndraft: none\n")
    return tmp_path


def write(name: str, lines: list[dict[str, Any]]) -> None:
    path = Path(name)
    if name.startswith("hf:"):
        import datasets

        folder = name.removeprefix("hf:")
        shutil.rmtree(folder, ignore_errors=True)
        datasets.Dataset.from_list(lines).save_to_disk(folder)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path)
    elif path.suffix == ".txt":
        path.write_text("".join(f"{line['prompt']}\n" for line in lines))
    elif path.suffix == ".json":
        path.write_text(json.dumps(lines))
    else:  # without the last line's end, as some editors leave it
        path.write_text("\n".join(json.dumps(line) for line in lines))


def run(name: str, *flags: str, out: str = "o.jsonl", given: str | None = None) -> Any:
    command = ["generate", name, "--pair", "pair.yaml", "--n", "2", "--out", out, *flags]
    return cli(*command, input=given)


def keys(out: str = "o.jsonl") -> list[tuple[str, int]]:
    rows = rows_in(out)
    return [(row["id"], row["sample"]) for row in rows]


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt", "p.json", "p.parquet", "hf:p"])
def test_added_prompts_are_drawn_and_other_samples_stay(place: Path, name: str) -> None:
    write(name, LINES[:3])
    assert run(name).exit_code == 0
    before = Path("o.jsonl").read_bytes()
    write(name, LINES)
    done = run(name)
    assert (done.exit_code, "prompts grow from 3 to 5" in done.stderr) == (0, True)
    assert Path("o.jsonl").read_bytes().startswith(before)
    assert keys() == [(str(number), sample) for number in range(5) for sample in (0, 1)]
    loaded.clear()
    again = run(name)
    assert (again.exit_code, loaded, "grows" in again.stderr) == (0, [], False)
    run(name, out="w.jsonl")
    assert sorted(Path("w.jsonl").read_text().split("\n")) == sorted(
        Path("o.jsonl").read_text().split("\n")
    )


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            [LINES[0], {"prompt": "other", "level": 1}, *LINES[2:]],
            'number 2 (id "1", p.jsonl:2) has changed',
        ),
        (
            [*LINES[:2], {**LINES[2], "level": 9}, *LINES[3:]],
            'number 3 (id "2", p.jsonl:3) has changed',
        ),
        ([*LINES[:3], LINES[4], LINES[3], LINES[0]], 'number 4 (id "3", p.jsonl:4) has changed'),
        (LINES[:3], "5 before, 3 now; those after number 3 are missing"),
        (LINES[1:], '5 before, 4 now; number 1 (id "0", p.jsonl:1) has changed'),
        ([{**LINES[0], "id": "a"}, *LINES[1:]], 'number 1 (id "a", p.jsonl:1) has changed'),
        ([*LINES[:4], {**LINES[4], "reference": "r"}], 'number 5 (id "4", p.jsonl:5) has changed'),
    ],
)
def test_any_other_change_is_refused_where_it_begins(place: Path, now: Any, message: str) -> None:
    write("p.jsonl", LINES)
    run("p.jsonl")
    before = [Path(name).read_bytes() for name in ("o.jsonl", "o.jsonl.manifest.json")]
    write("p.jsonl", now)
    done = run("p.jsonl")
    assert done.exit_code == 2
    assert "begun with other settings" in done.stderr
    assert message in done.stderr
    assert [Path(name).read_bytes() for name in ("o.jsonl", "o.jsonl.manifest.json")] == before


@pytest.mark.parametrize("name", ["hf:d", "hf:o/n"])
def test_shards_of_datasets_are_merged_in_the_order_of_a_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import datasets

    lines = [{"id": id_, "prompt": id_} for id_ in "agbh"]
    write("hf:d", lines)
    monkeypatch.setattr("bass_cli.io.hub._reach_hub", lambda source, name: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **words: {"train": lines})
    parts = [f"{number}.jsonl" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        assert run(name, "--shard", f"{number}/2", out=part).exit_code == 0
    done = cli("merge", "all.jsonl", *parts, code=0)
    found = [id_ for id_, _ in keys("all.jsonl")]
    assert sorted(found) == sorted([*"agbh"] * 2)
    assert (found == [id_ for id_ in "agbh" for _ in (0, 1)]) == (name == "hf:d")
    reason = "the prompts of a dataset are not read; prompts are ordered part by part"
    assert (reason in done.stderr) == (name == "hf:o/n")
    assert "not here or has changed" not in done.stderr


def test_folders_of_datasets_are_read_before_a_job(place: Path) -> None:
    """So changes and faults are found as in files, not only in the first row."""
    write("hf:d", LINES)
    run("hf:d")
    write("hf:d", [*LINES[:3], {"prompt": "other", "level": 3}])
    done = run("hf:d")
    assert done.exit_code == 2
    assert '5 before, 4 now; number 4 (id "3", hf:d:4) has changed' in done.stderr
    loaded.clear()
    write("hf:d", [*LINES[:3], {"prompt": "", "level": 3}])
    done = run("hf:d", "--overwrite")
    assert (done.exit_code, loaded) == (2, [])
    assert 'hf:d:4: field "prompt": it is empty' in done.stderr


def test_standard_input_may_grow_too(place: Path) -> None:
    run("-", given="a\nb\n")
    assert run("-", given="a\nb\nc\n").exit_code == 0
    assert len(keys()) == 6
    assert run("-", given="a\nx\nc\nd\n").exit_code == 2


def test_prompts_beyond_the_limit_may_change(place: Path) -> None:
    write("p.jsonl", LINES)
    run("p.jsonl", "--limit", "2")
    write("p.jsonl", [*LINES[:2], {"prompt": "other"}])
    done = run("p.jsonl", "--limit", "3")
    assert done.exit_code == 0
    assert "limit grows from 2 to 3" in done.stderr
    assert "prompts grow" not in done.stderr
    assert len(keys()) == 6


def test_maximal_coupling_lets_a_complete_file_grow_only(place: Path) -> None:
    flags = ("--coupling", "maximal", "--batch-size", "2")
    write("p.jsonl", LINES[:3])
    run("p.jsonl", *flags)
    path = Path("o.jsonl.manifest.json")
    manifest = json.loads(path.read_text())
    write("p.jsonl", LINES)
    path.write_text(json.dumps(manifest | {"finished": False}))
    done = run("p.jsonl", *flags)
    assert done.exit_code == 2
    assert "complete it with the prompts that it was begun with first" in done.stderr
    path.write_text(json.dumps(manifest))
    assert run("p.jsonl", *flags).exit_code == 0
    assert len(keys()) == 10


def test_shards_grow_and_are_merged_with_the_prompts_that_they_had(place: Path) -> None:
    write("p.jsonl", LINES[:4])
    for number in (1, 2):
        run("p.jsonl", "--shard", f"{number}/2", out=f"s{number}.jsonl")
    write("p.jsonl", LINES)  # a later addition does not hide what the parts are made of
    merged = cli("merge", "m.jsonl", "s1.jsonl", "s2.jsonl", code=0)
    assert keys("m.jsonl") == [(str(number), sample) for number in range(4) for sample in (0, 1)]
    assert run("p.jsonl", out="m.jsonl").exit_code == 0  # continued like a single run's file
    assert len(keys("m.jsonl")) == 10
    assert run("p.jsonl", "--shard", "1/2", out="s1.jsonl").exit_code == 0
    assert "prompts:" in cli("merge", "x.jsonl", "s1.jsonl", "s2.jsonl", code=2).stderr
    assert run("p.jsonl", "--shard", "2/2", out="s2.jsonl").exit_code == 0
    merged = cli("merge", "x.jsonl", "s1.jsonl", "s2.jsonl")
    assert (merged.exit_code, len(keys("x.jsonl"))) == (0, 10)


def test_prompt_digest_of_many_prompts_is_small_and_finds_changes() -> None:
    def digest(words: list[str]) -> PromptDigest:
        found = PromptDigest(Source("p.jsonl", "jsonl"))
        for prompt in prompts_of(words):
            found.add(prompt)
        return found

    words = [f"word {number}" for number in range(5000)]
    record = json.loads(json.dumps(digest(words).record()))
    assert len(json.dumps(record)) < 5000
    assert digest(words).growth(record) is None
    assert digest([*words, "more"]).growth(record) == "5000"
    words[1234] = "another"
    with pytest.raises(ValueError, match="has changed") as fault:
        digest(words).growth(record)
    first, last = (int(word) for word in str(fault.value).split() if word.isdigit())
    assert first <= 1235 <= last < first + 32
    for broken in ({}, {**record, "count": 0}, {**record, "marks": 3}, None, [1]):
        with pytest.raises(ValueError, match="the manifest's entry cannot be read"):
            digest(words[:3]).growth(broken)


def test_samples_cut_by_a_budget_do_not_fail_a_merge(place: Path) -> None:
    write("p.jsonl", [{"prompt": "SLOW"}, {"prompt": "b"}])
    for number in (1, 2):
        done = run("p.jsonl", "--budget", "9s", "--shard", f"{number}/2", out=f"s{number}.jsonl")
        assert done.exit_code == 0
    merged = cli("merge", "m.jsonl", "s1.jsonl", "s2.jsonl", code=0)
    assert "lines that the budget truncated: 2" in merged.stderr


def test_prompts_may_grow_where_the_manifest_is_damaged(place: Path) -> None:
    """The lines, and attributes of the file if it has any, show that it fits."""
    write("p.jsonl", LINES[:3])
    run("p.jsonl")
    Path("o.jsonl.manifest.json").write_text("")
    write("p.jsonl", LINES)
    done = run("p.jsonl")
    assert done.exit_code == 0, done.stderr
    assert len(keys()) == 10
    if os.listxattr("o.jsonl"):
        Path("o.jsonl.manifest.json").write_text("")
        write("p.jsonl", [{"prompt": "x"}, *LINES[1:]])
        assert "begun with other settings" in run("p.jsonl").stderr
