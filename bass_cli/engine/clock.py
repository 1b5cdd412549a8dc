"""The time budget: deadlines, and how long the next round is likely to take. Not here: what happens at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

_WEIGHT = 0.3  # of the newest round in the moving average


class Clock:
    """Seconds since some start, from `now` (injected in tests), and a moving average of round times by draft length."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self._seconds: dict[int, float] = {}

    def observe(self, width: int, seconds: float) -> None:
        """A round with draft length `width` took `seconds`."""
        before = self._seconds.get(width, seconds)
        self._seconds[width] = before + _WEIGHT * (seconds - before)

    def predict(self, width: int) -> float:
        """Seconds that a round with draft length `width` is likely to take: the average of the nearest width seen
        that is at least as long, or of the longest seen; 0 before any round."""
        if not self._seconds:
            return 0.0
        longer = [w for w in self._seconds if w >= width]
        return self._seconds[min(longer) if longer else max(self._seconds)]

    def longest_in_time(self, width: int, deadline: float | None, predict: Callable[[int], float] | None = None) -> int:
        """The largest draft length up to `width` whose round should end by `deadline`; 0 if none should: a plain round
        is the shortest there is, and whether to start even that is the caller's question (`predict(0)`). `predict`
        stands in for the method of that name: a round that has to be captured first takes longer."""
        if deadline is None:
            return width
        left = deadline - self.now()
        fitting = (w for w in range(width, 0, -1) if (predict or self.predict)(w) <= left)
        return next(fitting, 0)
