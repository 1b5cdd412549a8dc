"""Processes that train together, from the side of whoever begins them: waits until there are
enough, gives each its number, shows how far the first is; where one dies all end, and a new group
goes on from the last checkpoint.

Single-threaded, on the clock it is given; it reaches the processes through a Fleet, which is Ray
(cluster/rays.py) or a test's. Not here: what they do (rank.py).
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from bass_cli.cluster.worker import Fault
from bass_cli.cluster.worker_pool import LOOK, Lost, Place
from bass_cli.distill.exchange import RankInfo
from bass_cli.distill.rank import LOST, News, Present
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.io.progress import clock

# Seconds that the first one waits for the others: it is not known whether they come, and those
# that come later are left out until a group is made again.
PATIENCE = 120.0
HOPELESS = 5  # groups that end one after the other, without a checkpoint between them
_GRACE = 10.0  # seconds until it is known who died, where another has felt it
_WAIT, _BEAT, _BEAT_OF_ALL = 0.1, 0.5, 0.004  # seconds, as the crew has them


class Fleet(Protocol):
    """Processes with a Rank in each, by place."""

    def places(self) -> set[Place]:
        """Where there should be one now."""

    def start(self, place: Place) -> None:
        """Begin one there, as soon as there is room, and have it prepare."""

    def ask(self, place: Place, seat: RankInfo | None, beat: float) -> None:
        """Have it exchange; what it answers is an event to come."""

    def wait(self, timeout: float) -> list[tuple[Place, Any]]:
        """What has happened, waiting so many seconds for anything at all."""

    def stop(self, place: Place) -> None:
        """End the one there; nothing is heard of it any more."""


class Group:
    """One training by as many processes as there are, and by others when these end. `checkpoint`:
    the file that they keep it in."""

    def __init__(
        self,
        fleet: Fleet,
        screen: Screen,
        checkpoint: Path,
        *,
        now: Callable[[], float] = time.monotonic,
    ):
        self._fleet, self._screen, self._checkpoint, self._now = fleet, screen, checkpoint, now
        self._line, self._share = "starting the actors", 0.0
        self._kept = self._mark()
        self._in_a_row = self._wanted = 0

    def run(self) -> dict[str, Any]:
        """The report. UserError or MachineError where one of them finds something wanting, or they
        die one after the other."""
        with self._screen.watching(lambda: self._line, lambda: self._share or None) as tick:
            self._tick = tick
            while True:
                document = self._together(self._gather())
                if document is not None:
                    return document

    def _gather(self) -> dict[Place, Present]:
        """Begin as many as there is room for; those that are there when all are, or when the first
        has waited long enough."""
        ready: dict[Place, Present] = {}
        started, wanted = set[Place](), set[Place]()
        began, looked, first = self._now(), self._now() - LOOK, 0.0
        while not ready or (len(ready) < len(wanted) and self._now() - first < PATIENCE):
            if self._now() - looked >= LOOK:
                looked, wanted = self._now(), self._fleet.places()
                for place in sorted(wanted - started, key=str):
                    self._fleet.start(place)
                started |= wanted
            for place, event in self._fleet.wait(_WAIT):
                if isinstance(event, Fault):
                    self._refuse(event)
                elif isinstance(event, Lost):
                    self._fleet.stop(place)
                    started.discard(place)  # begun again with the next look
                    self._lose("an actor", event.why)
                else:
                    first = first if ready else self._now()
                    ready[place] = event
            spent = clock(self._now() - began)
            self._show(f"{len(ready)} of {len(wanted)} actors are ready, {spent} elapsed", 0.0)
        for place in started - ready.keys():
            self._fleet.stop(place)
        self._wanted = len(wanted)
        return ready

    def _together(self, ready: Mapping[Place, Present]) -> dict[str, Any] | None:
        """What they come to; None where one has died. None of them is left."""
        seats, beat = seats_of(ready), max(_BEAT, _BEAT_OF_ALL * len(ready))
        known = "" if len(ready) == self._wanted else f" of {self._wanted}"
        self._screen.note(f"{len(ready)}{known} actors train together")
        try:
            for place, seat in seats.items():
                self._fleet.ask(place, seat, beat)
            while True:
                for place, event in self._fleet.wait(_WAIT):
                    if not isinstance(event, News) or event.fault is not None:
                        why: Any = event.fault if isinstance(event, News) else event
                        self._end(place, ready, why)
                        return None
                    if not seats[place].rank:
                        self._hear(event, len(seats))
                        if event.document is not None:
                            return event.document
                    if event.document is None:  # the others are done before the first is
                        self._fleet.ask(place, None, beat)
        finally:
            for place in ready:
                self._fleet.stop(place)

    def _end(self, place: Place, ready: Mapping[Place, Present], why: Fault | Lost) -> None:
        """One of them has died, or felt it: who it was, if that comes out."""
        if isinstance(why, Fault) and why.kind != LOST:
            self._refuse(why)
        until = self._now() + _GRACE
        while isinstance(why, Fault) and self._now() < until:
            for other, event in self._fleet.wait(_WAIT):
                if isinstance(event, Lost):
                    place, why = other, event
        text = why.text if isinstance(why, Fault) else why.why
        self._lose(f"an actor on {ready[place].node}", text)

    def _lose(self, who: str, why: str) -> None:
        """MachineError where going on does not help."""
        before, self._kept = self._kept, self._mark()
        self._in_a_row = 1 if before != self._kept else self._in_a_row + 1
        if self._in_a_row > HOPELESS:
            raise MachineError(
                f"{self._in_a_row} actors died one after the other without a checkpoint between "
                f"them; the last: {who}: {why}"
            )
        self._screen.note(f"{who} is gone, the others go on from the last checkpoint: {why}")

    def _refuse(self, fault: Fault) -> NoReturn:
        text = f"on {fault.node}: {fault.text}"
        if fault.kind == "bug":
            raise RuntimeError(text)
        raise (MachineError if fault.kind == "machine" else UserError)(text)

    def _hear(self, news: News, count: int) -> None:
        for note in news.notes:
            self._screen.note(note)
        self._show(f"{count} actors: {news.line}", news.share or 0.0)

    def _show(self, line: str, share: float) -> None:
        self._line, self._share = line, share
        self._tick()

    def _mark(self) -> int | None:
        """Of a checkpoint, another for each."""
        return self._checkpoint.stat().st_mtime_ns if self._checkpoint.exists() else None


def seats_of(ready: Mapping[Place, Present]) -> dict[Place, RankInfo]:
    """Numbers for all: those of one node one after the other, this node's first, since what the
    first one writes is read here."""
    order = sorted(ready, key=lambda place: (ready[place].node != platform.node(),
                                             ready[place].host, str(place)))  # fmt: skip
    beside, first = Counter(one.host for one in ready.values()), ready[order[0]]
    return {
        place: RankInfo(rank, len(order), first.host, first.port, beside[ready[place].host])
        for rank, place in enumerate(order)
    }
