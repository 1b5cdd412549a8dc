"""Namespaces, and a file system with a few read-only folders and a private /tmp.

All this runs in the supervisor, before the program's process exists.
"""

from __future__ import annotations

import ctypes
import os

from .libc import SetupError, call

# In the order of creation: only the owner of a new user namespace may make the others.
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
    """Move this process (for "pid": its children) into new namespaces.

    SetupError names the layer that the system refuses.
    """
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
    """Mount a /proc of the new process namespace.

    It is left out if the system forbids it, as in a container that masks its own /proc.
    """
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
