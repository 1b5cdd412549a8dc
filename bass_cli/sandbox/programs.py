"""The sandbox for programs that a language model wrote. Each has its own interpreter and limits.

jail/ isolates a program; isolation.py finds the layers that this system allows. docs/SANDBOX.md
says what programs can and cannot reach. Nothing here depends on a benchmark.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

from bass_cli.errors import MachineError
from bass_cli.sandbox.isolation import Isolation as Isolation
from bass_cli.sandbox.isolation import choose_users, describe, find_layers, interpreter_paths
from bass_cli.sandbox.process import Ending as Ending
from bass_cli.sandbox.process import WorkerPool

if TYPE_CHECKING:
    from bass_cli.sandbox.jail import JobSpec

K = TypeVar("K")
ATTEMPTS = 3  # if a supervisor cannot start, which is not the program's fault
# A program fails if its supervisor is lost this often. No other program runs the second time.
LOSSES = 2


class Program(NamedTuple):
    """A program and its tests, which run in their own process.

    Attributes:
        text: the program.
        tests: the tests. They pass if they run to their end without an exception. Without tests a
            program passes if its process says that the text ran to its end. An exception of the
            tests with an attribute `limit` (seconds) says that the program exceeded that time
            limit. Then the program runs again alone if it waited for a processor. An attribute
            `about` is the verdict's detail.
        names: global names of the program that the tests use. Plain data is copied; for other
            objects the tests get a proxy. These names replace builtins and names of `setup`.
        setup: trusted text that runs first in the tests' process. It cannot use `names`. If it
            fails, the program does not run, and the ending is "unusable". A time limit should leave
            room for sending values: `transfer_seconds(value)` measures that.
    """

    text: str
    tests: str = ""
    names: tuple[str, ...] = ()
    setup: str = ""


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
        self.layers = find_layers(lambda some: self._run(WorkerPool(), Program(""), some), layers)
        self.isolation = describe(self.layers)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in list(self._pools):
            pool.dismiss()

    def run(self, programs: Iterable[tuple[K, Program]]) -> Generator[tuple[K, Ending], None, None]:
        """Run (key, program) pairs and yield (key, verdict) as they finish.

        Programs are read as workers become free. Closing the iterator, or an exception, kills the
        running programs.

        If a program's supervisor could not start or was lost, the program runs again while no other
        program runs. So a program that harms supervisors loses only its own verdict. A starved
        program runs once more alone too.

        Raises:
            MachineError: a program cannot be started, for a reason that is not the program's.
        """
        running: dict[Future[Ending], _Attempt[K]] = {}
        again: deque[_Attempt[K]] = deque()
        source = (_Attempt(key, program) for key, program in programs)
        self._pools.add(pool := WorkerPool())
        threads = ThreadPoolExecutor(self._workers, "sandbox")

        def start(attempt: _Attempt[K]) -> None:
            running[threads.submit(self._run, pool, attempt.program, self.layers)] = attempt

        try:
            while True:
                # Enough that no worker waits for the reader of this iterator.
                while not again and len(running) < 2 * self._workers:
                    if (attempt := next(source, None)) is None:
                        break
                    start(attempt)
                if again and not running:
                    start(again.popleft())
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    if pool.dismissed:  # the sandbox was left; killed programs have no verdict
                        return
                    attempt = running.pop(done)
                    verdict = attempt.judge(done.result(), beside_others=self._workers > 1)
                    if verdict is None:
                        again.append(attempt)
                    else:
                        yield attempt.key, verdict
        finally:
            for future in running:
                future.cancel()
            pool.dismiss()
            threads.shutdown(wait=True)
            self._pools.discard(pool)

    def _run(self, pool: WorkerPool, program: Program, layers: tuple[str, ...]) -> Ending:
        """Run a program once with these layers, as a user of its own if they have one."""
        user = self._users.get()
        try:
            owner = (user, user) if "uid" in layers else (os.getuid(), os.getgid())
            in_memory = "mount" in layers
            with contextlib.nullcontext(None) if in_memory else work_folder(owner) as folder:
                spec = {
                    **self._limits._asdict(),
                    "cpu_seconds": math.ceil(self._limits.cpu_seconds),
                    "text": program.text,
                    "layers": layers,
                    "path": self._path,
                    "places": self._places,
                    "folder": folder,
                    "owner": owner,
                }
                checks = (program.tests, program.setup, tuple(program.names))
                return pool.run(cast("JobSpec", spec), checks)
        finally:
            self._users.put(user)


class _Attempt(Generic[K]):
    """A program without a verdict yet, and how often it ran and lost its supervisor."""

    def __init__(self, key: K, program: Program) -> None:
        self.key, self.program = key, program
        self._runs = self._losses = 0

    def judge(self, ending: Ending, *, beside_others: bool) -> Ending | None:
        """Return the verdict. None if the program must run again, alone.

        MachineError if it cannot be started, for a reason that is not the program's.
        """
        status, detail, *_ = ending
        self._runs += 1
        self._losses += status == "lost"
        if status == "starved" and beside_others and self._runs == 1:
            return None
        if status in ("refused", "lost") and self._runs < ATTEMPTS and self._losses < LOSSES:
            return None
        if status == "refused":
            raise MachineError(
                "a program could not be run, and the program is not the cause: "
                f"{detail}; run the same command again to continue"
            )
        if status == "lost":
            return Ending("failed", f"{detail}, also when it ran alone", ending.seconds)
        return ending._replace(status="timed out") if status == "starved" else ending


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def work_folder(owner: tuple[int, int]) -> Iterator[str]:
    """Make a work folder on disk, for systems where a program cannot have one in memory.

    It belongs to `owner` (uid, gid), and is removed afterwards, whatever the program did to it.
    """
    try:
        path = Path(tempfile.mkdtemp(prefix="bass-program-"))
    except OSError as error:
        reason = f"programs need a temporary folder: {error.strerror}"
        raise MachineError(f"{reason}; set TMPDIR to a writable folder") from None
    try:
        if owner != (os.getuid(), os.getgid()):
            os.chown(path, *owner)
        yield os.path.realpath(path)
    finally:
        remove_tree(path)


def remove_tree(top: Path) -> None:
    """Remove a folder that a hostile program has filled. No process may use it any more.

    Folders are moved aside before they are emptied, so that no path gets long and nothing
    recurses. Links are removed, never followed. What the system refuses to remove is left.
    """
    aside = Path(tempfile.mkdtemp(prefix="bass-removed-", dir=top.parent))
    waiting, number = [top], 0
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
        for entry in _list(folder):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # to be moved, a folder must be writable itself
                    number += 1
                    os.rename(entry.path, aside / str(number))
                    waiting.append(aside / str(number))
                else:
                    os.unlink(entry.path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(aside)


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
