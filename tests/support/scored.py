"""Stand-ins for scoring: a task of small programs, one of summaries, and a sandbox that runs
programs in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from bass_cli.errors import UserError
from bass_cli.eval.tasks.task import Problem, Task
from bass_cli.sandbox.programs import DEFAULT_LIMITS, Ending, Limits, Program


class Isolation(NamedTuple):
    network: str = "namespace"
    files: str = "none"

    def warnings(self) -> list[str]:
        return ["files are not kept in"]

    def __str__(self) -> str:
        return "network: namespace"

    def refuse_weakness(self) -> None:
        """There is none that counts."""


class Programs(Task):
    """A task whose answers are programs; `tests` go after them."""

    name, executes, rates, has_base = "humaneval", True, False, False
    limits = DEFAULT_LIMITS

    def __init__(self, problems: dict[str, Problem]) -> None:
        self.problems = problems

    def figures(self, responses: Any) -> dict[str, Any]:
        return {}

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        return Program(("" if whole else problem.prompt) + text + "\n" + problem.fields["tests"])


class Texts(Task):
    """A task whose answers are rated: by their length, so that a test knows the figures."""

    name, executes, rates, has_base = "xsum", False, True, False

    def __init__(self, problems: dict[str, Problem]) -> None:
        self.problems, self.rated = problems, Counter[str]()

    def figures(self, responses: Any) -> dict[str, Any]:
        return {}

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        self.rated[text] += 1
        return {"rouge1": len(text) / 10, "rouge2": 1 - len(text) / 10, "rougeL": len(text) / 20}


class Sandbox:
    """Runs programs here and now, newest first; KeyboardInterrupt comes after `patience` of them.

    `ran`: what was run; `limits`: those of the last one opened; `running`: iterators that were
    not closed.
    """

    ran: ClassVar[list[Program]] = []
    opened = running = 0
    limits = DEFAULT_LIMITS
    patience: float = float("inf")
    isolation = Isolation()

    def __init__(self, *, workers: int | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        type(self).opened += 1
        type(self).limits = limits

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, programs: Iterable[tuple[str, Program]]) -> Iterator[tuple[str, Ending]]:
        type(self).running += 1
        try:
            for key, program in reversed(list(programs)):
                if len(self.ran) >= self.patience:
                    raise KeyboardInterrupt
                self.ran.append(program)
                yield key, self._judge(program)
        finally:
            type(self).running -= 1

    def _judge(self, program: Program) -> Ending:
        try:
            exec(program.text, {"__name__": "tested"})
        except BaseException as error:
            return Ending("failed", repr(error), 0.25)
        return Ending("passed", "", 0.25)


def adding(number: int) -> Problem:
    """A problem whose answer is "+ 1", or anything else that makes the number one more."""
    return Problem(f"HumanEval/{number}", f"n = {number} ", {"tests": f"assert n == {number + 1}"})


def small_tasks() -> tuple[Programs, Texts, Programs]:
    """Return humaneval with 12 problems, xsum with three and mbpp with two."""
    mbpp = Programs({number: Problem(number, "", {"tests": "assert n"}) for number in ("11", "12")})
    mbpp.name = "mbpp"
    summaries = Texts({str(number): Problem(str(number), "", {}) for number in range(3)})
    return Programs({f"HumanEval/{i}": adding(i) for i in range(12)}), summaries, mbpp


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *tasks: Any) -> None:
    """Put the stand-ins where scoring looks for tasks and sandbox, and go to an empty folder."""
    known = {task.name: task for task in tasks}

    def load_task(name: str, data: str | None = None) -> Any:
        if name not in known:
            raise UserError(f'unknown task "{name}"')
        return known[name]

    for module in ("eval.scoring", "report.runs"):
        monkeypatch.setattr(f"bass_cli.{module}.load_task", load_task)
    monkeypatch.setattr("bass_cli.eval.scoring.Sandbox", Sandbox)
    Sandbox.ran, Sandbox.opened, Sandbox.running, Sandbox.patience = [], 0, 0, float("inf")
    monkeypatch.chdir(tmp_path)


def line(
    number: int, sample: int, text: str, *, reason: str = "eos", **figures: Any
) -> dict[str, Any]:
    """A line as bass writes it, for the problem `adding(number)`."""
    row = {"id": str(number), "sample": sample, "text": text, "finish_reason": reason, "tokens": 10, "mean_logprob": -0.5,
           "seconds": 1.0, "rounds": 4, "drafted": 16, "accepted": 8}  # fmt: skip
    return row | {"task_id": f"HumanEval/{number}", "completion": text} | figures


def write(path: str, rows: Iterable[dict[str, Any]], **manifest: Any) -> str:
    """Write the lines, and a manifest where one is given; the path."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if manifest:
        Path(f"{path}.manifest.json").write_text(json.dumps(manifest))
    return path
