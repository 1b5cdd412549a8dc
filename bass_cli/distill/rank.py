"""One of the processes that train together, as whoever looks after them has it: told which number
it is, it works in a thread of its own, and says how far it is, what became of it, and, if it is the
first, the report.

It knows nothing of what carries its messages. Nothing heavy is imported before it is told to
prepare. Not here: the work itself (work.py), the others (group.py), what they exchange
(exchange.py).
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

LOST = "peers"  # the kind of a Fault whose cause is another's end


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What all of them are told: the command's options, its pair and job, where it was given,
    `samples`: bytes of the file to learn from; `every`: seconds between checkpoints; `address`:
    asks for that of a process's node."""

    args: DistillArgs
    pair: Pair
    job: Job
    folder: str
    samples: int
    every: float
    address: Callable[[], str]


class Present(NamedTuple):
    """One has looked at its models, and waits for the others: its node, by name and address, and a
    port there at which they can meet."""

    node: str
    host: str
    port: int


class News(NamedTuple):
    """How one is. `document`: the report, once all is done."""

    line: str
    share: float | None
    notes: tuple[str, ...]
    document: dict[str, Any] | None = None
    fault: Fault | None = None


class Rank:
    """Its methods are called one after the other, and what they give back is data."""

    def __init__(self, order: JobSpec):
        self._order, self._relay = order, Relay()
        self._news = threading.Condition()
        self._found: tuple[Plan, Source, Store] | None = None
        self._document: dict[str, Any] | None = None
        self._fault: Fault | None = None

    def prepare(self) -> Present | Fault:
        """Check all that can be checked without weights."""
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

    def exchange(self, seat: RankInfo | None, beat: float) -> News:
        """Begin, with a seat; how it is after `beat` seconds, or as soon as it is over."""
        if seat is not None:
            thread = threading.Thread(target=self._work, args=(seat,), daemon=True, name="training")
            thread.start()
        with self._news:
            self._news.wait_for(lambda: self._fault is not None or self._document is not None, beat)
            notes = self._relay.told()
            return News(self._relay.line(), self._relay.share(), notes, self._document, self._fault)

    def _check_folder(self) -> None:
        """UserError where this node does not see what the command has written."""
        assert self._order.args.out is not None
        samples = Path(self._order.args.out) / "samples.jsonl"
        if not samples.exists() or samples.stat().st_size != self._order.samples:
            raise UserError(
                f"--out {self._order.args.out}: the samples that were drawn are not there; actors "
                "on several nodes need a folder that all of them share"
            )

    def _work(self, seat: RankInfo) -> None:
        from bass_cli.distill.exchange import PeerLostError

        try:
            document, fault = self._train(seat), None
        except PeerLostError as error:
            document, fault = None, Fault(LOST, str(error), platform.node())
        except Exception as error:
            document, fault = None, fault_of(error)
        with self._news:
            self._document, self._fault = document, fault
            self._news.notify_all()

    def _train(self, seat: RankInfo) -> dict[str, Any]:
        from bass_cli.distill.settings import training_of
        from bass_cli.distill.work import Places, Work

        assert self._found is not None
        assert self._order.args.out is not None
        plan, source, store = self._found
        self._relay.phase("meeting the others")
        work = Work(
            plan,
            source,
            training_of(self._order.args),
            Places(Path(self._order.args.out)),
            self._relay,
            peers=store.join(seat, plan.device),
            beside=seat.beside if plan.device.type == "cpu" else 1,
            every=self._order.every,
        )
        document = work.run()
        if not seat.rank:
            self._relay.phase("writing the draft")
            work.write()
        return document


class Relay:
    """What a screen is told, kept until somebody asks."""

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

    def told(self) -> tuple[str, ...]:
        """Notes since this was last asked."""
        with self._lock:
            notes, self._notes = tuple(self._notes), []
        return notes
