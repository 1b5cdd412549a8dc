"""The sandbox for programs that a language model wrote. Each has its own interpreter and limits.

jail/ isolates a program; isolation.py finds the layers that this system allows. docs/SANDBOX.md
says what programs can and cannot reach. Nothing here depends on a benchmark.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
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
ATTEMPTS = 3  # if a supervisor cannot start, which is not the program's fault
# A program fails if its supervisor is lost this often. No other program runs the second time.
LOSSES = 2


class Limits(NamedTuple):
    """Limits of one program.

    Memory is limited for each of its processes, processor time for all together. `seconds` is
    wall-clock time. It is longer than the processor time, so that a busy machine does not turn a
    pass into a failure.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30  # of address space
    processes: int = 32  # and threads
    open_files: int = 64
    file_bytes: int = 16 << 20  # one file
    folder_bytes: int = 64 << 20  # all files, where the work folder is in memory
    # of standard output and error; the rest is read and dropped
    output_bytes: int = 64 << 10


DEFAULT_LIMITS = Limits()


class Ending(NamedTuple):
    """The verdict on a program.

    Attributes:
        status: "passed", "failed", "timed out" (wall clock or processor time) or "out of memory"
            (Python raised MemoryError).
        detail: one line about it, written in part by the program.
        seconds: wall-clock time.
        output: the start of what it printed.
    """

    status: str
    detail: str
    seconds: float
    output: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


class _RunLock:
    """A shared and exclusive lock: programs run together, or one runs alone.

    A waiting exclusive holder goes before shared holders that come later.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._running = self._waiting_alone = 0
        self._alone = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._alone and not self._waiting_alone)
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
            self._waiting_alone += 1
            self._change.wait_for(lambda: not self._alone and not self._running)
            self._waiting_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._change:
                self._alone = False
                self._change.notify_all()


class Sandbox:
    """Run programs in isolation.

    Args:
        workers: programs at once. Default: the number of cores that this process may use.
        limits: limits of each program.
        layers: use only these layers of isolation. For tests.

    Raises:
        MachineError: the system cannot run programs.
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
        self._pools: set[WorkerPool] = set()
        self._lock = _RunLock()
        self.layers = find_layers(self._attempt, layers)
        self.isolation: Isolation = describe(self.layers)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in list(self._pools):
            pool.dismiss()

    def run(self, programs: Iterable[tuple[K, Program]]) -> Generator[tuple[K, Ending], None, None]:
        """Run (key, program) pairs and yield (key, verdict) as they finish.

        Programs are read as workers become free. A program passes if its tests run to their end
        without an exception; without tests, if its text does. Closing the iterator, or an
        exception, kills the running programs.

        Raises:
            MachineError: a program cannot be started, for a reason that is not the program's.
        """
        waiting: dict[Future[Ending], K] = {}
        source = iter(programs)
        self._pools.add(pool := WorkerPool())
        threads = ThreadPoolExecutor(self._workers, "sandbox")
        try:
            while True:
                for key, program in source:
                    waiting[threads.submit(self._judge, pool, program)] = key
                    # Enough that no worker waits for the reader of this iterator.
                    if len(waiting) >= 2 * self._workers:
                        break
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    if pool.dismissed:  # the sandbox was left; killed programs have no verdict
                        return
                    yield waiting.pop(done), done.result()
        finally:
            for future in waiting:
                future.cancel()
            pool.dismiss()
            threads.shutdown(wait=True)
            self._pools.discard(pool)

    def _judge(self, pool: WorkerPool, program: Program) -> Ending:
        """Run one program, again and alone if needed.

        If its supervisor could not start or was lost, the program runs again while no other
        program runs. So a program that harms supervisors loses only its own verdict. A starved
        program runs once more alone too.
        """
        losses = 0
        for attempt in range(ATTEMPTS):
            with self._lock.alone() if attempt else self._lock.together():
                report = self._try(pool, program, self.layers)
            losses += report.status == "lost"
            hindered = report.status == "starved" and self._workers > 1 and not attempt
            if (
                pool.dismissed
                or losses == LOSSES
                or not (hindered or report.status in ("refused", "lost"))
            ):
                break
        if report.status == "refused" and not pool.dismissed:
            raise MachineError(
                "a program could not be run, and the program is not the cause: "
                f"{report.detail}; run the same command again to continue"
            )
        if report.status == "lost":
            return Ending("failed", f"{report.detail}, also when it ran alone", report.seconds)
        status = "timed out" if report.status == "starved" else report.status
        return Ending(
            status, report.detail, report.seconds, report.output.decode("utf-8", "replace")
        )

    def _attempt(self, layers: tuple[str, ...]) -> Report:
        return self._try(WorkerPool(), "", layers)

    def _try(self, pool: WorkerPool, program: Program, layers: tuple[str, ...]) -> Report:
        user = self._users.get()
        try:
            owner = (user, user) if "uid" in layers else (os.getuid(), os.getgid())
            with (
                contextlib.nullcontext(None) if "mount" in layers else work_folder(owner) as folder
            ):
                return pool.run(self._spec(program, layers, owner, folder))
        finally:
            self._users.put(user)

    def _spec(
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
