"""The processes below this one: found in /proc, counted, stopped, killed and collected, wherever
they have hidden.

Killing is needed where there is no process namespace, whose end would end them all.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time

KILL, STOP = 9, 19 if sys.platform == "linux" else 17
# fields of a process's stat, see `_stats`: user and system time each
CHILDRENS_FAULTS, OWN_TIME, CHILDRENS_END = (8, 11, 15)


def kill_descendants(process: int = 0) -> None:
    """Kill every process below this one and collect it, whatever session or group it hides in.

    Where nothing says who descends from whom (no /proc), only the session that the program's
    `process` began with.
    """
    if os.getpid() == 1:  # the rest of the namespace goes with its first process
        return
    if not os.path.exists("/proc/self/stat"):
        if process:
            _send(-process, KILL)
        return
    while _collect():
        _kill_below(os.getpid())
        time.sleep(0.001)


def kill_tree(process: int) -> None:
    """Kill a child of this process that does not end by itself, and every process below it."""
    _send(process, STOP)  # so that it starts and collects nothing meanwhile
    if os.path.exists("/proc/self/stat"):
        _kill_below(process)
    _send(process, KILL)


def _kill_below(process: int) -> None:
    stopped: set[int] = set()
    while (
        found := descendants(process) - stopped
    ):  # what is stopped cannot fork while the rest is looked for
        for one in found:
            _send(one, STOP)
        stopped |= found
    for one in stopped:
        _send(one, KILL)


def _collect() -> bool:
    """Collect the children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def descendants(process: int) -> set[int]:
    """Every living process below this one, from /proc."""
    return _below(
        process, {one: fields for one, fields in _stats().items() if fields[0] not in b"ZX"}
    )


def processor_seconds() -> float:
    """What the processes below this one have used, with those that ended and were waited for
    (all of them, unless a program asks the system to forget its children). Where there is no
    /proc, only the children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = ended.ru_utime + ended.ru_stime
    if os.path.exists("/proc/self/stat"):
        stats = _stats()
        ticks = sum(
            int(field)
            for one in _below(_own(), stats)
            for field in stats[one][OWN_TIME:CHILDRENS_END]
        )
        used += ticks / os.sysconf("SC_CLK_TCK")
    return used


def waited_seconds() -> float:
    """How long the threads below this process were ready to run while others did; infinite where
    that cannot be known, as with processes that have ended."""
    if resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt:
        return math.inf
    nanoseconds = 0
    try:
        stats = _stats()
        for one in _below(_own(), stats):
            if stats[one][CHILDRENS_FAULTS] != b"0":
                return math.inf
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/schedstat", "rb") as file:
                    nanoseconds += int(file.read().split()[1])
    except (OSError, IndexError):
        return math.inf
    return nanoseconds / 1e9


def _own() -> int:
    """The number of this process in /proc, which may be that of another namespace."""
    return int(os.readlink("/proc/self"))


def _stats() -> dict[int, list[bytes]]:
    """Of each process, what /proc/PID/stat says after its name: the state, the parent, ..."""
    found: dict[int, list[bytes]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                found[int(name)] = file.read().rsplit(b") ", 1)[1].split()
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    return found


def _below(process: int, stats: dict[int, list[bytes]]) -> set[int]:
    below: set[int] = set()
    while (
        more := {one for one, fields in stats.items() if int(fields[1]) in below | {process}}
        - below
    ):
        below |= more
    return below


def _send(process: int, signal: int) -> None:
    try:
        os.kill(process, signal)
    except (ProcessLookupError, PermissionError):
        return
