"""Folders that only this user may write to: what lies there may be believed, and libraries there
may be loaded.

Standard library only. Not here: which folder is the cache (host.py), what is read from it
(io/cached.py).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as Linux
# The processes that this one starts use the same folder.
_SHARED = "_BASS_PRIVATE_FOLDER"
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
_NOWHERE = Path(os.devnull, "bass")  # nothing can be kept or read there


def fault_of(path: Path) -> str | None:
    """Return why other users might have written what lies at `path`; None if only this user and
    root can.

    Every folder and symbolic link on the way has to belong to one of the two, and a folder that
    others may write to must be sticky, as /tmp is. `path` itself must belong to this user, and
    others must not be able to write to it. What does not exist yet is no fault.
    """
    user = os.geteuid()
    here, links, status = Path("/"), 0, os.lstat("/")
    waiting = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    while True:
        if status.st_uid not in (0, user):
            return f"{here} belongs to user {status.st_uid}"
        if not waiting:
            break
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            return f"other users may write to {here}"
        here /= waiting.pop()
        try:
            status = os.lstat(here)
            target = os.readlink(here) if stat.S_ISLNK(status.st_mode) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{here}: {error.strerror}"
        if target is not None:
            links += 1
            if status.st_uid not in (0, user):
                return f"{here} is a link of user {status.st_uid}"
            if links > _MOST_LINKS:
                return f"{here}: too many links"
            parts = Path(os.path.normpath(here.parent / target)).parts
            waiting += reversed(parts[1:])
            here, status = Path("/"), os.lstat("/")  # a link's own mode says nothing
    if status.st_uid != user:
        return f"{here} belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"other users may write to {here}; chmod go-w mends that"
    return None


def make_private(folder: Path) -> None:
    """Make a folder, and those around it that are missing, for this user alone.

    Raises:
        OSError: it cannot be made, or other users may write there.
    """
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was first
            one.mkdir(0o700)
    if (fault := fault_of(folder)) is not None:
        raise PermissionError(errno.EACCES, fault, str(folder))
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def own_or_fresh(folder: Path, what: str) -> Path:
    """Return `folder` if only this user can write there, else a fresh folder that is removed at
    the end. One line on standard error says so; `what`: its purpose, for that line."""
    fault = fault_of(folder)
    return folder if fault is None else fresh_folder(f"{what} {folder} is not used: {fault}")


def fresh_folder(note: str) -> Path:
    """Return a temporary folder for this process and those that it starts. The first call makes
    it and writes `note` to standard error; the process that made it removes it at its end."""
    given = os.environ.get(_SHARED)
    if given and os.path.isdir(given) and fault_of(Path(given)) is None:
        return Path(given)
    made = _make_temporary()
    if made is None:
        print(f"bass: {note}; nothing is kept", file=sys.stderr)
        return _NOWHERE
    os.environ[_SHARED] = str(made)
    atexit.register(_remove, made, os.getpid())
    print(f"bass: {note}; {made} is used, and removed at the end", file=sys.stderr)
    return made


def _make_temporary() -> Path | None:
    """A new folder where nobody else can replace it; None if there is no place for one."""
    places = list(_TEMPORARY)
    with contextlib.suppress(FileNotFoundError):
        places.insert(0, tempfile.gettempdir())
    for place in places:
        with contextlib.suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix="bass-", dir=place))
            if fault_of(made) is None:
                return made
            made.rmdir()
    return None


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
