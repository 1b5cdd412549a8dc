"""What ends a job when a process of Ray's dies that the driver cannot do without: its control store
(GCS) or the driver's own node (raylet).

Ray itself tries for a minute to reach the control store, inside calls that nothing interrupts, and
then ends the process with a dump. Not here: actors that die (worker_pool.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

from bass_cli.errors import MachineError

_INTERVAL = 0.5  # seconds between two looks
_REFUSED = 2  # looks in a row at which nothing listens: the process has died
_PATIENCE = 20.0  # seconds without any answer: the host or the network is gone
_GRACE = 2.0  # seconds for the main thread to end the command in order


class RayWatch:
    """Connects to processes of Ray's again and again from `begin` to the end of the block. `asked`:
    the value of --ray.

    `check` raises MachineError when one is gone. If the block does not end within 2 s of that,
    `say` gets the sentence, and the process ends with exit code 3. Result lines that are written
    are whole.
    """

    def __init__(self, asked: str, say: Callable[[str], None]):
        self._asked, self._say = asked, say
        self._over, self.fault = threading.Event(), ""
        self._addresses: Mapping[str, str] = {}

    def __enter__(self) -> RayWatch:
        return self

    def begin(self, addresses: Mapping[str, str]) -> None:
        """Watch these, by name: host:port."""
        self._addresses = addresses
        threading.Thread(target=self._look, daemon=True, name="watching Ray").start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def check(self) -> None:
        """Raise MachineError if one of them is gone."""
        if self.fault:
            raise MachineError(self.fault)

    def _look(self) -> None:
        refused = dict.fromkeys(self._addresses, 0)
        answered = dict.fromkeys(self._addresses, time.monotonic())
        while not self._over.wait(_INTERVAL):
            for name, address in self._addresses.items():
                try:
                    _connect(address)
                except ConnectionRefusedError:
                    refused[name] += 1
                except OSError:
                    refused[name] = 0
                else:
                    refused[name], answered[name] = 0, time.monotonic()
                if refused[name] >= _REFUSED or time.monotonic() - answered[name] > _PATIENCE:
                    self._end(f"--ray {self._asked}: Ray's {name} at {address} has died, or "
                              "cannot be reached")  # fmt: skip
                    return

    def _end(self, fault: str) -> None:
        self.fault = fault
        if not self._over.wait(_GRACE):
            self._say(fault)
            os._exit(3)


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
