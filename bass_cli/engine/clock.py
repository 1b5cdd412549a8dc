"""The time budget: how long the next round or a prompt's prefill is likely to take. Not here:
what a deadline ends."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable

# rounds of a draft length that a prediction looks at: one that stumbled, or two, do not count
_NEWEST = 5
# rounds in a row that may be cut short by a prediction; then it has to be seen again whether it is
# true
_PATIENCE = 64
_RECENT = 16  # prefills that a prediction looks at
_DOUBT = 0.8  # what a prediction that kept a prompt from being tried is worth at the next one


class Clock:
    """Seconds since some start, from `now` (injected in tests), and the median of recent round
    times by draft length."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self._rounds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NEWEST))
        self._seconds: dict[int, float] = {}  # by draft length: the median of those rounds
        self._cut = 0  # rounds in a row that were cut short
        # over prompts, by the model that reads them
        self.passes = {"target": Passes(), "draft": Passes()}

    def forget(self) -> None:
        """Nothing was observed: what comes will be faster than what was."""
        self._rounds.clear()
        self._seconds.clear()
        for passes in self.passes.values():
            passes.forget()

    def observe(self, width: int, seconds: float) -> None:
        """Count a round with draft length `width`. A time that is below 0 or not finite teaches
        nothing: the clock was set."""
        if not 0 <= seconds < math.inf:
            return
        self._rounds[width].append(seconds)
        self._seconds[width] = statistics.median_low(self._rounds[width])

    def predict(self, width: int) -> float:
        """Seconds that a round with draft length `width` is likely to take: in between two that
        were seen in proportion, else what the nearest one took; 0 before any round."""
        if not self._seconds:
            return 0.0
        below = max((w for w in self._seconds if w <= width), default=None)
        above = min((w for w in self._seconds if w >= width), default=None)
        if below is None or above is None or below == above:
            return self._seconds[(above if above is not None else below) or 0]
        share = (width - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])

    def longest_in_time(
        self, width: int, deadline: float | None, predict: Callable[[int], float] | None = None
    ) -> int:
        """The largest draft length up to `width` whose round should end by `deadline`; 0 if none
        should: a plain round is the shortest there is, and whether to start even that is the
        caller's question (`predict(0)`). `predict` stands in for the method of that name: a
        round that has to be captured first takes longer."""
        if deadline is None:
            return width
        left = deadline - self.now()
        found = next((w for w in range(width, 0, -1) if (predict or self.predict)(w) <= left), 0)
        self._cut = self._cut + 1 if found < width else 0
        if self._cut == _PATIENCE:
            self._doubt(found)
        return found

    def _doubt(self, width: int) -> None:
        """No round was longer than `width` for a while, because of what such rounds once took:
        that is forgotten."""
        self._cut = 0
        for longer in [w for w in self._seconds if w > width]:
            del self._rounds[longer], self._seconds[longer]


class Passes:
    """How long one model's passes over parts of prompts take."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._trust = 1.0

    def forget(self) -> None:
        """As Clock.forget."""
        self._recent.clear()

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a pass over so many tokens, unless it had none or its time is no time."""
        if tokens and 0 <= seconds < math.inf:
            self._recent.append((tokens, seconds))
            self._trust = 1.0

    def predict(self, tokens: int) -> float:
        """Seconds that a pass over so many tokens is likely to take: the least that recent ones
        tell, of which shorter ones count in proportion. 0 before any."""
        return (
            min(
                (seconds * max(tokens / known, 1.0) for known, seconds in self._recent), default=0.0
            )
            * self._trust
        )

    def doubt(self) -> None:
        """A prompt was given up because of a prediction. If it was wrong, nobody might ever
        learn: trust it less."""
        self._trust *= _DOUBT


class Prefill:
    """Says before every pass of a model over a prompt whether it should end by `deadline`, and
    tells `passes` how long they take. `wait`: returns when the device has done all that it was
    given, for a pass that was only launched says nothing."""

    def __init__(
        self, passes: Passes, deadline: float, *, now: Callable[[], float], wait: Callable[[], None]
    ):
        self._passes, self._deadline, self._now, self._wait = passes, deadline, now, wait
        self._running: tuple[int, float] | None = (
            None  # the tokens of the pass under way, and when it began
        )

    def __call__(self, tokens: int) -> bool:
        """Whether a pass over so many tokens may begin now."""
        self.end()
        began = self._now()
        if began + self._passes.predict(tokens) > self._deadline:
            self._passes.doubt()
            return False
        self._running = tokens, began
        return True

    def end(self) -> None:
        """The pass under way, if there is one, has ended once the device is idle."""
        self._wait()
        if self._running is not None:
            tokens, began = self._running
            self._passes.observe(tokens, self._now() - began)
            self._running = None
