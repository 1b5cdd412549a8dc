"""Arithmetic of scoring: pass@k, the sample ranked first, and statistics of times.

Pure functions. Shares are fractions of 1, times are in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """A sample that can be ranked. `mean_logprob` is in nats, None if unknown."""

    @property
    def sample(self) -> int: ...
    @property
    def mean_logprob(self) -> float | None: ...


R = TypeVar("R", bound=Ranked)


def pass_at_k(samples: int, passed: int, k: int) -> float | None:
    """Return the chance that at least one of k samples passes.

    The k samples are drawn without replacement from `samples`, of which `passed` pass. Computes
    1 - C(n-c, k) / C(n, k) as a product, which neither overflows nor cancels (Chen et al. 2021,
    arXiv 2107.03374, figure 3). None with fewer than k samples: then no unbiased estimate exists.
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
    """Return the sample with the highest mean log-probability (Pass@First of arXiv 2404.15778).

    Samples without one come last. The lowest sample number wins a tie. None without samples.
    """
    return max(finished, key=_sort_key, default=None)


def _sort_key(sample: Ranked) -> tuple[float, int]:
    known = -math.inf if sample.mean_logprob is None else sample.mean_logprob
    return known, -sample.sample


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean. None without values."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole. None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between neighbours (numpy's default definition)."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, p90 and max. None without values."""
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
    """Return statistics of how late problems were. None without values.

    Args:
        values: seconds beyond the deadline for each problem, negative if early.

    Returns:
        median, p90, p99 and max in seconds, and `share_over`, the fraction of late problems.
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
