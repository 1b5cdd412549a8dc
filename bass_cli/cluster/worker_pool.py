"""The driver's side of a job that many processes draw: who is at work, what each is asked next,
what becomes of one that dies or of a node that joins; samples out as one process would give them.

Single-threaded, on the clock it is given. It reaches the workers through a Fleet, which is Ray
(rays.py) or a test's. Not here: which samples go where (pool.py), what a worker does (worker.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bass_cli.cluster.pool import Part, Pool
from bass_cli.cluster.worker import Fault, Ready, Report
from bass_cli.errors import MachineError, UserError
from bass_cli.io.completion import Completion
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.usage import together
from bass_cli.run.manifest import Facts

LOOK = 2.0  # seconds between two looks at which nodes there are
_WAIT = 0.1  # seconds after which a driver without news looks whether there is anything else to do
# A worker is asked so often, and all of them together no more than keeps a quarter of the driver's
# core busy with their answers, of which each takes it a millisecond (docs/SCALE.md).
_BEAT, _BEAT_OF_ALL = 0.1, 0.004
_RATED = 5.0  # seconds over which an actor's tokens a second are counted
_SHOWN = 8  # actors with figures of their own in the progress line
_HOPELESS = 5  # deaths without a sample between them, and two for every worker, end a job


class Place(NamedTuple):
    """Where a worker runs: a number on a node, or on any node (None)."""

    node: str | None
    number: int


class Lost(NamedTuple):
    """A worker has died, or cannot be reached."""

    why: str


Event = Ready | Report | Fault | Lost


class Fleet(Protocol):
    """Processes with a Worker in each, by place; all of them are asked from one thread."""

    def places(self) -> set[Place]:
        """Where there should be a worker now."""

    def start(self, place: Place) -> None:
        """Begin one there, as soon as there is room, and have it prepare."""

    def ask(self, place: Place, parts: list[Part], beat: float) -> None:
        """Have it exchange; what it answers is an event to come."""

    def wait(self, timeout: float) -> list[tuple[Place, Event]]:
        """What has happened, waiting so many seconds for anything at all."""

    def stop(self, place: Place) -> None:
        """End the one there; nothing is heard of it any more."""


@dataclass(slots=True)
class _Member:
    """A worker as the driver knows it. `ready`: what it said of itself; `report`: its last; `rate`:
    tokens a second of its last seconds, counted from `mark` (when, how many)."""

    expected: bool  # whether its place was there when the job began
    ready: Ready | None = None
    report: Report | None = None
    mark: tuple[float, int] | None = None
    rate: float = 0.0


@dataclass(slots=True)
class _Past:
    """What is left of workers that are gone."""

    in_a_row: int = 0  # died without a sample between them
    usages: list[Mapping[str, Any]] = field(default_factory=list)


class WorkerPool:
    """Workers of one job, wherever the fleet has them. `n`, `alike`: see Pool."""

    def __init__(
        self,
        fleet: Fleet,
        screen: Screen,
        *,
        n: int,
        alike: bool,
        now: Callable[[], float] = time.monotonic,
    ):
        self._fleet, self._screen, self._n, self._alike, self._now = fleet, screen, n, alike, now
        self._members: dict[Place, _Member] = {}
        self._expected: set[Place] = set()  # those that were there when the job began
        self._left_out: set[Place] = set()
        self._told: set[str] = set()  # notes, which are said once
        self._past = _Past()
        self._pool: Pool | None = None
        self._facts: Facts | None = None
        self._looked = -LOOK

    def gather(self) -> Facts:
        """Begin workers wherever there is room; what the first that is ready knows of the models.
        UserError or MachineError where one finds them wanting."""
        while self._facts is None:
            self._look(expected=True)
            for place, event in self._fleet.wait(_WAIT):
                for _ in self._take(place, event):
                    raise AssertionError("a sample of a job that has not begun")
        return self._facts

    def draw(
        self, prompts: Iterator[Prompt], done: Container[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        """Samples 0 to n - 1 of every prompt (`count` of them, if that is known), but those in
        `done`, as they end anywhere. Whoever joins takes part; what a lost one had is drawn
        again."""
        self._pool = Pool(prompts, done, n=self._n, count=count, alike=self._alike)
        for place, member in self._members.items():
            if member.ready is not None:
                self._pool.hire(place)
        for place, member in self._members.items():
            if member.ready is not None:
                self._ask(place, member)
        while not self._pool.over():
            self._look()
            for place, event in self._fleet.wait(_WAIT):
                yield from self._take(place, event)

    def line(self) -> str:
        """What each worker is at, its rows and tokens a second; the first of them, and how many
        there are."""
        ready = [one.report for one in self._members.values() if one.report is not None]
        rates = [one.rate for one in self._members.values() if one.report is not None]
        each = [
            f"{report.busy}/{report.rows} rows {rate:.0f} tokens/s"
            if report.phase is None
            else report.phase
            for report, rate in zip(ready, rates, strict=True)
        ]
        more = [f"and {len(each) - _SHOWN} more"] if len(each) > _SHOWN else []
        known = f"{len(ready)} of {len(self._members)} actors at work"
        return "; ".join([known, *each[:_SHOWN], *more])

    def usage(self) -> dict[str, Any]:
        """Where the seconds of all of them went, those that are gone included."""
        mine = [one.report.usage for one in self._members.values() if one.report is not None]
        return together([*self._past.usages, *mine]) | {"rows": sum(one["rows"] for one in mine)}

    def _look(self, *, expected: bool = False) -> None:
        """Every other second: begin workers where there should be some and are none."""
        if self._now() - self._looked < LOOK:
            return
        self._looked, wanted = self._now(), self._fleet.places()
        for place in [one for one in self._members if one not in wanted]:
            self._lose(place, "its node has left")
        for place in sorted(wanted - self._members.keys() - self._left_out, key=str):
            self._members[place] = _Member(expected or place in self._expected)
            self._expected |= {place} if expected else set()
            self._fleet.start(place)

    def _take(self, place: Place, event: Event) -> Iterator[Completion]:
        """What follows of an event: samples, and what the worker is asked next."""
        member = self._members.get(place)
        if member is None:  # of one that was given up
            return
        if isinstance(event, Lost):
            self._lose(place, event.why)
        elif isinstance(event, Fault):
            self._refuse(place, member, event)
        elif isinstance(event, Ready):
            member.ready = event
            self._accept(place, member, event)
        else:
            yield from self._deliver(place, event)
            self._hear(member, event)
            if event.fault is not None:
                self._refuse(place, member, event.fault)
            else:
                self._ask(place, member)

    def _accept(self, place: Place, member: _Member, ready: Ready) -> None:
        """One more is ready. Its samples must be those that all others would draw."""
        if self._facts is None:
            self._facts = ready.facts
            self._told |= set(ready.facts.notes)  # whoever asked for the facts says them
        self._tell(ready.facts.notes, ready.node)
        mine, theirs = self._facts.manifest["results"], ready.facts.manifest["results"]
        other = [key for key in mine if mine[key] != theirs.get(key)]
        if other:
            shown = f"{other[0]}: {theirs.get(other[0])!r} there, {mine[other[0]]!r} elsewhere"
            text = f"its samples would be others ({shown}); models and versions have to be the same"
            self._refuse(place, member, Fault("user", text, ready.node))
        elif self._pool is not None:
            self._pool.hire(place)
            self._ask(place, member)

    def _deliver(self, place: Place, report: Report) -> Iterator[Completion]:
        assert self._pool is not None
        for completion in report.completions:
            self._past.in_a_row = 0
            if self._pool.deliver(place, completion):
                yield completion

    def _hear(self, member: _Member, report: Report) -> None:
        """Keep what a worker says of itself, and show it."""
        assert member.ready is not None
        before, member.report, now = member.report, report, self._now()
        if before is None or report.tokens == 0:
            member.mark = now, report.tokens
        else:
            self._screen.rounds(
                report.tokens - before.tokens,
                report.row_rounds - before.row_rounds,
                report.accepted - before.accepted,
            )
        since, tokens = member.mark or (now, 0)
        if now - since >= _RATED:
            member.rate = (report.tokens - tokens) / (now - since)
            member.mark = now, report.tokens
        self._tell(report.notes, member.ready.node)

    def _ask(self, place: Place, member: _Member) -> None:
        assert self._pool is not None
        assert member.ready is not None
        rows = member.ready.facts.rows if member.report is None else member.report.rows
        beat = max(_BEAT, _BEAT_OF_ALL * len(self._pool))
        self._fleet.ask(place, self._pool.chunk(place, rows), beat)

    def _lose(self, place: Place, why: str) -> None:
        """The worker is gone; what it had is drawn again. MachineError where that does not help."""
        member = self._members.pop(place)
        self._fleet.stop(place)
        if member.report is not None:
            self._past.usages.append(member.report.usage)
        held = 0 if self._pool is None else self._pool.lose(place)
        where = "an actor" if member.ready is None else f"an actor on {member.ready.node}"
        self._past.in_a_row += 1
        if self._past.in_a_row > _HOPELESS + 2 * len(self._expected | self._members.keys()):
            raise MachineError(
                f"{self._past.in_a_row} actors died one after the other without a sample between "
                f"them; the last: {where}: {why}"
            )
        self._screen.note(f"{where} is gone, its {held} samples are drawn again: {why}")

    def _refuse(self, place: Place, member: _Member, fault: Fault) -> None:
        """End the job, for a worker cannot take part that was there from the beginning; leave one
        out that joined."""
        text = f"on {fault.node}: {fault.text}"
        if fault.kind == "bug":
            raise RuntimeError(text)
        if member.expected:
            raise (MachineError if fault.kind == "machine" else UserError)(text)
        self._screen.note(f"an actor that joined is left out: {text}")
        self._left_out.add(place)
        self._members.pop(place)
        self._fleet.stop(place)
        if self._pool is not None:
            self._pool.lose(place)

    def _tell(self, notes: Iterable[str], node: str) -> None:
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                self._screen.note(f"{node}: {note}")
