"""A worker process: the whole engine with its own batch, which draws parts of a job.

It draws through the library's engine. The driver: worker_pool.py.
"""

from __future__ import annotations

import platform
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.cluster.fleet import Process
from bass_cli.config.job import Job
from bass_cli.io.prompts import Prompt, Shard, Wanted
from bass_cli.io.results import Completion
from bass_cli.io.usage import Usage
from bass_cli.run.manifest import Facts
from bass_cli.run.requests import import_for
from bass_cli.system.children import Fault
from bass_cli.system.host import expect
from bass_cli.system.threads import CoreMonitor, begin

if TYPE_CHECKING:
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.run.plan import Plan


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job with what is known of its prompts.

    Attributes:
        source: What identifies the prompts, for the manifest.
        prompts: The number of prompts; for a worker its share. None if unknown.
        longest: The text or token ids of the longest prompt.
        shard: The part of the prompts that is drawn; None for all.
        wanted: See Checked; for a worker its share.
    """

    job: Job
    source: Mapping[str, Any]
    prompts: int | None = None
    longest: str | list[int] = ""
    shard: Shard | None = None
    wanted: Wanted | None = None


class Part(NamedTuple):
    """Some samples of a prompt, by their numbers."""

    prompt: Prompt
    samples: tuple[int, ...]


class Ready(NamedTuple):
    """A worker has checked its models and is ready to draw."""

    node: str
    facts: Facts


class Report(NamedTuple):
    """New samples and notes of a worker, and its state.

    Attributes:
        completions: Samples since the last report.
        notes: Notes since the last report.
        phase: What the worker does; None while it draws.
        rows: The slots of its batch.
        busy: The slots in use.
        tokens: All tokens so far.
        row_rounds: The sequences of all rounds so far.
        accepted: The accepted drafts of all rounds so far.
        usage: Usage.summary().
        fault: The error that ended the worker, None if there is none.
    """

    completions: tuple[Completion, ...] = ()
    notes: tuple[str, ...] = ()
    phase: str | None = None
    rows: int = 0
    busy: int = 0
    tokens: int = 0
    row_rounds: int = 0
    accepted: int = 0
    usage: Mapping[str, Any] = {}
    fault: Fault | None = None


class Feed:
    """The prompts for the engine, as they arrive.

    The iterator yields None while no prompt waits and samples are being drawn. It blocks if there
    is nothing to do. `(id, sample) in feed` is true for samples that this worker need not draw.
    """

    def __init__(self) -> None:
        self._parts: deque[Prompt] = deque()
        self._wanted: dict[str, set[int]] = {}
        self._more = threading.Condition()

    def add(self, parts: list[Part]) -> None:
        """Add parts. None may be of a prompt whose samples are still being drawn."""
        with self._more:
            for prompt, samples in parts:
                assert prompt.id not in self._wanted
                self._wanted[prompt.id] = set(samples)
                self._parts.append(prompt)
            self._more.notify_all()

    def end(self, completion: Completion) -> None:
        """Remove a finished sample."""
        with self._more:
            samples = self._wanted[completion.id]
            samples.discard(completion.sample)
            if completion.is_of_prompt or not samples:
                del self._wanted[completion.id]

    def __iter__(self) -> Iterator[Prompt | None]:
        return self

    def __next__(self) -> Prompt | None:
        with self._more:
            self._more.wait_for(lambda: self._parts or self._wanted)
            return self._parts.popleft() if self._parts else None

    def __contains__(self, key: Any) -> bool:
        id_, sample = key
        with self._more:
            return sample not in self._wanted.get(id_, ())

    @property
    def idle(self) -> bool:
        """Return whether all samples are finished."""
        return not self._wanted


class Worker(Process):
    """Draw parts of a job in a thread."""

    def __init__(self, spec: JobSpec):
        super().__init__()
        if begin(spec.job.threads):  # an actor of Ray; other processes do so earlier
            expect(spec.job.device)
        self._spec, self._feed, self._report = spec, Feed(), Report()
        self._finished: list[Completion] = []
        self._begun = False
        self._plan: Plan | None = None
        self._usage = Usage(0, None)

    def _check(self) -> Ready:
        spec = self._spec
        tokenizer = import_for(spec.job, self.note)
        from bass_cli.run.manifest import facts_of
        from bass_cli.run.plan import make_plan

        self._plan = make_plan(
            spec.job,
            longest_prompt=spec.longest,
            prompts=spec.prompts,
            wanted=spec.wanted,
            tokenizer=tokenizer,
        )
        self._report = Report(rows=self._plan.rows)
        facts = facts_of(self._plan, spec.source, shard=spec.shard)
        return Ready(platform.node(), facts)

    def exchange(self, parts: list[Part], beat: float) -> Report:
        """Add parts and return a report after `beat` seconds, or once all samples are finished."""
        if not self._begun:
            self._begun = True
            self._start(self._draw)
        self._feed.add(parts)
        with self._news:
            self._news.wait_for(self._must_report, beat)
            finished, self._finished = tuple(self._finished), []
            return self._report._replace(
                completions=finished,
                notes=self._take_notes(),
                busy=0 if self._feed.idle else self._report.busy,
                usage=self._usage.summary(),
                fault=self._fault,
            )

    def _must_report(self) -> bool:
        return self._fault is not None or (self._feed.idle and bool(self._finished))

    def _draw(self) -> None:
        assert self._plan is not None
        from bass_cli.run.engine import Engine

        self._usage = Usage(self._plan.rows, None)
        engine = Engine(
            self._plan,
            lazy=True,
            on_round=self._on_round(CoreMonitor(self._spec.job.threads)),
            on_phase=self._on_phase,
            on_note=self.note,
        )
        for completion in engine.draw(self._feed, self._feed):
            with self._news:
                self._usage.sample()
                self._feed.end(completion)
                self._finished.append(completion)
                self._news.notify_all()

    def _on_round(self, cores: CoreMonitor) -> Callable[[RoundResult], None]:
        def on_round(done: RoundResult) -> None:
            cores.update()
            accepted, busy, before = sum(done.accepted), len(done.accepted), self._report
            with self._news:
                self._report = before._replace(
                    phase=None,
                    rows=done.capacity or before.rows,
                    busy=busy,
                    tokens=before.tokens + accepted + busy,
                    row_rounds=before.row_rounds + busy,
                    accepted=before.accepted + accepted,
                )
                self._usage.round(
                    busy, done.seconds, done.capturing, self._report.rows, refills=done.refills
                )
                if done.width:
                    self._usage.drafts(done.num_drafts, done.accepted)

        return on_round

    def _on_phase(self, name: str) -> None:
        with self._news:
            self._report = self._report._replace(phase=name)
            self._usage.phase(name)
