"""The driver of a job that many workers draw: starts workers, hands out samples, yields results.

It runs on one thread and reaches the workers through a Fleet: Ray (rays.py), or a test's. If a
worker dies, its samples are drawn again. Which samples go where: pool.py. The worker: worker.py.
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

LOOK = 2.0  # seconds between two checks for nodes that joined or left
_WAIT = 0.1  # seconds to wait for events
# Seconds between two reports of a worker, and the least time between two reports of any workers. A
# report takes the driver 1 ms, so reports use at most a quarter of its core (docs/SCALE.md).
_BEAT, _BEAT_OF_ALL = 0.1, 0.004
_RATED = 5.0  # seconds over which an actor's tokens per second are measured
_SHOWN = 8  # actors that the progress line shows
_HOPELESS = 5  # a job ends after this many deaths, plus two per worker, without a sample


class Place(NamedTuple):
    """Where a worker runs: its number on a node; `node` is None for any node."""

    node: str | None
    number: int


class Lost(NamedTuple):
    """A worker has died or cannot be reached."""

    why: str


Event = Ready | Report | Fault | Lost


class Fleet(Protocol):
    """Processes with one Worker each, by place. All calls come from one thread."""

    def places(self) -> set[Place]:
        """Return the places where workers should run now."""

    def start(self, place: Place) -> None:
        """Start a worker and call its `prepare`, as soon as there is room."""

    def ask(self, place: Place, parts: list[Part], beat: float) -> None:
        """Call a worker's `exchange`. `wait` returns the report."""

    def wait(self, timeout: float) -> list[tuple[Place, Event]]:
        """Return events, after at most `timeout` seconds."""

    def stop(self, place: Place) -> None:
        """End a worker. No more events come from it."""


@dataclass(slots=True)
class _Member:
    """The driver's record of a worker.

    Attributes:
        expected: Whether its place existed when the job began.
        ready: What its `prepare` returned.
        report: Its last report.
        mark: Time and tokens at which the measurement of `rate` began.
        rate: Tokens per second.
    """

    expected: bool
    ready: Ready | None = None
    report: Report | None = None
    mark: tuple[float, int] | None = None
    rate: float = 0.0


@dataclass(slots=True)
class _Past:
    """The record of workers that are gone."""

    in_a_row: int = 0  # deaths since the last sample
    usages: list[Mapping[str, Any]] = field(default_factory=list)


class WorkerPool:
    """The workers of one job. For `n` and `alike` see Pool."""

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
        self._expected: set[Place] = set()  # places when the job began
        self._left_out: set[Place] = set()
        self._noted: set[str] = set()  # notes that were shown
        self._past = _Past()
        self._pool: Pool | None = None
        self._facts: Facts | None = None
        self._checked = -LOOK

    def gather(self) -> Facts:
        """Start the workers and return what the first ready one knows of the models.

        Raises:
            UserError, MachineError: A worker cannot use the models.
        """
        while self._facts is None:
            self._check_nodes(expected=True)
            for place, event in self._fleet.wait(_WAIT):
                for _ in self._take(place, event):
                    raise AssertionError("a sample of a job that has not begun")
        return self._facts

    def draw(
        self, prompts: Iterator[Prompt], done: Container[tuple[str, int]], count: int | None
    ) -> Iterator[Completion]:
        """Yield the samples 0 to n - 1 of every prompt, except those in `done`, as they finish.

        Workers may join meanwhile. The samples of a lost worker are drawn again.

        Args:
            prompts: The prompts.
            done: (id, sample) pairs that exist already.
            count: The number of prompts, None if unknown.
        """
        self._pool = Pool(prompts, done, n=self._n, count=count, alike=self._alike)
        for place, member in self._members.items():
            if member.ready is not None:
                self._pool.hire(place)
        for place, member in self._members.items():
            if member.ready is not None:
                self._ask(place, member)
        while not self._pool.over():
            self._check_nodes()
            for place, event in self._fleet.wait(_WAIT):
                yield from self._take(place, event)

    def line(self) -> str:
        """Return the progress line: the phase, or busy slots and tokens per second, by worker."""
        ready = [one.report for one in self._members.values() if one.report is not None]
        rates = [one.rate for one in self._members.values() if one.report is not None]
        each = [
            f"{report.busy}/{report.rows} rows {rate:.0f} tokens/s"
            if report.phase is None
            else report.phase
            for report, rate in zip(ready, rates, strict=True)
        ]
        more = [f"and {len(each) - _SHOWN} more"] if len(each) > _SHOWN else []
        known = f"{len(ready)} of {len(self._members)} actors running"
        return "; ".join([known, *each[:_SHOWN], *more])

    def usage(self) -> dict[str, Any]:
        """Return where the seconds of all workers went, including those that are gone."""
        mine = [one.report.usage for one in self._members.values() if one.report is not None]
        return together([*self._past.usages, *mine]) | {"rows": sum(one["rows"] for one in mine)}

    def _check_nodes(self, *, expected: bool = False) -> None:
        """Every 2 s, start missing workers and drop those whose node has left."""
        if self._now() - self._checked < LOOK:
            return
        self._checked, wanted = self._now(), self._fleet.places()
        for place in [one for one in self._members if one not in wanted]:
            self._lose(place, "its node has left")
        for place in sorted(wanted - self._members.keys() - self._left_out, key=str):
            self._members[place] = _Member(expected or place in self._expected)
            self._expected |= {place} if expected else set()
            self._fleet.start(place)

    def _take(self, place: Place, event: Event) -> Iterator[Completion]:
        """Handle an event; yield its samples."""
        member = self._members.get(place)
        if member is None:  # the worker was given up
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
            self._update(member, event)
            if event.fault is not None:
                self._refuse(place, member, event.fault)
            else:
                self._ask(place, member)

    def _accept(self, place: Place, member: _Member, ready: Ready) -> None:
        """Let a ready worker take part, if it would draw the same samples as the others."""
        if self._facts is None:
            self._facts = ready.facts
            self._noted |= set(ready.facts.notes)  # the caller of `gather` shows these
        self._note(ready.facts.notes, ready.node)
        mine, theirs = self._facts.manifest["results"], ready.facts.manifest["results"]
        other = [key for key in mine if mine[key] != theirs.get(key)]
        if other:
            shown = f"{other[0]}: {theirs.get(other[0])!r} there, {mine[other[0]]!r} elsewhere"
            text = f"it would draw other samples ({shown}); use the same models and versions"
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

    def _update(self, member: _Member, report: Report) -> None:
        """Record a worker's report and show its progress."""
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
        self._note(report.notes, member.ready.node)

    def _ask(self, place: Place, member: _Member) -> None:
        assert self._pool is not None
        assert member.ready is not None
        rows = member.ready.facts.rows if member.report is None else member.report.rows
        beat = max(_BEAT, _BEAT_OF_ALL * len(self._pool))
        self._fleet.ask(place, self._pool.chunk(place, rows), beat)

    def _lose(self, place: Place, why: str) -> None:
        """Remove a worker that is gone; its samples are drawn again.

        Raises:
            MachineError: Too many workers died without a sample in between.
        """
        member = self._members.pop(place)
        self._fleet.stop(place)
        if member.report is not None:
            self._past.usages.append(member.report.usage)
        held = 0 if self._pool is None else self._pool.lose(place)
        where = "an actor" if member.ready is None else f"an actor on {member.ready.node}"
        self._past.in_a_row += 1
        if self._past.in_a_row > _HOPELESS + 2 * len(self._expected | self._members.keys()):
            raise MachineError(
                f"{self._past.in_a_row} actors died in a row without drawing a sample; the last "
                f"was {where}: {why}"
            )
        self._screen.note(f"lost {where}: {why}; its {held} samples are drawn again")

    def _refuse(self, place: Place, member: _Member, fault: Fault) -> None:
        """Handle a worker's fault: leave out a worker that joined later, else end the job."""
        text = f"on {fault.node}: {fault.text}"
        if fault.kind == "bug":
            raise RuntimeError(text)
        if member.expected:
            raise (MachineError if fault.kind == "machine" else UserError)(text)
        self._screen.note(f"an actor that joined cannot take part: {text}")
        self._left_out.add(place)
        self._members.pop(place)
        self._fleet.stop(place)
        if self._pool is not None:
            self._pool.lose(place)

    def _note(self, notes: Iterable[str], node: str) -> None:
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self._screen.note(f"{node}: {note}")
