"""The driver of a job that many workers draw: starts workers, hands out samples, yields results.

It runs on one thread and reaches the workers (worker.py) through a Fleet. If a worker dies, its
samples are drawn again. `WorkerPool` has the processes and the clock; `Pool` assigns the samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bass_cli.cluster.fleet import BEAT_OF_ALL, POLL, WAIT, Fleet, Lost, Place
from bass_cli.cluster.worker import Part, Ready, Report
from bass_cli.errors import MachineError
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion
from bass_cli.io.usage import together
from bass_cli.run.manifest import Facts
from bass_cli.system.children import Fault

_BEAT = 0.1  # seconds between two reports of a worker
_RATED = 5.0  # seconds over which an actor's tokens per second are measured
_SHOWN = 8  # actors that the progress line shows
_HOPELESS = 5  # a job ends after this many deaths, plus two per worker, without a sample
_RESERVE = 8  # a worker holds 1/8 more samples than it has slots, so that no slot becomes empty
_PIECES = 8  # parts of a prompt at most, because each part runs the prefill again


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
        self._deaths_in_a_row = 0  # since the last sample
        self._past_usages: list[Mapping[str, Any]] = []  # of workers that are gone
        self._pool: Pool | None = None
        self._facts: Facts | None = None
        self._checked = -POLL

    @property
    def facts(self) -> Facts:
        """What the first ready worker knows of the models, after `gather`."""
        assert self._facts is not None
        return self._facts

    def gather(self) -> None:
        """Start the workers, and wait until the first one has checked the models.

        Raises:
            UserError, MachineError: A worker cannot use the models.
        """
        while self._facts is None:
            self._check_nodes(expected=True)
            for place, event in self._fleet.wait(WAIT):
                for _ in self._take(place, event):
                    raise AssertionError("a sample of a job that has not begun")

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
        ready = {place: one for place, one in self._members.items() if one.ready is not None}
        for place in ready:
            self._pool.hire(place)
        for place, member in ready.items():
            self._ask(place, member)
        while not self._pool.over():
            self._check_nodes()
            for place, event in self._fleet.wait(WAIT):
                yield from self._take(place, event)

    def line(self) -> str:
        """Return the progress line: the phase, or busy slots and tokens per second, by worker."""
        each = [
            one.report.phase or f"{one.report.busy}/{one.report.rows} rows {one.rate:.0f} tokens/s"
            for one in self._members.values()
            if one.report is not None
        ]
        more = [f"and {len(each) - _SHOWN} more"] if len(each) > _SHOWN else []
        known = f"{len(each)} of {len(self._members)} actors running"
        return "; ".join([known, *each[:_SHOWN], *more])

    def usage(self) -> dict[str, Any]:
        """Return where the seconds of all workers went, including those that are gone."""
        mine = [one.report.usage for one in self._members.values() if one.report is not None]
        return together([*self._past_usages, *mine]) | {"rows": sum(one["rows"] for one in mine)}

    def _check_nodes(self, *, expected: bool = False) -> None:
        """Every 2 s, start missing workers and drop those whose node has left."""
        if self._now() - self._checked < POLL:
            return
        self._checked, wanted = self._now(), self._fleet.places()
        for place in [one for one in self._members if one not in wanted]:
            self._lose(place, "its node has left")
        for place in sorted(wanted - self._members.keys() - self._left_out, key=str):
            self._members[place] = _Member(expected or place in self._expected)
            self._expected |= {place} if expected else set()
            self._fleet.start(place)

    def _take(self, place: Place, event: Ready | Report | Fault | Lost) -> Iterator[Completion]:
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
            found = self._deliver(place, event)
            self._update(member, event)
            try:  # the worker gets new samples before the others are written, which takes time
                if event.fault is None:
                    self._ask(place, member)
            finally:  # a mistake in a later prompt loses no finished sample
                yield from found
            if event.fault is not None:
                self._refuse(place, member, event.fault)

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

    def _deliver(self, place: Place, report: Report) -> list[Completion]:
        """Take the samples of a report from the pool; return those that are new."""
        pool = self._pool
        assert pool is not None
        if report.completions:
            self._deaths_in_a_row = 0
        return [one for one in report.completions if pool.deliver(place, one)]

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
        beat = max(_BEAT, BEAT_OF_ALL * len(self._pool))
        self._fleet.ask(place, self._pool.chunk(place, rows), beat)

    def _lose(self, place: Place, why: str) -> None:
        """Remove a worker that is gone; its samples are drawn again.

        Raises:
            MachineError: Too many workers died without a sample in between.
        """
        member = self._members.pop(place)
        self._fleet.stop(place)
        if member.report is not None:
            self._past_usages.append(member.report.usage)
        held = 0 if self._pool is None else self._pool.lose(place)
        where = "an actor" if member.ready is None else f"an actor on {member.ready.node}"
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _HOPELESS + 2 * len(self._expected | self._members.keys()):
            raise MachineError(
                f"{self._deaths_in_a_row} actors died in a row without drawing a sample; the last "
                f"was {where}: {why}"
            )
        self._screen.note(f"lost {where}: {why}; its {held} samples are drawn again")

    def _refuse(self, place: Place, member: _Member, fault: Fault) -> None:
        """Handle a worker's fault: leave out a worker that joined later, else end the job."""
        if member.expected or fault.kind == "bug":
            raise fault.error()
        self._screen.note(f"an actor that joined cannot take part: {fault.error()}")
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


class Pool:
    """The samples 0 to n - 1 of every prompt, except those in `done`.

    Each sample is assigned to one worker at a time. A sample from any other worker is ignored, so
    there are no duplicates. The samples of a lost worker become available again.

    Args:
        prompts: The prompts, read as workers need them.
        done: (id, sample) pairs that exist already.
        n: Samples per prompt, unless a prompt has its own number.
        count: The number of prompts, None if unknown.
        alike: Whether the samples of a prompt are copies of one, which needs one slot.
    """

    def __init__(
        self,
        prompts: Iterator[Prompt],
        done: Container[tuple[str, int]],
        *,
        n: int,
        count: int | None,
        alike: bool = False,
    ):
        self._prompts, self._done, self._n, self._alike = prompts, done, n, alike
        self._unread = math.inf if count is None else count
        self._waiting: dict[str, tuple[Prompt, list[int]]] = {}  # by id: unassigned samples
        self._workers: dict[Hashable, _Assigned] = {}
        self._failed: set[str] = set()  # prompts that cannot be run

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self._workers)

    def hire(self, worker: Hashable) -> None:
        """Add a worker."""
        self._workers[worker] = _Assigned()

    def lose(self, worker: Hashable) -> int:
        """Remove a worker, and return how many samples it had not finished."""
        mine = self._workers.pop(worker, _Assigned())
        for id_, (prompt, samples) in mine.parts.items():
            if id_ not in self._failed:
                waiting = self._waiting.setdefault(id_, (prompt, []))[1]
                waiting += samples
                waiting.sort()
        return sum(len(samples) for _, samples in mine.parts.values())

    def held(self, worker: Hashable) -> int:
        """Return the number of slots that the worker's samples need."""
        parts = self._workers[worker].parts.values()
        return len(parts) if self._alike else sum(len(samples) for _, samples in parts)

    def chunk(self, worker: Hashable, rows: int) -> list[Part]:
        """Assign samples to a worker and return them.

        They keep its `rows` slots busy until the next call. The reserve is an eighth of the slots,
        or twice the smaller of two numbers if that is more: the samples that ended since the last
        call, and those between the two calls before. Many that end at once, as samples of one
        length do, are no reason to take those that other workers will need.
        """
        mine, parts = self._workers[worker], list[Part]()
        expected = 2 * min(mine.ended, mine.ended_before)
        wanted = rows + max(rows // _RESERVE, expected, 1) - self.held(worker)
        mine.ended, mine.ended_before = 0, mine.ended
        while wanted > 0 and (part := self._part(mine)) is not None:
            mine.parts[part.prompt.id] = part.prompt, set(part.samples)
            wanted -= 1 if self._alike else len(part.samples)
            parts.append(part)
        return parts

    def deliver(self, worker: Hashable, completion: Completion) -> bool:
        """Take a finished sample from a worker; return whether it is wanted and new."""
        mine = self._workers.get(worker)
        if mine is None or completion.id not in mine.parts:
            return False
        missing = mine.parts[completion.id][1]
        ended = {completion.sample} & missing
        new = bool(ended)
        if completion.is_of_prompt:
            new, ended = completion.id not in self._failed, set(missing)
            self._failed.add(completion.id)
            self._waiting.pop(completion.id, None)
        missing -= ended
        if not missing:
            del mine.parts[completion.id]
        mine.ended += int(not missing) if self._alike else len(ended)
        return new

    def over(self) -> bool:
        """Return whether all samples are finished."""
        return not any(mine.parts for mine in self._workers.values()) and not (
            self._waiting or self._read()
        )

    def _part(self, mine: _Assigned) -> Part | None:
        """Return samples of the first prompt of which the worker has none; None if there is none.

        Near the end of a job, a worker's share of the remaining samples may be less than a whole
        prompt. Then return only that many.
        """
        found = next((one for id_, one in self._waiting.items() if id_ not in mine.parts), None)
        found = found or self._read()
        if found is None:
            return None
        prompt, missing = found
        size = len(missing) if self._alike else self._size(len(missing))
        part = Part(prompt, tuple(missing[:size]))
        del missing[:size]
        if not missing:
            del self._waiting[prompt.id]
        return part

    def _size(self, most: int) -> int:
        left = self._unread * self._n + sum(len(samples) for _, samples in self._waiting.values())
        share = max(left / len(self._workers), self._n / _PIECES)
        return most if share >= most else math.ceil(share)

    def _read(self) -> tuple[Prompt, list[int]] | None:
        """Read the next prompt that lacks samples; None after the last."""
        for prompt in self._prompts:
            self._unread = max(self._unread - 1, 0)
            numbers = range(prompt.samples(self._n))
            missing = [i for i in numbers if (prompt.id, i) not in self._done]
            if missing:
                self._waiting[prompt.id] = prompt, missing
                return self._waiting[prompt.id]
        self._unread = 0
        return None


@dataclass(slots=True)
class _Assigned:
    """The samples that a worker holds, by prompt id.

    Attributes:
        parts: The prompts with the samples that are not finished.
        ended: The number of samples that ended since the last `chunk`.
        ended_before: The number of samples that ended between the last two calls of `chunk`.
    """

    parts: dict[str, tuple[Prompt, set[int]]] = field(default_factory=dict)
    ended: int = 0
    ended_before: int = 0
