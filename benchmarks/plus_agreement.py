"""Compare bass's verdicts on HumanEval+ or MBPP+ with those of the installed evalplus package.

    python benchmarks/plus_agreement.py mbpp+ MbppPlus.jsonl --every 3 --changed 2
    python benchmarks/plus_agreement.py humaneval+ HumanEvalPlus.jsonl --samples FILE --first 2

The programs are the canonical solutions and solutions that are changed in one place, or a model's
samples. evalplus has no real sandbox.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from evalplus.data.mbpp import mbpp_deserialize_inputs
from evalplus.eval import MBPP_OUTPUT_NOT_NONE_TASKS, PASS, untrusted_check
from evalplus.gen.util import trusted_exec
from mutants import mutants

from bass_cli.eval.samples import read_generations
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Problem, Task
from bass_cli.sandbox.programs import Program, Sandbox

SETS = ("base", "plus")


def changed_solutions(problem: Problem, number: int, changed: int) -> list[str]:
    """Return the canonical solution of a problem, and `changed` solutions that differ from it."""
    fields = problem.fields
    right = fields["prompt"] + fields["canonical_solution"]
    return [right, *mutants(right, fields["entry_point"], changed, number)]


def samples_of(path: str, task: Task, first: int) -> dict[str, list[str]]:
    """Return the first samples of each problem in a file, as whole programs."""
    known = set(task.problems)
    found: dict[str, list[str]] = {}
    for row in read_generations(path).rows:
        if row.task_id in known and row.sample < first:
            text = row.text if row.whole else task.problems[row.task_id].prompt + row.text
            found.setdefault(row.task_id, []).append(text)
    return found


def programs_of(
    task: Task, problem: Problem, texts: list[str]
) -> dict[tuple[str, str, str], Program]:
    """Return the programs of a problem by (task_id, set of tests, text)."""
    makes = dict(zip(SETS, (task.base_program, task.program), strict=True))
    return {
        (problem.task_id, which, text): makes[which](problem, text, whole=True)
        for which in SETS
        for text in texts
    }


def verdicts_of_evalplus(fields: Any, task_id: str, which: str, texts: list[str]) -> list[bool]:
    """Return which texts pass one set of tests by evalplus."""
    inputs, name = copy.deepcopy(fields[f"{which}_input"]), fields["entry_point"]
    dataset = "mbpp" if task_id.startswith("Mbpp/") else "humaneval"
    if dataset == "mbpp":
        inputs = mbpp_deserialize_inputs(task_id, inputs)
    not_none = dataset == "mbpp" and name in MBPP_OUTPUT_NOT_NONE_TASKS
    solution = fields["prompt"] + fields["canonical_solution"]
    expected, seconds = trusted_exec(
        solution, inputs, name, record_time=True, output_not_none=not_none
    )
    atol = fields["atol"]
    return [
        untrusted_check(
            dataset, text, copy.deepcopy(inputs), name, expected, atol, seconds, fast_check=True
        )[0]
        == PASS
        for text in texts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("humaneval+", "mbpp+"))
    parser.add_argument("file", help="problems in EvalPlus's layout")
    parser.add_argument("--every", type=int, default=1, help="use every n-th problem")
    parser.add_argument("--changed", type=int, default=2, help="changed solutions of each problem")
    parser.add_argument("--samples", help="a file of samples, in place of changed solutions")
    parser.add_argument("--first", type=int, default=2, help="samples of each problem")
    parser.add_argument(
        "--without", nargs="*", default=[], help="problems to leave out, by task_id"
    )
    args = parser.parse_args()
    task = load_task(args.task, args.file)
    chosen = [one for one in task.problems.values() if one.task_id not in args.without]
    chosen = chosen[:: args.every]
    programs: dict[tuple[str, str, str], Program] = {}
    samples = samples_of(args.samples, task, args.first) if args.samples else None
    for number, problem in enumerate(chosen):
        if samples is None:
            texts = changed_solutions(problem, number, args.changed)
        else:
            texts = samples.get(problem.task_id, [])
        programs |= programs_of(task, problem, texts)
    with Sandbox(limits=task.limits) as sandbox:
        ours = dict(sandbox.run(programs.items()))
    pairs: Counter[tuple[bool, bool]] = Counter()
    for problem in chosen:
        for which in SETS:
            texts = [key[2] for key in programs if key[:2] == (problem.task_id, which)]
            theirs = verdicts_of_evalplus(problem.fields, problem.task_id, which, texts)
            for text, passed in zip(texts, theirs, strict=True):
                ending = ours[problem.task_id, which, text]
                pairs[ending.passed, passed] += 1
                if ending.passed != passed:
                    print(f"{problem.task_id}, {which}: bass {ending}, evalplus {passed}\n{text}")
    print(f"{len(programs)} verdicts on {len(chosen)} problems")
    print(f"both pass {pairs[True, True]}, both fail {pairs[False, False]}")
    print(f"only bass passes {pairs[True, False]}, only evalplus passes {pairs[False, True]}")


if __name__ == "__main__":
    main()
