"""The C library and the system calls that Python has no names for, called through ctypes; failures
become OSError.

Numbers are those of Linux.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
# loaded already: this is only a handle, and a new one is slow to make
LIBRARY = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38


class SetupError(Exception):
    """A layer of isolation that the system does not allow: its name and the reason."""

    def __init__(self, layer: str, reason: object) -> None:
        super().__init__(layer, str(reason))
        self.layer, self.reason = layer, str(reason)


def machine() -> str:
    """The processor's name as the kernel says it, such as "x86_64"."""
    return os.uname().machine


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library; whole numbers go as C longs, so that variadic functions
    see all their bits."""
    function = getattr(LIBRARY, name)
    result = int(
        function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    )
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: object) -> None:
    """Set one attribute of this process; nothing happens on systems without prctl."""
    if sys.platform == "linux":
        call("prctl", option, value, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, also those that a program of root's would get back when it is
    executed."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        # beyond the last one, or not ours to drop: the rest of this function empties the sets
        # anyway
        except OSError:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
