"""Landlock: a process gives up access to files outside a list, to TCP, and signals to others.

This holds for its descendants too. It needs no privilege, so it works where namespaces are
forbidden. Source: the kernel's userspace-api/landlock.
"""

from __future__ import annotations

import ctypes
import os

from .libc import SetupError, call

CREATE, ADD_RULE, RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
ALL_TCP, ALL_SCOPES = 3, 3  # bind and connect; abstract UNIX sockets and signals
NETWORK_SINCE, SCOPES_SINCE = 4, 6


def version() -> int:
    """Return the kernel's Landlock version, 0 without Landlock."""
    try:
        return call("syscall", CREATE, None, 0, 1)
    except OSError:
        return 0


def handled_rights(offered: int) -> int:
    """Return all rights over files that this version of Landlock can take away."""
    rights = (1 << 13) - 1
    for since, right in ((2, 1 << 13), (3, TRUNCATE), (5, IOCTL)):
        rights |= right if offered >= since else 0
    return rights


def restrict(readable: list[str], writable: list[str]) -> None:
    """Take away access to all files but these, and those below these folders.

    `no_new_privs` must be set before. SetupError if the kernel refuses.
    """
    offered = version()
    if not offered:
        raise SetupError("landlock", "the kernel does not offer it")
    handled = handled_rights(offered)
    network, scopes = ALL_TCP * (offered >= NETWORK_SINCE), ALL_SCOPES * (offered >= SCOPES_SINCE)
    # Older kernels have fewer fields.
    size = 8 * (1 + (offered >= NETWORK_SINCE) + (offered >= SCOPES_SINCE))
    try:
        rules = call(
            "syscall",
            CREATE,
            ctypes.byref((ctypes.c_uint64 * 3)(handled, network, scopes)),
            size,
            0,
        )
        for path in readable:
            _allow(rules, path, handled & (EXECUTE | READ_FILE | READ_DIR))
        for path in writable:
            _allow(rules, path, handled)
        call("syscall", RESTRICT, rules, 0)
        os.close(rules)
    except OSError as error:
        raise SetupError("landlock", error) from None


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing or invisible: nothing to allow
        return
    rights &= -1 if os.path.isdir(path) else FILE_RIGHTS
    # packed: u64 rights, s32 descriptor
    rule = (ctypes.c_uint32 * 3)(rights & 0xFFFFFFFF, rights >> 32, place)
    try:
        call("syscall", ADD_RULE, rules, 1, ctypes.byref(rule), 0)
    finally:
        os.close(place)
