"""When to try again what did not pay, what a first use may cost, and what drafting may lose in all.

Not here: what is tried, and what it costs (goodput.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from bass_cli.engine.contracts import Outlook
from bass_cli.lengths.round_cost import Array

_CAUTION = 2.0  # how many times what a length costs once must be saved: hopes may not come true
_TRIAL = 0.02  # share of the time left that a first use may take while nobody knows what is kept
_PATIENCE = (4, 512)  # rounds before the next try: at first, and at most, or a change is missed
_SPARED = 0.005  # share of the time below which waiting longer saves nothing worth having
_LOOKS = (4, 24)  # looks that what is thought at first counts as, and that are remembered
_HOPE = 0.1  # what a look is thought to win at first, in plain rounds: a tenth more tokens
_REGRET = 0.012  # share of the time that drafting may have lost
_AHEAD = 200.0  # rounds that are still to come, at most, of which that share may be lost already
# Plain rounds that it may lose besides: where next to nothing can be won, and at most.
_GRACE = (1.0, 3.0)
_PROMISING = 0.3  # win hoped for, in plain decoding's speed, from which on it may lose the most
# Of what was hoped for, what counts a round later if drafting ever won: bad stretches pass.
_FADE = 0.995
_CREDIT = 6.0  # plain rounds that it may lose after it had won them
_KEPT = 0.2  # share of all that it has won that it keeps in any case, and may lose the rest


def trial(plain: float, rounds: float) -> float:
    """Seconds that a first use may take on trial, of so many rounds of `plain` seconds."""
    return _TRIAL * plain * rounds


def first_use(lengths: Sequence[int], outlook: Outlook, plain: float, unsure: bool) -> Array:
    """What these lengths cost once, in seconds a round left; no end: too dear to try.

    `plain`: seconds of a plain round. `unsure`: nobody knows yet what rows keep of a draft.
    """
    once = numpy.array([outlook.entry(k) for k in lengths])
    if unsure:
        most = trial(plain, outlook.left)
        once[[outlook.cold(k) > most for k in lengths]] = numpy.inf
    found: Array = once * (_CAUTION / outlook.left)
    return found


class Tries:
    """Of something that may not pay: the wait doubles with each failure."""

    def __init__(self) -> None:
        self.idle, self._wait = 0, _PATIENCE[0]  # rounds without it; rounds to wait

    @property
    def thinkable(self) -> bool:
        """Whether there were enough rounds without for the most frequent tries."""
        return self.idle >= _PATIENCE[0]

    def due(self, loss: float) -> bool:
        """Whether a try that would lose so many plain rounds is due.

        What the budget could pay for in every round is never given up.
        """
        return loss <= _REGRET or self.idle >= min(self._wait, int(loss / _SPARED))

    def observe(self, *, paid: bool, probe: bool = True) -> None:
        """It was done, as a `probe` or not. A probe that paid goes on."""
        if paid or probe:
            self._wait = _PATIENCE[0] if paid else min(2 * self._wait, _PATIENCE[1])
        self.idle = self._wait if paid and probe else 0


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
        self._tries.idle = 0

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
        self._spent = self._lost = 0.0  # of rounds; net of what was won, but for old wins
        self._won = self._most = 0.0  # in all, below 0: lost; the most that it ever was
        self._hope = _PROMISING  # the win hoped for

    def spend(self, seconds: float, *, won: float = 0.0, plain: float) -> None:
        """A round took so long, and has won so much. `plain`: seconds of a plain round."""
        self._spent, self._won = self._spent + seconds, self._won + won
        self._most = max(self._most, self._won)
        self._lost = max(self._lost - won, -_REGRET * self._spent - _CREDIT * plain)

    def expect(self, win: float) -> None:
        """Drafting should win so much now, in plain decoding's speed."""
        self._hope = max(win, _FADE * self._hope) if self._most else win

    def affords(self, seconds: float, *, plain: float, left: float) -> bool:
        """Whether so much more may be lost. `left`: rounds that may still come."""
        least, most = _GRACE
        grace = min(max(most * self._hope / _PROMISING, least), most)
        may = _REGRET * (self._spent + min(left, _AHEAD) * plain) + grace * plain
        return seconds <= max(may - self._lost, self._won - _KEPT * self._most)
