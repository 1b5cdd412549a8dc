"""Replace files atomically: after a kill or a power cut a file has its old or its new content.

For files that grow line by line (io/results.py, eval/judging.py) there are functions that find
their present name or copy them. io/places.py says whether a file may be replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

# Errors of file systems that cannot sync a folder
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EBADF}


def write_file(path: str | Path, content: bytes) -> None:
    """Replace the content of a file; a link is followed. An OSError leaves the file as it was."""
    replace_file(path, lambda stream: stream.write(content)).close()


def replace_file(path: str | Path, write: Callable[[IO[bytes]], object]) -> IO[bytes]:
    """Replace the content of a file by what `write` puts into a stream.

    The new content goes to a draft in the same folder, under a random name that is opened
    exclusively, so that no link is followed. The draft is synced to disk, then renamed. Drafts of
    killed processes are removed first.

    Returns:
        The stream, open to read and append, and locked.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # created after the path was checked
        raise OSError(errno.EINVAL, "it is not a regular file", str(target))
    remove_drafts(target)
    draft, stream = _new_draft(target)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(stream.fileno(), os.stat(target).st_mode & 0o777)
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        with contextlib.suppress(OSError):
            stream.close()  # tries to write its buffer once more
        raise
    sync_folder(target.parent)
    return stream


def _new_draft(target: Path) -> tuple[Path, IO[bytes]]:
    """Create a draft beside the target. Its lock tells it from drafts of killed processes."""
    while True:
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")
        stream = open(draft, "x+b", opener=_open_here)  # noqa: SIM115 - the caller has it
        with contextlib.suppress(OSError):  # without locks, old drafts are not removed either
            fcntl.flock(stream, fcntl.LOCK_EX)
        if is_at(stream, draft):  # another process may remove it before it is locked
            return draft, stream
        stream.close()


def _open_here(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_APPEND | os.O_NONBLOCK, 0o666)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def remove_drafts(path: str | Path) -> None:
    """Remove the drafts of this file that killed processes left. Drafts in use are locked."""
    target = Path(os.path.realpath(path))
    for draft in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.new"):
        with contextlib.suppress(OSError), open(draft, "rb", opener=_open_here) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def is_at(stream: IO[bytes], path: str | Path) -> bool:
    """Whether the path leads to the file that the stream was opened on."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except OSError:
        return False


def present_name(stream: IO[bytes]) -> str | None:
    """Return the present name of an open file; None if it has none or it is unknown."""
    try:
        name = os.readlink(f"/proc/self/fd/{stream.fileno()}")
    except OSError:
        return None
    return name if is_at(stream, name) else None


def copy_aside(stream: IO[bytes], path: str | Path) -> Path:
    """Copy the stream's file to a new file beside `path`, NAME.saved.jsonl or NAME.saved-N.jsonl.

    If the folder no longer exists, the copy goes to the temporary folder.
    """
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        place = Path(tempfile.gettempdir(), place.name)
    for number in itertools.count(1):
        name = place.with_name(
            f"{place.stem}.saved{'' if number == 1 else f'-{number}'}{place.suffix}"
        )
        try:
            copy = open(name, "xb", opener=_open_here)  # noqa: SIM115 - the next statement has it
        except FileExistsError:
            continue
        try:
            with copy:
                stream.seek(0)
                shutil.copyfileobj(stream, copy)
                copy.flush()
                os.fsync(copy.fileno())
            sync_folder(name.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        return name
    raise AssertionError
