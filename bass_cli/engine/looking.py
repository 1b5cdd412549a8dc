"""Whether to look for drafts that the host may have: as long as looking, with what it finds, wins time; then now and then.

Once drafts are found, what looking took is spent, so they may be worth drafting where looking was not. Not here: how long
the drafts are to be (goodput.py).
"""

from __future__ import annotations

_SEARCH, _MEMORY = 8, 24  # looks before a verdict, and how many the mean of what they win goes back
_REST = (8, 512)  # rounds without a look: the first time, and at most
_CHEAP = 0.01  # share of a plain round that a look may take and never be given up


class Looking:
    """Rests ever longer while looks win nothing."""

    def __init__(self) -> None:
        self._rest, self._resting, self._looks, self._gain = _REST[0], 0, 0, 0.0

    @property
    def due(self) -> bool:
        """Whether this is a round to look in."""
        return self._resting == 0

    def skip(self) -> None:
        """A round went by without a look."""
        self._resting = max(self._resting - 1, 0)

    def observe(self, gain: float, share: float) -> None:
        """A look, and the drafts that it may have brought, won `gain` plain rounds; the look alone took `share` of one."""
        self._looks += 1
        self._gain += (gain - self._gain) / min(self._looks, _MEMORY)
        if self._looks < _SEARCH:
            return
        if self._gain >= 0:
            self._rest = _REST[0]
        elif share > _CHEAP:
            self._resting, self._rest = self._rest, min(2 * self._rest, _REST[1])
            self._looks, self._gain = 0, 0.0
