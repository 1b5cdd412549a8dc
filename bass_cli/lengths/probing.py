"""When to probe whether drafting pays again: ever more rarely, so that it comes back after a bad
stretch.

Not here: how long a probe is, and what it may cost (goodput.py, losses.py).
"""

from __future__ import annotations

_PATIENCE = (4, 512)  # plain rounds before a probe: at first, and at most
# share of the time below which fewer probes save nothing worth having: what begins meanwhile is
# missed
_SPARED = 0.005


class Probing:
    """Counts plain rounds, and waits longer after each probe that failed."""

    def __init__(self) -> None:
        self._plain, self._patience = 0, _PATIENCE[0]

    @property
    def plain(self) -> int:
        """Rounds without drafts since the last one with them."""
        return self._plain

    @property
    def thinkable(self) -> bool:
        """Whether there were enough of them for the most frequent probes."""
        return self._plain >= _PATIENCE[0]

    def due(self, loss: float) -> bool:
        """Whether a probe that would lose so many plain rounds is due by now."""
        return self._plain >= min(self._patience, loss / _SPARED)

    def skip(self) -> None:
        """A round without drafts."""
        self._plain += 1

    def observe(self, *, most: bool, probe: bool) -> None:
        """A round with drafts, `most` of which were kept; `probe`: it was one."""
        self._plain = 0
        if most:
            self._patience = _PATIENCE[0]
            self._plain = self._patience if probe else 0  # the probe goes on
        elif probe:
            self._patience = min(2 * self._patience, _PATIENCE[1])
