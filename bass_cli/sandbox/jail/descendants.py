"""Find, measure, kill and reap all descendants of this process, from /proc.

Killing them one by one is needed only without a process namespace, whose end would end them all.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time

KILL, STOP = 9, 19 if sys.platform == "linux" else 17
# Indices into the fields of `_stats`. OWN_TIME to CHILDRENS_END: user and system time in clock
# ticks, of the process and then of its reaped children.
CHILDRENS_FAULTS, OWN_TIME, CHILDRENS_END = (8, 11, 15)


def kill_descendants(process: int = 0) -> None:
    """Kill and reap every descendant of this process, whatever its session or group.

    Without /proc descendants are unknown; then this kills the session of the program's `process`.
    """
    if os.getpid() == 1:  # the kernel kills the rest of the namespace with its first process
        return
    if not os.path.exists("/proc/self/stat"):
        if process:
            _send(-process, KILL)
        return
    while _reap():
        _kill_below(os.getpid())
        time.sleep(0.001)


def kill_tree(process: int) -> None:
    """Kill a child of this process and all its descendants."""
    _send(process, STOP)  # so that it neither forks nor reaps meanwhile
    if os.path.exists("/proc/self/stat"):
        _kill_below(process)
    _send(process, KILL)


def _kill_below(process: int) -> None:
    stopped: set[int] = set()
    # A stopped process cannot fork, so this ends when all are stopped.
    while found := descendants(process) - stopped:
        for one in found:
            _send(one, STOP)
        stopped |= found
    for one in stopped:
        _send(one, KILL)


def _reap() -> bool:
    """Reap the children that have ended. Returns whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def descendants(process: int) -> set[int]:
    """Return every living descendant of a process."""
    return _below(
        process, {one: fields for one, fields in _stats().items() if fields[0] not in b"ZX"}
    )


def processor_seconds() -> float:
    """Return the processor time of all descendants of this process.

    It includes processes that have ended and were reaped, which is all of them unless a program
    ignores SIGCHLD. Without /proc it includes only this process's children that have ended.
    """
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
    """Return how long the threads below this process waited for a processor, in seconds.

    inf if unknown, for example if one of the processes has ended.
    """
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
    """Return this process's number in /proc, which may belong to another namespace."""
    return int(os.readlink("/proc/self"))


def _stats() -> dict[int, list[bytes]]:
    """Return the fields of each /proc/PID/stat after the name: state, parent, ..."""
    found: dict[int, list[bytes]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                found[int(name)] = file.read().rsplit(b") ", 1)[1].split()
        except (OSError, IndexError):  # the process has ended
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
