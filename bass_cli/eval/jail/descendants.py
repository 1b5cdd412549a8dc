"""The processes below this one: found in /proc, stopped, killed and collected, wherever they have hidden.

Needed where there is no process namespace, whose end would end them all.
"""

from __future__ import annotations

import os
import sys
import time

KILL, STOP = 9, 19 if sys.platform == "linux" else 17


def kill_descendants(process: int = 0) -> None:
    """Kill every process below this one and collect it, whatever session or group it hides in.

    Where nothing says who descends from whom (no /proc), only the session that the program's `process` began with.
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
    while found := descendants(process) - stopped:  # what is stopped cannot fork while the rest is looked for
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
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rsplit(b") ", 1)[1].split(b" ", 2)[:2]
        except (OSError, IndexError):  # not a process, or one that has ended meanwhile
            continue
        if name.isdigit() and state not in b"ZX":
            parents[int(name)] = int(parent)
    below: set[int] = set()
    while more := {one for one, parent in parents.items() if parent in below | {process}} - below:
        below |= more
    return below


def _send(process: int, signal: int) -> None:
    try:
        os.kill(process, signal)
    except (ProcessLookupError, PermissionError):
        return
