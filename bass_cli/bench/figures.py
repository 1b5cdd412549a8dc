"""From what a run did to its figures: plain arithmetic on rounds, no device, no models.

All times are seconds since decoding began; prefill is not in them. Not here: how a run is made
(drive.py), what the hardware could do at best (costs.py).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FEWEST = 3  # repeats, for an interval that says anything
# Tokens a row. A controller starts without measurements, so its shorter runs show mostly learning.
ENOUGH_TOKENS = 64
NO_VERDICT = "no verdict"
# Student's t, two-sided 95 %, by degrees of freedom from 2 on (Fisher, 1925); beyond, about 2.
_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


class Step(NamedTuple):
    """One round: when it ended, its draft length, the rows that were live and how many drafts
    each of them kept."""

    ended: float
    width: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]


class Run(NamedTuple):
    """A whole batch decoded: `contexts`, each row's length before the first round; `tokens` that
    each row was to have; `prefill` in seconds; `captures`: graphs that were captured while it
    ran, which should be none."""

    steps: tuple[Step, ...]
    contexts: tuple[int, ...]
    tokens: int
    prefill: float = 0.0
    captures: int = 0


class Latency(NamedTuple):
    """Milliseconds per token of a sequence: of the first row to have all its tokens, of the
    last, and the mean row."""

    first: float
    last: float
    mean: float


class Counts(NamedTuple):
    """What a run drafted and kept. `rate`: accepted over drafted. `trials`: accepted over the
    drafts whose turn came, that is, up to the first that was rejected; it is what an acceptance
    that was set should come out as. `mean`: accepted a row and round. Rates are None where
    nothing was drafted."""

    rounds: int
    rate: float | None
    trials: float | None
    mean: float


def finish_times(run: Run, ends: Sequence[float] | None = None) -> list[float]:
    """When each row had its tokens, by row; `ends`: other times at which the rounds ended."""
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
    """Time until a row had its tokens, over its tokens."""
    times = finish_times(run, ends)
    scale = 1000.0 / run.tokens
    return Latency(min(times) * scale, max(times) * scale, statistics.fmean(times) * scale)


def tokens_per_second(run: Run) -> float:
    """All rows' tokens over the time until the last row had its own."""
    return len(run.contexts) * run.tokens / max(finish_times(run))


def counts(run: Run) -> Counts:
    """Acceptance over all rounds, the last one's surplus included."""
    drafted = sum(step.width * len(step.rows) for step in run.steps)
    kept = sum(sum(step.accepted) for step in run.steps)
    rejected = sum(a < step.width for step in run.steps for a in step.accepted)
    rowrounds = sum(len(step.rows) for step in run.steps)
    return Counts(
        len(run.steps),
        kept / drafted if drafted else None,
        kept / (kept + rejected) if drafted else None,
        kept / rowrounds,
    )


def most_common(values: Iterable[int]) -> int:
    """The value met most often; the largest of those that tie."""
    found = Counter(values)
    return max(found, key=lambda value: (found[value], value))


def round_seconds(run: Run, width: int) -> list[float]:
    """How long rounds of this draft length took, from one round's end to the next one's, while
    all rows were live."""
    starts = [0.0] + [step.ended for step in run.steps[:-1]]
    return [
        step.ended - start
        for step, start in zip(run.steps, starts, strict=True)
        if step.width == width and len(step.rows) == len(run.contexts)
    ]


class Spread(NamedTuple):
    """Median, least and greatest of some repeats."""

    median: float
    least: float
    greatest: float


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of ratios, from one ratio of each repeat.

    Student's t on the logarithms: a ratio and its inverse count alike. None for fewer than FEWEST
    repeats.
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
    """Say what an interval of speed-ups means; None if there were too few repeats for one."""
    if found is None:
        return NO_VERDICT
    return "faster" if found[0] > 1 else "slower" if found[1] < 1 else "within noise"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
