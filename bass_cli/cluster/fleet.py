"""The processes of a job on many devices: messages and interfaces that drawing and training share,
and processes of this machine, one per GPU or on CPUs.

A driver starts a `Process` at each place of a `Fleet`, and then calls its `exchange` again and
again. A process of this machine is killed when its driver ends, however that ends. Drivers:
worker_pool.py for samples, distill/group.py for training. Ray's actors: rays.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO, Any, NamedTuple, Protocol

from bass_cli.config.job import Job
from bass_cli.errors import MachineError
from bass_cli.reading import shown
from bass_cli.system.children import Child, Fault, end_of, start_child
from bass_cli.system.host import expect, visible_gpus
from bass_cli.system.threads import begin, usable_cores

POLL = 2.0  # seconds between two checks for places that appeared or vanished
WAIT = 0.1  # seconds to wait for events
# Least time between two calls of `exchange` of any processes, in seconds. A report takes the driver
# 1 ms, so reports use at most a quarter of its core (docs/SCALE.md).
BEAT_OF_ALL = 0.004


class Place(NamedTuple):
    """Where a process runs: its number on a node; `node` is None for any node."""

    node: str | None
    number: int


class Request(NamedTuple):
    """The values of --ray and --actors.

    Attributes:
        address: "local", "auto" or HOST:PORT.
        actors: The number of actors; None for all.
    """

    address: str
    actors: int | None


class Lost(NamedTuple):
    """A process has died or cannot be reached."""

    why: str


class Fleet(Protocol):
    """Processes by place. All calls come from one thread."""

    def places(self) -> set[Place]:
        """Return the places where processes should run now."""

    def start(self, place: Place) -> None:
        """Start a process and call its `prepare`, as soon as there is room."""

    def ask(self, place: Place, given: Any, beat: float) -> None:
        """Call the `exchange` of a process."""

    def wait(self, timeout: float) -> list[tuple[Place, Any]]:
        """Return events after at most `timeout` seconds: results of `prepare` and `exchange`, a
        Fault for an exception of theirs, and Lost."""

    def stop(self, place: Place) -> None:
        """End the process; it causes no further events."""


class Cluster(Protocol):
    """Where the processes of a job run: this machine, or the nodes of a Ray cluster."""

    @property
    def job(self) -> Job:
        """The job with the device that a process uses."""

    def places(self) -> set[Place]:
        """See Fleet.places."""

    def fleet(self, kind: type[Process], spec: Any) -> AbstractContextManager[Fleet]:
        """Return a context of a fleet without processes; it ends the processes.

        Args:
            kind: The class of the processes.
            spec: The argument of its constructor.
        """


class Process(ABC):
    """A process of a job: a thread works, and `exchange` reports what it has done.

    Methods are called one after the other, and return plain data. Heavy modules are imported in
    `prepare`, when the number of threads is set.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()  # held to change what `exchange` reports
        self._notes: list[str] = []
        self._fault: Fault | None = None

    def prepare(self) -> Any:
        """Check everything that can be checked without weights; return facts, or a Fault."""
        try:
            return self._check()
        except Exception as error:
            return Fault.of(error)

    @abstractmethod
    def _check(self) -> Any: ...

    @abstractmethod
    def exchange(self, given: Any, beat: float) -> Any:
        """Take work, and return a report after `beat` seconds, or earlier if there is news."""

    def note(self, message: str) -> None:
        """Add a note to the next report."""
        with self._news:
            self._notes.append(message)

    def _start(self, work: Callable[[], None]) -> None:
        """Call `work` in a thread; its exception becomes the fault of the next report."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                with self._news:
                    self._fault = self._fault or Fault.of(error)
                    self._news.notify_all()

        threading.Thread(target=run, daemon=True, name=type(self).__name__).start()

    def _take_notes(self) -> tuple[str, ...]:
        """Return the notes since the last call. `_news` must be held."""
        notes, self._notes = tuple(self._notes), []
        return notes


_KEPT = 4096  # bytes of a process's output that are kept, for the last line before it ended
_LAST = 1.0  # seconds for the rest of that output, which children of the process may hold open


class ThisMachine:
    """The places for a job's processes on this machine.

    Attributes:
        job: The job with the device that a process uses.

    Raises:
        MachineError: There are fewer GPUs than processes.
    """

    def __init__(self, request: Request, job: Job):
        self._gpus = [] if job.device == "cpu" else visible_gpus()
        on_gpus, cores = job.device == "cuda" or bool(self._gpus), usable_cores().most
        count = request.actors or (len(self._gpus) if on_gpus else cores // (job.threads or cores))
        if on_gpus and len(self._gpus) < max(count, 1):
            raise MachineError(
                f"`actors` {max(count, 1)}: this machine has {len(self._gpus)} GPUs, and each "
                "actor takes one; use fewer actors or `device` cpu"
            )
        self._count = max(count, 1)
        self._threads = job.threads or max(cores // self._count, 1)
        self.job = job.model_copy(update={"device": "cuda" if on_gpus else "cpu"})

    def places(self) -> set[Place]:
        """Return the places: the requested number, or one per GPU.

        On CPUs there is one, or as many as fit with --threads.
        """
        return {Place(None, number) for number in range(self._count)}

    def environment(self, place: Place) -> dict[str, str]:
        """Return the environment variables of the process at a place."""
        own = {"OMP_NUM_THREADS": str(self._threads)}
        if self._gpus:
            own["CUDA_VISIBLE_DEVICES"] = self._gpus[place.number]
        return {**os.environ, **own}

    def fleet(self, kind: type[Process], spec: Any) -> contextlib.closing[ProcessFleet]:
        """See Cluster.fleet."""
        return contextlib.closing(ProcessFleet(self, kind, spec))


class ProcessFleet:
    """A Fleet of processes of this machine. For `kind` and `spec` see Cluster.fleet."""

    def __init__(self, machine: ThisMachine, kind: type[Process], spec: Any):
        self._machine = machine
        # the first part apart: unpickling the second one imports modules
        first = pickle.dumps((machine.job.threads, machine.job.device))
        self._job = first + pickle.dumps((kind, spec))
        self._running: dict[Place, Child] = {}
        self._events = queue.SimpleQueue[tuple[Child, Place, Any]]()
        self.places = machine.places

    def start(self, place: Place) -> None:
        reading, writing = os.pipe()  # results; anything may print to standard output
        try:
            self._running[place] = process = start_child(
                __name__,
                writing,
                functools.partial(self._listen, place, reading),
                environment=self._machine.environment(place),
                merged=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        _send(process, self._job)

    def ask(self, place: Place, given: Any, beat: float) -> None:
        _send(self._running[place], pickle.dumps((given, beat)))

    def wait(self, timeout: float) -> list[tuple[Place, Any]]:
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout))
            while True:  # and all other events that are there
                found.append(self._events.get_nowait())
        return [
            (place, event) for process, place, event in found if self._running.get(place) is process
        ]

    def stop(self, place: Place) -> None:
        process = self._running.pop(place, None)
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def close(self) -> None:
        """End all processes. On a GPU each takes some tenths of a second to end."""
        for process in self._running.values():
            process.kill()
        for place in list(self._running):
            self.stop(place)

    def _listen(self, place: Place, reading: int, process: Child) -> None:
        """Read the results of a process until it ends."""
        printed = bytearray()
        printing = threading.Thread(target=_keep_end, args=(process.stdout, printed), daemon=True)
        printing.start()
        with (
            os.fdopen(reading, "rb") as results,
            contextlib.suppress(EOFError, OSError, pickle.UnpicklingError),
        ):
            while True:
                self._events.put((process, place, pickle.load(results)))
        code = process.wait()
        printing.join(_LAST)
        self._events.put((process, place, Lost(_end_with(code, bytes(printed)))))


def _keep_end(stream: IO[bytes], printed: bytearray) -> None:
    """Read a stream to its end, so that its writer never waits. Keep the last bytes."""
    with stream, contextlib.suppress(OSError):
        while chunk := os.read(stream.fileno(), _KEPT):
            printed += chunk
            del printed[:-_KEPT]


def _send(process: Child, message: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the listening thread reports why
        process.stdin.write(message)
        process.stdin.flush()


def _end_with(code: int, printed: bytes) -> str:
    """Return how a process ended, and the last line that it printed."""
    how = end_of(code)
    lines = printed.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}; it printed last: {shown(last)}" if last else how


def main(results: int) -> None:
    """Run a Process: read its class and argument, then calls, from standard input until it is
    closed. Write results to the file descriptor `results`."""
    os.set_inheritable(results, False)
    channel = os.fdopen(results, "wb")

    def say(call: Callable[[], Any]) -> None:
        try:
            event = call()
        except Exception as error:
            event = Fault.of(error)
        pickle.dump(event, channel)
        channel.flush()

    with contextlib.suppress(EOFError, BrokenPipeError):
        threads, device = pickle.load(sys.stdin.buffer)
        begin(threads)
        expect(device)
        kind, spec = pickle.load(sys.stdin.buffer)
        process: Process = kind(spec)
        say(process.prepare)
        while True:
            say(functools.partial(process.exchange, *pickle.load(sys.stdin.buffer)))
    os._exit(0)  # other threads may run
