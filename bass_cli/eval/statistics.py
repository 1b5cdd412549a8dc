"""Compute means, standard errors and 95 % intervals of an evaluation's figures.

The problems of a data set count as a random sample of the problems that it could have. So a figure
is a mean over problems, and its error comes from the differences between problems (Miller 2024,
arXiv 2411.00640). Here is arithmetic only; report.py chooses the figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy

CONFIDENCE = 0.95
# The standard error of a bound of a percentile interval is about 2.7 % of the figure's standard
# error with 10,000 resamples: sqrt(0.025 x 0.975 / 10000) over the normal density at that bound.
RESAMPLES = 10_000
SEED = 0  # of the bootstrap; fixed, so that a report is reproducible
# Normal intervals are too narrow with fewer problems (Bowyer et al. 2025, arXiv 2503.01747).
FEW = 100
_Z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_CELLS = 1 << 22  # numbers of a block of resamples: 32 MiB

Method = Literal["normal", "bootstrap"]


class Estimate(NamedTuple):
    """A mean over problems with its error.

    Attributes:
        value: the mean.
        standard_error: in the unit of the value. None with fewer than two problems.
        low, high: bounds of the 95 % interval. None with fewer than two problems.
        problems: the number of values.
        method: how the error was found: by `over_problems` or by `bootstrap`.
    """

    value: float
    standard_error: float | None
    low: float | None
    high: float | None
    problems: int
    method: Method

    def document(self) -> dict[str, Any]:
        """Return the entry of a report: value, standard_error, interval, problems, method."""
        interval = None if self.low is None else [self.low, self.high]
        return {
            "value": self.value,
            "standard_error": self.standard_error,
            "interval": interval,
            "problems": self.problems,
            "method": self.method,
        }


def over_problems(values: Iterable[float], *, least: float, most: float) -> Estimate | None:
    """Estimate the mean of values of which each belongs to one problem. None without values.

    The standard error is sqrt(sum((s_i - mean)^2) / (P (P - 1))) for P problems. A problem's value
    may be the mean of its samples, or another unbiased estimate such as pass@k. So the samples of a
    problem may depend on each other: with n samples for each problem this is the clustered standard
    error of Miller 2024 (arXiv 2411.00640), where a cluster is a problem, times sqrt(P / (P - 1)),
    which makes its square unbiased. The interval is the mean plus or minus 1.96 standard errors.

    Args:
        values: one for each problem.
        least, most: the bounds of the figure, to which the interval is limited.
    """
    found = [float(value) for value in values]
    if not found:
        return None
    middle = math.fsum(found) / len(found)
    if len(found) < 2:
        return Estimate(middle, None, None, None, len(found), "normal")
    squares = math.fsum((value - middle) ** 2 for value in found)
    error = math.sqrt(squares / (len(found) * (len(found) - 1)))
    low, high = max(middle - _Z * error, least), min(middle + _Z * error, most)
    return Estimate(middle, error, low, high, len(found), "normal")


def share_of(values: Iterable[float]) -> Estimate | None:
    """Return `over_problems` of shares, which are between 0 and 1."""
    return over_problems(values, least=0.0, most=1.0)


def bootstrap(values: Iterable[float], *, seed: int = SEED) -> Estimate | None:
    """Estimate the mean of values with the bootstrap over problems. None without values.

    Each of RESAMPLES resamples draws as many problems as there are, with replacement. The standard
    error is the standard deviation of their means. The interval is from their 2.5 % to their 97.5 %
    quantile (Efron and Tibshirani 1993, chapter 13). Problems are whole, so the samples of a
    problem may depend on each other.

    Equal values are counted together, so a resample is one draw from a multinomial distribution.
    The generator is numpy's RandomState, whose numbers are the same in all versions.
    """
    found = numpy.asarray([float(value) for value in values])
    if not len(found):
        return None
    middle = math.fsum(found) / len(found)
    if len(found) < 2:
        return Estimate(middle, None, None, None, len(found), "bootstrap")
    distinct, counts = numpy.unique(found, return_counts=True)
    generator, size = numpy.random.RandomState(seed), max(1, _CELLS // len(distinct))
    everything = numpy.empty(RESAMPLES)
    for start in range(0, RESAMPLES, size):
        block = everything[start : start + size]
        drawn = generator.multinomial(len(found), counts / len(found), size=len(block))
        block[:] = drawn @ distinct / len(found)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(one) for one in numpy.quantile(everything, (tail, 1 - tail)))
    error = float(everything.std(ddof=1))
    return Estimate(middle, error, low, high, len(found), "bootstrap")


def pass_at_k(samples: int, passed: int, k: int) -> float | None:
    """Return the chance that at least one of k samples passes.

    The k samples are drawn without replacement from `samples`, of which `passed` pass. This is
    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, figure 3), rounded once, so that
    equal shares of different numbers of samples are equal. None with fewer than k samples: then no
    unbiased estimate exists.
    """
    assert 0 <= passed <= samples
    assert k >= 1
    if samples < k:
        return None
    every = math.comb(samples, k)
    return (every - math.comb(samples - passed, k)) / every


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean. None without values."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole. None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between neighbours."""
    return float(numpy.quantile(values, share))


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, p90 and max. None without values."""
    if not values:
        return None
    return {
        "mean": math.fsum(values) / len(values),
        "median": statistics.median(values),
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
    return {
        "median": statistics.median(values),
        "p90": quantile(values, 0.9),
        "p99": quantile(values, 0.99),
        "max": max(values),
        "share_over": sum(value > 0 for value in values) / len(values),
    }
