"""Calls into the C library through ctypes, for what Python does not offer. Failures raise OSError.

The numbers are those of Linux.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
# A handle of the C library that is already loaded. Made once, because it is slow.
LIBRARY = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38


class SetupError(Exception):
    """The system refuses a layer of isolation. Has the layer's name and the reason."""

    def __init__(self, layer: str, reason: object) -> None:
        super().__init__(layer, str(reason))
        self.layer, self.reason = layer, str(reason)


def machine() -> str:
    """Return the kernel's name of the processor, for example "x86_64"."""
    return os.uname().machine


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library.

    Integers are passed as C longs, because variadic functions read all 64 bits. OSError if the
    function returns -1.
    """
    function = getattr(LIBRARY, name)
    result = int(
        function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    )
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: object) -> None:
    """Set one attribute of this process. Does nothing on systems without prctl."""
    if sys.platform == "linux":
        call("prctl", option, value, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, also those that root would regain by executing a program."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        # The number is beyond the last capability, or this user may not drop it. `capset` below
        # empties the sets in any case.
        except OSError:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
