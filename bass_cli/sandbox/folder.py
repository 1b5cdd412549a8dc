"""A work folder on disk, for systems where a program cannot have one in memory.

It is removed afterwards, whatever the program did to it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bass_cli.errors import MachineError


@contextlib.contextmanager
def work_folder(owner: tuple[int, int]) -> Iterator[str]:
    """Make a fresh folder that belongs to `owner` (uid, gid), and remove it afterwards."""
    try:
        path = Path(tempfile.mkdtemp(prefix="bass-program-"))
    except OSError as error:
        reason = f"programs need a temporary folder: {error.strerror}"
        raise MachineError(f"{reason}; set TMPDIR to a writable folder") from None
    try:
        if owner != (os.getuid(), os.getgid()):
            os.chown(path, *owner)
        yield os.path.realpath(path)
    finally:
        remove_tree(path)


def remove_tree(top: Path) -> None:
    """Remove a folder that a hostile program has filled. No process may use it any more.

    Folders are moved aside before they are emptied, so that no path gets long and nothing
    recurses. Links are removed, never followed. What the system refuses to remove is left.
    """
    aside = Path(tempfile.mkdtemp(prefix="bass-removed-", dir=top.parent))
    waiting, number = [top], 0
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
        for entry in _entries(folder):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # to be moved, a folder must be writable itself
                    number += 1
                    os.rename(entry.path, aside / str(number))
                    waiting.append(aside / str(number))
                else:
                    os.unlink(entry.path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(aside)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
