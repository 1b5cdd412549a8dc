"""The time budget: how long the next round or a prompt's prefill is likely to take. Not here: what a deadline ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WEIGHT = 0.3  # of the newest round in the moving average
_RECENT = 16  # prefills that a prediction looks at
_DOUBT = 0.8  # what a prediction that kept a prompt from being tried is worth at the next one


class Clock:
    """Seconds since some start, from `now` (injected in tests), and a moving average of round times by draft length."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self._seconds: dict[int, float] = {}
        self._prefills: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._trust = 1.0

    def forget(self) -> None:
        """Nothing was observed: what comes will be faster than what was."""
        self._seconds.clear()
        self._prefills.clear()

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

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A prompt of so many tokens was stored in `seconds`."""
        self._prefills.append((tokens, seconds))
        self._trust = 1.0

    def predict_prefill(self, tokens: int) -> float:
        """Seconds that a prompt of so many tokens is likely to take: the least of recent ones that were as long; else in
        proportion to the longest. 0 before any."""
        as_long = [seconds for known, seconds in self._prefills if known >= tokens]
        if as_long:
            return min(as_long) * self._trust
        known, seconds = max(self._prefills, default=(1, 0.0))
        return seconds * tokens / max(known, 1) * self._trust

    def doubt_prefill(self) -> None:
        """A prompt was not tried because of a prediction. If it was wrong, nobody would ever learn: trust it less."""
        self._trust *= _DOUBT
