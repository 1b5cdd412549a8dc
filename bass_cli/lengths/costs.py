"""What a round takes, by rows, draft length and context: a grid of points, interpolated, how it is
written down, and how far a device is off it.

Not here: how points are measured or where surfaces are kept (profiling/, profiles.py), what follows
from a round's cost (goodput.py).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from bass_cli.engine.graphs import ARITHMETIC, STEP
from bass_cli.io.reading import finite, parse_object, truth, whole

FORMAT = 1  # of what is written down; another one is not read
Grid = tuple[tuple[float, ...], ...]
Array = NDArray[numpy.float64]

# How far off drafting's parts of a measured or another surface may be, beside what all are (logs);
_TRUST = {True: (0.0, 0.15, 0.15), False: (0.0, 0.5, 1.0)}
_TOGETHER = {True: 0.1, False: 0.5}  # and how far all of them: a busy or throttled device
_ANYTHING = 100.0  # the variance of what a pass takes where nothing was ever measured
_NOISE = 0.03  # of one round's seconds
# What each part, and all of them, may change from one round to the next: 0.4 %.
_DRIFTED = 0.004**2 * (numpy.eye(3) + 1)
# Standard deviations from which on a round says that something was wrong or has changed.
_SURPRISE = 3.0
# Of its square, this is laid to all parts alike, as much to chance: one stumble is not believed.
_SHARE = 0.25
_STUMBLE = math.log(2)  # a round tells no more than that it took twice or half its time
_ITERATED = 4  # times that a round is looked at anew; a fifth would move its parts by less than 1 %
_ENOUGH = 8  # rounds of so many rows from which on they are worth keeping for another job
# Bounds of what is believed: seconds of a round, seconds of a further token of context, tokens of
# context, rows and drafts. Beyond them no device works, and sums would lose their meaning.
_LEAST, _MOST, _MOST_GROWTH, _MOST_CONTEXT, _MOST_ROWS = 1e-7, 1e5, 1.0, 1e9, 1 << 20
_FURTHEST = 25.0  # logarithm of a factor, at most: a guess of 1 s may be off by 1e10


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds on a grid of `rows` x `widths` (live rows, drafts a row), all rows about `context`
    tokens long.

    `verify`: the target's pass over width + 1 tokens a row, acceptance, commit and the host's
    part; `draft`: all draft steps of that width, 0 at width 0. `growth`: seconds that one more
    token of context adds for each row to the target's pass and to each draft step. `acceptance`:
    the chance that a draft whose turn came stood while this was measured; None if nobody knows.
    `measured`: by `bass profile`; what a job has learnt on the side is not.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    verify: Grid
    draft: Grid
    context: float = 0.0
    growth: tuple[float, float] = (0.0, 0.0)
    acceptance: float | None = None
    measured: bool = True

    def seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """Return the seconds of a whole round: `width` drafts for each of `rows` rows.

        More rows, longer drafts and a longer context never cost less. `context` is the tokens of
        a row (None: the grid's own); a shorter one never costs less than half.
        """
        return self.verify_seconds(rows, width, context) + self.draft_seconds(rows, width, context)

    def verify_seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """The part that is not drafting."""
        return self._grown(self._value(self.verify, rows, width), rows, context, self.growth[0])

    def draft_seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """Return the seconds of all draft steps of a round.

        A shorter context saves less in a shorter draft, so the result is the largest value of all
        widths up to this one. The value is linear between grid points, so these are enough.
        """
        shorter = (w for w in self.widths if w < width) if context is not None else ()
        return max(
            self._grown(self._value(self.draft, rows, w), rows, context, self.growth[1] * w)
            for w in (*shorter, width)
        )

    def digest(self) -> str:
        """Tells this surface from every other."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    def _grown(self, value: float, rows: int, context: float | None, growth: float) -> float:
        """Add what `rows` rows of another context cost, at `growth` seconds a token."""
        if context is None:
            return value
        return max(value + rows * self.further(context) * growth, value / 2)

    def further(self, context: float) -> float:
        """Return the tokens of a context beyond the grid's own; the least is minus half of it."""
        return max(context - self.context, -self.context / 2)

    def _value(self, grid: Grid, rows: int, width: int) -> float:
        """Interpolate a grid: linear between its points and beyond the last ones.

        What one more draft adds is extrapolated, not the sum: each part is at least 0 and never
        falls beyond the last row. A plane through the last points could fall below 0 there. Before
        the first points, and where there is one line only, the value stays as it is.
        """
        at, share = _between(self.rows, rows)
        low, high = grid[at], grid[min(at + 1, len(grid) - 1)]
        found = _onward(low[0], high[0], share)
        for i, (left, right) in enumerate(itertools.pairwise(self.widths)):
            part = min(width - left, right - left) / (right - left)
            if part <= 0:
                break
            found += part * _onward(low[i + 1] - low[i], high[i + 1] - high[i], share)
        if width > self.widths[-1] and len(self.widths) > 1:
            # The steepest end of all lines up to these rows, so that more rows never cost less.
            ends = [line[-1] - line[-2] for line in grid[: at + 2]]
            further = (width - self.widths[-1]) / (self.widths[-1] - self.widths[-2])
            found += further * _onward(max(ends[: at + 1]), max(ends), share)
        return found


def make_surface(
    rows: Sequence[int],
    widths: Sequence[int],
    *,
    verify: Sequence[Sequence[float]],
    draft: Sequence[Sequence[float]],
    context: float = 0.0,
    growth: tuple[float, float] = (0.0, 0.0),
    acceptance: float | None = None,
    measured: bool = True,
) -> Surface:
    """Make a Surface of what was measured.

    More rows or a longer draft never take less time, whatever was measured, and all values are
    within the bounds that `read_surface` accepts. `widths` begin at 0, where drafting takes no
    time.
    """
    assert widths[0] == 0
    draft = [[0.0, *line[1:]] for line in draft]
    return Surface(
        tuple(rows),
        tuple(widths),
        _rising(_bounded(verify, _LEAST)),
        _rising(_bounded(draft, 0.0)),
        min(max(context, 0.0), _MOST_CONTEXT),
        (min(max(growth[0], 0.0), _MOST_GROWTH), min(max(growth[1], 0.0), _MOST_GROWTH)),
        acceptance,
        measured,
    )


def read_surface(text: str | bytes) -> Surface:
    """The Surface that `to_json` wrote. ValueError for anything else."""
    found = parse_object(text)
    if found.pop("format", None) != FORMAT:
        raise ValueError("of another format")
    try:
        surface = _typed(found)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a cost surface: {error}") from None
    _check(surface)
    return surface


def _typed(found: Mapping[str, Any]) -> Surface:
    def grid(key: str) -> Grid:
        return tuple(tuple(finite(value) for value in line) for line in found[key])

    verify, draft = found["growth"]
    acceptance = found["acceptance"]
    return Surface(
        tuple(whole(n) for n in found["rows"]),
        tuple(whole(n) for n in found["widths"]),
        grid("verify"),
        grid("draft"),
        finite(found["context"]),
        (finite(verify), finite(draft)),
        None if acceptance is None else finite(acceptance),
        truth(found["measured"]),
    )


def _check(surface: Surface) -> None:
    """Raise ValueError unless this could be a device: `make_surface` never makes another one."""
    for name, axis in (("rows", surface.rows), ("widths", surface.widths)):
        if not axis or any(b <= a for a, b in itertools.pairwise(axis)):
            raise ValueError(f"{name} are not rising numbers")
        if axis[-1] > _MOST_ROWS:
            raise ValueError(f"{name} above {_MOST_ROWS}")
    if surface.rows[0] < 1 or surface.widths[0] != 0:
        raise ValueError("rows do not begin at 1 or more, or widths not at 0")
    for name, grid, least in (("verify", surface.verify, _LEAST), ("draft", surface.draft, 0.0)):
        if len(grid) != len(surface.rows) or any(len(line) != len(surface.widths) for line in grid):
            raise ValueError("a grid that does not fit its rows and widths")
        if not all(least <= value <= _MOST for line in grid for value in line):
            raise ValueError(f"seconds in {name} that are not between {least:g} and {_MOST:g}")
        if grid != _rising(grid):
            raise ValueError(f"seconds in {name} that fall with more rows or drafts")
    if any(line[0] for line in surface.draft):
        raise ValueError("drafting that takes time in rounds without drafts")
    if not 0 <= surface.context <= _MOST_CONTEXT:
        raise ValueError(f"a context that is not between 0 and {_MOST_CONTEXT:g} tokens")
    if not all(0 <= growth <= _MOST_GROWTH for growth in surface.growth):
        raise ValueError(f"a growth that is not between 0 and {_MOST_GROWTH:g} seconds a token")
    if surface.acceptance is not None and not 0 <= surface.acceptance <= 1:
        raise ValueError("an acceptance that is not between 0 and 1")


def _between(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The index of the point at or below a value and the share of the way to the next; beyond
    the last point it goes on as between the last two; before the first one it stays."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    at = min(bisect.bisect_right(axis, value), len(axis) - 1) - 1
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def _onward(low: float, high: float, share: float) -> float:
    """Go `share` of the way from one value to the next; beyond the next, never down."""
    if share == 0:
        return low
    return low + min(share, 1.0) * (high - low) + max(share - 1.0, 0.0) * max(high - low, 0.0)


def _bounded(grid: Sequence[Sequence[float]], least: float) -> list[list[float]]:
    """Replace what is not a number, and what no device takes, by the nearest bound."""
    found = numpy.nan_to_num(numpy.array(grid, dtype=numpy.float64), nan=least)
    bounded: list[list[float]] = found.clip(least, _MOST).tolist()
    return bounded


def _rising(grid: Sequence[Sequence[float]]) -> Grid:
    """The grid with what falls along an axis evened out."""
    lines = [_even(line) for line in grid]
    return tuple(zip(*(_even(column) for column in zip(*lines, strict=True)), strict=True))


def _even(line: Sequence[float]) -> list[float]:
    """Halfway between the largest value so far and the smallest one to come, which rises."""
    ahead = reversed(list(itertools.accumulate(reversed(line), min)))
    return [
        (high + low) / 2 for high, low in zip(itertools.accumulate(line, max), ahead, strict=True)
    ]


def _guess(at_once: bool) -> Surface:
    """In plain passes, where nobody measured."""
    return make_surface(
        (1, 2),
        (0, 1, 2),
        verify=[[1 + rows * tokens / ARITHMETIC for tokens in (1, 2, 3)] for rows in (1, 2)],
        draft=[[0.0, STEP, STEP if at_once else 2 * STEP]] * 2,
        measured=False,
    )


class RoundCost:
    """Seconds of rounds for the `choices` of draft lengths (rising, from 0).

    The logarithms of the three factors are followed by a Kalman filter, so that one sum tells of
    its parts. Without a `surface` nothing is known before the first round. `frozen`: nothing moves,
    for maximal coupling; needs a surface. `at_once`: all drafts of a round take one pass.
    """

    def __init__(
        self,
        choices: Sequence[int],
        surface: Surface | None,
        *,
        frozen: bool = False,
        at_once: bool = False,
    ):
        assert surface is not None or not frozen
        self._choices, self._frozen = numpy.array(choices), frozen
        self.known = surface is not None
        self._surface = surface or _guess(at_once)
        self._factors, trust = numpy.ones(3), _TRUST[self._surface.measured]
        # Covariance of their logarithms: that of a plain pass is all parts' alike.
        self._doubt: Array = numpy.diag(trust) ** 2 + _TOGETHER[self._surface.measured] ** 2
        if not self.known:
            self._doubt += _ANYTHING
        # By rows: seconds at the surface's context; seconds that a further token of context adds.
        self._parts: dict[int, tuple[Array, Array]] = {}
        self._met: Counter[int] = Counter()  # rounds by rows
        # A first round is slower than any other (caches, libraries): a guess is not to follow it.
        self._first = not self._surface.measured

    def line(self, rows: int, context: float | None = None, *, free: bool = False) -> Array:
        """Seconds of rounds with each choice's drafts in `rows` rows of this context, [choices].

        `free`: the host has the drafts, none is made in a round. This is asked before every round,
        so it may take some microseconds only.
        """
        found: Array = self._scaled(rows, context, free).sum(0)
        return found

    def learn(
        self, rows: int, width: int, seconds: float, context: float | None, *, free: bool = False
    ) -> None:
        """Learn from a round that took so long. A time that is not above 0 and finite teaches
        nothing: the clock stood still or was set."""
        first, self._first = self._first, False
        if self._frozen or first or not 0 < seconds < math.inf:
            return
        self._met[rows] += 1
        place = int(abs(self._choices - width).argmin())
        parts = self._scaled(rows, context, free)[:, place]
        told = math.log(seconds) - math.log(float(parts.sum()))
        most = _STUMBLE if self.known else _FURTHEST
        told = min(max(told, -most), most)
        moved, shares, off, noise = self._moved(parts, told)
        if self.known and off * off > _SURPRISE**2 * (shares @ self._doubt @ shares + noise):
            noise = _SHARE * off * off
            self._doubt = self._doubt + noise
            moved, shares, off, noise = self._moved(parts, told, noise)
        seen = self._doubt @ shares
        gain = seen / (shares @ seen + noise)
        moved = numpy.log(self._factors) + moved
        self._factors = numpy.exp(moved.clip(-_FURTHEST, _FURTHEST))
        self._doubt = self._doubt - numpy.outer(gain, seen) + _DRIFTED
        self.known = True

    def _moved(
        self, parts: Array, told: float, noise: float = _NOISE**2
    ) -> tuple[Array, Array, float, float]:
        """By how much the factors move if a round of these parts took exp(told) of its time (logs);
        the parts' shares of it then; how far off it was, seen from there; the noise.

        A sum of exponentials is no line: a part of which next to nothing is known may become most
        of a round, and is a smaller surprise then. So it is looked at from where it leads to.
        """
        due, moved = math.log(float(parts.sum())), numpy.zeros(3)
        for _ in range(_ITERATED):
            there = parts * numpy.exp(moved)
            shares = there / there.sum()
            off = due + told - math.log(float(there.sum())) + float(shares @ moved)
            seen = self._doubt @ shares
            moved = seen / (shares @ seen + noise) * off
        return moved, shares, off, noise

    def tells(self, rows: int, place: int, context: float | None = None) -> float:
        """How much a plain round would tell of what a round of this choice takes in plain ones.

        As a share, a standard deviation; 0 where nothing may be learnt.
        """
        if self._frozen:
            return 0.0
        parts = self._scaled(rows, context, False)[:, place]
        apart = parts / parts.sum() - (1.0, 0.0, 0.0)
        plain = self._doubt[0]
        return abs(float(apart @ plain)) / float(plain[0] + _NOISE**2) ** 0.5

    def surface(self, *, acceptance: float) -> Surface | None:
        """What was learnt, for the row counts met often; None if nothing is worth keeping."""
        often = sorted(rows for rows, times in self._met.items() if times >= _ENOUGH)
        if self._surface.measured or not often:
            return None
        parts = [self._scaled(rows, None, False) for rows in often]
        return make_surface(
            often,
            self._choices.tolist(),
            verify=[(plain + places).tolist() for plain, places, _ in parts],
            draft=[draft.tolist() for _, _, draft in parts],
            acceptance=acceptance,
            measured=False,
        )

    def _scaled(self, rows: int, context: float | None, free: bool) -> Array:
        """Seconds of the parts, [3, choices]."""
        if rows not in self._parts:
            here, there = (self._at(rows, self._surface.context + more) for more in (0, 1))
            self._parts[rows] = here, there - here
        here, slope = self._parts[rows]
        if context is not None:
            here = numpy.maximum(here + slope * self._surface.further(context), here / 2)
            # A shorter context saves more in a longer draft, which still never costs less.
            here = numpy.maximum.accumulate(here, axis=1)
        return here * (self._factors * (1.0, 1.0, 0.0 if free else 1.0))[:, None]

    def _at(self, rows: int, context: float) -> Array:
        widths, surface = self._choices.tolist(), self._surface
        verify = numpy.array([surface.verify_seconds(rows, k, context) for k in widths])
        draft = numpy.array([surface.draft_seconds(rows, k, context) for k in widths])
        return numpy.stack((0 * verify + verify[0], (verify - verify[0]).clip(0.0), draft))
