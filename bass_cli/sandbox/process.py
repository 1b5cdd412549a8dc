"""Start, wait for and cancel the supervisor process of one program.

The supervisor's own code is in jail/. isolation.py chooses the layers, programs.py the workers.
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
from typing import NamedTuple

from bass_cli.sandbox.jail.descendants import kill_tree
from bass_cli.sandbox.jail.job_spec import JobSpec

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


class Report(NamedTuple):
    """A supervisor's report.

    `status` has three values more than `Ending.status`: "refused" (the system refused a layer,
    detail "LAYER: reason"), "lost" (the supervisor ended without a report) and "starved" (timed
    out, and may have waited for a processor).
    """

    status: str
    detail: str
    seconds: float
    output: bytes


LOST = Report("lost", "the process that watches the program has ended", 0.0, b"")
REPORT_BYTES = 1 << 20  # most bytes of a report without the program's output


class SupervisorProcess:
    """The supervisor process of one program.

    `cancel` may be called from any thread, before, during or after `run`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outlet: int | None = None
        self._cancelled = False

    def run(self, spec: JobSpec) -> Report:
        """Run one program to its end.

        All its processes are dead when this returns. If the supervisor was stuck, they have been
        sent SIGKILL.
        """
        inlet, outlet = os.pipe()
        os.set_blocking(outlet, False)
        with self._lock:
            self._outlet = outlet
        command = [sys.executable, *START[:-1], START[-1].format(str(Path(__file__).parent))]
        try:
            supervisor = subprocess.Popen(
                command,
                stdin=inlet,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(inlet)
        with supervisor:
            try:
                if self._cancelled:  # before the pipe existed
                    self._close()
                for part in ({**spec, "checks": spec["checks"] is not None}, spec["checks"]):
                    self._send(marshal.dumps(part))
                assert supervisor.stdout
                most = spec["output_bytes"] + REPORT_BYTES
                data = _read(
                    supervisor.stdout.fileno(), time.monotonic() + spec["seconds"] + GRACE, most
                )
            finally:
                self._close()
                self._end(supervisor)
        return _parse(data)

    def cancel(self) -> None:
        """Kill the program. Its supervisor exits when its inlet is closed."""
        self._cancelled = True
        self._close()

    def _send(self, spec: bytes) -> None:
        """Send one part without blocking under the lock. Stops if the supervisor has ended."""
        waiting = memoryview(len(spec).to_bytes(8, "little") + spec)
        while waiting:
            with self._lock:
                if self._outlet is None:
                    return
                try:
                    waiting = waiting[os.write(self._outlet, waiting) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return
            if waiting:
                time.sleep(0.002)

    def _close(self) -> None:
        with self._lock:
            if self._outlet is not None:
                os.close(self._outlet)
            self._outlet = None

    def _end(self, supervisor: subprocess.Popen[bytes]) -> None:
        try:
            supervisor.wait(GRACE)
        except subprocess.TimeoutExpired:
            kill_tree(supervisor.pid)


class WorkerPool:
    """The supervisor processes of one run. They can be cancelled together."""

    def __init__(self) -> None:
        self.dismissed = False
        self._processes: set[SupervisorProcess] = set()
        self._lock = threading.Lock()

    def run(self, spec: JobSpec) -> Report:
        """Run one program. Returns "lost" at once if the pool is dismissed."""
        process = SupervisorProcess()
        with self._lock:
            if self.dismissed:
                return LOST
            self._processes.add(process)
        try:
            return process.run(spec)
        finally:
            with self._lock:
                self._processes.discard(process)

    def dismiss(self) -> None:
        """Kill all running programs. No program can be started afterwards."""
        with self._lock:
            self.dismissed = True
            for process in self._processes:
                process.cancel()


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


def _parse(data: bytes) -> Report:
    try:
        status, seconds, length, rest = data.split(b"\n", 3)
        detail, output = rest[: int(length)], rest[int(length) :]
        return Report(status.decode(), detail.decode("utf-8", "replace"), float(seconds), output)
    except ValueError:
        return LOST
