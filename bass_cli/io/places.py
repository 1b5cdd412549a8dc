"""Which files a command may write: what a name leads to and promises, whether what is there already
may be replaced, whether it is read too.

Nothing is opened for writing here. Not here: writing (io/results.py, io/saving.py).
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

_LONGEST = 2**28  # bytes that are read to see whose a file is; no report comes near it
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
# a name's end that promises a format of its own
_FORMATS = re.compile(
    r"\.(json|csv|tsv|ya?ml|xlsx|parquet|arrow|feather|gz|bz2|xz|zst|lz4|zip|tar|tgz)"
)
Named = Iterable[tuple[str, str | Path | None]]  # what a file is to the user, and its path


def descriptor_of(path: str | Path) -> int | None:
    """The number of the open stream that a name like /dev/stdout stands for: it is written to,
    never replaced."""
    found = re.fullmatch(r"/dev/std(out|err)|(?:/dev|/proc/self)/fd/([0-9]{1,9})", str(path))
    if found is None:
        return None
    return int(found[2]) if found[2] else 1 if found[1] == "out" else 2


def check_place(what: str, path: str | Path) -> None:
    """UserError, beginning with `what`, unless the path leads to a regular file or to nothing
    yet, in a folder that can be written to."""
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
        raise UserError(
            f"{what}: this is {kind}, and only regular files are written; give another name"
        )
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
    """UserError where there is a file with content that is not `ours`: it is no `kind`, and
    would be lost."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(_LONGEST + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{what}: cannot tell what is in it: {error.strerror}; {remedy}") from None
    if content.strip(b"\0 \t\r\n") and (len(content) > _LONGEST or not ours(content)):
        raise UserError(f"{what}: it exists and is not {kind}; {remedy}")


def is_stream(path: str) -> bool:
    """Whether samples go to an open stream under this name, and not to a file."""
    return path == "-" or descriptor_of(path) is not None


def check_format(option: str, path: str, *, suffix: str, written: str) -> None:
    """UserError where a name promises a format of its own that is not `suffix`, the format of
    what is written."""
    promised = Path(path).suffix.lower()
    if promised != suffix and _FORMATS.fullmatch(promised):
        raise UserError(
            f"{option} {path}: nothing is written as {promised}; {written}. Let the name end in "
            f"{suffix}, and "
            "convert the file when it is complete"
        )


def refuse_shared_files(outputs: Named, inputs: Named) -> None:
    """UserError where an output is a file that is read too, or two outputs are one file, by
    whatever links or names.

    Nothing is opened. "-" is what standard input or output is connected to. What is no file is
    shared freely.
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
    """What all names of one file have in common; of a file to be, its path without links; None
    for what is no file."""
    try:
        status = os.fstat(stream.fileno()) if path == "-" else os.stat(path)
    except (OSError, ValueError):
        return None if path == "-" else os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
