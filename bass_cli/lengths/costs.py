"""What a round will take, as a controller knows it: from a profile that is scaled to what rounds
really take, or learnt from nothing while a job runs.

Not here: the grid itself (round_cost.py), what is decided from it (goodput.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from bass_cli.lengths.round_cost import Surface, make_surface

Array = NDArray[numpy.float64]

_MEMORY = 0.05  # weight of a round in the moving scale of a profile
_OWN = 0.1  # the same for what one draft length is off by itself
_LEAST_OWN, _MOST_OWN = 0.7, 1.4
_STUMBLE = 2.0  # how far a single round may be off and still count whole
_FORGET = 0.97  # what a round later an observation still weighs when costs are learnt
_ENOUGH = 8  # rounds of so many rows from which on they are worth keeping for another job


class Costs(Protocol):
    """Seconds of rounds by draft length, for the `choices` they were made for (rising, from 0).
    `free`: the host has the drafts, none is made in a round."""

    free: bool

    @property
    def known(self) -> bool:
        """Whether there is anything to predict from."""

    def line(self, rows: int, context: float | None = None) -> Array:
        """Seconds of a round of each choice's drafts for each of `rows` rows of this context,
        [choices]. This is asked before every round, so it may take some microseconds only."""

    def learn(self, rows: int, width: int, seconds: float, context: float | None = None) -> None:
        """A round took so long."""


class Profiled:
    """A surface, and a moving scale of seen over predicted, so that a stale profile or a
    throttled device is followed: one for all rounds, and a small one for each draft length.
    `frozen`: neither moves; rounds' times then decide nothing."""

    known, free = True, False

    def __init__(self, surface: Surface, choices: Sequence[int], *, frozen: bool = False):
        self._surface, self._choices, self._frozen = surface, tuple(choices), frozen
        self._scale, self._own = 1.0, numpy.ones(len(choices))
        self._lines: dict[
            int, tuple[Array, Array]
        ] = {}  # by rows: seconds at the surface's context, and by token of it

    def line(self, rows: int, context: float | None = None) -> Array:
        return self._scale * self._own * self._unscaled(rows, context)

    def learn(self, rows: int, width: int, seconds: float, context: float | None = None) -> None:
        if self._frozen:
            return
        place = nearest(self._choices, width)
        due = self._scale * float(self._own[place] * self._unscaled(rows, context)[place])
        off = min(max(seconds / due, 1 / _STUMBLE), _STUMBLE)
        self._scale *= off**_MEMORY
        self._own[place] = min(max(float(self._own[place]) * off**_OWN, _LEAST_OWN), _MOST_OWN)

    def _unscaled(self, rows: int, context: float | None) -> Array:
        if rows not in self._lines:
            surface, base = self._surface, self._surface.context
            here, there = (
                numpy.array([surface.seconds(rows, k, c) for k in self._choices])
                for c in (base, base + 1)
            )
            self._lines[rows] = here, there - here
        here, slope = self._lines[rows]
        return (
            here
            if context is None
            else here + slope * max(context - self._surface.context, -self._surface.context / 2)
        )


def nearest(choices: Sequence[int], width: int) -> int:
    """The place of the choice nearest to a width that was run."""
    return min(range(len(choices)), key=lambda place: abs(choices[place] - width))


class _Seen(NamedTuple):
    seconds: float
    times: int


# of the three weights, before anything was seen, in passes; the last: where a model drafts, for
# four of its passes
_GUESSED = (1.0, 0.03, 0.8)
_DOUBT = 1e4  # how little that guess weighs against what is seen


class Learned:
    """Seconds a round = a + b rows (width + 1) + c steps, fitted by recursive least squares with
    forgetting: a step for each draft, or `at_once` one for all. Where only one width was seen, a
    guess says what others cost: a fifth of a pass for each step unless drafts are `free`, and
    next to nothing for a row. `start`: what an earlier job has learnt."""

    def __init__(
        self, choices: Sequence[int], start: Surface | None = None, *, at_once: bool = False
    ) -> None:
        self._choices, self.free = numpy.array(choices), False
        self._most_steps = 1 if at_once else self._choices[-1]
        self._weights = [0.0, 0.0, 0.0]
        self._spread = [[_DOUBT if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._typical = self._unit = 0.0  # seconds of rounds: a moving average, the first one
        self._seen: dict[tuple[int, int], _Seen] = {}
        if start is not None:
            for rows in start.rows:
                for width in start.widths:
                    self.learn(rows, width, start.seconds(rows, width))
                self._seen[rows, 0] = _Seen(start.seconds(rows, 0), _ENOUGH)

    @property
    def known(self) -> bool:
        """Whether any round was seen."""
        return self._typical > 0

    def line(self, rows: int, context: float | None = None) -> Array:
        fixed, token, step = self._weights
        steps = numpy.minimum(self._choices, self._most_steps)
        found = token * rows / 8 * (self._choices + 1) + fixed + step / 4 * steps
        return numpy.maximum(found, max(self._typical / 10, 1e-9))

    def predict(self, rows: int, width: int) -> float:
        """Never less than a tenth of a typical round: a fit may be wrong far from what it has
        seen."""
        found = sum(w * f for w, f in zip(self._weights, self._features(rows, width), strict=True))
        return max(found, self._typical / 10, 1e-9)

    def learn(self, rows: int, width: int, seconds: float, context: float | None = None) -> None:
        if self._typical:
            # a stumble of the machine
            seconds = min(seconds, 4 * self.predict(rows, width) + self._typical)
        features = self._features(rows, width)
        if not self._typical:
            self._unit = seconds
            guessed = (*_GUESSED[:2], 0.0) if self.free else _GUESSED
            share = seconds / sum(g * f for g, f in zip(guessed, features, strict=True))
            self._weights = [share * g for g in guessed]
        self._typical += 0.1 * (seconds - self._typical) if self._typical else seconds
        # so that errors count relative to a round's seconds
        x = tuple(f * self._unit / seconds for f in features)
        ahead = [sum(row[j] * x[j] for j in range(3)) for row in self._spread]
        scale = _FORGET + sum(a * b for a, b in zip(x, ahead, strict=True))
        wrong = self._unit - sum(w * f for w, f in zip(self._weights, x, strict=True))
        self._weights = [w + a / scale * wrong for w, a in zip(self._weights, ahead, strict=True)]
        forget = _FORGET if max(self._spread[i][i] for i in range(3)) < _DOUBT else 1.0
        self._spread = [
            [(self._spread[i][j] - ahead[i] * ahead[j] / scale) / forget for j in range(3)]
            for i in range(3)
        ]
        before = self._seen.get((rows, width), _Seen(seconds, 0))
        times = before.times + 1
        self._seen[rows, width] = _Seen(
            before.seconds + max(1 / times, _MEMORY) * (seconds - before.seconds), times
        )

    def surface(self, *, acceptance: float | None) -> Surface | None:
        """What was learnt, on a grid of the row counts that were met often; None if there is
        none. Lengths that were not met are the fit's."""
        counts = {
            rows: sum(seen.times for (r, _), seen in self._seen.items() if r == rows)
            for rows, _ in self._seen
        }
        widths = self._choices.tolist()
        often = sorted(rows for rows, times in counts.items() if times >= _ENOUGH)
        if not often:
            return None
        drafting = max(self._weights[2], 0.0)
        whole = [[self._best_guess(rows, width) for width in widths] for rows in often]
        draft = [
            [
                min(drafting * min(width, self._most_steps) / 4, 0.9 * (seconds - line[0]))
                if width
                else 0.0
                for width, seconds in zip(widths, line, strict=True)
            ]
            for line in ([max(s, line[0]) for s in line] for line in whole)
        ]
        verify = [
            [seconds - part for seconds, part in zip(line, parts, strict=True)]
            for line, parts in zip(whole, draft, strict=True)
        ]
        return make_surface(
            often, widths, verify=verify, draft=draft, acceptance=acceptance, measured=False
        )

    def _best_guess(self, rows: int, width: int) -> float:
        seen = self._seen.get((rows, width), _Seen(0.0, 0))
        return seen.seconds if seen.times >= 3 else self.predict(rows, width)

    def _features(self, rows: int, width: int) -> tuple[float, float, float]:
        return 1.0, rows * (width + 1) / 8, min(width, self._most_steps) / 4
