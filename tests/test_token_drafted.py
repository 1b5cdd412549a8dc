"""`token_drafted` in result lines, against the accepted drafts that each round reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in
from pydantic import ValidationError

from bass_cli import Completion, Job, Pair, Sampling, Speculation, generate
from bass_cli.engine.loop import Loop
from bass_cli.io.resume import fault_of_line

PROMPTS = [{"id": "a", "prompt": "the cat"}, {"id": "b", "prompt": "a dog sat on the"}]
FLAGS = ["--device", "cpu", "--n", "3", "--max-new-tokens", "8", "--draft-length", "4", "--quiet"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return drafts by name: none, lookup, the target itself, and a model that seldom agrees."""
    found = {"none": "none", "lookup": "lookup"}
    for seed, name in enumerate(("itself", "other")):
        folder = tmp_path_factory.mktemp(name)
        write_checkpoint("llama", folder, seed=seed)
        write_tokenizer(folder)
        found[name] = str(folder)
    return found


def job(
    folders: dict[str, str], draft: str, n: int = 1, batch: Any = "auto", **sampling: Any
) -> Job:
    given = {"seed": 3, "max_new_tokens": 30, "temperature": 0.4, "top_p": 1.0} | sampling
    return Job(
        pair=Pair(name="tiny", target=folders["itself"], draft=folders[draft]),
        n=n,
        device="cpu",
        batch_size=batch,
        token_ids=True,
        token_drafted=True,
        sampling=Sampling(**given),
        speculation=Speculation(length=0 if draft == "none" else 4),
    )


def counted(one: Completion) -> None:
    """Compare the numbers of zeros and ones with the counts of the line."""
    assert one.token_drafted is not None
    assert one.token_ids is not None
    assert len(one.token_drafted) == len(one.token_ids) == one.tokens
    assert sum(one.token_drafted) == one.accepted
    # each round ends with a token of the target, unless the sample ended within its drafts
    ended_within = one.token_drafted[-1]
    assert one.token_drafted.count(0) == one.rounds - ended_within


@pytest.mark.parametrize("draft", ["none", "lookup", "itself", "other"])
@pytest.mark.parametrize("stop", [(), ("e",)])
def test_marks_of_one_sample_follow_from_its_rounds(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, draft: str, stop: tuple[str, ...]
) -> None:
    """A round appends its accepted drafts and a token of the target; the end cuts the last one."""
    rounds, whole = list[int](), Loop.round

    def recording(loop: Loop, *args: Any, **words: Any) -> Any:
        done = whole(loop, *args, **words)
        rounds.extend(done.accepted)
        return done

    monkeypatch.setattr(Loop, "round", recording)
    (one,) = generate(PROMPTS[:1], job(folders, draft, stop=stop, temperature=0.1))
    pattern = [mark for accepted in rounds for mark in (*[1] * accepted, 0)]
    assert one.token_drafted == pattern[: one.tokens]
    assert len(pattern) - one.tokens <= 4
    if draft in ("none", "itself"):
        assert (1 in one.token_drafted) == (draft == "itself")
    counted(one)


@pytest.mark.parametrize("draft", ["lookup", "itself", "other"])
def test_marks_of_many_samples_agree_with_their_counts(folders: dict[str, str], draft: str) -> None:
    """Rows are fewer than samples, so rows move to other places and are used again."""
    lines = [one | {"max_new_tokens": 9 + 8 * at} for at, one in enumerate(PROMPTS)]
    found = list(generate(lines, job(folders, draft, n=6, batch=4, temperature=0.9)))
    assert len(found) == 12
    for one in found:
        counted(one)
    assert any(one.accepted for one in found)
    plain = {
        (one.id, one.sample): one
        for one in generate(lines, job(folders, "none", n=6, temperature=0.9))
    }
    for one in found:
        assert one.token_ids == plain[one.id, one.sample].token_ids
        assert plain[one.id, one.sample].token_drafted == [0] * one.tokens


def test_copies_at_temperature_0_have_zeros(folders: dict[str, str]) -> None:
    first, copy = generate(PROMPTS[:1], job(folders, "itself", n=2, temperature=0))
    assert copy.copy_of == 0
    assert first.token_drafted is not None
    assert sum(first.token_drafted) == first.accepted > 0
    assert copy.token_ids == first.token_ids
    assert copy.token_drafted == [0] * copy.tokens
    assert copy.accepted == 0


def test_the_option_needs_token_ids_and_writes_nothing_without_it(folders: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="`token_drafted` needs the tokens"):
        Job(pair=Pair(name="tiny", target=folders["itself"]), token_drafted=True)
    usual = job(folders, "itself").model_copy(update={"token_drafted": False})
    (one,) = generate(PROMPTS[:1], usual)
    assert one.token_drafted is None
    assert "token_drafted" not in one.row()


def run(*args: str, **settings: Any) -> Any:
    return cli("generate", *args, **settings)


def test_command_resumes_and_refuses_other_lines(folders: dict[str, str], tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "s.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    models = ["--model", folders["itself"], "--draft", folders["itself"]]
    args = [str(prompts), *models, *FLAGS, "--logprobs", "--out", str(out)]
    run(*args, "--token-drafted", code=0)
    whole = out.read_text().splitlines()
    keys = ["token_ids", "token_logprobs", "token_drafted"]
    assert [list(json.loads(line))[-3:] for line in whole] == [keys] * 6
    out.write_text("".join(f"{line}\n" for line in whole[:2]) + whole[2][:40])
    run(*args, "--token-drafted", code=0)
    for line in rows_in(out):
        counted(Completion(**line))
    assert "token_drafted: true before, not given now" in run(*args, code=2).output


def test_a_file_without_manifest_is_continued_only_with_the_same_option() -> None:
    line = Completion("a", 0, "x", "eos", 1, -1.0, -1.0, 0.1, 1, 0, 0, 3, 2, token_ids=[5]).row()
    same = {"seed": 3, "token_ids": True}
    assert fault_of_line(line, same, {"a": {}}) is None
    marked = line | {"token_drafted": [0]}
    assert fault_of_line(marked, same | {"token_drafted": True}, {"a": {}}) is None
    fault = fault_of_line(marked, same, {"a": {}})
    assert fault == "token_drafted: with before, without now"
    fault = fault_of_line(line, same | {"token_drafted": True}, {"a": {}})
    assert fault == "token_drafted: without before, with now"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_other_layouts_have_the_same_marks(
    folders: dict[str, str], tmp_path: Path, suffix: str
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / f"s.{suffix}"
    prompts.write_text(json.dumps(PROMPTS[0]) + "\n")
    models = ["--model", folders["itself"], "--draft", "lookup", "--token-ids", "--token-drafted"]
    args = [str(prompts), *models, *FLAGS, "--group", "--columns", "tokens,accepted,token_drafted"]
    run(*args, "--out", str(out), code=0)
    if suffix == "parquet":
        import pyarrow.parquet

        (row,) = pyarrow.parquet.read_table(out).to_pylist()
    else:
        (row,) = rows_in(out)
    assert len(row["samples"]) == 3
    for one in row["samples"]:
        assert len(one["token_drafted"]) == one["tokens"]
        assert sum(one["token_drafted"]) == one["accepted"]


def test_tables_of_ray_have_the_marks(folders: dict[str, str]) -> None:
    import pyarrow

    import bass_cli.ray

    drawer = bass_cli.ray.Drawer(job(folders, "itself", n=2))
    table = drawer(pyarrow.table({"id": ["a"], "prompt": ["the cat"]}))
    assert table.schema.field("token_drafted").type == pyarrow.list_(pyarrow.int64())
    rows = table.select(["token_drafted", "tokens", "accepted"]).to_pylist()
    assert len(rows) == 2
    for row in rows:
        assert len(row["token_drafted"]) == row["tokens"]
        assert sum(row["token_drafted"]) == row["accepted"] > 0
