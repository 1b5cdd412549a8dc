"""Ends jobs of bass by signals at random times, gives the same command again until it finishes, and compares the files with
those of a run that nobody disturbed.

    python bench/kills.py [--kills 1000] [--seed 0] [--json]

SIGKILL, SIGTERM, SIGINT and SIGHUP, at any time from the first instruction of the command to its last; mostly `bass
generate`, every fourth job `bass eval` or `bass score`. A line is lost if a finished sample or verdict was in the file once
and is not there, byte for byte, at the end, or never came; doubled if it is there twice; changed if it says something else
than in the undisturbed run (times and rounds left out). Interpreter and libraries are imported once: every run is a fork.
Exit code 1 if there is any such line, a traceback, or a run that could not go on.
"""

import argparse
import collections
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import small_jobs as jobs

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STUCK = 120.0  # seconds after which a run that takes less than two is taken for one that hangs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="how many signals to send to running jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    chance, began = random.Random(args.seed), time.monotonic()
    counts, differences, faults = collections.Counter(), jobs.Differences(), []
    with tempfile.TemporaryDirectory(prefix="bass-kills-") as folder:
        place = Path(folder)
        jobs.import_everything(place)
        while counts["kills"] < args.kills and not faults:
            counts["jobs"] += 1
            job = (chance.choice((jobs.evaluation, jobs.scoring)) if counts["jobs"] % 4 == 0 else jobs.generation)(chance)
            found = disturb(job, place, counts, args.kills, chance, faults)
            differences += found
            if any(found):
                faults.append(f"{' '.join(job.arguments)}: {found}")
    figures = dict(counts) | differences._asdict() | {"faults": faults, "seconds": round(time.monotonic() - began)}
    print(json.dumps(figures) if args.json else "\n".join(f"{key:16} {value}" for key, value in figures.items()))
    sys.exit(bool(faults))


def disturb(job, place, counts, kills, chance, faults):
    """One job, undisturbed and disturbed; how their files differ."""
    name = f"{counts['jobs']}"
    due, folder, log = place / f"{name}-due", place / name, place / f"{name}.log"
    began = time.monotonic()
    code = jobs.finish(jobs.start(job, jobs.inputs_for(due, place), log))
    whole = time.monotonic() - began
    if code not in (0, 1) or "Traceback" in log.read_text():
        faults.append(f"undisturbed, exit code {code}: {log.read_text()}")
        return jobs.Differences()
    jobs.inputs_for(folder, place)
    kept = {}
    while True:
        child, number = jobs.start(job, folder, log), chance.choice(SIGNALS)
        ended = None
        if counts["kills"] < kills:
            ended = jobs.finish_within(child, chance.uniform(0, whole))
            if ended is None:
                jobs.os.kill(child, number)
                counts["kills"] += 1
                counts[number.name] += 1
                counts[f"in {job.command}"] += 1
        disturbed = ended is None and counts["kills"] <= kills
        ended = jobs.finish_within(child, _STUCK) if ended is None else ended
        if ended is None or "Traceback" in log.read_text():
            jobs.os.kill(child, signal.SIGKILL) if ended is None else None
            faults.append(f"{number.name}, exit code {ended}: {log.read_text()}")
            return jobs.Differences()
        if ended == code:
            return jobs.compare(job, folder, due, kept)
        if not (disturbed and ended in (130, -number)):
            faults.append(f"exit code {ended} instead of {code} after {number.name}: {log.read_text()}")
            return jobs.Differences()
        for file in job.files:
            for key, lines in jobs.whole_lines(jobs.read(folder / file)).items():
                kept.setdefault(file, {}).setdefault(key, lines)


if __name__ == "__main__":
    main()
