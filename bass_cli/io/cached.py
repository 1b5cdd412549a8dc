"""Read and write entries of the user's cache; an entry that another user may write is refused.

system/host.py chooses the folder. The entries are made in formats/tokenizer_files.py and
lengths/profiles.py.
"""

from __future__ import annotations

import errno
from pathlib import Path

from bass_cli.io.reading import read_bytes
from bass_cli.io.saving import write_file
from bass_cli.system.private import fault_of, make_private


def read_cached(path: Path, most: int) -> bytes:
    """Read an entry of at most `most` bytes.

    Raises:
        FileNotFoundError: There is no such entry.
        OSError: It cannot be read, is too large, or another user may have written it.
    """
    if (fault := fault_of(path)) is not None:
        raise PermissionError(errno.EACCES, fault, str(path))
    return read_bytes(path, most)


def write_cached(path: Path, content: bytes) -> None:
    """Write an entry atomically, in a folder that only this user may access.

    OSError if it cannot be written.
    """
    make_private(path.parent)
    write_file(path, content)
    path.chmod(0o600)
