"""The processes of a distributed training: `Group` starts and supervises them, `Rank` is one.

A group starts when all processes are ready. If one of them ends, all end, and a new group resumes
from the last checkpoint. A Rank trains in a thread and reports its progress, its errors and, for
rank 0, the report. training.py trains; exchange.py sums the gradients. Modules that import torch
are imported when the number of threads is set.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_cli.cluster.fleet import BEAT_OF_ALL, POLL, WAIT, Fleet, Lost, Place, Process
from bass_cli.config.job import Job, Pair
from bass_cli.config.machine_commands import DistillArgs
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen, clock
from bass_cli.system.children import Fault
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.distill.exchange import RankInfo, Store
    from bass_cli.distill.network import Source
    from bass_cli.run.plan import Plan

# Seconds that the first ready process waits for the others. Those that come later join only when a
# group is made again.
PATIENCE = 120.0
HOPELESS = 5  # failed groups without a new checkpoint that end the run
PEERS = "peers"  # kind of a Fault that another process's death caused
_GRACE = 10.0  # seconds to find out which process died, after another one reported an error
_BEAT = 0.5  # seconds between two reports of a process


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The job of all processes.

    pair: the pair of the command; job: the job that drew the samples. folder: working directory of
    the command. samples: bytes of the sample file. every: seconds between checkpoints.
    """

    args: DistillArgs
    pair: Pair
    job: Job
    folder: str
    samples: int
    every: float


class RankReady(NamedTuple):
    """A process is ready: the name and address of its node, and a port where a group can meet."""

    node: str
    host: str
    port: int


class RankReport(NamedTuple):
    """Progress of a process. `document`: the report, when the training is done."""

    line: str
    share: float | None
    notes: tuple[str, ...]
    document: dict[str, Any] | None = None
    fault: Fault | None = None


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
        self._mark = self._last_checkpoint()
        self._in_a_row = self._wanted = 0

    def run(self) -> dict[str, Any]:
        """Run the training and return its report.

        UserError or MachineError if a process refuses the job, or if processes die repeatedly.
        """
        with self._screen.watching(lambda: self._line, lambda: self._share or None) as tick:
            self._tick = tick
            while True:
                document = self._train(self._gather())
                if document is not None:
                    return document

    def _gather(self) -> dict[Place, RankReady]:
        """Start processes at all places; return those that are ready.

        Returns when all are ready, or PATIENCE seconds after the first one.
        """
        ready: dict[Place, RankReady] = {}
        started, wanted = set[Place](), set[Place]()
        began, polled, first = self._now(), self._now() - POLL, 0.0
        while not ready or (len(ready) < len(wanted) and self._now() - first < PATIENCE):
            if self._now() - polled >= POLL:
                polled, wanted = self._now(), self._fleet.places()
                for place in sorted(wanted - started, key=str):
                    self._fleet.start(place)
                started |= wanted
            for place, event in self._fleet.wait(WAIT):
                if isinstance(event, Fault):
                    raise event.error()
                if isinstance(event, Lost):
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

    def _train(self, ready: Mapping[Place, RankReady]) -> dict[str, Any] | None:
        """Train with these processes, and end them.

        Returns: the report; None if a process died.
        """
        infos, beat = assign_ranks(ready), max(_BEAT, BEAT_OF_ALL * len(ready))
        known = "" if len(ready) == self._wanted else f" of {self._wanted}"
        self._screen.note(f"{len(ready)}{known} actors train together")
        try:
            for place, info in infos.items():
                self._fleet.ask(place, info, beat)
            while True:
                for place, event in self._fleet.wait(WAIT):
                    why = event.fault if isinstance(event, RankReport) else event
                    if why is not None:
                        self._handle_loss(place, ready, why)
                        return None
                    if not infos[place].rank:
                        for note in event.notes:
                            self._screen.note(note)
                        self._show(f"{len(infos)} actors: {event.line}", event.share or 0.0)
                        if event.document is not None:
                            return event.document
                    if event.document is None:  # the others finish before rank 0
                        self._fleet.ask(place, None, beat)
        finally:
            for place in ready:
                self._fleet.stop(place)

    def _handle_loss(
        self, place: Place, ready: Mapping[Place, RankReady], why: Fault | Lost
    ) -> None:
        """Handle a process that died or reported an error; find out which one died, if possible."""
        if isinstance(why, Fault) and why.kind != PEERS:
            raise why.error()
        until = self._now() + _GRACE
        while isinstance(why, Fault) and self._now() < until:
            for other, event in self._fleet.wait(WAIT):
                if isinstance(event, Lost):
                    place, why = other, event
        text = why.text if isinstance(why, Fault) else why.why
        self._lose(f"an actor on {ready[place].node}", text)

    def _lose(self, who: str, why: str) -> None:
        """Note the loss of a process; MachineError after too many without a checkpoint."""
        before, self._mark = self._mark, self._last_checkpoint()
        self._in_a_row = 1 if before != self._mark else self._in_a_row + 1
        if self._in_a_row > HOPELESS:
            raise MachineError(
                f"{self._in_a_row} actors died without a checkpoint between them; the last one: "
                f"{who}: {why}"
            )
        self._screen.note(f"{who} died; the others resume from the last checkpoint: {why}")

    def _show(self, line: str, share: float) -> None:
        self._line, self._share = line, share
        self._tick()

    def _last_checkpoint(self) -> int | None:
        """Return a number that changes with each checkpoint."""
        return self._checkpoint.stat().st_mtime_ns if self._checkpoint.exists() else None


def assign_ranks(ready: Mapping[Place, RankReady]) -> dict[Place, RankInfo]:
    """Assign ranks. Processes of a node get consecutive ranks, and this node comes first, because
    it reads what rank 0 writes."""
    from bass_cli.distill.exchange import RankInfo

    order = sorted(
        ready, key=lambda at: (ready[at].node != platform.node(), ready[at].host, str(at))
    )
    beside, first = Counter(one.host for one in ready.values()), ready[order[0]]
    return {
        place: RankInfo(rank, len(order), first.host, first.port, beside[ready[place].host])
        for rank, place in enumerate(order)
    }


class Rank(Process):
    """A process of a training. A TrainingRun shows its progress on it as on a Screen."""

    def __init__(self, spec: TrainingSpec):
        super().__init__()
        assert spec.args.out is not None
        self._spec, self._out = spec, spec.args.out
        self._found: tuple[Plan, Source, Store] | None = None
        self._document: dict[str, Any] | None = None
        self.phase("starting")

    def _check(self) -> RankReady:
        spec = self._spec
        with contextlib.suppress(OSError):  # paths of the command may be relative to it
            os.chdir(spec.folder)
        configure_threads(spec.job.threads, self.note)
        from bass_cli.cluster.rays import address_here
        from bass_cli.distill.exchange import Store
        from bass_cli.distill.settings import check_memory, find_source, training_of
        from bass_cli.run.plan import make_plan

        samples = Path(self._out) / "samples.jsonl"
        if not samples.exists() or samples.stat().st_size != spec.samples:
            raise UserError(
                f"`out` {self._out}: the samples are not in this folder; actors on several nodes "
                "need a folder that all nodes share"
            )
        plan = make_plan(spec.job)
        source = find_source(spec.args, spec.pair, plan)
        check_memory(plan, source, training_of(spec.args))
        self._found = plan, source, Store()
        return RankReady(platform.node(), address_here(), self._found[2].port)

    def exchange(self, info: RankInfo | None, beat: float) -> RankReport:
        """Start the training if a rank is given, and report after `beat` seconds or at the end."""
        if info is not None:
            self._start(lambda: self._work(info))
        with self._news:
            self._news.wait_for(lambda: self._fault is not None or self._document is not None, beat)
            notes = self._take_notes()
            return RankReport(self._line(), self._share(), notes, self._document, self._fault)

    def _work(self, info: RankInfo) -> None:
        from bass_cli.distill.exchange import PeerLostError

        document, fault = None, None
        try:
            document = self._train(info)
        except PeerLostError as error:
            fault = Fault(PEERS, str(error), platform.node())
        with self._news:
            self._document, self._fault = document, fault
            self._news.notify_all()

    def _train(self, info: RankInfo) -> dict[str, Any]:
        from bass_cli.distill.settings import training_of
        from bass_cli.distill.training import Places, TrainingRun

        assert self._found is not None
        plan, source, store = self._found
        self.phase("connecting to the other processes")
        training = TrainingRun(
            plan,
            source,
            training_of(self._spec.args),
            Places.of(Path(self._out)),
            self,
            peers=store.join(info, plan.device),
            beside=info.beside if plan.device.type == "cpu" else 1,
            every=self._spec.every,
        )
        document = training.run()
        if not info.rank:
            self.phase("writing the draft")
            training.write()
        return document

    def phase(self, name: str) -> None:
        began = time.monotonic()
        self._line: Callable[[], str] = lambda: f"{name}, {clock(time.monotonic() - began)} elapsed"
        self._share: Callable[[], float | None] = lambda: None

    @contextlib.contextmanager
    def watching(
        self, line: Callable[[], str], share: Callable[[], float | None]
    ) -> Iterator[Callable[[], None]]:
        self._line, self._share = line, share
        yield lambda: None
