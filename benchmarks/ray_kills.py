"""Kill actors and drivers of `bass generate --ray` at random times, resume until the job finishes,
and compare the file with that of one undisturbed process.

    python benchmarks/ray_kills.py [--kills 200] [--minutes 30] [--actors 4] [--prompts 400]

SIGKILL, nine times of ten to an actor, else to the driver. Uses a Ray of its own with tiny random
models on CPUs; jobs follow each other, each with another seed, until the number of kills or minutes
is reached. A sample is lost if it is missing in the finished file, doubled if it is there twice,
changed if it differs from the undisturbed run (times and rounds excepted). Exit code 1 for any of
these, or a run that cannot resume. Needs the checkout and bass-cli[ray].
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
STORE = 80 * 2**20  # bytes
_STUCK = 600.0  # seconds without a new line after which a run hangs


def command(seed, out, *more):
    flags: tuple[str, ...]
    flags = ("--n", "2", "--max-new-tokens", "40", "--token-ids", "--device", "cpu", "--quiet")
    flags += ("--pair", "pair.yaml", "--draft", "none", "--draft-length", "auto")
    flags += ("--seed", str(seed), "--out", out)
    return [sys.executable, "-m", "bass_cli", "generate", "p.txt", *flags, *more]


def actors():
    """Return the descendant processes that run a Worker."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, IndexError):
            above = number = int(file.parent.name)
            if file.read_bytes().startswith(b"ray::Worker"):
                while above not in (0, os.getpid()):
                    text = Path(f"/proc/{above}/stat").read_text()
                    above = int(text.rpartition(")")[2].split()[1])
                found += [number] if above == os.getpid() else []
    return sorted(found)


def said(path):
    """Return what a seed fixes, by sample, and the number of lines."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    keys = ("text", "token_ids", "finish_reason", "seed")
    return {(row["id"], row["sample"]): [row[key] for key in keys] for row in rows}, len(rows)


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturb(place, address, seed, counts, options, chance, end):
    """Run one job to its end with kills; return the errors of its file."""
    due, out = place / f"due{seed}.jsonl", place / f"{seed}.jsonl"
    subprocess.run(command(seed, due.name), cwd=place, check=True)
    more = ("--ray", address, "--actors", str(options.actors), "--batch-size", "4")
    while True:
        child = subprocess.Popen(command(seed, out.name, *more), cwd=place)
        seen, when = lines(out), time.monotonic()
        while child.poll() is None:
            # only after a new line, so that the job makes progress
            pause = time.monotonic() + chance.uniform(0.0, 1.5)
            while child.poll() is None and (time.monotonic() < pause or lines(out) == seen):
                time.sleep(0.05)
                if time.monotonic() - when > _STUCK:
                    child.kill()
                    return [f"seed {seed}: no line in {_STUCK:.0f} s"]
            seen, when = lines(out), time.monotonic()
            if child.poll() is not None or counts["kills"] >= options.kills or when > end:
                continue
            victims = actors()
            driver = chance.random() < 0.1
            if driver or victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid if driver else chance.choice(victims), signal.SIGKILL)
                    counts["kills"] += 1
                    counts["of drivers"] += driver
        code = child.wait()
        if code == 0:
            break
        if code != -signal.SIGKILL:
            return [f"seed {seed}: exit code {code}"]
    (wanted, _), (found, count) = said(due), said(out)
    counts["samples"] += len(wanted)
    counts["lost"] += len(wanted.keys() - found.keys())
    counts["doubled"] += count - len(found)
    counts["changed"] += sum(found[key] != wanted.get(key) for key in found)
    return []


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    from checkpoints import write_pair
    from ray.cluster_utils import Cluster

    names = ("jobs", "kills", "of drivers", "samples", "lost", "doubled", "changed")
    counts, faults = dict.fromkeys(names, 0), list[str]()
    chance, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    head = {"num_cpus": options.actors, "object_store_memory": STORE, "include_dashboard": False}
    with tempfile.TemporaryDirectory() as name:
        write_pair(Path(name), prompts=options.prompts)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            while counts["kills"] < options.kills and time.monotonic() < end and not faults:
                faults += disturb(
                    Path(name), cluster.address, counts["jobs"], counts, options, chance, end
                )
                counts["jobs"] += 1
                print(json.dumps(counts), file=sys.stderr, flush=True)
        finally:
            cluster.shutdown()
    print(json.dumps(counts | {"faults": faults}))
    sys.exit(bool(faults or counts["lost"] or counts["doubled"] or counts["changed"]))


if __name__ == "__main__":
    main()
