"""Files that are replaced in one step: after a kill or a power cut a reader finds the old content
or the new one, whole.

Files that grow line by line (io/results.py, eval/judging.py) are only looked after here when
they lose their name. Not here: whether a file may be replaced.
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

# What a file system answers that cannot sync a folder; the rename stands, and is as durable
# there as it can be.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EBADF}


def write_file(path: str | Path, content: bytes) -> None:
    """Replace the file, or the one that a link names, by one with this content. OSError leaves
    it as it was."""
    replace_file(path, lambda stream: stream.write(content)).close()


def replace_file(path: str | Path, write: Callable[[IO[bytes]], object]) -> IO[bytes]:
    """The same for what `write` puts into a stream; returns that stream, open to read and append,
    locked, under its name.

    The draft lies in the same folder, under a name that nobody can guess and that is opened
    exclusively, so no link is ever followed there. It is on the disk before it gets the name,
    and the name before this returns. What a killed process left of doing the same is removed.
    """
    target = Path(os.path.realpath(path))
    if (
        target.exists() and not target.is_file()
    ):  # a device, say, that came here since the path was checked
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
            stream.close()  # tries once more to write what it could not
        raise
    sync_folder(target.parent)
    return stream


def _new_draft(target: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside the target, locked, so that nobody takes it for one that was left."""
    while True:
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")
        stream = open(draft, "x+b", opener=_open_here)  # noqa: SIM115 - the caller has it
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: there nothing that was left is removed either
            fcntl.flock(stream, fcntl.LOCK_EX)
        if is_at(stream, draft):  # else it was removed before it was locked
            return draft, stream
        stream.close()


def _open_here(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_APPEND | os.O_NONBLOCK, 0o666)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
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
    """Remove what killed processes left of replacing this file. Who is still doing so holds a
    lock on its draft."""
    target = Path(os.path.realpath(path))
    for draft in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.new"):
        with contextlib.suppress(OSError), open(draft, "rb", opener=_open_here) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def is_at(stream: IO[bytes], path: str | Path) -> bool:
    """Whether the file under this name is the one that the stream was opened on."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except OSError:
        return False


def present_name(stream: IO[bytes]) -> str | None:
    """The name that an open file has now, if the system says; None where it has none."""
    try:
        name = os.readlink(f"/proc/self/fd/{stream.fileno()}")
    except OSError:
        return None
    return name if is_at(stream, name) else None


def copy_aside(stream: IO[bytes], path: str | Path) -> Path:
    """A new file beside `path`, or in the temporary folder if that one is gone, with all that
    the stream's file holds: its name is NAME.saved.jsonl, or has the first .saved-N that is
    free."""
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
