"""A view of the system with nothing in it: namespaces, and a file system of a few read-only folders
and a private /tmp.

Everything here happens in the warden, before the program's process exists.
"""

from __future__ import annotations

import ctypes
import os

from .libc import SetupError, call

# In the order in which they are left: only the owner of a new user namespace may make the others.
FLAGS = {
    "user": 0x10000000,
    "pid": 0x20000000,
    "mount": 0x00020000,
    "network": 0x40000000,
    "ipc": 0x08000000,
}
RDONLY, NOSUID, NODEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH, MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 2, 442, -100, 0x8000
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK, BASE, OLD = "/tmp/work", "/tmp", "/.old"


def leave(layers: tuple[str, ...]) -> None:
    """Move this process (for "pid": its children) into new namespaces; SetupError names the one
    that was refused."""
    user, group = os.getuid(), os.getgid()
    for layer in (name for name in FLAGS if name in layers):
        try:
            call("unshare", FLAGS[layer])
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
    """Make a file system of the given (place, real path) pairs, read-only, and put this process
    into it.

    Writable are /tmp and /dev/shm, in memory, `size` bytes each, owned by `owner` (uid, gid).
    All of it is gone with the last process in it. The way is that of container tools: an empty
    file system becomes the root, the old root is a folder in it while folders are taken over,
    and is then cut off.
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
            _take_over(place, OLD + real)
        _mount_proc()
        call("umount2", OLD.encode(), DETACH)
        os.rmdir(OLD)
        os.makedirs(WORK)
        os.chown(WORK, *owner)
        _mount("none", "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    except (OSError, AttributeError) as error:
        raise SetupError("mount", error) from None


def _take_over(place: str, source: str) -> None:
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, place, None, BIND | RECURSIVE)
    # Also what is mounted below must be read-only, which the older remount cannot do; flags are
    # only added.
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID, 0, 0, 0)
    call(
        "syscall",
        MOUNT_SETATTR,
        AT_FDCWD,
        place.encode(),
        AT_RECURSIVE,
        ctypes.byref(attributes),
        32,
    )


def _mount_proc() -> None:
    """A /proc of the new process namespace; left out where the system (a container that masks
    its own) forbids it."""
    os.mkdir("/proc", 0o755)
    try:
        _mount("proc", "/proc", "proc", NOSUID | NODEV | 8)
    except OSError:
        return


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind and kind.encode(),
        flags,
        options.encode() or None,
    )
