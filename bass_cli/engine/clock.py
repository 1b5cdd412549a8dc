"""Predictions: how long the next round or the prefill of a prompt takes (`Clock`), and how much of
a job is still to come (`Forecast`). Not here: what a deadline ends (run/scheduler.py)."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable

import numpy

_NEWEST = 5  # rounds of a draft length in the median: one or two slow ones do not count
# After this many rounds in a row that a prediction has shortened, the prediction is tested again.
_PATIENCE = 64
_RECENT = 16  # passes that a prediction uses
_DOUBT = 0.8  # factor on predictions after each prompt that they caused to be given up


class Clock:
    """Seconds from `now` (injected in tests), and the median of recent round times by draft
    length."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self._rounds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NEWEST))
        self._seconds: dict[int, float] = {}  # by draft length: the median
        self._cut = 0  # rounds in a row that were shortened
        # Passes over prompts, by the model that reads them.
        self.passes = {"target": Passes(), "draft": Passes()}

    def forget(self) -> None:
        """Forget all times, because later ones will be shorter."""
        self._rounds.clear()
        self._seconds.clear()
        for passes in self.passes.values():
            passes.forget()

    def observe(self, width: int, seconds: float) -> None:
        """Record a round with draft length `width`. Ignore times below 0 or not finite: the
        system clock was set."""
        if not 0 <= seconds < math.inf:
            return
        self._rounds[width].append(seconds)
        self._seconds[width] = statistics.median_low(self._rounds[width])

    def predict(self, width: int) -> float:
        """Return the predicted seconds of a round with draft length `width`.

        Interpolate between the nearest measured lengths, or use the nearest one. 0 before any
        round.
        """
        if not self._seconds:
            return 0.0
        known = sorted(self._seconds)
        return float(numpy.interp(width, known, [self._seconds[w] for w in known]))

    def longest_in_time(
        self, width: int, deadline: float | None, predict: Callable[[int], float] | None = None
    ) -> int:
        """Return the largest draft length up to `width` whose round should end by `deadline`.

        Returns 0 if none should. A plain round is the shortest one; whether to start even that is
        the caller's decision (`predict(0)`).

        Args:
            predict: used instead of the method of that name, for rounds that must be captured
                first.
        """
        if deadline is None:
            return width
        left = deadline - self.now()
        found = next((w for w in range(width, 0, -1) if (predict or self.predict)(w) <= left), 0)
        self._cut = self._cut + 1 if found < width else 0
        if self._cut == _PATIENCE:
            self._doubt(found)
        return found

    def _doubt(self, width: int) -> None:
        """Forget the times of rounds longer than `width`: predictions from them have kept such
        rounds from running for a while."""
        self._cut = 0
        for longer in [w for w in self._seconds if w > width]:
            del self._rounds[longer], self._seconds[longer]


class Passes:
    """Predict how long one model's passes over parts of prompts take."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._discount = 1.0

    def forget(self) -> None:
        """See Clock.forget."""
        self._recent.clear()

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a pass over `tokens` tokens. Ignore an empty pass and times below 0 or not
        finite."""
        if tokens and 0 <= seconds < math.inf:
            self._recent.append((tokens, seconds))
            self._discount = 1.0

    def predict(self, tokens: int) -> float:
        """Return the predicted seconds of a pass over `tokens` tokens: the least of the recent
        ones, scaled up in proportion from shorter ones. 0 before any."""
        return (
            min(
                (seconds * max(tokens / known, 1.0) for known, seconds in self._recent), default=0.0
            )
            * self._discount
        )

    def doubt(self) -> None:
        """Lower later predictions, because a prompt was given up due to one. Otherwise a wrong
        prediction could never be corrected."""
        self._discount *= _DOUBT


class Prefill:
    """Decide before every pass of a model over a prompt whether it should end by `deadline`, and
    record the times in `passes`.

    Args:
        wait: returns when the device is idle; the launch of a pass says nothing about its time.
    """

    def __init__(
        self, passes: Passes, deadline: float, *, now: Callable[[], float], wait: Callable[[], None]
    ):
        self._passes, self._deadline, self._now, self._wait = passes, deadline, now, wait
        # The tokens of the pass in flight, and when it began.
        self._running: tuple[int, float] | None = None

    def __call__(self, tokens: int) -> bool:
        """Return whether a pass over `tokens` tokens may begin now."""
        self.end()
        began = self._now()
        if began + self._passes.predict(tokens) > self._deadline:
            self._passes.doubt()
            return False
        self._running = tokens, began
        return True

    def end(self) -> None:
        """Wait for the pass in flight, if there is one, and record its time."""
        self._wait()
        if self._running is not None:
            tokens, began = self._running
            self._passes.observe(tokens, self._now() - began)
            self._running = None


# Before any sample has ended, a sample is expected to use this part of its limit: limits are set so
# that few samples reach them.
_PART = 1 / 4


def expected(limit: float) -> float:
    """Return the expected tokens of a sample if only its limit is known."""
    return limit * _PART


class Forecast:
    """Forecast how much of a job is still to come, which decides whether a graph capture can still
    pay. The limit on new tokens says little if samples end by themselves, so samples are expected
    to become as long as those that have ended.

    Args:
        samples: how many the job has. None if unknown: then as many as have begun are expected to
            follow.
    """

    def __init__(self, samples: int | None):
        self._samples = samples
        self._begun = self._ended = self._tokens = 0

    def expect(self, samples: int | None) -> None:
        """Note that so many more samples are to come; None if unknown."""
        if samples is None or self._samples is None:
            self._samples = None
        else:
            self._samples += samples

    def begin(self, samples: int, *, expected: int | None = None) -> None:
        """Note that `samples` more samples were taken up, waiting ones included.

        `expected`: how many of them the number of all samples includes. Default: all.
        """
        self._begun += samples
        if self._samples is not None and expected is not None:
            self._samples += samples - expected

    def end(self, tokens: int) -> None:
        """Note that a sample has ended with `tokens` tokens."""
        self._ended += 1
        self._tokens += tokens

    def length(self, generated: float) -> float:
        """Return the expected tokens of a sample, at least 1.

        Args:
            generated: mean tokens of the live rows. Before any sample has ended, twice that is
                expected.
        """
        return max(self._tokens / self._ended, 1.0) if self._ended else 2 * generated + 1

    def becomes(self, limit: int, generated: int) -> float:
        """Return the expected tokens of a sample, for deciding how many rows to admit.

        It errs on the long side, because too many rows are worse than too few: all tokens generated
        so far over the samples that have ended. Those that end first are short. `expected(limit)`
        counts as one ended sample.

        Args:
            generated: tokens of all live rows together.
        """
        tokens = expected(limit) + self._tokens + generated
        return min(tokens / (1 + self._ended), float(limit))

    def waiting(self, waiting: int, *, ended: bool) -> int:
        """Return the number of samples without a row: the `waiting` ones, and unless `ended`
        those of prompts that were not taken up yet."""
        if ended:
            return waiting
        return waiting + (
            self._begun if self._samples is None else max(0, self._samples - self._begun)
        )
