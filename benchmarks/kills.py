"""Kill jobs of bass at random times, resume them until they finish, and compare the files with
those of undisturbed runs.

    python benchmarks/kills.py [--kills 1000] [--seed 0] [--json]

SIGKILL, SIGTERM, SIGINT and SIGHUP, at any time from the first instruction of the command to its
last; mostly `bass generate`, every fourth job `bass eval` or `bass score`. A line is lost if a
finished sample or verdict was in the file once and is missing at the end, or never came; doubled if
it is there twice; changed if it differs from the undisturbed run (times and rounds excepted).
Interpreter and libraries are imported once: every run is a fork. Exit code 1 for any such line, a
traceback, or a run that cannot resume.
"""

import signal
import time

import small_jobs as jobs
from small_jobs import Differences, compare, read, whole_lines

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STUCK = 120.0  # seconds after which a run hangs; usual runs take less than two


def disturb(job, place, counts, kills, chance):
    """Run one job undisturbed and disturbed; return the differences of its files, and errors."""
    name = f"{counts['jobs']}"
    undisturbed, folder, log = place / f"{name}-undisturbed", place / name, place / f"{name}.log"
    began = time.monotonic()
    code = jobs.finish(jobs.start(job, jobs.inputs_for(undisturbed, place), log))
    whole = time.monotonic() - began
    if code not in (0, 1) or "Traceback" in log.read_text():
        return Differences(), [f"undisturbed, exit code {code}: {log.read_text()}"]
    jobs.inputs_for(folder, place)
    kept: dict[str, dict[tuple, list[bytes]]] = {}
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
            return Differences(), [f"{number.name}, exit code {ended}: {log.read_text()}"]
        if ended == code:
            found = compare(job, folder, undisturbed, kept)
            return found, [str(found)] if any(found) else []
        if not (disturbed and ended in (130, -number)):
            return Differences(), [
                f"exit code {ended} instead of {code} after {number.name}: {log.read_text()}"
            ]
        for file in job.files:
            for key, lines in whole_lines(read(folder / file)).items():
                kept.setdefault(file, {}).setdefault(key, lines)


if __name__ == "__main__":
    jobs.disturb_many(disturb, __doc__, unit="kills", count=1000, others=4)
