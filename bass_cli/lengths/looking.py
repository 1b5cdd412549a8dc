"""Whether to look for drafts that the host may have: as long as looking, with what it finds, wins
time; then now and then.

Once drafts are found, what looking took is spent, so they may be worth drafting where looking
was not. Not here: how long the drafts are to be (goodput.py).
"""

from __future__ import annotations

_SEARCH, _MEMORY = 8, 24  # looks before a verdict, and how many the mean of what they win goes back
_REST = (8, 512)  # rounds without a look: the first time, and at most
# looks that what is thought at first counts as; what a look weighs one look later
_PRIOR, _FADE = (4.0, 0.98)
_RARE = 0.01  # share of the looks that is never thought less
_CHEAP = 0.01  # share of a plain round that a look may take and never be given up
_SPARED = 0.005  # share of the time below which no longer rest brings what looking costs


class Looking:
    """Rests ever longer while looks win nothing, but not longer than saves much: what begins
    meanwhile is missed."""

    def __init__(self) -> None:
        self._rest, self._resting, self._looks, self._gain = _REST[0], 0, 0, 0.0
        # looks that found what is worth drafting, of all
        self._worth, self._all = (0.25 * _PRIOR, _PRIOR)

    @property
    def due(self) -> bool:
        """Whether this is a round to look in."""
        return self._resting == 0

    def skip(self) -> None:
        """A round went by without a look."""
        self._resting = max(self._resting - 1, 0)

    @property
    def share(self) -> float:
        """Of the rounds, those in which drafts are likely to be found that are worth drafting;
        never 0."""
        return max(self._worth / self._all, _RARE)

    def observe(self, gain: float, share: float, worth: bool) -> None:
        """A look, and the drafts that it may have brought, won `gain` plain rounds; the look
        alone took `share` of one; `worth`: they would have paid if they had cost nothing once."""
        self._worth, self._all = _FADE * self._worth + worth, _FADE * self._all + 1
        self._looks += 1
        self._gain += (gain - self._gain) / min(self._looks, _MEMORY)
        if self._looks < _SEARCH:
            return
        if self._gain >= 0:
            self._rest = _REST[0]
        elif share > _CHEAP:
            longest = min(_REST[1], int(_SEARCH * share / _SPARED))
            self._resting, self._rest = min(self._rest, longest), min(2 * self._rest, longest)
            self._looks, self._gain = 0, 0.0
