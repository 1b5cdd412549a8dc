"""`bass score` refuses files that mix settings, and scores those that only look like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from scored import line, write

from bass_cli.io.prompts import shard_of

ALLOW = "--allow-code-execution"
EVAL = {"task": "humaneval", "n": 2, "seed": 0}

pytestmark = pytest.mark.usefixtures("scored_stand_ins")


def score(path: str, *more: str, **settings: Any) -> Any:
    return cli("score", path, ALLOW, *more, **settings)


def refused(path: str) -> str:
    result = score(path, code=2)
    assert not Path(f"{path}.verdicts.jsonl").exists(), "nothing is run before"
    return result.stderr


def notes(path: str) -> list[str]:
    result = score(path, "--json", code=0)
    return json.loads(result.stdout)["notes"]


def foreign(number: int, **more: Any) -> dict[str, Any]:
    return {"task_id": f"HumanEval/{number}", "completion": "+ 1", **more}


@pytest.mark.parametrize(("rows", "manifest", "message"), [
    # two files of bass, joined
    ([line(0, 0, "+ 1", seed=0), line(0, 1, "+ 1", seed=1)], None,
     'f.jsonl:2: field "seed" is 1, and 0 in line 1, for the same problem "HumanEval/0"; the file mixes settings'),
    ([line(0, 0, "+ 1", seed=0), line(1, 0, "+ 1", seed=7)], None, "f.jsonl:2: the seed is 7, and 0 in line 1"),
    # another prompt format or tokenizer
    ([line(0, 0, "+ 1", prompt_tokens=40), line(0, 1, "+ 1", prompt_tokens=52)], EVAL,
     'field "prompt_tokens" is 52, and 40'),
    # the manifest of another file
    ([line(0, 0, "+ 1", seed=3)], EVAL, "seed 3, and 0 in f.jsonl.manifest.json"),
    ([line(0, 5, "+ 1", seed=0)], EVAL, "sample 5 exists, and n is 2 in f.jsonl.manifest.json"),
    # two tools, and two models of another tool
    ([line(0, 0, "+ 1"), foreign(1)], None, "f.jsonl:2: the line is of another tool, and line 1 is not"),
    ([foreign(0, model="a/b"), foreign(1, model="a/c")], None, 'f.jsonl:2: field "model" is "a/c", and "a/b" in line 1'),
    ([foreign(0, temperature=0.2), foreign(0, temperature=0.8)], None, 'field "temperature" is 0.8, and 0.2 in line 1'),
])  # fmt: skip
def test_mixes_are_refused_by_line_and_field(
    rows: list[Any], manifest: dict[str, Any] | None, message: str
) -> None:
    write("f.jsonl", rows, **({} if manifest is None else {"results": manifest}))
    assert message in refused("f.jsonl")


def test_parts_of_a_job_that_were_joined_by_hand_are_refused() -> None:
    parts = {
        number: [i for i in range(12) if shard_of(str(i), 2).number == number] for number in (1, 2)
    }
    assert all(parts.values())
    rows = [line(i, 0, "+ 1", seed=0) for number in (1, 2) for i in parts[number]]
    write("f.jsonl", rows, results={**EVAL, "n": 1, "shard": "1/2"})
    message = refused("f.jsonl")
    assert f'"{parts[2][0]}" is not in shard 1/2' in message
    assert "join the parts of a job with bass merge" in message
    write("g.jsonl", rows, results={**EVAL, "n": 1})  # as bass merge writes it
    assert notes("g.jsonl") == ["intervals are too narrow with fewer than 100 problems"]


def test_two_manifests_in_one_file_are_refused() -> None:
    write("f.jsonl", [line(0, 0, "+ 1", seed=0)], results=EVAL)
    manifest = Path("f.jsonl.manifest.json")
    manifest.write_text(2 * (manifest.read_text() + "\n"))
    assert "f.jsonl.manifest.json: it holds several manifests" in refused("f.jsonl")


def test_what_only_looks_like_a_mix_is_scored() -> None:
    # prompts with seeds and numbers of samples of their own, which bass generate takes
    rows = [line(0, 0, "+ 1", seed=0), line(1, 0, "+ 1", seed=5), line(1, 1, "+ 1", seed=5)]
    write("f.jsonl", rows, results={"target": "m", "n": 1, "seed": 0})
    assert "the prompts have 2 seeds; bass generate takes one for each prompt" in notes("f.jsonl")
    # another tool numbers seeds by sample
    write(
        "g.jsonl",
        [foreign(0, seed=1), foreign(0, seed=2), foreign(1, seed=1), foreign(1, solution=None)],
    )
    assert not any("seed" in one for one in notes("g.jsonl"))
    # a prompt that failed has one line, and a sample that a budget stopped before its prompt has no tokens of it
    rows = [line(0, 0, "+ 1", prompt_tokens=9), line(0, 1, "", reason="budget", prompt_tokens=0),
            line(1, 0, "", reason="error", prompt_tokens=0)]  # fmt: skip
    write("h.jsonl", rows, results={**EVAL, "budget": 9.0})
    score("h.jsonl", code=0)
    # a group of samples on one line
    group = {
        "id": "0",
        "task_id": "HumanEval/0",
        "seed": 0,
        "samples": [{"text": "+ 1", "finish_reason": "eos"}] * 2,
    }
    write("i.jsonl", [group], results=EVAL)
    score("i.jsonl", code=0)


def test_samples_that_are_no_objects_are_an_error() -> None:
    write("f.jsonl", [foreign(0) | {"samples": [1]}])
    assert 'f.jsonl:1: field "samples": it must be a list of JSON objects' in refused("f.jsonl")


def test_numbers_of_samples_that_differ_have_a_note() -> None:
    write("f.jsonl", [foreign(0), foreign(0), foreign(1)])
    assert "problems have 1 to 2 samples" in notes("f.jsonl")
    write("g.jsonl", [foreign(0), foreign(1)])
    assert not any("samples" in one for one in notes("g.jsonl"))
