"""Tasks whose answers are compared without a program: their verdicts, figures and options."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in
from scored import Problem, Sandbox, Texts, install, line, write

from bass_cli.eval.tasks.task import Check, Task


class Sums(Task):
    """A task of one number: the right answer is in the field `sum`."""

    name, executes = "sums", False

    def __init__(self, problems: dict[str, Problem]) -> None:
        self.problems, self.checked = problems, Counter[str]()

    def check(self, problem: Problem, text: str) -> Check:
        self.checked[text] += 1
        if not text:
            return Check("no answer", "the text is empty")
        right = text == problem.fields["sum"]
        return Check("passed" if right else "failed", f"{text}, expected {problem.fields['sum']}")


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sums:
    problems = {f"S/{i}": Problem(f"S/{i}", "", {"sum": str(i)}) for i in range(2)}
    install(monkeypatch, tmp_path, task := Sums(problems), Texts(problems))
    rows = [
        line(0, 0, "0", mean_logprob=-0.9),
        line(0, 1, "1", mean_logprob=-0.1),
        line(1, 0, "1", mean_logprob=-0.2),
        line(1, 1, "", mean_logprob=-0.3),
        line(1, 2, "1", reason="budget"),
    ]
    write("f.jsonl", [row | {"task_id": row["task_id"].replace("HumanEval", "S")} for row in rows])
    return task


def score(*arguments: str, **settings: Any) -> Any:
    return cli("score", "f.jsonl", *arguments, **settings)


def test_compared_answers_have_the_figures_of_programs_and_no_sandbox(sums: Sums) -> None:
    result = score("--task", "sums", "--json", "--k", "1,2", code=0)
    report = json.loads(result.stdout)
    assert report["statuses"] == {"failed": 1, "no answer": 1, "not finished": 1, "passed": 2}
    assert (report["pass_first"], report["pass_all"]) == (1 / 2, 2 / 2)
    assert report["pass_at_k"] == {"1": (1 / 2 + 1 / 3) / 2, "2": (1 + 2 / 3) / 2}
    assert report["isolation"] is None
    assert Sandbox.opened == 0


def test_verdicts_are_kept_and_only_changed_answers_are_checked_again(sums: Sums) -> None:
    first = score("--task", "sums", "--json")
    assert sums.checked == {"0": 1, "1": 2, "": 1}
    kept = rows_in("f.jsonl.verdicts.jsonl")
    assert {(row["task_id"], row["sample"], row["status"], row["detail"]) for row in kept} == {
        ("S/0", 0, "passed", "0, expected 0"),
        ("S/0", 1, "failed", "1, expected 0"),
        ("S/1", 0, "passed", "1, expected 1"),
        ("S/1", 1, "no answer", "the text is empty"),
    }
    again = score("--task", "sums", "--json")
    assert again.stdout == first.stdout
    assert sum(sums.checked.values()) == 4
    score("--task", "sums", "--rejudge")
    assert sum(sums.checked.values()) == 8
    sums.problems["S/0"] = Problem("S/0", "", {"sum": "5"})  # the right answer has changed
    changed = json.loads(score("--task", "sums", "--json").stdout)
    assert (changed["by_problem"][0]["passed"], sum(sums.checked.values())) == (0, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "sums", "--workers", "2"), "sums has no programs to run"),
        (("--task", "xsum", "--k", "1"), "xsum has no verdicts; leave it out"),
    ],
)
def test_options_without_effect_are_refused(
    sums: Sums, options: tuple[str, ...], message: str
) -> None:
    result = score(*options)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
