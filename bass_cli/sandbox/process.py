"""One warden from outside: a fresh interpreter is started, gets its order, is waited for, and can
be called off.

What happens inside is jail/; who decides about layers and workers is isolation.py and
programs.py.
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

# Not -I: it would ignore PYTHONHASHSEED. The effect is the same: no user folder (-s), no
# variable but these, and the folder of the command (the first of the path) replaced. No start-up
# files either (-S): installed packages are found through the path in the order, which costs less
# than half the time.
START = (
    "-s",
    "-S",
    "-c",
    "import sys; sys.path.pop(0); sys.path.append({!r}); from jail.supervisor import main; main()",
)
# One thread for numeric libraries, which else reserve memory for every core. Hashes are fixed:
# the order of a set is the same in every run, and so is the verdict.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_CTYPE": "C.UTF-8",
}
GRACE = 30.0  # seconds beyond a program's own after which the warden itself is taken for stuck


class Report(NamedTuple):
    """What a warden says at the end; `status` is also "refused" (detail "LAYER: reason"), "lost"
    (it said nothing) or "starved" (timed out, after it had waited for a processor, or may have)."""

    status: str
    detail: str
    seconds: float
    output: bytes


LOST = Report("lost", "the process that watches the program has ended", 0.0, b"")
WORDS_BYTES = 1 << 20  # of a report beside the program's output; more comes from no warden


class Cell:
    """One program's warden. `cancel` may come from any thread, before, during or after `run`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: int | None = None
        self._cancelled = False

    def run(self, order: JobSpec) -> Report:
        """Run one order to its end; when this returns, every process of it is dead (or just
        dying, if the warden itself was stuck and had to be killed, with what is below it)."""
        inlet, outlet = os.pipe()
        os.set_blocking(outlet, False)
        with self._lock:
            self._orders = outlet
        command = [sys.executable, *START[:-1], START[-1].format(str(Path(__file__).parent))]
        try:
            warden = subprocess.Popen(
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
        with warden:
            try:
                if self._cancelled:  # called off before there was anything to close
                    self._close()
                for part in ({**order, "checks": order["checks"] is not None}, order["checks"]):
                    self._send(marshal.dumps(part))
                assert warden.stdout
                most = order["output_bytes"] + WORDS_BYTES
                data = _read(
                    warden.stdout.fileno(), time.monotonic() + order["seconds"] + GRACE, most
                )
            finally:
                self._close()
                self._end(warden)
        return _parse(data)

    def cancel(self) -> None:
        """Have the program killed: its warden ends as soon as nobody holds the other end of its
        orders."""
        self._cancelled = True
        self._close()

    def _send(self, order: bytes) -> None:
        """Without blocking under the lock; an order that nobody reads any more is dropped."""
        waiting = memoryview(len(order).to_bytes(8, "little") + order)
        while waiting:
            with self._lock:
                if self._orders is None:
                    return
                try:
                    waiting = waiting[os.write(self._orders, waiting) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return
            if waiting:
                time.sleep(0.002)

    def _close(self) -> None:
        with self._lock:
            if self._orders is not None:
                os.close(self._orders)
            self._orders = None

    def _end(self, warden: subprocess.Popen[bytes]) -> None:
        try:
            warden.wait(GRACE)
        except subprocess.TimeoutExpired:
            kill_tree(warden.pid)


class WorkerPool:
    """The cells of one run, to be called off together, those included that start afterwards."""

    def __init__(self) -> None:
        self.dismissed = False
        self._cells: set[Cell] = set()
        self._lock = threading.Lock()

    def run(self, order: JobSpec) -> Report:
        """Run one order in a cell of its own; "lost" at once if the crew is dismissed."""
        cell = Cell()
        with self._lock:
            if self.dismissed:
                return LOST
            self._cells.add(cell)
        try:
            return cell.run(order)
        finally:
            with self._lock:
                self._cells.discard(cell)

    def dismiss(self) -> None:
        """Kill what is running and start nothing more."""
        with self._lock:
            self.dismissed = True
            for cell in self._cells:
                cell.cancel()


def _read(descriptor: int, deadline: float, most: int) -> bytes:
    """What is written until all have closed the pipe, or until the deadline; nothing if it is
    more than `most` bytes."""
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
