"""Asynchronous scheduling: rounds that are launched before the last one's tokens are known, so that
a device never waits for its host.

Not here: what a round is and when one is launched (step.py), graphs (captured.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

import numpy

from bass_cli.engine.contracts import Round
from bass_cli.engine.deadline import Clock
from bass_cli.engine.graphs import Running
from bass_cli.engine.ledger import Integers, Row

# gaps of which the least counts: the others held an admission, a stop string, a line to write
_RECENT = 8
_WEIGHT = 0.05  # of the newest round in the share of rows that end: some twenty rounds count


class Flight(NamedTuple):
    """A round that was launched: with these rows (of the batch as it was after so many `changes`),
    `width` drafts each (and maybe more `places`), or where it is `cut` on average,
    of which `meant` were the host's (None: all are the device's), `began` and `asking` as for
    Round.seconds; what went into `capturing`; whether nothing was captured or ran uncaptured
    (`steady`); `waiting`: as Round's."""

    rows: tuple[Row, ...]
    changes: int
    width: int
    places: int
    cut: bool
    meant: tuple[int, ...] | None
    running: Running
    began: float
    asking: float
    looked: bool
    capturing: float
    steady: bool
    waiting: float

    @property
    def length(self) -> int:
        """Its draft length, by which the clock knows it."""
        return self.width if self.cut else self.places

    @property
    def most(self) -> int:
        """Drafts of a row that may stand."""
        return self.places if self.cut else self.width

    @property
    def under_way(self) -> bool:
        """Whether a row of it is still live."""
        return any(row.place >= 0 for row in self.rows)

    def live(self, table: Integers, changes: int) -> tuple[Flight, Integers, Integers]:
        """The same with only those of its rows that are live after so many changes; the places
        where they are now, and their lines of the table that it brought. Of a round that was cut
        that says at its end what was verified."""
        meant = self.meant
        if self.cut:
            meant, table = tuple(table[: len(self.rows), -1].tolist()), table[:, :-1]
        if changes == self.changes:
            places = numpy.arange(len(self.rows))
            return self._replace(meant=meant), places, table[: len(self.rows)]
        places = numpy.fromiter([row.place for row in self.rows], numpy.int64, len(self.rows))
        alive = places >= 0  # -1: nowhere
        chosen = alive.tolist()
        rows = tuple(itertools.compress(self.rows, chosen))
        meant = None if meant is None else tuple(itertools.compress(meant, chosen))
        (lines,) = alive.nonzero()
        return self._replace(rows=rows, meant=meant), places[lines], table[lines]

    def landed(self, kept: tuple[int, ...], seconds: float, *, late: bool) -> Round:
        """What it did: each row kept so many drafts, and it took so long. `late`: it has been
        over for a while, so nobody knows what it took."""
        return Round(
            self.width,
            kept,
            seconds,
            self.steady and not late,
            self.meant,
            self.asking if self.looked else 0.0,
            self.rows,
            self.capturing,
            waiting=self.waiting,
        )


class Worth:
    """Whether launching ahead pays: it hides what the host does between two rounds, and a row
    that ends takes part in one more round for nothing. All times are the loop's clock's."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._ending = self._seconds = 0.0
        self._ended = 0
        self._landed: float | None = None  # when the last round was over

    def idle(self) -> None:
        """No row was live: whatever the device did, no round could have been launched."""
        self._landed = None

    def begins(self, now: float) -> None:
        """A round begins behind nothing, which might have been launched ahead; looks for drafts
        are not counted as waiting."""
        if self._landed is not None:
            self._gaps.append(now - self._landed)

    def start(self, flight: Flight) -> float:
        """When the device began with it: not before it was done with the last one."""
        return flight.began if self._landed is None else max(flight.began, self._landed)

    def until(self, deadline: float | None, flight: Flight, clock: Clock) -> float | None:
        """What a deadline is to the round behind this one, which waits until that is over, if
        it is asked for now."""
        if deadline is None:
            return None
        over = self.start(flight) + clock.predict(flight.length)
        return deadline - max(over - clock.now(), 0.0)

    def rows_ended(self, count: int) -> None:
        self._ended += count

    def landed(self, now: float, seconds: float, rows: int) -> None:
        """A round of so many rows is over, and took so long."""
        self._ending += _WEIGHT * (self._ended / rows - self._ending)
        self._ended, self._seconds, self._landed = 0, seconds, now

    def pays(self, *, waiting: bool) -> bool:
        """`waiting`: whether samples wait for rows; otherwise nobody misses what an ended row
        takes."""
        return self.saves(waiting=waiting) > 0

    def saves(self, *, waiting: bool) -> float:
        """Seconds that it saves a round; 0 where it does not pay."""
        lost = self._ending * self._seconds if waiting else 0.0
        return max(min(self._gaps, default=0.0) - lost, 0.0)
