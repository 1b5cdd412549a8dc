"""What drafting has lost against plain decoding so far, and what it may still lose: that bounds
probes and mistakes.

Not here: what is drafted (goodput.py).
"""

from __future__ import annotations

_REGRET = 0.012  # share of the time that drafting may have lost
_AHEAD = 200  # rounds that are still to come, at most, of which that share may be lost already
# plain rounds that it may have lost besides, where next to nothing can be won, and at most
_GRACE = (1.0, 3.0)
_HOPE = 0.3  # what drafting must be expected to win for the most of that, in plain decoding's speed
# of what was expected once, what a round later still counts if anything was won: bad stretches pass
_FADE = 0.995
_CREDIT = 6.0  # and so many that it may lose after it had won them
_KEPT = 0.2  # share of all that it has won that it keeps in any case


class Losses:
    """Seconds, against plain decoding of the same tokens. What was won long ago counts less."""

    def __init__(self) -> None:
        self._spent, self._lost = 0.0, 0.0
        self._won, self._most = 0.0, 0.0  # in all, below 0: lost; the most that it ever was
        self._hope: float | None = None

    def spend(self, seconds: float) -> None:
        """A round took so long."""
        self._spent += seconds

    def lose(self, seconds: float, *, plain: float) -> None:
        """Of that, so much (below 0: won) would not have been needed. plain: seconds of a plain
        round, here and below."""
        self._won -= seconds
        self._most = max(self._most, self._won)
        self._lost = max(self._lost + seconds, -_REGRET * self._spent - _CREDIT * plain)

    def expect(self, win: float) -> None:
        """Before a round: what drafting is expected to win, as a share of plain decoding's
        speed."""
        self._hope = max(win, _FADE * self._hope) if self._hope is not None and self._most else win

    def affords(self, seconds: float, *, plain: float, left: float) -> bool:
        """Whether so much more may be lost. `left`: plain rounds that may still come."""
        least, most = _GRACE
        hope = _HOPE if self._hope is None else self._hope
        grace = min(max(most * hope / _HOPE, least), most) + _REGRET * min(left, _AHEAD)
        return seconds <= max(
            _REGRET * self._spent + grace * plain - self._lost, self._won - _KEPT * self._most
        )
