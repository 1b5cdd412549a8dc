"""The processes of a job on many devices: messages and interfaces that drawing and training share.

A driver starts a `Process` at each place of a `Fleet`, and then calls its `exchange` again and
again. Drivers: worker_pool.py for samples, distill/group.py for training. Fleets: processes of this
machine in processes.py, Ray's actors in rays.py, or a test's.
"""

from __future__ import annotations

import platform
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from bass_cli.config.job import Job
from bass_cli.errors import MachineError, UserError

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


class Fault(NamedTuple):
    """The error that ends a process.

    Attributes:
        kind: "user" for a UserError, "machine" for a MachineError, "bug" for anything else.
        text: The message, or the traceback of a bug.
        node: The name of the node.
    """

    kind: str
    text: str
    node: str = "a node"

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Return an error of this process as a Fault."""
        if isinstance(error, UserError):
            kind = "machine" if isinstance(error, MachineError) else "user"
            return cls(kind, str(error), platform.node())
        return cls("bug", "".join(traceback.format_exception(error)), platform.node())

    def error(self) -> Exception:
        """Return the error for the driver to raise, with the name of the node."""
        kinds = {"user": UserError, "machine": MachineError}
        return kinds.get(self.kind, RuntimeError)(f"on {self.node}: {self.text}")


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
