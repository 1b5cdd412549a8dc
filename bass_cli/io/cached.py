"""Entries of the user's cache: read only if nobody else can have written them.

Not here: which folder that is (system/host.py), what is in an entry (formats/tokenizer_files.py,
lengths/profiles.py).
"""

from __future__ import annotations

import errno
from pathlib import Path

from bass_cli.io.reading import read_bytes
from bass_cli.io.saving import write_file
from bass_cli.system.private import fault_of, make_private


def read_cached(path: Path, most: int) -> bytes:
    """Return all of an entry of at most `most` bytes.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, is too large, or another user may have written it.
    """
    if (fault := fault_of(path)) is not None:
        raise PermissionError(errno.EACCES, fault, str(path))
    return read_bytes(path, most)


def write_cached(path: Path, content: bytes) -> None:
    """Write an entry, whole or not at all, in a folder of this user alone. OSError if it cannot
    be written."""
    make_private(path.parent)
    write_file(path, content)
    path.chmod(0o600)
