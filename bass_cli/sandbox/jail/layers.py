"""Layers of isolation that a process takes on: namespaces, Landlock, and no capabilities.

The supervisor enters the namespaces before the program's process exists. The calls go to the C
library through ctypes, because Python does not offer them; the numbers are those of Linux. Sources:
the kernel's userspace-api/landlock, and the manual pages of unshare and mount_setattr.
"""

from __future__ import annotations

import ctypes
import os
import sys

# A handle of the C library that is already loaded. Made once, because it is slow.
LIBRARY = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
# Namespaces in the order of creation: only the owner of a new user namespace may make the others.
NAMESPACES = {
    "user": 0x10000000,
    "pid": 0x20000000,
    "mount": 0x00020000,
    "network": 0x40000000,
    "ipc": 0x08000000,
}
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
RECURSIVE, PRIVATE, DETACH = 16384, 1 << 18, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK, BASE, OLD = "/tmp/work", "/tmp", "/.old"
# Landlock: system calls, rights over files, and the kernel's versions that added rights
CREATE, ADD_RULE, RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
FIRST_RIGHTS, LATER_RIGHTS = (1 << 13) - 1, {2: 1 << 13, 3: TRUNCATE, 5: IOCTL}
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
ALL_TCP, ALL_SCOPES = 3, 3  # bind and connect; abstract UNIX sockets and signals
NETWORK_SINCE, SCOPES_SINCE = 4, 6


class SetupError(Exception):
    """The system refuses a layer of isolation. Has the layer's name and the reason."""

    def __init__(self, layer: str, reason: object) -> None:
        super().__init__(layer, str(reason))
        self.layer, self.reason = layer, str(reason)


def enter_namespaces(layers: tuple[str, ...]) -> None:
    """Move this process (for "pid": its children) into new namespaces.

    SetupError names the layer that the system refuses.
    """
    user, group = os.getuid(), os.getgid()
    for layer in (name for name in NAMESPACES if name in layers):
        try:
            call("unshare", NAMESPACES[layer])
            if layer == "user":
                _write("/proc/self/setgroups", "deny")
                _write("/proc/self/uid_map", f"{user} {user} 1")
                _write("/proc/self/gid_map", f"{group} {group} 1")
        except OSError as error:
            raise SetupError(layer, error) from None


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def build_root(paths: list[tuple[str, str]], owner: tuple[int, int], size: int) -> None:
    """Make a new root file system and move this process into it.

    It works as in container tools: an empty file system becomes the root, the old root is a
    folder in it while folders are bind-mounted from there, and is then detached. All of it
    disappears with the last process in it.

    Args:
        paths: (place, real path) pairs that are visible, read-only.
        owner: uid and gid of /tmp and /dev/shm, which are writable and in memory.
        size: bytes of each of the two.
    """
    try:
        _mount("none", "/", None, RECURSIVE | PRIVATE)
        _mount("tmpfs", BASE, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
        os.chdir(BASE)
        os.mkdir(OLD[1:], 0o700)
        call("pivot_root", b".", OLD[1:].encode())
        os.chdir("/")
        private = f"mode=1777,uid={owner[0]},gid={owner[1]},size={size},nr_inodes=20000"
        for place in (BASE, "/dev/shm"):
            os.makedirs(place)
            _mount("tmpfs", place, "tmpfs", NOSUID | NODEV, private)
        for place, real in [*paths, *((device, device) for device in DEVICES)]:
            _bind(place, OLD + real)
        _mount_proc()
        call("umount2", OLD.encode(), DETACH)
        os.rmdir(OLD)
        os.makedirs(WORK)
        os.chown(WORK, *owner)
        _mount("none", "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    except (OSError, AttributeError) as error:
        raise SetupError("mount", error) from None


def _bind(place: str, source: str) -> None:
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, place, None, BIND | RECURSIVE)
    # mount_setattr makes nested mounts read-only too, which a remount cannot do.
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID, 0, 0, 0)
    where = (AT_FDCWD, place.encode(), AT_RECURSIVE)
    call("syscall", MOUNT_SETATTR, *where, ctypes.byref(attributes), ctypes.sizeof(attributes))


def _mount_proc() -> None:
    """Mount a /proc of the new process namespace.

    It is left out if the system forbids it, as in a container that masks its own /proc.
    """
    os.mkdir("/proc", 0o755)
    try:
        _mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    except OSError:
        return


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    what = (source.encode(), target.encode(), kind and kind.encode())
    call("mount", *what, flags, options.encode() or None)


def landlock_version() -> int:
    """Return the kernel's Landlock version, 0 without Landlock."""
    try:
        return call("syscall", CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Give up access to all files but these and those below these folders, with Landlock.

    The process also gives up TCP and signals to others, if the kernel's Landlock has that. All this
    holds for its descendants too. It needs no privilege, so it works where namespaces are
    forbidden. `no_new_privs` must be set before. SetupError if the kernel refuses.
    """
    version = landlock_version()
    if not version:
        raise SetupError("landlock", "the kernel does not offer it")
    handled = FIRST_RIGHTS
    for since, right in LATER_RIGHTS.items():
        handled |= right * (version >= since)
    network, scopes = ALL_TCP * (version >= NETWORK_SINCE), ALL_SCOPES * (version >= SCOPES_SINCE)
    # Older kernels have fewer fields.
    size = 8 * (1 + (version >= NETWORK_SINCE) + (version >= SCOPES_SINCE))
    fields = (ctypes.c_uint64 * 3)(handled, network, scopes)
    try:
        rules = call("syscall", CREATE, ctypes.byref(fields), size, 0)
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


def prctl(option: int, value: object) -> None:
    """Set one attribute of this process. Does nothing on systems without prctl."""
    if sys.platform == "linux":
        call("prctl", option, value, 0, 0, 0)


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
