"""Fills a cost surface where time did not suffice to measure it, and tells the draft's part from
the target's.

Not here: the measuring (measure.py).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy

Point = tuple[int, int]  # rows, width
_LEAST = 1e-7  # seconds of a round: a clock may stand still


def filled(
    points: dict[Point, float], rows: Sequence[int], widths: Sequence[int]
) -> list[list[float]]:
    """Fill in the points that were not measured.

    The others come from a fit (seconds of a pass, and more for each row and token, none of them
    below 0), corrected by what the fit is off at the nearest widths and then at the nearest rows.
    No point is below one that was measured with fewer rows and drafts.
    """
    points = {at: max(value, _LEAST) for at, value in points.items() if math.isfinite(value)}
    assert points, "not even one round was measured"
    places = numpy.array(list(points))
    seconds = numpy.array(list(points.values()))

    def features(count: numpy.ndarray, width: numpy.ndarray) -> numpy.ndarray:
        return numpy.stack((numpy.ones(len(count)), count, count * width), 1)

    weights = _positive_fit(features(*places.T) / seconds[:, None], numpy.ones(len(seconds)))
    grid = numpy.array(list(itertools.product(rows, widths)))
    fitted = (features(*grid.T) @ weights).reshape(len(rows), len(widths))
    off = {
        (count, width): points[count, width] - float(fitted[i, j])
        for i, count in enumerate(rows)
        for j, width in enumerate(widths)
        if (count, width) in points
    }
    seen = sorted({count for count, _ in off})
    lines = [
        _between(widths, {width: value for (c, width), value in off.items() if c == count})
        for count in seen
    ]
    columns = [
        _between(rows, dict(zip(seen, column, strict=True))) for column in zip(*lines, strict=True)
    ]
    whole = fitted + numpy.array(columns).T
    floor = [
        [
            max((points[at] for at in points if at[0] <= count and at[1] <= width), default=0.0)
            for width in widths
        ]
        for count in rows
    ]
    found: list[list[float]] = [
        [
            points.get((count, width), max(value, least, float(seconds.min())))
            for width, value, least in zip(widths, values, leasts, strict=True)
        ]
        for count, values, leasts in zip(rows, whole.tolist(), floor, strict=True)
    ]
    return found


def _positive_fit(features: numpy.ndarray, values: numpy.ndarray) -> numpy.ndarray:
    """Solve least squares with weights of at least 0, by trying every set of features that are
    used; features [points, few], values [points]."""
    count = features.shape[1]
    best, least = numpy.zeros(count), float(values @ values)
    for used in itertools.product((False, True), repeat=count):
        columns = numpy.flatnonzero(used)
        weights, *_ = numpy.linalg.lstsq(features[:, columns], values, rcond=None)
        off = features[:, columns] @ weights - values
        if (weights >= 0).all() and off @ off < least:
            best, least = numpy.zeros(count), float(off @ off)
            best[columns] = weights
    return best


def _between(axis: Sequence[int], known: dict[int, float]) -> list[float]:
    """Values along an axis, linear between known points and the nearest one's beyond them."""
    places = sorted(known)
    found: list[float] = numpy.interp(axis, places, [known[place] for place in places]).tolist()
    return found


def drafting(
    whole: dict[Point, float],
    verify: dict[Point, float],
    rows: Sequence[int],
    widths: Sequence[int],
    *,
    at_once: bool = False,
) -> list[list[float]]:
    """What real rounds took beyond the target's part, as lines through the lengths that were
    measured; numbers of rows that were not lie between. `at_once`: one pass drafts all, so that
    where only one length was measured the others take as long."""
    known: dict[int, dict[int, float]] = {}
    for (count, width), seconds in whole.items():
        if (count, width) in verify:
            known.setdefault(count, {})[width] = max(seconds - verify[count, width], 0.0)
    if not known:
        return [[0.0] * len(widths) for _ in rows]
    lines = {count: _steps(line, widths, at_once) for count, line in known.items()}
    columns = [
        _between(rows, {count: line[place] for count, line in lines.items()})
        for place in range(len(widths))
    ]
    return [list(line) for line in zip(*columns, strict=True)]


def _steps(known: dict[int, float], widths: Sequence[int], at_once: bool) -> list[float]:
    """Seconds of drafting so many tokens, from those of some: on the line between the two nearest
    lengths, or the last two."""
    measured = sorted(known)
    if len(measured) == 1:
        (only,) = measured
        steps = {width: known[only] * (1.0 if at_once else width / only) for width in widths}
        return [steps[width] if width else 0.0 for width in widths]
    found = []
    for width in widths:
        after = min(max(bisect.bisect_left(measured, width), 1), len(measured) - 1)
        low, high = measured[after - 1], measured[after]
        step = max((known[high] - known[low]) / (high - low), 0.0)
        found.append(max(known[high] + (width - high) * step, 0.0) if width else 0.0)
    return found
