"""`bass compare`: paired differences against a calculation by hand, and refusals."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from scored import Sandbox, line, write

ALLOW = "--allow-code-execution"
N = 4
MANIFEST = {
    "task": "humaneval", "target": "m", "n": N, "temperature": 0.2, "seed": 0, "prompt_format": "raw", "prompts": "d1",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("scored_stand_ins")


def compare(*arguments: str, **settings: Any) -> Any:
    return cli("compare", *arguments, ALLOW, **settings)


def compared(*arguments: str) -> dict[str, Any]:
    result = compare(*arguments, "--json", code=0)
    return json.loads(result.stdout)


def run(
    path: str,
    passed: list[int],
    *,
    likely: list[bool] | None = None,
    slow: float = 1.0,
    **results: Any,
) -> str:
    """Write N samples of each problem, of which `passed` pass. `likely`: whether the likeliest does."""
    rows = []
    for i, count in enumerate(passed):
        first = count > 0 if likely is None else likely[i]
        order = [first, *[True] * (count - first), *[False] * (N - count - (not first))]
        rows += [
            line(
                i,
                s,
                "+ 1" if right else "+ 2",
                mean_logprob=-1.0 - s,
                seconds=slow * (i + 1 + s),
                seed=results.get("seed", 0),
            )
            for s, right in enumerate(order)
        ]
    return write(path, rows, results=MANIFEST | results)


A, B = [4, 3, 2, 0, 1, 4], [4, 1, 3, 0, 1, 2]


def test_differences_are_paired_by_problem() -> None:
    run("a.jsonl", A, likely=[True, True, False, False, True, True])
    run("b.jsonl", B, likely=[True, False, True, False, True, False], slow=2.0)
    found = compared("a.jsonl", "b.jsonl", "--k", "1,2")
    gaps = [(a - b) / N for a, b in zip(A, B, strict=True)]
    one = found["figures"]["pass@1"]
    assert (one["a"], one["b"]) == (pytest.approx(sum(A) / 24), pytest.approx(sum(B) / 24))
    assert one["difference"]["value"] == pytest.approx(sum(gaps) / 6)
    error = statistics.stdev(gaps) / 6**0.5
    assert one["difference"]["standard_error"] == pytest.approx(error)
    assert one["difference"]["interval"] == pytest.approx(
        [sum(gaps) / 6 - 1.959964 * error, sum(gaps) / 6 + 1.959964 * error]
    )
    assert (one["a_better"], one["b_better"], one["equal"]) == (2, 1, 3)
    first = found["figures"]["pass_first"]
    assert first["difference"]["method"] == "bootstrap"
    assert first["difference"]["value"] == pytest.approx((2 - 1) / 6)
    # differences 1, 1, -1, 0, 0, 0: the bootstrap's error is their population deviation over sqrt(6)
    assert first["difference"]["standard_error"] == pytest.approx(
        statistics.pstdev([1, 1, -1, 0, 0, 0]) / 6**0.5, rel=0.03
    )
    assert [first[key] for key in ("a_better", "b_better", "equal", "both", "neither")] == [
        2,
        1,
        3,
        2,
        1,
    ]
    every = found["figures"]["pass_all"]
    assert [every[key] for key in ("a_better", "b_better", "both", "neither")] == [0, 0, 5, 1]
    time = found["figures"]["seconds_to_last"]
    assert (time["a"], time["b"], time["a_better"]) == (6.5, 13.0, 6), "less time is better"
    assert time["difference"]["value"] == -6.5


def test_problems_that_differ_are_listed_with_the_largest_first() -> None:
    run("a.jsonl", A)
    run("b.jsonl", B)
    found = compared("a.jsonl", "b.jsonl", "--k", "1")
    assert [one["task_id"][-1] for one in found["differing"]] == ["1", "5", "2"]
    assert found["differing"][0]["passed"] == [3, 1]
    assert found["differing"][0]["figures"]["pass@1"] == [0.75, 0.25]
    shown = compare("a.jsonl", "b.jsonl", "--k", "1").stdout
    assert "3 of 4" in shown
    assert "HumanEval/0" not in shown
    same = compare("a.jsonl", run("c.jsonl", A), "--k", "1")
    assert "no problem differs" in same.stdout


def test_settings_that_differ_are_named() -> None:
    run("a.jsonl", A)
    run("b.jsonl", B, temperature=0.8, seed=1, prompt_format="chat", prompts="d2")
    found = compared("a.jsonl", "b.jsonl")
    assert found["settings"]["sampling.temperature"] == {"a": 0.2, "b": 0.8}
    assert set(found["settings"]) == {"sampling.temperature", "seed", "prompt_format", "prompts"}
    shown = compare("a.jsonl", "b.jsonl").stdout
    assert "sampling.temperature  0.2" in shown


def test_reports_compare_as_their_samples_do_and_run_nothing() -> None:
    for name, passed in (("a", A), ("b", B)):
        run(f"{name}.jsonl", passed)
        cli("score", f"{name}.jsonl", ALLOW, "--report", f"{name}.json", code=0)
    before = compared("a.jsonl", "b.jsonl")
    Sandbox.ran.clear()
    assert compared("a.json", "b.json") == compared("a.json", "b.jsonl") == before
    assert Sandbox.ran == []
    assert "both runs are reports already" in compare("a.json", "b.json", "--k", "1").stderr
    report = json.loads(Path("a.json").read_text())
    del report["estimates"]
    Path("old.json").write_text(json.dumps(report))
    assert 'old.json: it has no "estimates"' in compare("old.json", "b.jsonl").stderr


def test_summaries_are_compared_by_rouge() -> None:
    def summaries(path: str, *texts: str) -> str:
        rows = [
            {"task_id": str(i), "completion": text, "sample": 0} for i, text in enumerate(texts)
        ]
        return write(path, rows, results={"task": "xsum"})

    found = compared(
        summaries("a.jsonl", "abcd", "ab", "a"), summaries("b.jsonl", "ab", "ab", "abc")
    )
    one = found["figures"]["first.rougeL"]  # the stand-in's score is the length / 20
    assert one["difference"]["value"] == pytest.approx(0.0, abs=1e-12)
    assert (one["a_better"], one["b_better"], one["equal"]) == (1, 1, 1)
    assert "best ROUGE-L A" in compare("a.jsonl", "b.jsonl").stdout


def test_equal_shares_of_different_numbers_of_samples_are_equal() -> None:
    """1 of 2 samples and 4 of 8 are the same pass@1."""
    files = []
    for name, n in (("a", 2), ("b", 8)):
        rows = [
            line(i, s, "+ 1" if s < n // 2 else "+ 2", mean_logprob=-1.0 - s, seed=0)
            for i in range(3)
            for s in range(n)
        ]
        files.append(write(f"{name}.jsonl", rows, results=MANIFEST | {"n": n}))
    found = compared(*files, "--k", "1")
    one = found["figures"]["pass@1"]
    assert (one["a_better"], one["b_better"], one["equal"]) == (0, 0, 3)
    assert found["differing"] == []
    assert any(
        note.startswith("3 problems have different numbers of samples in A and B")
        and note.endswith("except pass@k")
        for note in found["notes"]
    )


def test_damaged_reports_are_named() -> None:
    reports = []
    for name in ("a", "b"):
        run(f"{name}.jsonl", A[:2])
        reports.append(json.loads(cli("score", f"{name}.jsonl", ALLOW, "--json").stdout))
    Path("b.json").write_text(json.dumps(reports[1]))
    places: list[tuple[tuple[Any, ...], Any]] = [
        (("samples",), None), (("estimates",), 1), (("estimates", "pass_first"), None), (("notes",), None),
        (("setting",), []), (("setting", "prompts"), None), (("setting", "machine"), "x"),
        (("setting", "machine", "device"), None), (("setting", "n"), float("inf")), (("by_problem", 0), {}),
        (("by_problem", 0, "samples"), None), (("by_problem", 0, "pass_at_k"), []), (("by_problem", 0, "pass_all"), "x"),
    ]  # fmt: skip
    for (*path, last), value in places:
        damaged = json.loads(json.dumps(reports[0]))
        part = damaged
        for key in path:
            part = part[key]
        if value is None:
            del part[last]
        else:
            part[last] = value
        Path("a.json").write_text(json.dumps(damaged))
        result = compare("a.json", "b.json", code=2)
        assert "a.json: the report is damaged" in result.stderr, (path, last)


def test_table_is_for_papers_too() -> None:
    run("a.jsonl", A)
    run("b.jsonl", B)
    rows = list(
        csv.DictReader(
            compare("a.jsonl", "b.jsonl", "--k", "1", "--format", "csv").stdout.splitlines()
        )
    )
    found = compared("a.jsonl", "b.jsonl", "--k", "1")["figures"]["pass@1"]
    row = next(one for one in rows if one["figure"] == "pass@1 (%)")
    assert float(row["A − B standard error"]) == found["difference"]["standard_error"]
    assert (row["A better"], row["equal"], row["both"]) == ("2", "3", "")
    markdown = compare("a.jsonl", "b.jsonl", "--format", "md").stdout.splitlines()
    assert markdown[0].startswith("| figure | A | B | A − B |")


@pytest.mark.parametrize(("other", "message"), [
    (lambda: run("b.jsonl", A[:4]),
     'b.jsonl: it has no samples of "HumanEval/4", "HumanEval/5"; draw the same problems'),
    (lambda: run("b.jsonl", [*A, 1]), 'a.jsonl: it has no samples of "HumanEval/6"'),
    (lambda: run("b.jsonl", A, prompts="d2"),
     "its prompts differ from those of a.jsonl, and the prompt format is raw in both"),
    (lambda: write("b.jsonl", [{"task_id": "0", "completion": "a"}], results={"task": "xsum"}),
     "b.jsonl: its task is xsum, and that of a.jsonl is humaneval"),
    (lambda: "a.jsonl", "A and B are the same file"),
    (lambda: write("b.json", []), "b.json: this is not a report"),
    (lambda: "c.json", "c.json: cannot read the report"),
])  # fmt: skip
def test_runs_that_do_not_compare_are_refused(other: Any, message: str) -> None:
    run("a.jsonl", A)
    assert message in compare("a.jsonl", other(), code=2).stderr
