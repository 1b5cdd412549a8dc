"""The sandbox for programs that a language model wrote: each in an interpreter of its own, with
limits and a verdict.

What holds a program is in jail/, which layers this system allows in isolation.py.
docs/SANDBOX.md says what is kept out and what is not. Nothing here knows a benchmark.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar, cast

from bass_cli.errors import MachineError
from bass_cli.sandbox.folder import work_folder
from bass_cli.sandbox.isolation import Isolation as Isolation
from bass_cli.sandbox.isolation import choose_users, describe, find_layers, interpreter_paths
from bass_cli.sandbox.jail.job_spec import Checked as Checked
from bass_cli.sandbox.jail.job_spec import JobSpec, Program
from bass_cli.sandbox.process import Report, WorkerPool

K = TypeVar("K")
ATTEMPTS = 3  # for a warden that could not start, which says nothing about the program
LOSSES = (
    2  # of a warden while a program ran, the second without company: then it is the program's doing
)


class Limits(NamedTuple):
    """What one program may use. Memory is for each of its processes, processor time for all
    together; `seconds` is wall-clock time.

    The wall clock is the looser of the two clocks on purpose: a busy machine must not turn a
    pass into a failure.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30  # of address space
    processes: int = 32  # and threads
    open_files: int = 64
    file_bytes: int = 16 << 20  # one file
    folder_bytes: int = 64 << 20  # all files, where the work folder is in memory
    # what is kept of standard output and error; the rest is read and dropped
    output_bytes: int = 64 << 10


DEFAULT_LIMITS = Limits()


class Ending(NamedTuple):
    """How a program ended: "passed", "failed", "timed out" (either clock) or "out of memory"
    (Python said so).

    `detail` is one line about it, written in part by the program; `output` is the start of what
    it printed.
    """

    status: str
    detail: str
    seconds: float
    output: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


class _Turns:
    """Programs run together, or one runs alone: who asks for that is waited for by those who
    come later."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._running = self._asking = 0
        self._alone = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._alone and not self._asking)
            self._running += 1
        try:
            yield
        finally:
            with self._change:
                self._running -= 1
                self._change.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._change:
            self._asking += 1
            self._change.wait_for(lambda: not self._alone and not self._running)
            self._asking -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._change:
                self._alone = False
                self._change.notify_all()


class Sandbox:
    """Runs programs, `workers` at a time (default: one for each core this process may use).

    Raises MachineError if the system cannot run programs at all. `layers` is for tests: use no
    others than these.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        layers: Iterable[str] | None = None,
    ) -> None:
        self._limits = limits
        self._workers = workers or available_cores()
        self._path, self._places = interpreter_paths()
        users = choose_users(self._workers) if os.geteuid() == 0 else [os.getuid()] * self._workers
        self._users: queue.SimpleQueue[int] = queue.SimpleQueue()
        for user in users:
            self._users.put(user)
        self._crews: set[WorkerPool] = set()
        self._turns = _Turns()
        self.layers = find_layers(self._attempt, layers)
        self.isolation: Isolation = describe(self.layers)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        for crew in list(self._crews):
            crew.dismiss()

    def run(self, programs: Iterable[tuple[K, Program]]) -> Iterator[tuple[K, Ending]]:
        """The verdict of each (key, program), as they finish. Programs are read as workers come
        free.

        A program passes if its tests, or where it has none its own text, run to their end without
        an exception. Closing the iterator, or any exception, kills what is running. MachineError
        if a program cannot be started, which says nothing about the program.
        """
        waiting: dict[Future[Ending], K] = {}
        source = iter(programs)
        self._crews.add(crew := WorkerPool())
        pool = ThreadPoolExecutor(self._workers, "sandbox")
        try:
            while True:
                for key, program in source:
                    waiting[pool.submit(self._judge, crew, program)] = key
                    if (
                        len(waiting) >= 2 * self._workers
                    ):  # so that none waits for the reader of this iterator
                        break
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    if crew.dismissed:  # the sandbox has been left: what was killed has no verdict
                        return
                    yield waiting.pop(done), done.result()
        finally:
            for future in waiting:
                future.cancel()
            crew.dismiss()
            pool.shutdown(wait=True)
            self._crews.discard(crew)

    def _judge(self, crew: WorkerPool, program: Program) -> Ending:
        """A warden that could not start, or was lost, is followed by another while no other
        program runs: whatever a program has done to it, or to another's, then costs that program
        alone its verdict. A program that the wall clock ended while it waited for a processor
        ("starved") runs once more like that too."""
        losses = 0
        for attempt in range(ATTEMPTS):
            with self._turns.alone() if attempt else self._turns.together():
                report = self._try(crew, program, self.layers)
            losses += report.status == "lost"
            hindered = report.status == "starved" and self._workers > 1 and not attempt
            if (
                crew.dismissed
                or losses == LOSSES
                or not (hindered or report.status in ("refused", "lost"))
            ):
                break
        if report.status == "refused" and not crew.dismissed:
            raise MachineError(
                "a program could not be run, for a reason that is not the program's: "
                f"{report.detail}"
            )
        if report.status == "lost":
            return Ending("failed", f"{report.detail}, also when it ran alone", report.seconds)
        status = "timed out" if report.status == "starved" else report.status
        return Ending(
            status, report.detail, report.seconds, report.output.decode("utf-8", "replace")
        )

    def _attempt(self, layers: tuple[str, ...]) -> Report:
        return self._try(WorkerPool(), "", layers)

    def _try(self, crew: WorkerPool, program: Program, layers: tuple[str, ...]) -> Report:
        user = self._users.get()
        try:
            owner = (user, user) if "uid" in layers else (os.getuid(), os.getgid())
            with (
                contextlib.nullcontext(None) if "mount" in layers else work_folder(owner) as folder
            ):
                return crew.run(self._order(program, layers, owner, folder))
        finally:
            self._users.put(user)

    def _order(
        self, program: Program, layers: tuple[str, ...], owner: tuple[int, int], folder: str | None
    ) -> JobSpec:
        text, checks = program, None
        if isinstance(program, Checked):
            text, checks = program.text, (program.tests, program.setup, tuple(program.names))
        about = {
            "text": text,
            "checks": checks,
            "layers": layers,
            "path": self._path,
            "places": self._places,
            "folder": folder,
        }
        limits = self._limits._asdict() | {"cpu_seconds": math.ceil(self._limits.cpu_seconds)}
        return cast(JobSpec, about | {"owner": owner} | limits)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
