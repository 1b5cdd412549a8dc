"""End a job soon after Ray's control store (GCS) or the driver's raylet has died.

Ray itself tries for a minute to reach the control store, in calls that cannot be interrupted, and
then ends the process with a dump. Actors that die: worker_pool.py.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

from bass_cli.errors import MachineError

_INTERVAL = 0.5  # seconds between two connection attempts
_REFUSED = 2  # attempts refused in a row: the process has died
_PATIENCE = 20.0  # seconds without any answer: the host or the network is gone
_GRACE = 2.0  # seconds for the main thread to end the command


class RayWatch:
    """Connect to Ray's processes every 0.5 s, from `begin` to the end of the block.

    When one is gone, `check` raises MachineError. If the block does not end within 2 s, a thread
    calls `say` with the error and ends the process with exit code 3. Written result lines are
    complete.

    Args:
        address: The value of --ray.
        say: Writes an error.
    """

    def __init__(self, address: str, say: Callable[[str], None]):
        self._address, self._say = address, say
        self._over, self.fault = threading.Event(), ""
        self._addresses: Mapping[str, str] = {}

    def __enter__(self) -> RayWatch:
        return self

    def begin(self, addresses: Mapping[str, str]) -> None:
        """Start to watch these addresses (host:port), by the name of the process."""
        self._addresses = addresses
        threading.Thread(target=self._watch, daemon=True, name="watching Ray").start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def check(self) -> None:
        """Raise MachineError if one of the processes is gone."""
        if self.fault:
            raise MachineError(self.fault)

    def _watch(self) -> None:
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
                    self._end(f"--ray {self._address}: Ray's {name} at {address} has died, or "
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
