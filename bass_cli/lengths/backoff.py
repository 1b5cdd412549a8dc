"""When to try again what did not pay, what a first use may cost, and what drafting may lose in all.

Not here: what is tried, and what it costs (goodput.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from bass_cli.engine.contracts import ControllerInput
from bass_cli.lengths.round_cost import Array

_CAUTION = 2.0  # how many times what a length costs once must be saved: hopes may not come true
_TRIAL = 0.02  # share of the time left that a first use may take while nobody knows what is kept
_PATIENCE = 4  # rounds before the next try, at least
# Of the time since the last try, what one may lose: at first, and after some that failed. With
# less, waiting would save nothing worth having, and a change is missed.
_SHARES = (0.08, 0.005)
_LOOKS = (4, 24)  # looks that what is thought at first counts as, and that are remembered
_HOPE = 0.1  # what a look is thought to win at first, in plain rounds: a tenth more tokens
_REGRET = 0.012  # share of the time that drafting may have lost
_AHEAD = 256.0  # rounds that are still to come, at most, of which that share may be lost already
_GRACE = 1.5  # plain rounds that it may lose besides
_KEPT = 0.2  # share of all that it has won that it keeps in any case, and may lose the rest


def trial(plain: float, rounds: float) -> float:
    """Seconds that a first use may take on trial, of so many rounds of `plain` seconds."""
    return _TRIAL * plain * rounds


def first_use(
    lengths: Sequence[int], inputs: ControllerInput, line: Array, most: float, unsure: bool
) -> Array:
    """What these lengths cost once, in seconds a round left; no end: too dear to try.

    `line`: seconds of a round of each, the first of plain ones. `most`: seconds that may still be
    lost, by a round of which nothing stands and by catching up for it. `unsure`: nobody knows yet
    what rows keep of a draft.
    """
    one_time_costs, warmup_costs = (
        numpy.array([of(k) for k in lengths]) for of in (inputs.one_time_cost, inputs.warmup_cost)
    )
    once: Array = one_time_costs * (_CAUTION / inputs.left)
    dear = (line - line[0] + inputs.catch_up > most) & (numpy.array(lengths) > 0)
    once[dear | (unsure & (warmup_costs > trial(float(line[0]), inputs.left)))] = numpy.inf
    return once


class Tries:
    """Of something that may not pay: each failure halves what tries may lose."""

    def __init__(self) -> None:
        self.idle = 0.0  # rounds without it
        self._share = _SHARES[0]

    @property
    def thinkable(self) -> bool:
        """Whether there were enough rounds without for the most frequent tries."""
        return self.idle >= _PATIENCE

    def due(self, loss: float) -> bool:
        """Whether a try that would lose so many plain rounds is due.

        What the budget could pay for in every round is never given up.
        """
        return loss <= max(_REGRET, self._share * self.idle)

    def observe(self, *, paid: bool, probe: bool = True) -> None:
        """It was done, as a `probe` or not. A probe that paid goes on."""
        if paid or probe:
            self._share = _SHARES[0] if paid else max(self._share / 2, _SHARES[1])
        self.idle = math.inf if paid and probe else 0.0


class Looks:
    """Looking for drafts that the host may have, in plain rounds: what a look takes and wins."""

    def __init__(self) -> None:
        self._tries, self._count = Tries(), _LOOKS[0]
        self.cost, self._gain, self._hope = 0.0, _HOPE, _HOPE
        self._found = 0.0  # what the drafts of the look under way may win

    @property
    def due(self) -> bool:
        """Whether this is a round to look in: it wins, or there was none for long enough."""
        return self._gain >= 0 or self._tries.due(self.cost)

    def begin(self) -> None:
        """One is under way: what it brings will not be known when the next round is decided."""
        self._tries.idle = 0.0

    def find(self, win: float) -> float:
        """What looks are likely to win once all is captured; these drafts may win so much then."""
        self._found = win
        return self._mean(self._hope, win) - self.cost

    def observe(self, *, cost: float, gain: float) -> None:
        """A look took `cost` (0: there was none), and won `gain` with what it brought."""
        if not cost:
            self._tries.idle += 1
            return
        self.cost, self._gain = cost, self._mean(self._gain, gain)
        self._hope, self._found = self._mean(self._hope, self._found), 0.0
        self._count = min(self._count + 1, _LOOKS[1])
        self._tries.observe(paid=self._gain >= 0)

    def _mean(self, before: float, now: float) -> float:
        return before + (now - before) / (self._count + 1)


class Budget:
    """Seconds that drafting has won or lost against plain decoding of the same tokens."""

    def __init__(self) -> None:
        self._spent = 0.0  # of rounds
        self._won = self._most = 0.0  # in all, below 0: lost; the most that it ever was

    def spend(self, seconds: float, *, won: float = 0.0) -> None:
        """A round took so long, and has won so much."""
        self._spent, self._won = self._spent + seconds, self._won + won
        self._most = max(self._most, self._won)

    def left(self, *, plain: float, rounds: float) -> float:
        """Seconds that may still be lost. `rounds`: of `plain` seconds, may still come."""
        may = _REGRET * (self._spent + min(rounds, _AHEAD) * plain) + _GRACE * plain
        return may + self._won - _KEPT * self._most
