"""Compare the files of a disturbed job with those of an undisturbed run: lines lost, doubled,
changed. Used by kills.py and power_cuts.py; not a script.
"""

import json
from typing import NamedTuple

# fields that depend on the run, not on the sample: times, other rows of the batch, rounding
_MEASURED = ("seconds", "rounds", "drafted", "accepted", "mean_logprob", "sum_logprob", "isolation")


def rows_of(content):
    """Yield every line with its JSON object, or None if it is broken."""
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        yield line, row if isinstance(row, dict) else None


def whole_lines(content):
    """Return the lines that count, {key: [bytes, ...]}: verdicts, and samples that did not fail."""
    found: dict[tuple, list[bytes]] = {}
    for line, row in rows_of(content):
        if row is not None and row.get("finish_reason") != "error":
            found.setdefault((row.get("id", row.get("task_id")), row.get("sample")), []).append(
                line
            )
    return found


def read(path):
    return path.read_bytes() if path.exists() else b""


class Differences(NamedTuple):
    """How many lines a disturbed run lost, doubled and changed."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0

    def __add__(self, other):
        return Differences(*map(sum, zip(self, other, strict=True)))


def compare(job, folder, undisturbed, kept):
    """Compare the lines of a finished job with those of an undisturbed one, and with those that had
    to survive: `kept`, {file: {key: [bytes]}}. Failed prompts have one line too. Any other
    difference (a broken line, an unfinished manifest, a superfluous file) counts as changed."""
    total = Differences()
    for name in job.files:
        there, due = (whole_lines(read(place / name)) for place in (folder, undisturbed))
        held = kept.get(name, {})
        total += Differences(
            lost=len(due.keys() - there.keys())
            + sum(there.get(key, [])[:1] != lines[:1] for key, lines in held.items())
        )
        total += Differences(
            doubled=sum(len(lines) - 1 for lines in there.values()),
            changed=sum(
                key not in due or _settled(lines[0]) != _settled(due[key][0])
                for key, lines in there.items()
            ),
        )
        total += Differences(changed=_others(folder / name) != _others(undisturbed / name))
    if job.manifest is not None:
        ours, theirs = (
            json.loads(read(place / job.manifest) or b"{}") for place in (folder, undisturbed)
        )
        total += Differences(
            changed=any(ours.get(key) != theirs.get(key) for key in ("finished", "results"))
            or ours["totals"]["finish_reasons"] != theirs["totals"]["finish_reasons"]
        )
    names = [{path.name for path in place.iterdir()} for place in (folder, undisturbed)]
    return total + Differences(changed=names[0] != names[1])


def _settled(line):
    return {key: value for key, value in json.loads(line).items() if key not in _MEASURED}


def _others(path):
    """Return the lines of failed prompts, and broken ones."""
    return sorted(
        str(line if row is None else (row["id"], row["error"]))
        for line, row in rows_of(read(path))
        if row is None or row.get("finish_reason") == "error"
    )
