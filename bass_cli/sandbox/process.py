"""Start, wait for and cancel the supervisor processes of programs.

A supervisor's own code is in jail/. isolation.py chooses the layers, programs.py runs programs.
"""

from __future__ import annotations

import marshal
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bass_cli.sandbox.jail.descendants import kill_tree

if TYPE_CHECKING:
    from bass_cli.sandbox.jail import Checks, JobSpec

# These options have the effect of -I, which would also ignore PYTHONHASHSEED: no user folder (-s),
# only the variables below, and no current folder in the path. Without start-up files (-S) the
# interpreter starts in less than half the time; `JobSpec.path` finds installed packages.
START = (
    "-s",
    "-S",
    "-c",
    "import sys; sys.path.pop(0); sys.path.append({!r}); from jail.supervisor import main; main()",
)
# Numeric libraries use one thread, because they reserve memory for every thread. Hashes are fixed,
# so that the order of a set, and so the verdict, is the same in every run.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_CTYPE": "C.UTF-8",
}
GRACE = 30.0  # seconds beyond a program's limit after which its supervisor counts as stuck
REPORT_BYTES = 1 << 20  # most bytes of a report without the program's output


class Ending(NamedTuple):
    """How a program ended.

    Attributes:
        status: a verdict: "passed", "failed", "timed out" (wall clock or processor time) or "out of
            memory" (Python raised MemoryError); or "unusable", if the setup of the tests failed
            before the program ran. A supervisor also reports "refused" (the system refused a layer,
            detail "LAYER: reason"), "lost" (the supervisor ended without a report) and "starved"
            (timed out, and may have waited for a processor).
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


LOST = Ending("lost", "the process that watches the program has ended", 0.0)


class WorkerPool:
    """The supervisor processes of one run. Any thread may run programs or dismiss the pool."""

    def __init__(self) -> None:
        self.dismissed = False
        self._outlets: set[int] = set()  # pipes to the supervisors, which end when theirs is closed
        self._lock = threading.Lock()

    def run(self, spec: JobSpec, checks: Checks) -> Ending:
        """Run one program to its end. Returns LOST at once if the pool is dismissed.

        All its processes are dead when this returns. If the supervisor was stuck, they have been
        sent SIGKILL.
        """
        with self._lock:
            if self.dismissed:
                return LOST
            inlet, outlet = os.pipe()
            os.set_blocking(outlet, False)
            self._outlets.add(outlet)
        try:
            supervisor = subprocess.Popen(
                [sys.executable, *START[:-1], START[-1].format(str(Path(__file__).parent))],
                stdin=inlet,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            self._close(outlet)
            raise
        finally:
            os.close(inlet)
        with supervisor:
            try:
                for part in (marshal.dumps(cast("dict[str, Any]", spec)), marshal.dumps(checks)):
                    self._send(outlet, part)
                assert supervisor.stdout
                most = spec["output_bytes"] + REPORT_BYTES
                deadline = time.monotonic() + spec["seconds"] + GRACE
                return _parse(_read(supervisor.stdout.fileno(), deadline, most))
            finally:
                self._close(outlet)
                try:
                    supervisor.wait(GRACE)
                except subprocess.TimeoutExpired:
                    kill_tree(supervisor.pid)

    def dismiss(self) -> None:
        """Kill all running programs. No program can be started afterwards."""
        with self._lock:
            self.dismissed = True
            while self._outlets:
                os.close(self._outlets.pop())

    def _send(self, outlet: int, part: bytes) -> None:
        """Send one part without blocking under the lock. Stops if the supervisor has ended."""
        waiting = memoryview(len(part).to_bytes(8, "little") + part)
        while waiting:
            with self._lock:
                if outlet not in self._outlets:
                    return
                try:
                    waiting = waiting[os.write(outlet, waiting) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return
            if waiting:
                time.sleep(0.002)

    def _close(self, outlet: int) -> None:
        with self._lock:
            if outlet in self._outlets:
                self._outlets.remove(outlet)
                os.close(outlet)


def _read(descriptor: int, deadline: float, most: int) -> bytes:
    """Read a pipe until its end or the deadline. Empty if there are more than `most` bytes."""
    data = b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and len(data) <= most:
        if poll.poll(1000 * left):
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            data += piece
    return data if len(data) <= most else b""


def _parse(data: bytes) -> Ending:
    try:
        status, seconds, length, rest = data.split(b"\n", 3)
        detail, output = rest[: int(length)], rest[int(length) :]
        texts = (one.decode("utf-8", "replace") for one in (detail, output))
        return Ending(status.decode(), next(texts), float(seconds), next(texts))
    except ValueError:
        return LOST
