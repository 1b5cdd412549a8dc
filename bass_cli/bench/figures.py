"""Compute the figures of a run from its rounds: latencies, rates, intervals and verdicts.

All times are seconds since decoding began, without prefill. runs.py makes the runs; floor.py
computes the floor of the hardware.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FEWEST = 3  # repeats that a confidence interval needs
# Tokens of a row. A controller starts without measurements, so shorter runs show mostly learning.
ENOUGH_TOKENS = 64
NO_VERDICT = "no verdict"
# Student's t, two-sided 95 %, by degrees of freedom from 2 on (Fisher, 1925); beyond, about 2.
_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


class Step(NamedTuple):
    """One round: its end, its draft length, its rows, and the accepted drafts of each row."""

    ended: float
    width: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]


class Run(NamedTuple):
    """A batch that was decoded to its end.

    contexts: length of each row before the first round. tokens: new tokens of each row. prefill:
    seconds. captures: graphs captured during the run, which should be 0.
    """

    steps: tuple[Step, ...]
    contexts: tuple[int, ...]
    tokens: int
    prefill: float = 0.0
    captures: int = 0


class Latency(NamedTuple):
    """Milliseconds per token of a sequence: first row to finish, last row, and mean of all."""

    first: float
    last: float
    mean: float


class Counts(NamedTuple):
    """Acceptance of a run.

    rate: accepted over drafted tokens. trials: accepted over the drafts up to and including the
    first rejection of each row and round; a simulated acceptance is measured by this one. mean:
    accepted drafts of a row in a round. Rates are None if nothing was drafted.
    """

    rounds: int
    rate: float | None
    trials: float | None
    mean: float


def finish_times(run: Run, ends: Sequence[float] | None = None) -> list[float]:
    """Return when each row finished. `ends` replaces the end times of the rounds."""
    left = [run.tokens] * len(run.contexts)
    times = [0.0] * len(run.contexts)
    for step, ended in zip(
        run.steps, [s.ended for s in run.steps] if ends is None else ends, strict=True
    ):
        for row, accepted in zip(step.rows, step.accepted, strict=True):
            if left[row] > 0:
                left[row] -= accepted + 1
                times[row] = ended
    assert all(rest <= 0 for rest in left), "a row never ended"
    return times


def latency(run: Run, ends: Sequence[float] | None = None) -> Latency:
    """Return the time to finish a row over its tokens."""
    times = finish_times(run, ends)
    scale = 1000.0 / run.tokens
    return Latency(min(times) * scale, max(times) * scale, statistics.fmean(times) * scale)


def tokens_per_second(run: Run) -> float:
    """Return the tokens of all rows over the time until the last row finished."""
    return len(run.contexts) * run.tokens / max(finish_times(run))


def counts(run: Run) -> Counts:
    """Count acceptance over all rounds, with accepted tokens beyond a row's limit."""
    drafted = sum(step.width * len(step.rows) for step in run.steps)
    accepted = sum(sum(step.accepted) for step in run.steps)
    rejected = sum(a < step.width for step in run.steps for a in step.accepted)
    row_rounds = sum(len(step.rows) for step in run.steps)
    return Counts(
        len(run.steps),
        accepted / drafted if drafted else None,
        accepted / (accepted + rejected) if drafted else None,
        accepted / row_rounds,
    )


def most_common(values: Iterable[int]) -> int:
    """Return the most frequent value; of several, the largest."""
    found = Counter(values)
    return max(found, key=lambda value: (found[value], value))


def round_seconds(run: Run, width: int) -> list[float]:
    """Return the seconds of each round with this draft length and all rows in the batch.

    A round is timed from the end of the one before.
    """
    starts = [0.0] + [step.ended for step in run.steps[:-1]]
    return [
        step.ended - start
        for step, start in zip(run.steps, starts, strict=True)
        if step.width == width and len(step.rows) == len(run.contexts)
    ]


class Spread(NamedTuple):
    """Median, least and greatest of the repeats."""

    median: float
    least: float
    greatest: float


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the geometric mean of ratios, one for each repeat.

    Uses Student's t on the logarithms, so that a ratio and its inverse are treated alike. None for
    fewer than FEWEST repeats.
    """
    if len(ratios) < FEWEST:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    freedom = len(logs) - 1
    t = _T[freedom - 2] if freedom - 2 < len(_T) else 2.131
    off = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - off), math.exp(mean + off)


def verdict(found: Sequence[float] | None) -> str:
    """Name what an interval of speed-ups shows. `found` is None if there were too few repeats."""
    if found is None:
        return NO_VERDICT
    return "faster" if found[0] > 1 else "slower" if found[1] < 1 else "within noise"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
