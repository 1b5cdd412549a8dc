"""The user's cache: its folder, which only this user may write to, and its entries.

Caches are read, and compiled kernels loaded, from such folders only. An entry that another user may
have written is refused. Entries are made in formats/tokenizer.py and lengths/surface.py.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from bass_cli.io import terminal
from bass_cli.io.saving import write_file
from bass_cli.reading import read_bytes

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as in Linux
# Names the temporary folder, for the processes that this one starts.
_SHARED = "_BASS_PRIVATE_FOLDER"
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
_NOWHERE = Path(os.devnull, "bass")  # nothing can be read or written there


def cache_folder() -> Path:
    """Return the folder for caches: $XDG_CACHE_HOME/bass, or ~/.cache/bass.

    A user without a home gets one among the temporary files. The folder may be missing or not
    writable. If other users can write there, return a fresh folder and write a line to standard
    error.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given or Path.home() / ".cache") / "bass"
    except RuntimeError:  # no HOME, and a user that the system does not list, as in many containers
        folder = temporary_folder() / f"bass-{os.getuid()}"
    return _own_or_fresh(folder, "cache folder")


def temporary_folder() -> Path:
    """Return the folder for temporary files; if none is writable, TMPDIR or /tmp."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def prepare_kernel_cache() -> Path:
    """Return the folder for Triton's compiled kernels.

    Triton loads libraries from it. So if its own folder is not writable, or other users can write
    there, set TRITON_CACHE_DIR to another one.
    """
    given = os.environ.get("TRITON_CACHE_DIR")
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
    folder = Path(given) if given else home / ".triton" / "cache"
    if not given and not (folder.is_absolute() and is_writable(folder)):
        folder = temporary_folder() / f"bass-{os.getuid()}" / "triton"
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    found = _own_or_fresh(folder, "Triton's cache folder")
    if found != folder:
        found = found / "triton"
        os.environ["TRITON_CACHE_DIR"] = str(found)
    with contextlib.suppress(OSError):  # Triton itself would make it with the umask's permissions
        make_private(found)
    return found


def is_writable(folder: Path) -> bool:
    """Return whether files can be written to the folder, or the folder can be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def read_cached(path: Path, most: int) -> bytes:
    """Read an entry of at most `most` bytes.

    Raises:
        FileNotFoundError: There is no such entry.
        OSError: It cannot be read, is too large, or another user may have written it.
    """
    _check_private(path)
    return read_bytes(path, most)


def write_cached(path: Path, content: bytes) -> None:
    """Write an entry atomically, in a folder that only this user may access.

    OSError if it cannot be written.
    """
    make_private(path.parent)
    write_file(path, content)
    path.chmod(0o600)


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
    _check_private(folder)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def _check_private(path: Path) -> None:
    if (fault := fault_of(path)) is not None:
        raise PermissionError(errno.EACCES, fault, str(path))


def _own_or_fresh(folder: Path, what: str) -> Path:
    """Return `folder` if only this user can write there, else a temporary folder.

    This process and its children share that one. The first call makes it and writes the reason to
    standard error; the process that made it removes it when it ends.

    Args:
        what: The folder's purpose, for that line.
    """
    if (fault := fault_of(folder)) is None:
        return folder
    given = os.environ.get(_SHARED)
    if given and os.path.isdir(given) and fault_of(Path(given)) is None:
        return Path(given)
    made, note = _make_temporary(), f"{what} {folder} is not used: {fault}"
    if made is None:
        terminal.line(f"bass: {note}; nothing is cached")
        return _NOWHERE
    os.environ[_SHARED] = str(made)
    atexit.register(_remove, made, os.getpid())
    terminal.line(f"bass: {note}; {made} is used until this process ends")
    return made


def _make_temporary() -> Path | None:
    """Make a folder that no other user can replace; None if there is no place for one."""
    places = list(_PLACES)
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
