"""`bass rank`: ranks and scores in lines of all formats and layouts, in place or in another file."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in

from bass_cli.io.linefile import write_lines
from bass_cli.io.resume import check_manifest, read_manifest

pytestmark = pytest.mark.usefixtures("here")
MANIFEST = {
    "results": {"n": 3, "seed": 0},
    "finished": True,
    "totals": {"samples": 7, "seconds": 2.0},
}


def sample(id_: str, number: int, text: str, logprob: float | None, **more: Any) -> dict[str, Any]:
    row = {"id": id_, "sample": number, "text": text, "finish_reason": "eos", "tokens": 4,
           "mean_logprob": logprob, "rounds": 2, "drafted": 6, "accepted": 2}  # fmt: skip
    return row | {"prompt_tokens": 5} | more


def rows() -> list[dict[str, Any]]:
    """Lines of three prompts, mixed. Prompt a: 7 has two votes. Prompt b: sample 1 is cut.

    Prompt c could not be run.
    """
    return [
        sample("a", 1, "#### 7.0", -0.9),
        sample("b", 0, "x", -0.5),
        sample("a", 0, "#### 8", -0.1),
        sample("a", 2, "so #### 7", -0.8),
        sample("b", 1, "x", -0.1, finish_reason="budget"),
        sample("b", 2, "y", -0.2),
        sample("c", 0, "", None, finish_reason="error", prompt_tokens=0, error="too long"),
    ]


STANDINGS = {("a", 2): 1, ("a", 1): 2, ("a", 0): 3, ("b", 2): 1, ("b", 0): 2, ("b", 1): 3}


def save(name: str, found: list[dict[str, Any]], manifest: dict[str, Any] | None = MANIFEST) -> str:
    write_lines(name, [json.dumps(row).encode() + b"\n" for row in found])
    if manifest is not None:
        Path(f"{name}.manifest.json").write_text(json.dumps(manifest))
    return name


def bass(*arguments: str, fails: bool = False) -> Any:
    result = cli("rank", *arguments, code=2 if fails else 0)
    return " ".join(result.stderr.split())


def ranks(found: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    return {(row["id"], row["sample"]): row["rank"] for row in found if "rank" in row}


@pytest.mark.parametrize("name", ["f.jsonl", "f.jsonl.gz", "f.jsonl.zst", "f.parquet"])
def test_ranks_are_written_in_place_in_every_format(name: str) -> None:
    save(name, rows())
    said = bass(name, "--by", "majority,logprob")
    found = rows_in(name)
    assert ranks(found) == STANDINGS
    assert [
        {key: value for key, value in row.items() if key not in ("rank", "scores")} for row in found
    ] == rows()
    assert found[0]["scores"] == {"majority": 2 / 3, "logprob": -0.9}
    assert found[4]["scores"] == {"majority": None, "logprob": None}
    assert "ranked 6 samples of 2 prompts by majority; 6 kept, 0 dropped" in said


def test_only_the_best_are_kept_in_another_file() -> None:
    save("f.jsonl", rows())
    before = Path("f.jsonl").read_bytes()
    bass("f.jsonl", "--by", "majority", "--best", "1", "--out", "best.parquet")
    assert Path("f.jsonl").read_bytes() == before
    found = rows_in("best.parquet")
    assert [(row["id"], row["sample"]) for row in found] == [("a", 2), ("b", 2), ("c", 0)]
    assert found[2]["error"] == "too long"
    manifest = read_manifest("best.parquet")
    assert manifest["results"] == {"n": 3, "seed": 0, "best_of": 1, "rank_by": "majority"}
    assert manifest["totals"]["samples"] == 3
    assert manifest["totals"]["dropped"] == 4
    assert manifest["totals"]["seconds"] is None  # those of the run are of all samples
    assert manifest["ranked"]["by"] == {"majority": None}


def test_kept_file_is_not_continued_by_a_run_without_best_of() -> None:
    save("f.jsonl", rows())
    bass("f.jsonl", "--best", "2")
    with pytest.raises(Exception, match="best_of: 2 before, not given now"):
        check_manifest("f.jsonl", {"n": 3, "seed": 0})


@pytest.mark.parametrize("numbered", [True, False])
def test_lines_of_prompts_are_ranked_inside(numbered: bool) -> None:
    grouped = []
    for id_ in ("a", "b"):
        found = sorted((row for row in rows() if row["id"] == id_), key=lambda row: row["sample"])
        samples = [
            {key: value for key, value in row.items() if key not in ("id", "prompt_tokens")}
            for row in found
        ]
        if not numbered:
            for one in samples:
                del one["sample"]
        grouped.append({"id": id_, "prompt_tokens": 5, "samples": samples})
    grouped.append({"id": "c", "samples": [], "error": "too long"})
    save("f.jsonl", grouped)
    bass("f.jsonl", "--by", "majority", "--best", "2")
    a, b, c = rows_in("f.jsonl")
    assert [(one["sample"], one["rank"]) for one in a["samples"]] == [(1, 2), (2, 1)]
    assert [(one["sample"], one["rank"]) for one in b["samples"]] == [(0, 2), (2, 1)]
    assert c == grouped[2]


def test_lines_of_other_tools_need_no_manifest() -> None:
    found = [
        {"task_id": "HumanEval/0", "completion": f"    return {text}\n"}
        for text in ("missing", "sorted(numbers)[0]", "1 +")
    ]
    save("f.jsonl", found, None)
    bass("f.jsonl", "--task", "humaneval", "--by", "static")
    assert [row["rank"] for row in rows_in("f.jsonl")] == [2, 1, 3]
    assert [row["scores"]["static"] for row in rows_in("f.jsonl")] == [3, 4, 1]
    assert not Path("f.jsonl.manifest.json").exists()


def test_code_of_no_task_continues_its_prompt() -> None:
    prompts = [{"id": "a", "prompt": "import os\ndef f(x):\n"}]
    Path("p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    texts = ["    return os.sep + y\n", "    return os.sep\n", "```python\ndef f(x): return 1\n```"]
    found = [sample("a", at, text, -0.1 * at) for at, text in enumerate(texts)]
    save("f.jsonl", found)
    bass("f.jsonl", "--by", "static", "--prompts", "p.jsonl")
    assert ranks(rows_in("f.jsonl")) == {("a", 1): 1, ("a", 2): 2, ("a", 0): 3}
    save("g.jsonl", [row | {"prompt": prompts[0]["prompt"]} for row in found])
    bass("g.jsonl", "--by", "static")
    assert ranks(rows_in("g.jsonl")) == ranks(rows_in("f.jsonl"))


def test_an_expression_that_backtracks_ends_after_its_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bass_cli.eval.ranking._PATIENCE", 0.1)
    save("f.jsonl", [sample("a", 0, "a" * 80 + "b", -0.1)])
    before = Path("f.jsonl").read_bytes()
    said = bass("f.jsonl", "--by", "majority", "--answer", "(a|aa)+$", fails=True)
    assert "f.jsonl:1: --answer: the regular expression takes more than 0.1 s" in said
    assert Path("f.jsonl").read_bytes() == before


def test_samples_without_a_score_are_counted() -> None:
    save(
        "f.jsonl", [sample("a", 0, "x", None), sample("a", 1, "x", -0.5), sample("b", 0, "y", None)]
    )
    said = bass("f.jsonl", "--by", "logprob,majority")
    assert "2 of 3 finished samples have no score by logprob; they come after those" in said
    assert "no score by majority" not in said


def test_answers_are_those_of_the_expression() -> None:
    texts = ["Answer: 4 (not 5)", "Answer: 5 5", "Answer: 5.0 4", "Answer: none"]
    save("f.jsonl", [sample("a", at, text, None) for at, text in enumerate(texts)])
    bass("f.jsonl", "--by", "majority", "--answer", r"Answer: ([\d.]+)")
    assert [row["scores"]["majority"] for row in rows_in("f.jsonl")] == [0.25, 0.5, 0.5, 0.0]


def test_earlier_scores_stay_beside_new_ones() -> None:
    save("f.jsonl", rows())
    bass("f.jsonl", "--by", "majority")
    bass("f.jsonl", "--by", "logprob")
    assert rows_in("f.jsonl")[0]["scores"] == {"majority": 2 / 3, "logprob": -0.9}
    assert ranks(rows_in("f.jsonl"))["a", 0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--by", "statik"], 'there is no ranker "statik"; did you mean "static"'),
        (["--best", "0"], "--best (or BASS_BEST): a whole number from 1 on is needed"),
        (["--out", "f.csv"], "nothing is written as .csv"),
        (["--out", "taken.jsonl"], "taken.jsonl: it exists; use --overwrite"),
        (["--answer", "("], "--answer (or BASS_ANSWER): this is not a regular expression"),
        (["--data", "x.jsonl"], "--data needs --task"),
        (["--task", "humanevil", "--by", "static"], 'there is no task "humanevil"'),
        (["--task", "humaneval", "--by", "static"], 'field "task_id"'),
        (["--prompts", "p.jsonl", "--by", "static"], 'there is no prompt "a", which f.jsonl has'),
        (["--out", "-"], "name a file"),
    ],
)
def test_wrong_options_are_refused_and_change_nothing(arguments: list[str], said: str) -> None:
    save("f.jsonl", rows())
    save("taken.jsonl", rows())
    Path("p.jsonl").write_text('{"id": "z", "prompt": "x"}\n')
    before = Path("f.jsonl").read_bytes()
    assert said in bass("f.jsonl", *arguments, fails=True)
    assert Path("f.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"id": "a", "sample": 0}], 'f.jsonl:1: field "text": it is missing'),
        ([{"text": "x"}], 'f.jsonl:1: field "id" (or "task_id")'),
        ([{"id": "a", "sample": "x", "text": ""}], 'f.jsonl:1: field "sample"'),
        ([sample("a", 0, "x", 0), sample("a", 0, "y", 0)], "f.jsonl:2: sample 0"),
        ([], "the file has no samples"),
    ],
)
def test_wrong_lines_are_refused_with_their_place(lines: list[dict[str, Any]], said: str) -> None:
    save("f.jsonl", lines)
    assert said in bass("f.jsonl", fails=True)


def test_file_that_a_run_writes_is_refused() -> None:
    save("f.jsonl", rows())
    with open("f.jsonl", "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "another process is using this file" in bass("f.jsonl", fails=True)
    save("f.parquet", rows())
    write_lines("f.parquet.jsonl.zst", [b"{}\n"])
    assert "the run has not ended" in bass("f.parquet", fails=True)


def test_failed_write_leaves_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    save("f.jsonl", rows())
    before = Path("f.jsonl").read_bytes()

    def full(path: str, write: Callable[..., Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bass_cli.io.linefile.replace_file", full)
    cli("rank", "f.jsonl", code=3)
    assert Path("f.jsonl").read_bytes() == before


def test_counts_are_printed_as_json() -> None:
    save("f.jsonl", rows())
    result = cli("rank", "f.jsonl", "--best", "1", "--json")
    counts = {"prompts": 2, "samples": 6, "kept": 2, "dropped": 4, "by": ["logprob"]}
    assert json.loads(result.stdout) == counts
