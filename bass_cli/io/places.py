"""Which files a command may write: what a name leads to, and whether what is there already may be
replaced.

Nothing is opened for writing here. Not here: writing (io/results.py, io/saving.py), outputs that
are inputs too (io/results.py).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from bass_cli.errors import UserError

_LONGEST = 2**28  # bytes that are read to see whose a file is; no report comes near it
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


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
