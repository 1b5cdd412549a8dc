"""A filter on system calls, so that a program can only affect itself.

It forbids sockets, tracing, new namespaces, rare kernel interfaces, memory and queues that
outlive the program, and signals, limits and priorities for other processes. It needs no privilege,
so it works where namespaces are forbidden. Source: the kernel's userspace-api/seccomp_filter;
numbers for x86-64 and arm64.
"""

from __future__ import annotations

import ctypes
import os

from .layers import PR_SET_SECCOMP, SetupError, call

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
Numbers = dict[str, "tuple[int | None, int | None]"]  # of a call: on x86-64, on arm64
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
FORBIDDEN: Numbers = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "io_uring_setup": (425, 425),
    "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),  # no limit counts this memory
    "move_pages": (279, 239), "process_madvise": (440, 440), "process_mrelease": (448, 448),
}  # fmt: skip
# Limits and scheduling of the calling process only: the first arguments that a call must have.
# They are 0 for "this process", because a filter does not know the number of the caller. The first
# argument of setpriority means "one process".
ITSELF: dict[tuple[int, int], tuple[int, ...]] = {
    (302, 261): (0,),  # prlimit64
    # sched_setaffinity, -scheduler, -param, -attr
    (203, 122): (0,), (144, 119): (0,), (142, 118): (0,), (314, 274): (0,),
    (141, 140): (0, 0),  # setpriority
}  # fmt: skip
# Other ways to signal or schedule other processes: the argument of a call, and values that it must
# not have.
REFUSED_WITH: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
    (72, 25): (1, (8, 10, 15)),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX
    (16, 29): (1, (0x8901, 0x8902)),  # ioctl: FIOSETOWN, SIOCSPGRP, which are F_SETOWN for sockets
    (157, 167): (0, (62,)),  # prctl: PR_SCHED_CORE
}
# Memory, semaphores and queues with a key or a name. They outlive the program, and no limit counts
# them.
SHARED: Numbers = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}  # fmt: skip
# Changes to files outside the sandbox that neither Landlock nor a limit prevents. Forbidden only
# without a mount namespace.
ATTRIBUTES: Numbers = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466),
}  # fmt: skip
FORKS: Numbers = {"fork": (57, None), "vfork": (58, None)}
CLONE, CLONE3, NEW_USER, THREAD = (56, 220), 435, 0x10000000, 0x10000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
KILL, ALLOW, NOT_PERMITTED, NO_SUCH_CALL = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT, OTHER_ABI, ALL_PROCESSES = 0, 4, 16, 0x40000000, 0xFFFFFFFF
# The lower half comes first. The kernel uses only that half of the arguments compared here.
ARGUMENT_BYTES = 8
Instruction = tuple[int, int, int, int]  # code, skip if true, skip if false, operand


def filter_for(
    name: str, own: int | None, attributes: bool = True, forks: bool = True
) -> list[Instruction]:
    """Return the filter's instructions for a processor.

    Args:
        name: name of the processor, a key of ARCHITECTURE.
        own: the only process that may be signalled. None in a process namespace: then all may be
            signalled except the first one and all at once.
        attributes: allow changes of files' modes, owners and times.
        forks: allow new processes.
    """
    column = COLUMN[name]
    calls = [*FORBIDDEN.values(), *SHARED.values()]
    calls += [*(() if attributes else ATTRIBUTES.values()), *(() if forks else FORKS.values())]
    receiver = _when(EQUAL, 1, ALL_PROCESSES) if own is None else _unless(EQUAL, own)
    threads_only = [] if forks else _unless(ANY_BIT, THREAD)
    lines: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, ARCHITECTURE[name]), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]  # fmt: skip
    if name == "x86_64":
        lines += _when(ANY_BIT, OTHER_ABI, answer=NO_SUCH_CALL)
    lines += _when(EQUAL, *(n for numbers in calls if (n := numbers[column]) is not None))
    # A filter cannot read the flags of clone3. Without clone3 the C library uses clone.
    lines += _when(EQUAL, CLONE3, answer=NO_SUCH_CALL)
    lines += _check_arguments(CLONE[column], {0: _when(ANY_BIT, NEW_USER) + threads_only})
    for numbers in SIGNALS.values():
        lines += _check_arguments(numbers[column], {0: receiver})
    for numbers, needed in ITSELF.items():
        lines += _check_arguments(
            numbers[column], {i: _unless(EQUAL, n) for i, n in enumerate(needed)}
        )
    for numbers, (place, values) in REFUSED_WITH.items():
        lines += _check_arguments(numbers[column], {place: _when(EQUAL, *values)})
    return [*lines, (RETURN, 0, 0, ALLOW)]


def _when(test: int, *operands: int, answer: int = NOT_PERMITTED) -> list[Instruction]:
    """Return `answer` if the loaded value passes the test with any of the operands."""
    return [line for one in operands for line in ((test, 0, 1, one), (RETURN, 0, 0, answer))]


def _unless(test: int, operand: int) -> list[Instruction]:
    """Refuse the call unless the loaded value passes the test."""
    return [(test, 1, 0, operand), (RETURN, 0, 0, NOT_PERMITTED)]


def _check_arguments(number: int, checks: dict[int, list[Instruction]]) -> list[Instruction]:
    """Allow a call unless a check of one of its arguments, by index, returns an answer."""
    lines: list[Instruction] = []
    for place, check in checks.items():
        lines += [(LOAD, 0, 0, ARGUMENT_AT + ARGUMENT_BYTES * place), *check]
    return [(EQUAL, 0, len(lines) + 1, number), *lines, (RETURN, 0, 0, ALLOW)]


def restrict_calls(own: int | None, attributes: bool, forks: bool) -> None:
    """Install the filter (see `filter_for`) for this process and its descendants.

    `no_new_privs` must be set before.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURE:
        raise SetupError("seccomp", f"the numbers of system calls are not known for {machine}")
    lines = filter_for(machine, own, attributes, forks)
    code = b"".join(
        kind.to_bytes(2, "little") + bytes((yes, no)) + operand.to_bytes(4, "little")
        for kind, yes, no, operand in lines
    )
    buffer = ctypes.create_string_buffer(code)
    header = (ctypes.c_uint64 * 2)(len(lines), ctypes.addressof(buffer))
    try:
        call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(header), 0, 0)
    except OSError as error:
        raise SetupError("seccomp", error) from None
