"""Find the layers of isolation that this system allows, and describe what they keep out.

Layers are tried on an empty program. programs.py runs the untrusted programs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from bass_cli.errors import MachineError
from bass_cli.sandbox.jail.layers import NETWORK_SINCE, SCOPES_SINCE, landlock_version
from bass_cli.sandbox.process import Ending

LAYERS = ("user", "pid", "mount", "network", "ipc", "uid", "landlock", "seccomp")
SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/sbin",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
)
NEVER = {"/", "/tmp", "/dev", "/proc", "/root", "/home", "/etc"}
# user numbers that systemd reserves for temporary users
DYNAMIC_USERS = range(61184, 65520)
NONE, AS_ROOT, SCOPES = "none", ", as root", "Landlock"
ACCEPT = "`allow_code_execution`"


class Isolation(NamedTuple):
    """What keeps programs from the network, from files and from other processes. Or "none"."""

    network: str
    files: str
    processes: str

    def __str__(self) -> str:
        return "; ".join(f"{what}: {word}" for what, word in self._asdict().items())

    def weaknesses(self) -> list[str]:
        """Return a sentence for each thing that programs can reach here.

        It names the missing layers. Each of them alone would be enough.
        """
        notes = []
        if self.network == NONE or self.network.endswith("only"):
            what = "the network" if self.network == NONE else "the network except over TCP"
            notes.append(
                f"programs can reach {what}: this system allows neither network namespaces nor "
                "seccomp"
            )
        if self.files == NONE:
            notes.append(
                "programs can read and write what this user can: no mount namespaces, no "
                "Landlock, no other user"
            )
        elif "mount" not in self.files and "Landlock" not in self.files:
            notes.append(
                "programs can read files that all users can read, and write where all users can: "
                "no mount namespaces, no Landlock"
            )
        processes = self.processes.removesuffix(AS_ROOT)
        if processes in (NONE, SCOPES):
            what = "signal, limit and inspect" if processes == NONE else "limit and slow"
            notes.append(
                f"programs can {what} this user's processes, bass among them: no process "
                "namespaces, no seccomp, no other user"
            )
        return notes

    def warnings(self) -> list[str]:
        """Return the weaknesses and further warnings for the user."""
        notes = self.weaknesses()
        if self.processes.endswith(AS_ROOT):
            notes.append(
                "programs run as root without its privileges, because no other user can read this "
                "Python installation"
            )
        return notes

    def refuse_weakness(self) -> None:
        """Raise MachineError if there is a weakness, with the flag that accepts it."""
        if found := self.weaknesses():
            remedy = (
                f"Use a system that has one of the missing layers, or add {ACCEPT} to run the "
                "model's programs in this weak sandbox"
            )
            raise MachineError(f"the sandbox is weak here: {'; '.join(found)}. {remedy}")


def describe(layers: Iterable[str]) -> Isolation:
    """Return what a set of layers keeps out, in words."""
    active = set(layers)
    version = landlock_version() if "landlock" in active else 0
    words = {
        "network": {"network": "network namespace", "seccomp": "seccomp"},
        "files": {"mount": "mount namespace", "landlock": "Landlock", "uid": "a user of its own"},
        "processes": {"pid": "process namespace", "seccomp": "seccomp", "uid": "a user of its own"},
    }
    found = {
        what: [word for layer, word in by_layer.items() if layer in active]
        for what, by_layer in words.items()
    }
    if version >= NETWORK_SINCE and not found["network"]:
        found["network"] = ["Landlock, TCP only"]
    if version >= SCOPES_SINCE:
        found["processes"].append(SCOPES)
    named = {what: " and ".join(some) or NONE for what, some in found.items()}
    if os.geteuid() == 0 and "uid" not in active:
        named["processes"] += AS_ROOT
    return Isolation(**named)


def find_layers(
    attempt: Callable[[tuple[str, ...]], Ending], wanted: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Find the layers that work together on this system.

    A supervisor reports the layer that the system refuses. That layer is left out and the rest is
    tried again. Root needs no user namespace, but in a container the other namespaces may need it.

    Args:
        attempt: runs an empty program with some layers and returns the report.
        wanted: consider only these layers.
    """
    if sys.platform != "linux":
        return _allowed_layers(attempt, ())
    offered = [layer for layer in LAYERS if wanted is None or layer in wanted]
    without = tuple(layer for layer in offered if layer != "user")
    within = tuple(layer for layer in offered if layer != "uid")
    if os.geteuid():
        return _allowed_layers(attempt, within)
    layers = _allowed_layers(attempt, without)
    if "user" not in offered or {"pid", "mount"} & set(offered) <= set(layers):
        return layers
    other = _allowed_layers(attempt, within)
    return other if len(other) > len(layers) else layers


def _allowed_layers(
    attempt: Callable[[tuple[str, ...]], Ending], layers: tuple[str, ...]
) -> tuple[str, ...]:
    while True:
        report = attempt(layers)
        if report.status == "passed":
            return layers
        refused = report.detail.partition(":")[0]
        if report.status != "refused" or refused not in layers:
            raise MachineError(
                f"programs cannot be run on this system: {report.status}, {report.detail}"
            )
        layers = tuple(layer for layer in layers if layer != refused)


def interpreter_paths() -> tuple[list[str], list[tuple[str, str]]]:
    """Return sys.path of a fresh interpreter, and the (place, real path) pairs that it needs.

    Parents come before the folders in them.
    """
    path, prefixes = _paths_of(sys.executable)
    named = [os.path.abspath(one) for one in [*SYSTEM, *prefixes, *path] if os.path.exists(one)]
    places: dict[str, str] = {}
    for place in sorted({*named, *map(os.path.realpath, named)}, key=len):
        real = os.path.realpath(place)
        if place not in NEVER and not any(Path(place).is_relative_to(other) for other in places):
            places[place] = real
    return [*path], list(places.items())


@functools.cache
def _paths_of(executable: str) -> tuple[list[str], list[str]]:
    """Return sys.path and prefixes of an interpreter that starts without variables. It starts
    once in this process, not for each sandbox."""
    code = (
        "import json, sys; print(json.dumps([sys.path, [sys.prefix, sys.base_prefix, "
        "sys.exec_prefix]]))"
    )
    try:
        done = subprocess.run(
            [executable, "-I", "-c", code], capture_output=True, text=True, env={}, check=True
        )
        path, prefixes = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError) as error:
        reason = f"{executable} does not start without its environment variables ({error})"
        raise MachineError(f"programs cannot be run on this system: {reason}") from None
    return path, prefixes


def choose_users(count: int) -> list[int]:
    """Choose `count` numbers of users that do not exist and own no process.

    Root runs programs as these users, one for each worker.
    """
    known = {entry.pw_uid for entry in pwd.getpwall()}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # the process has ended
            known.add(os.stat(f"/proc/{name}").st_uid)
    return random.sample([number for number in DYNAMIC_USERS if number not in known], count)
