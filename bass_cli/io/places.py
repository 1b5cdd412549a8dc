"""Check the files that a command is going to write, before it does any work.

The checks cover the kind of file, its permissions and suffix, whether another program's file would
be replaced, and whether an output is also an input. Nothing is opened for writing here.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from bass_cli.errors import UserError

_LONGEST = 2**28  # the most bytes that are read to see what a file is; reports are far smaller
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
# Suffixes of other formats
_FORMATS = re.compile(
    r"\.(json|csv|tsv|ya?ml|xlsx|parquet|arrow|feather|gz|bz2|xz|zst|lz4|zip|tar|tgz)"
)
Named = Iterable[tuple[str, str | Path | None]]  # what a file is to the user, and its path


def descriptor_of(path: str | Path) -> int | None:
    """Return the descriptor that a name like /dev/stdout or /dev/fd/3 means, else None."""
    found = re.fullmatch(r"/dev/std(out|err)|(?:/dev|/proc/self)/fd/([0-9]{1,9})", str(path))
    if found is None:
        return None
    return int(found[2]) if found[2] else 1 if found[1] == "out" else 2


def check_place(what: str, path: str | Path) -> None:
    """Raise UserError unless a regular file can be written at the path.

    `what`: the beginning of the message.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        status = None
    except OSError as error:
        raise UserError(f"{what}: cannot write there: {error.strerror}") from None
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise UserError(f"{what}: this is a folder, a file is needed")
    if status is not None and not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise UserError(f"{what}: this is {kind}, not a regular file; give another name")
    folder = Path(os.path.realpath(path) if os.path.islink(path) else path).parent
    if not folder.is_dir():
        raise UserError(f"{what}: the folder {folder} is not there")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{what}: the folder {folder} is not writable")
    if status is not None and not os.access(path, os.W_OK):
        raise UserError(f"{what}: the file is write-protected")


def refuse_foreign(
    what: str,
    path: str | Path,
    ours: Callable[[bytes], bool],
    *,
    kind: str,
    remedy: str = "use --overwrite to replace it, or give another name",
) -> None:
    """Raise UserError if the file has content that another program wrote, and would be lost.

    Args:
        what: The beginning of the message.
        ours: Tells whether content is of the right kind.
        kind: The name of that kind.
        remedy: The end of the message.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(_LONGEST + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{what}: it cannot be read: {error.strerror}; {remedy}") from None
    if content.strip(b"\0 \t\r\n") and (len(content) > _LONGEST or not ours(content)):
        raise UserError(f"{what}: it exists and is not {kind}; {remedy}")


def is_stream(path: str) -> bool:
    """Whether the name means an open stream, not a file."""
    return path == "-" or descriptor_of(path) is not None


def check_format(option: str, path: str, *, suffix: str, written: str) -> None:
    """Raise UserError if the name has the suffix of another format than `suffix`."""
    promised = Path(path).suffix.lower()
    if promised != suffix and _FORMATS.fullmatch(promised):
        raise UserError(
            f"{option} {path}: nothing is written as {promised}; {written}. Use a name that ends "
            f"in {suffix}, and convert the file when it is complete"
        )


def refuse_shared_files(outputs: Named, inputs: Named) -> None:
    """Raise UserError if an output is also an input, or if two outputs are the same file.

    Links and other names of a file are recognised. "-" means what standard input or output is
    connected to. Streams and devices may be shared.
    """
    taken: dict[object, str] = {}
    for what, path in inputs:
        if path is not None and (found := _identity(path, sys.stdin)) is not None:
            taken.setdefault(found, f"{what}, which would be lost")
    for what, path in outputs:
        found = None if path is None else _identity(path, sys.stdout)
        if found in taken:
            raise UserError(f"{what} {path}: this is {taken[found]}; give another name")
        if found is not None:
            taken[found] = f"the file of {what} too"


def _identity(path: str | Path, stream: IO[str]) -> tuple[int, int] | str | None:
    """Return what all names of a file have in common; None if it is not a regular file.

    For a file that does not exist yet, this is its path without links.
    """
    try:
        status = os.fstat(stream.fileno()) if path == "-" else os.stat(path)
    except (OSError, ValueError):
        return None if path == "-" else os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
