"""Schedule the runs of all cells within the time limit, and estimate the time that is left.

grid.py and drive.py make the runs; figures.py computes their figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bass_cli.bench.figures import ENOUGH_TOKENS, FEWEST, Run, latency, spread

LEAST_TOKENS = 16  # of a row; fewer would measure little of a method
# share of the time limit for warm-up and runs; the rest is for timing the parts of rounds
_RUNS = 0.8
Key = tuple[int, str] | tuple[int, str, str]  # batch size, method, kind of text if several


class Turns:
    """The runs of all cells, in the order in which they are made.

    Every cell runs once before any cell runs again. The first cell always runs.

    Args:
        repeats: the most runs of a cell.
        limit: seconds from now on; None for no limit.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        *,
        repeats: int,
        limit: float | None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._keys, self._repeats, self._limit, self._now = tuple(keys), repeats, limit, now
        self._began = now()
        self._seconds: dict[Key, float] = {}
        self.runs: dict[Key, list[Run]] = {key: [] for key in keys}

    def exempt(self, seconds: float) -> None:
        """Exclude this many of the past seconds from the time limit."""
        self._began += seconds

    def tokens(self, warm: dict[Key, Run], most: int, *, least: int) -> int:
        """Choose the new tokens of a row so that the runs fit the time limit.

        If all repeats with ENOUGH_TOKENS do not fit, the number of repeats is reduced first, down
        to FEWEST, and then the number of tokens, down to LEAST_TOKENS.

        Args:
            warm: a short run of each cell.
            least, most: bounds of the result.
        """
        fixed = sum(run.prefill for run in warm.values())
        each = sum(latency(run).last / 1000.0 for run in warm.values())
        tokens = most
        if self._limit is not None:
            for repeats in range(self._repeats, min(FEWEST, self._repeats) - 1, -1):
                room = int((self._left() / repeats - fixed) / each)
                if room >= min(ENOUGH_TOKENS, most):
                    break
            tokens = min(most, max(least, LEAST_TOKENS, room))
        self._seconds = {
            key: run.prefill + tokens * latency(run).last / 1000.0 for key, run in warm.items()
        }
        return tokens

    def next(self) -> tuple[int, Key] | None:
        """Return repeat and cell of the next run; None if all are done or it would end late."""
        done = min(map(len, self.runs.values()))
        key = next(key for key in self._keys if len(self.runs[key]) == done)
        late = self._limit is not None and self._seconds[key] > self._left(_RUNS if done else 1.0)
        first = not self.runs[self._keys[0]]
        return None if done == self._repeats or (late and not first) else (done, key)

    def add(self, key: Key, run: Run, seconds: float) -> None:
        """Record a finished run and its seconds, prefill included."""
        self.runs[key].append(run)
        self._seconds[key] = seconds

    def seconds_left(self) -> float:
        """Estimate the seconds of the runs that are still to come."""
        rest = self._rest()
        return rest if self._limit is None else max(0.0, min(rest, self._left()))

    def in_time(self) -> bool:
        """Return whether the time limit has not passed yet."""
        return self._limit is None or self._now() - self._began < self._limit

    def report(self) -> dict[str, Any]:
        """Make the "repeats" of the document."""
        spreads = [
            spread([latency(run).mean for run in runs])
            for runs in self.runs.values()
            if len(runs) > 1
        ]
        return {
            "limit_seconds": self._limit,
            "seconds": self._now() - self._began,
            "repeats": self._repeats,
            "done": min(len(runs) for runs in self.runs.values() if runs),
            "missing_seconds": self._rest(),
            "missing": [list(key) for key, runs in self.runs.items() if not runs],
            "widest_spread": max(
                ((s.greatest - s.least) / s.median for s in spreads), default=None
            ),
        }

    def _rest(self) -> float:
        """Estimate the seconds of all missing runs from the last run of each cell."""
        return sum(
            self._seconds[key] * (self._repeats - len(runs)) for key, runs in self.runs.items()
        )

    def _left(self, share: float = _RUNS) -> float:
        assert self._limit is not None
        return share * self._limit - (self._now() - self._began)
