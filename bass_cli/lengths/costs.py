"""What a round will take, as everything that has to know it asks: a surface, and how far it is off.

A round is a plain pass, the drafts' places in that pass, and the draft's own steps. The surface
has all three; rounds say by which factor each of them is off. Not here: the surface
(round_cost.py), what follows from it (goodput.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from bass_cli.lengths.round_cost import Surface, make_surface

Array = NDArray[numpy.float64]

_TRUST = {
    True: 0.15,
    False: 0.7,
}  # how far off a part of a measured or another surface may be (logs)
_ANYTHING = 100.0  # the variance of what a pass takes where nothing was ever measured
_TOGETHER = 0.1  # and all of them together: a busy or throttled device
_NOISE = 0.03  # of one round's seconds
_DRIFT = 0.004  # what each part may change from one round to the next
_SURPRISE = (
    3.0  # standard deviations from which on a round says that something was wrong or has changed
)
_SHARE = (
    0.25  # of its square is laid to all parts alike, as much to chance: one stumble is not believed
)
_STUMBLE = math.log(2)  # a round tells no more than that it took twice or half its time
_ENOUGH = 8  # rounds of so many rows from which on they are worth keeping for another job
# In passes, where nobody measured: a row's token takes 0.4 % of a pass, a draft a fifth of one.
_GUESS = make_surface(
    (1, 257),
    (0, 64),
    verify=[[1.004, 1.26], [2.028, 67.82]],
    draft=[[0.0, 12.8], [0.0, 12.8]],
    measured=False,
)


class RoundCost:
    """Seconds of rounds for the `choices` of draft lengths (rising, from 0).

    The logarithms of the three factors are followed by a Kalman filter, so that one sum tells of
    its parts. Without a `surface` nothing is known before the first round. `frozen`: nothing moves,
    for maximal coupling.
    """

    def __init__(self, choices: Sequence[int], surface: Surface | None, *, frozen: bool = False):
        self._choices, self._frozen = numpy.array(choices), frozen
        self.known = surface is not None
        self._surface = surface or _GUESS
        self._factors, trust = numpy.ones(3), _TRUST[self._surface.measured]
        self._doubt: Array = (
            trust**2 * numpy.eye(3) + _TOGETHER**2
        )  # covariance of their logarithms
        if not self.known:
            self._doubt += _ANYTHING
        self._parts: dict[
            int, tuple[Array, Array]
        ] = {}  # by rows: at the surface's context; a token more
        self._inferred = 0.0  # by how much plain moved since it was seen last (log)
        self._met: Counter[int] = Counter()  # rounds by rows

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
        """A round took so long."""
        if self._frozen:
            return
        self._met[rows] += 1
        place = int(abs(self._choices - width).argmin())
        parts = self._scaled(rows, context, free)[:, place]
        due = float(parts.sum())
        off, noise, shares = math.log(seconds / due), _NOISE**2, parts / due
        seen = self._doubt @ shares
        if self.known:
            off = min(max(off, -_STUMBLE), _STUMBLE)
            if off * off > _SURPRISE**2 * (shares @ seen + noise):
                noise = _SHARE * off * off
                self._doubt = self._doubt + noise
                seen = self._doubt @ shares
        gain = seen / (shares @ seen + noise)
        self._factors = self._factors * numpy.exp(gain * off)
        self._inferred = self._inferred + float(gain[0]) * off if width else 0.0
        self._doubt = self._doubt - numpy.outer(gain, seen) + _DRIFT**2 * (numpy.eye(3) + 1)
        self.known = True

    def tells(self, rows: int, place: int, context: float | None = None) -> float:
        """How much a plain round would tell of what a round of this choice takes in plain ones.

        As a share: a standard deviation, or what drafting rounds alone have made of plain ones. 0
        where nothing may be learnt.
        """
        if self._frozen:
            return 0.0
        parts = self._scaled(rows, context, False)[:, place]
        apart = parts / parts.sum() - (1.0, 0.0, 0.0)
        plain = self._doubt[0]
        unsure = abs(float(apart @ plain)) / float(plain[0] + _NOISE**2) ** 0.5
        return max(unsure, abs(self._inferred))

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
            base = self._surface.context
            here = here + slope * max(context - base, -base / 2)
        return here * (self._factors * (1.0, 1.0, 0.0 if free else 1.0))[:, None]

    def _at(self, rows: int, context: float) -> Array:
        widths, surface = self._choices.tolist(), self._surface
        verify = numpy.array([surface.verify_seconds(rows, k, context) for k in widths])
        draft = numpy.array([surface.draft_seconds(rows, k, context) for k in widths])
        return numpy.stack((0 * verify + verify[0], verify - verify[0], draft))
