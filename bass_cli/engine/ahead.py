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
    (`steady`)."""

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

    def done(self, accepted: tuple[int, ...], seconds: float, *, late: bool) -> Round:
        """What it did, by live row, in so many seconds without capturing; `late`: it was over
        before anybody looked."""
        return Round(
            self.width,
            accepted,
            seconds,
            self.steady and not late,
            self.meant,
            self.asking if self.looked else 0.0,
            self.rows,
            self.capturing,
        )


class Worth:
    """Whether launching ahead pays: it hides what the host does between two rounds, and a row
    that ends takes part in one more round for nothing."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._ending = self._seconds = 0.0
        self._ended = 0

    def waited(self, seconds: float) -> None:
        """The device had nothing to do for so long between two rounds that might have been
        launched ahead, looks for drafts apart."""
        self._gaps.append(seconds)

    def rows_ended(self, count: int) -> None:
        self._ended += count

    def landed(self, seconds: float, rows: int) -> None:
        """A round of so many rows took so long."""
        self._ending += _WEIGHT * (self._ended / rows - self._ending)
        self._ended, self._seconds = 0, seconds

    def pays(self, *, waiting: bool) -> bool:
        """`waiting`: whether samples wait for rows; otherwise nobody misses what an ended row
        takes."""
        return self.saves(waiting=waiting) > 0

    def saves(self, *, waiting: bool) -> float:
        """Seconds that it saves a round; 0 where it does not pay."""
        lost = self._ending * self._seconds if waiting else 0.0
        return max(min(self._gaps, default=0.0) - lost, 0.0)
