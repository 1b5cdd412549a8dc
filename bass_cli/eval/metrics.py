"""What samples are worth, as plain arithmetic: pass@k, the sample ranked first, spreads of times.

Pure functions of numbers; no files, no tasks, no programs. Fractions are of 1, times in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """What ranking looks at in a sample; `mean_logprob` is natural, None where nobody knows it."""

    @property
    def sample(self) -> int: ...
    @property
    def mean_logprob(self) -> float | None: ...


R = TypeVar("R", bound=Ranked)


def pass_at_k(samples: int, passed: int, k: int) -> float | None:
    """The chance that one of k samples passes, drawn without replacement from `samples` of which
    `passed` do.

    1 - C(n-c, k) / C(n, k) as a product, which neither overflows nor cancels (Chen et al. 2021,
    arXiv 2107.03374, figure 3). None where there are fewer than k samples: then there is no
    unbiased estimate.
    """
    assert 0 <= passed <= samples
    assert k >= 1
    if samples < k:
        return None
    failed = samples - passed
    if failed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(failed + 1, samples + 1))


def first_ranked(finished: Iterable[R]) -> R | None:
    """The sample with the highest mean log-probability (Pass@First of arXiv 2404.15778), None if
    there is no sample.

    Those without one come last; the lowest sample number wins a tie, whatever the order of the
    lines is.
    """
    return max(finished, key=_rank, default=None)


def _rank(sample: Ranked) -> tuple[float, int]:
    known = -math.inf if sample.mean_logprob is None else sample.mean_logprob
    return known, -sample.sample


def mean(values: Iterable[float]) -> float | None:
    """The arithmetic mean, None of nothing."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, None where either is not known or the whole is nothing."""
    return part / whole if part is not None and whole else None


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values lie below, linear between neighbours (numpy's default
    definition)."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, p90 and max of some times; None of nothing."""
    if not values:
        return None
    middle = statistics.median(values)
    return {
        "mean": math.fsum(values) / len(values),
        "median": middle,
        "p90": quantile(values, 0.9),
        "max": max(values),
    }


def overshoot(values: Sequence[float]) -> dict[str, float] | None:
    """How late problems were, from each one's seconds beyond the deadline (negative: early); None
    of nothing.

    `share_over` is the fraction of problems that were late at all.
    """
    if not values:
        return None
    late = sum(value > 0 for value in values) / len(values)
    return {
        "median": statistics.median(values),
        "p90": quantile(values, 0.9),
        "p99": quantile(values, 0.99),
        "max": max(values),
        "share_over": late,
    }
