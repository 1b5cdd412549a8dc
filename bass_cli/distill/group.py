"""Start and supervise the processes of a training.

A group starts when all processes are ready. If one of them dies, all end, and a new group resumes
from the last checkpoint. Processes are reached through a Fleet: Ray (cluster/rays.py) or a test's.
rank.py is the process itself. This module is single-threaded.
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

# Seconds that the first ready process waits for the others. Those that come later join only when a
# group is made again.
PATIENCE = 120.0
HOPELESS = 5  # failed groups without a new checkpoint that end the run
_GRACE = 10.0  # seconds to find out which process died, after another one reported an error
_WAIT, _BEAT, _BEAT_OF_ALL = 0.1, 0.5, 0.004  # seconds, like those of cluster/worker_pool.py


class Fleet(Protocol):
    """Processes with a Rank in each, by place."""

    def places(self) -> set[Place]:
        """Return the places that should have a process now."""

    def start(self, place: Place) -> None:
        """Start a process there as soon as there is room, and let it prepare."""

    def ask(self, place: Place, info: RankInfo | None, beat: float) -> None:
        """Call `exchange` of the process; its result comes as an event."""

    def wait(self, timeout: float) -> list[tuple[Place, Any]]:
        """Return new events, after waiting at most this many seconds for one."""

    def stop(self, place: Place) -> None:
        """End the process there; it causes no further events."""


class Group:
    """A training by all available processes, restarted if one dies. `checkpoint`: its file."""

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
        """Run the training and return its report.

        UserError or MachineError if a process refuses the job, or if processes die repeatedly.
        """
        with self._screen.watching(lambda: self._line, lambda: self._share or None) as tick:
            self._tick = tick
            while True:
                document = self._together(self._gather())
                if document is not None:
                    return document

    def _gather(self) -> dict[Place, Present]:
        """Start processes at all places; return those that are ready.

        Returns when all are ready, or PATIENCE seconds after the first one.
        """
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
                    started.discard(place)  # started again at the next poll of the places
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
        """Train with these processes, and end them.

        Returns: the report; None if a process died.
        """
        infos, beat = assign_ranks(ready), max(_BEAT, _BEAT_OF_ALL * len(ready))
        known = "" if len(ready) == self._wanted else f" of {self._wanted}"
        self._screen.note(f"{len(ready)}{known} actors train together")
        try:
            for place, info in infos.items():
                self._fleet.ask(place, info, beat)
            while True:
                for place, event in self._fleet.wait(_WAIT):
                    if not isinstance(event, News) or event.fault is not None:
                        why: Any = event.fault if isinstance(event, News) else event
                        self._end(place, ready, why)
                        return None
                    if not infos[place].rank:
                        self._hear(event, len(infos))
                        if event.document is not None:
                            return event.document
                    if event.document is None:  # the others finish before rank 0
                        self._fleet.ask(place, None, beat)
        finally:
            for place in ready:
                self._fleet.stop(place)

    def _end(self, place: Place, ready: Mapping[Place, Present], why: Fault | Lost) -> None:
        """Handle a process that died or reported an error; find out which one died, if possible."""
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
        """Note the loss of a process; MachineError after too many without a checkpoint."""
        before, self._kept = self._kept, self._mark()
        self._in_a_row = 1 if before != self._kept else self._in_a_row + 1
        if self._in_a_row > HOPELESS:
            raise MachineError(
                f"{self._in_a_row} actors died without a checkpoint between them; the last one: "
                f"{who}: {why}"
            )
        self._screen.note(f"{who} died; the others resume from the last checkpoint: {why}")

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
        """Return a number that changes with each checkpoint."""
        return self._checkpoint.stat().st_mtime_ns if self._checkpoint.exists() else None


def assign_ranks(ready: Mapping[Place, Present]) -> dict[Place, RankInfo]:
    """Assign ranks. Processes of a node get consecutive ranks, and this node comes first, because
    it reads what rank 0 writes."""
    order = sorted(ready, key=lambda place: (ready[place].node != platform.node(),
                                             ready[place].host, str(place)))  # fmt: skip
    beside, first = Counter(one.host for one in ready.values()), ready[order[0]]
    return {
        place: RankInfo(rank, len(order), first.host, first.port, beside[ready[place].host])
        for rank, place in enumerate(order)
    }
