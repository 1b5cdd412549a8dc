"""Check and make folders that only this user can write to.

Caches are read, and compiled libraries loaded, from such folders only. Standard library only.
Which folder is the cache: host.py. What is read from it: io/cached.py.
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

from bass_cli.errors import spelled

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as in Linux
# Names the temporary folder, for the processes that this one starts.
_SHARED = "_BASS_PRIVATE_FOLDER"
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
_NOWHERE = Path(os.devnull, "bass")  # nothing can be read or written there


def fault_of(path: Path) -> str | None:
    """Return why other users could have written the file or folder at `path`, or None.

    Every folder and symbolic link on the way must belong to this user or to root. A folder on the
    way that others can write to must be sticky, as /tmp is. `path` itself must belong to this
    user, and others must not have write permission. A path that does not exist yet is no fault.
    """
    user = os.geteuid()
    here, links, status = Path("/"), 0, os.lstat("/")
    waiting = list(reversed((Path.cwd() / path).parts[1:]))
    while True:
        if status.st_uid not in (0, user):
            return f"{here} belongs to user {status.st_uid}"
        if not waiting:
            break
        mode = status.st_mode
        if stat.S_ISDIR(mode) and mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
            return _writable_by_others(here)
        part = waiting.pop()
        if part == "..":  # `here` contains no symbolic link, so this is what the system opens
            here = here.parent
            status = os.lstat(here)
            continue
        here /= part
        try:
            status = os.lstat(here)
            target = os.readlink(here) if stat.S_ISLNK(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"{here}: {error.strerror}"
        if target is not None:
            links += 1
            if status.st_uid not in (0, user):
                return f"{here} is a symbolic link of user {status.st_uid}"
            if links > _MOST_LINKS:
                return f"{here}: too many symbolic links"
            waiting += reversed((here.parent / target).parts[1:])
            here, status = Path("/"), os.lstat("/")  # a link's own mode has no meaning
    if status.st_uid != user:
        return f"{here} belongs to user {status.st_uid}"
    return _writable_by_others(here) if status.st_mode & _OTHERS_WRITE else None


def _writable_by_others(folder: Path) -> str:
    return f"other users can write to {folder} (to fix it: chmod go-w {folder})"


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, readable by this user only.

    Raises:
        OSError: The folder cannot be made, or other users can write to it.
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
    """Return `folder` if only this user can write there, else a temporary folder.

    In the second case one line on standard error gives the reason.

    Args:
        what: The folder's purpose, for that line.
    """
    fault = fault_of(folder)
    return folder if fault is None else fresh_folder(f"{what} {folder} is not used: {fault}")


def fresh_folder(note: str) -> Path:
    """Return a temporary folder that this process and its children share.

    The first call makes the folder and writes `note` to standard error. The process that made the
    folder removes it when it ends.
    """
    given = os.environ.get(_SHARED)
    if given and os.path.isdir(given) and fault_of(Path(given)) is None:
        return Path(given)
    made = _make_temporary()
    if made is None:
        _say(f"{note}; nothing is cached")
        return _NOWHERE
    os.environ[_SHARED] = str(made)
    atexit.register(_remove, made, os.getpid())
    _say(f"{note}; {made} is used until this process ends")
    return made


def _say(note: str) -> None:
    print(spelled(f"bass: {note}"), file=sys.stderr, flush=True)


def _make_temporary() -> Path | None:
    """Make a folder that no other user can replace; None if there is no place for one."""
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
