"""Check that two versions of bass write the same output files for the same seeds.

    mkdir -p build/old && git archive 3565a2a | tar x -C build/old
    python benchmarks/compare_jobs.py build/old . [--device cuda] [--workers 4] [--json FILE]

Runs a dozen jobs in both versions. Each job is `python -m bass_cli` with one tree's code, in a new
process, on tiny random models in the real format (or a real --pair). Lines are compared by (id,
sample) in everything that the seed fixes, log-probabilities within 1e-5. On a GPU the jobs also run
in bf16, which is reported separately, because the shapes of a batch change its rounding. Exits with
1 if float32 differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tiny_models import write_model

NEAR = 1e-5  # of a sum of log-probabilities
SEEDED = (
    "text",
    "token_ids",
    "finish_reason",
    "tokens",
    "seed",
    "prompt_tokens",
    "error",
    "copy_of",
)
CONTEXT = 1024  # room for two HumanEval prompts, with one byte for each token
OUT = "samples.jsonl"
GENERATE = "generate prompts.jsonl --pair {pair} --token-ids --max-new-tokens 40 "
# The commands of a job; several run one after the other with the same output.
JOBS = {
    "plain": ("--draft none --n 4 --batch-size 3",),
    "lookup": ("--draft lookup --n 4 --batch-size 3",),
    "draft model, auto": ("--n 8",),
    "draft model, length 4": ("--n 4 --draft-length 4 --batch-size 3",),
    "draft model, bass": ("--n 4 --draft-length bass --batch-size 8",),
    "skip:1": ("--draft skip:1 --n 4 --draft-length 3 --batch-size 3",),
    "greedy": ("--temperature 0 --n 4 --draft-length 4",),
    "top-k": ("--top-k 7 --top-p 1 --temperature 1 --n 4 --seed 5",),
    "stop strings": ("--stop e --stop ab --stop \\n --n 8 --draft-length 4 --batch-size 3",),
    "one row": ("--n 1 --batch-size 1 --limit 4",),
    "maximal, length 4": ("--coupling maximal --draft-length 4 --n 4 --batch-size 3",),
    "maximal, bass": ("--coupling maximal --draft-length bass --n 4 --batch-size 3",),
    "maximal, lookup": ("--coupling maximal --draft lookup --draft-length 3 --n 4 --batch-size 1",),
    "resumed": ("--n 2 --limit 3 --batch-size 3", "--n 4 --draft lookup"),
    "no token ids": ("--n 4 --draft-length 2 --batch-size auto",),
    "humaneval": (
        "eval humaneval --pair {pair} --limit 2 --n 2 --max-new-tokens 24 --prompt-format raw "
        "--token-ids --allow-code-execution --allow-weak-sandbox",
    ),
}


class Ran(NamedTuple):
    """Results of a job: lines by (id, sample), exit codes, seconds of all its commands."""

    lines: dict
    codes: list
    seconds: float


def write_models(folder):
    """Write a target of four layers, a draft of its first layer, and their pair."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,  # distributions as peaked as a real model's
        "template": "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}",
    }
    target = write_model(folder / "target", num_hidden_layers=4, **sizes)
    write_model(folder / "draft", num_hidden_layers=1, like=target, **sizes)
    (folder / "pair.yaml").write_text("target: target\ndraft: draft\n")


def write_prompts(folder):
    """Write prompts of 1 to about 300 tokens: one chat, one with a reference, one too long."""
    code = "def add(first, second):\n    return first + second\n"
    prompts = [
        {"id": "short", "prompt": "a"},
        {"id": "code", "prompt": code + code + "def add(", "reference": code},
        {"id": "long", "prompt": "one two three four five six seven, " * 8, "meta": 1},
        {"id": "chat", "messages": [{"role": "user", "content": "Say é and 1."}]},
        {"id": "middle", "prompt": "abcabcabcabcabc" * 3},
        {"id": "too long", "prompt": "xyz " * 60000},
        {"id": "last", "prompt": "\nclass Queue:\n"},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))


def run(tree, folder, name, given, device, dtype):
    """Run a job with this tree's code, in a new folder below `folder`."""
    place = Path(tempfile.mkdtemp(dir=folder, prefix="job-"))
    (place / "prompts.jsonl").symlink_to(folder / "prompts.jsonl")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BASS_")}
    paths = [str(tree), f"{tree}/kernels", os.environ.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    pair, codes, began = given.pair or str(folder / "pair.yaml"), [], time.perf_counter()
    for command in JOBS[name]:
        whole = (command if command.startswith("eval") else GENERATE + command).format(pair=pair)
        arguments = [*whole.split(), "--device", device, "--dtype", dtype, "--out", OUT]
        done = subprocess.run(
            [sys.executable, "-m", "bass_cli", *arguments],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
        )
        codes.append(done.returncode)
        if done.returncode not in (0, 1):  # 1: the prompt that cannot be run
            print(f"{name}, {tree}: exit code {done.returncode}\n{done.stderr}", file=sys.stderr)
    seconds, lines = time.perf_counter() - began, {}
    for line in (place / OUT).read_text().splitlines() if (place / OUT).exists() else ():
        row = json.loads(line)
        key = f"{row['id']}, sample {row['sample']}"
        assert key not in lines, f"{name}, {tree}: {key} is there twice"
        lines[key] = row
    return Ran(lines, codes, seconds)


def differences(old, new):
    """Describe the differences of two lines in what a seed fixes."""
    found = [key for key in SEEDED if old.get(key) != new.get(key)]
    sums = [row["sum_logprob"] for row in (old, new)]
    if None in sums:
        return found + ["sum_logprob"] * (sums[0] is not sums[1])
    return found + ["sum_logprob"] * (abs(sums[0] - sums[1]) > NEAR * max(1.0, abs(sums[0])))


def compare(old, new):
    """Make a row of the table: equal lines, the first difference, work and time."""
    unequal = {
        key: differences(old.lines[key], new.lines[key])
        if key in old.lines and key in new.lines
        else ["it is missing in one of them"]
        for key in sorted(old.lines.keys() | new.lines.keys())
    }
    unequal = {key: found for key, found in unequal.items() if found}
    drafted = [sum(row["drafted"] for row in ran.lines.values()) for ran in (old, new)]
    accepted = [sum(row["accepted"] for row in ran.lines.values()) for ran in (old, new)]
    lines = len(old.lines.keys() | new.lines.keys())
    return {
        "lines": lines,
        "equal": lines - len(unequal),
        "same": bool(lines) and not unequal and old.codes == new.codes,
        "exit_codes": [old.codes, new.codes],
        "tokens": sum(row["tokens"] for row in new.lines.values()),
        "drafted": drafted,
        "accepted": accepted,
        "seconds": [round(old.seconds, 1), round(new.seconds, 1)],
        "first_difference": next(iter(unequal.items()), None),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pair", help="a real pair with a draft model, instead of the tiny one")
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS), metavar="JOB")
    parser.add_argument(
        "--workers", type=int, default=1, help="jobs at once; then seconds tell little"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    trees = [given.old.resolve(), given.new.resolve()]
    for tree in trees:
        if not (tree / "bass_cli" / "configs").exists():
            (tree / "bass_cli" / "configs").symlink_to("../configs")
    dtypes = ("fp32", "bf16") if given.device == "cuda" else ("fp32",)
    rows = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(given.workers) as pool:
        folder = Path(name)
        write_models(folder)
        write_prompts(folder)
        runs = [(dtype, job) for dtype in dtypes for job in given.jobs]
        started = [
            [pool.submit(run, tree, folder, job, given, given.device, dtype) for tree in trees]
            for dtype, job in runs
        ]
        print(
            "| dtype | job | lines | equal | tokens | drafts accepted | s old | s new |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        for (dtype, job), both in zip(runs, started, strict=True):
            row = compare(*(one.result() for one in both))
            rows.append({"dtype": dtype, "job": job, **row})
            kept = f"{row['accepted'][1]} of {row['drafted'][1]}"
            old, new = row["seconds"]
            print(
                f"| {dtype} | {job} | {row['lines']} | {row['equal']} | {row['tokens']} "
                f"| {kept} | {old} | {new} |",
                flush=True,
            )
    for row in rows:
        if not row["same"]:
            print(
                f"{row['dtype']} {row['job']}: {row['first_difference']}, "
                f"exit codes {row['exit_codes']}"
            )
    lines, equal = (
        sum(row[key] for row in rows if row["dtype"] == "fp32") for key in ("lines", "equal")
    )
    print(f"float32: {equal} of {lines} lines are equal")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(not all(row["same"] for row in rows if row["dtype"] == "fp32"))


if __name__ == "__main__":
    main()
