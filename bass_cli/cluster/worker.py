"""One process that draws: the whole engine with a batch of its own, fed with parts of a job, its
samples fetched in bundles.

A thin shell around the library's iterator of completions. Heavy imports come with the first
message. Not here: how messages travel (rays.py), the other workers (pool.py, worker_pool.py).
"""

from __future__ import annotations

import platform
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.cluster.pool import Part
from bass_cli.config.job import Job
from bass_cli.errors import MachineError, UserError
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt
from bass_cli.io.shards import Shard
from bass_cli.io.usage import Usage
from bass_cli.run.manifest import Facts
from bass_cli.system.threads import CoreMonitor, configure_threads

if TYPE_CHECKING:
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.run.plan import Plan


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What every worker is told: the job, what identifies its prompts, how many of them it will
    have if all take the same share (None: nobody knows), the text of the longest, and which part
    of a larger job this one is."""

    job: Job
    source: Mapping[str, Any]
    prompts: int | None
    longest: str
    shard: Shard | None = None


class Fault(NamedTuple):
    """Why a worker cannot go on: a UserError's sentence ("user"), a MachineError's ("machine"), or
    a traceback ("bug"); and its node."""

    kind: str
    text: str
    node: str = "a node"


class Ready(NamedTuple):
    """A worker has looked at its models, and may be given parts."""

    node: str
    process: int
    facts: Facts


class Report(NamedTuple):
    """What there is since the last one: samples and notes; and how the worker is: what it is at
    (None while it draws), its rows and those that are live, and since it began: tokens, rows and
    accepted drafts of all rounds. `usage`: Usage.summary."""

    completions: tuple[Completion, ...]
    notes: tuple[str, ...]
    phase: str | None
    rows: int
    busy: int
    tokens: int
    row_rounds: int
    accepted: int
    usage: Mapping[str, Any]
    fault: Fault | None = None


class Feed:
    """The prompts that the engine is to draw, as they come: an iterator that gives None while
    there is none and samples are under way, and waits when nothing is. Of (id, sample), `in`
    says whether it is not asked for."""

    def __init__(self) -> None:
        self._parts: deque[Prompt] = deque()
        self._asked: dict[str, set[int]] = {}
        self._more = threading.Condition()

    def add(self, parts: list[Part]) -> None:
        """These are asked for; of a prompt that is under way, none."""
        with self._more:
            for prompt, samples in parts:
                assert prompt.id not in self._asked
                self._asked[prompt.id] = set(samples)
                self._parts.append(prompt)
            self._more.notify_all()

    def end(self, completion: Completion) -> None:
        """This one is there."""
        with self._more:
            samples = self._asked[completion.id]
            samples.discard(completion.sample)
            if completion.is_of_prompt or not samples:
                del self._asked[completion.id]

    def __iter__(self) -> Iterator[Prompt | None]:
        return self

    def __next__(self) -> Prompt | None:
        with self._more:
            self._more.wait_for(lambda: self._parts or self._asked)
            return self._parts.popleft() if self._parts else None

    def __contains__(self, key: Any) -> bool:
        id_, sample = key
        with self._more:
            return sample not in self._asked.get(id_, ())

    @property
    def idle(self) -> bool:
        """Whether nothing is asked for that is not there."""
        return not self._asked


class Worker:
    """Draws parts of the job that the order is about, in a thread of its own. Its methods are
    called one after the other, and what they give back is data."""

    def __init__(self, order: JobSpec):
        self._order, self._feed = order, Feed()
        self._due: list[Completion] = []
        self._notes: list[str] = []
        self._news = threading.Condition()
        self._phase: str | None = None
        self._fault: Fault | None = None
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._rows = self._busy = self._tokens = self._row_rounds = self._accepted = 0
        self._usage = Usage(0, None, now=time.monotonic)

    def prepare(self) -> Ready | Fault:
        """Check all that can be checked without weights."""
        try:
            import os

            configure_threads(self._order.job.threads, self._notes.append)
            from bass_cli.run.manifest import facts_of
            from bass_cli.run.plan import make_plan

            self._plan = make_plan(
                self._order.job, longest_prompt=self._order.longest, prompts=self._order.prompts
            )
            self._rows = self._plan.rows
            facts = facts_of(self._plan, self._order.source, shard=self._order.shard)
            return Ready(platform.node(), os.getpid(), facts)
        except Exception as error:
            return fault_of(error)

    def exchange(self, parts: list[Part], beat: float) -> Report:
        """Take these parts, too; what there is after `beat` seconds, or as soon as nothing is
        left to draw."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._draw, daemon=True, name="engine")
            self._thread.start()
        self._feed.add(parts)
        with self._news:
            self._news.wait_for(self._must_report, beat)
            due, self._due = tuple(self._due), []
            notes, self._notes = tuple(self._notes), []
            return Report(
                due,
                notes,
                self._phase,
                self._rows,
                0 if self._feed.idle else self._busy,
                self._tokens,
                self._row_rounds,
                self._accepted,
                self._usage.summary(),
                self._fault,
            )

    def _must_report(self) -> bool:
        return self._fault is not None or (self._feed.idle and bool(self._due))

    def _draw(self) -> None:
        assert self._plan is not None
        try:
            from bass_cli.run.engine import generate

            self._usage = Usage(self._rows, None, now=time.monotonic)
            for completion in generate(
                self._plan,
                self._feed,
                done=self._feed,
                on_round=self._on_round(CoreMonitor(self._order.job.threads)),
                on_phase=self._on_phase,
                on_note=self._notes.append,
            ):
                with self._news:
                    self._usage.sample()
                    self._feed.end(completion)
                    self._due.append(completion)
                    self._news.notify_all()
        except Exception as error:
            with self._news:
                self._fault = fault_of(error)
                self._news.notify_all()

    def _on_round(self, company: CoreMonitor) -> Callable[[RoundResult], None]:
        def on_round(done: RoundResult) -> None:
            company.look()
            with self._news:
                kept, self._busy = sum(done.accepted), len(done.accepted)
                self._rows, self._phase = done.capacity or self._rows, None
                self._tokens += kept + self._busy
                self._row_rounds += self._busy
                self._accepted += kept
                self._usage.round(self._busy, done.seconds, done.capturing, self._rows)

        return on_round

    def _on_phase(self, name: str) -> None:
        with self._news:
            self._phase = name
            self._usage.phase(name)


def fault_of(error: Exception) -> Fault:
    """What an error is to whoever asked for the work."""
    if isinstance(error, UserError):
        kind = "machine" if isinstance(error, MachineError) else "user"
        return Fault(kind, str(error), platform.node())
    return Fault("bug", "".join(traceback.format_exception(error)), platform.node())
