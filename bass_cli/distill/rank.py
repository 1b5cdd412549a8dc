"""A process of a distributed training, as group.py controls it.

It trains in a thread and reports its progress, its errors and, for rank 0, the report. It does not
depend on Ray. Heavy imports happen in `prepare`. work.py does the training; exchange.py sums the
gradients.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.cluster.worker import Fault, fault_of
from bass_cli.config.args import DistillArgs
from bass_cli.config.job import Job, Pair
from bass_cli.errors import UserError
from bass_cli.io.progress import clock
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.distill.exchange import RankInfo, Store
    from bass_cli.distill.student import Source
    from bass_cli.run.plan import Plan

LOST = "peers"  # kind of a Fault that another process's death caused


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The job of all processes.

    folder: working directory of the command. samples: bytes of the sample file. every: seconds
    between checkpoints. address: returns the address of the node that calls it.
    """

    args: DistillArgs
    pair: Pair
    job: Job
    folder: str
    samples: int
    every: float
    address: Callable[[], str]


class Present(NamedTuple):
    """A process is ready: the name and address of its node, and a port where a group can meet."""

    node: str
    host: str
    port: int


class News(NamedTuple):
    """Progress of a process. `document`: the report, when the training is done."""

    line: str
    share: float | None
    notes: tuple[str, ...]
    document: dict[str, Any] | None = None
    fault: Fault | None = None


class Rank:
    """A process of a training. Its methods are called one at a time and return plain data."""

    def __init__(self, order: JobSpec):
        self._order, self._relay = order, Relay()
        self._news = threading.Condition()
        self._found: tuple[Plan, Source, Store] | None = None
        self._document: dict[str, Any] | None = None
        self._fault: Fault | None = None

    def prepare(self) -> Present | Fault:
        """Check everything that can be checked without weights."""
        order = self._order
        try:
            with contextlib.suppress(OSError):  # paths of the command may be relative to it
                os.chdir(order.folder)
            configure_threads(order.job.threads, self._relay.note)
            from bass_cli.distill.exchange import Store
            from bass_cli.distill.settings import check_memory, find_source, training_of
            from bass_cli.run.plan import make_plan

            self._check_folder()
            plan = make_plan(order.job)
            source = find_source(order.args, order.pair, plan)
            check_memory(plan, source, training_of(order.args))
            self._found = plan, source, Store()
            return Present(platform.node(), order.address(), self._found[2].port)
        except Exception as error:
            return fault_of(error)

    def exchange(self, info: RankInfo | None, beat: float) -> News:
        """Start the training if a rank is given, and report after `beat` seconds or at the end."""
        if info is not None:
            thread = threading.Thread(target=self._work, args=(info,), daemon=True, name="training")
            thread.start()
        with self._news:
            self._news.wait_for(lambda: self._fault is not None or self._document is not None, beat)
            notes = self._relay.take_notes()
            return News(self._relay.line(), self._relay.share(), notes, self._document, self._fault)

    def _check_folder(self) -> None:
        """Raise UserError if this node does not see the sample file."""
        assert self._order.args.out is not None
        samples = Path(self._order.args.out) / "samples.jsonl"
        if not samples.exists() or samples.stat().st_size != self._order.samples:
            raise UserError(
                f"--out {self._order.args.out}: the samples are not in this folder; actors on "
                "several nodes need a folder that all nodes share"
            )

    def _work(self, info: RankInfo) -> None:
        from bass_cli.distill.exchange import PeerLostError

        try:
            document, fault = self._train(info), None
        except PeerLostError as error:
            document, fault = None, Fault(LOST, str(error), platform.node())
        except Exception as error:
            document, fault = None, fault_of(error)
        with self._news:
            self._document, self._fault = document, fault
            self._news.notify_all()

    def _train(self, info: RankInfo) -> dict[str, Any]:
        from bass_cli.distill.settings import training_of
        from bass_cli.distill.work import Places, Work

        assert self._found is not None
        assert self._order.args.out is not None
        plan, source, store = self._found
        self._relay.phase("connecting to the other processes")
        work = Work(
            plan,
            source,
            training_of(self._order.args),
            Places(Path(self._order.args.out)),
            self._relay,
            peers=store.join(info, plan.device),
            beside=info.beside if plan.device.type == "cpu" else 1,
            every=self._order.every,
        )
        document = work.run()
        if not info.rank:
            self._relay.phase("writing the draft")
            work.write()
        return document


class Relay:
    """Collects notes and progress, until `exchange` sends them."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._lock = now, threading.Lock()
        self._notes: list[str] = []
        self.phase("starting")

    def phase(self, name: str) -> None:
        began = self._now()
        self.line: Callable[[], str] = lambda: f"{name}, {clock(self._now() - began)} elapsed"
        self.share: Callable[[], float | None] = lambda: None

    def note(self, message: str) -> None:
        with self._lock:
            self._notes.append(message)

    @contextlib.contextmanager
    def watching(
        self, line: Callable[[], str], share: Callable[[], float | None]
    ) -> Iterator[Callable[[], None]]:
        self.line, self.share = line, share
        yield lambda: None

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes since the last call."""
        with self._lock:
            notes, self._notes = tuple(self._notes), []
        return notes
