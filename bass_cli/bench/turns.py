"""Cells in turn, until all repeats are done or time is up: which runs next, and how long the rest
takes.

Not here: what a run is (grid.py, drive.py), what its figures mean (figures.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bass_cli.bench.figures import ENOUGH_TOKENS, FEWEST, Run, latency, spread

LEAST_TOKENS = 16  # of a row: fewer say little of a method
# of the time limit, for warming up and the runs; the rest is for what is measured once, the parts
# of rounds
_RUNS = 0.8
Key = tuple[int, str] | tuple[int, str, str]  # batch size, method, kind of text if there are some


class Turns:
    """The runs of every batch size and method. `limit`: seconds from now on, None for no end;
    `repeats`: the most runs of a cell. Every cell is run once before any is run again, so that
    all are there when time is up; the first always is."""

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
        """So much of the time so far is not counted."""
        self._began += seconds

    def tokens(self, warm: dict[Key, Run], most: int, *, least: int) -> int:
        """Return how many tokens a row can have, by a short run of each cell.

        All repeats of every cell should fit into the time, with ENOUGH_TOKENS or more; if they
        do not, there are fewer repeats, but FEWEST if that is possible. Within `least` and `most`,
        and at least LEAST_TOKENS.
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
        """Repeat and cell of the next run; None if there is none, or none that is likely to end
        in time."""
        done = min(map(len, self.runs.values()))
        key = next(key for key in self._keys if len(self.runs[key]) == done)
        late = self._limit is not None and self._seconds[key] > self._left(_RUNS if done else 1.0)
        first = not self.runs[self._keys[0]]
        return None if done == self._repeats or (late and not first) else (done, key)

    def add(self, key: Key, run: Run, seconds: float) -> None:
        """A run is over, and took so long in all."""
        self.runs[key].append(run)
        self._seconds[key] = seconds

    def seconds_left(self) -> float:
        """What the runs that are still to come are expected to take."""
        rest = self._rest()
        return rest if self._limit is None else max(0.0, min(rest, self._left()))

    def in_time(self) -> bool:
        """Whether the limit, all of it, is still to come."""
        return self._limit is None or self._now() - self._began < self._limit

    def report(self) -> dict[str, Any]:
        """What became of the repeats, for the document."""
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
        """Seconds of all runs that have not been, by what a run of their cells took."""
        return sum(
            self._seconds[key] * (self._repeats - len(runs)) for key, runs in self.runs.items()
        )

    def _left(self, share: float = _RUNS) -> float:
        assert self._limit is not None
        return share * self._limit - (self._now() - self._began)
