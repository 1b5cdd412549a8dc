"""Check the files that a command is going to write, then replace them atomically.

The checks cover the kind of file, its permissions and suffix, whether another program's file would
be replaced, and whether an output is also an input; they open nothing for writing. After a kill or
a power cut a replaced file has its old or its new content. Files that grow line by line
(io/results.py, eval/stores.py) are locked; they can be found under a new name, and copied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import importlib.util
import io
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from bass_cli.errors import MachineError, UserError
from bass_cli.reading import os_errors_as

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
_PACKED = (".gz", ".zst")  # suffixes that follow that of a format
Named = Iterable[tuple[str, str | Path | None]]  # what a file is to the user, and its path
# Errors of file systems that cannot sync a folder
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EBADF}


def descriptor_of(path: str | Path) -> int | None:
    """Return the descriptor that a name like /dev/stdout or /dev/fd/3 means, else None."""
    found = re.fullmatch(r"/dev/std(out|err)|(?:/dev|/proc/self)/fd/([0-9]{1,9})", str(path))
    if found is None:
        return None
    return int(found[2]) if found[2] else 1 if found[1] == "out" else 2


def is_stream(path: str) -> bool:
    """Whether the name means an open stream, not a file."""
    return path == "-" or descriptor_of(path) is not None


def check_place(what: str, path: str | Path) -> None:
    """Raise UserError unless a regular file can be written at the path.

    `what`: the beginning of the message.
    """
    status = None
    with (
        os_errors_as(UserError, f"{what}: cannot write there"),
        contextlib.suppress(FileNotFoundError),
    ):
        status = os.stat(path)
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
    remedy: str = "use `overwrite` to replace it, or give another name",
) -> None:
    """Raise UserError if the file has content that another program wrote, and would be lost.

    Args:
        what: The beginning of the message.
        ours: Tells whether content is of the right kind.
        kind: The name of that kind.
        remedy: The end of the message.
    """
    content = b""
    with (
        os_errors_as(UserError, f"{what}: it cannot be read", remedy),
        contextlib.suppress(FileNotFoundError),
        open(path, "rb") as stream,
    ):
        content = stream.read(_LONGEST + 1)
    if content.strip(b"\0 \t\r\n") and (len(content) > _LONGEST or not ours(content)):
        raise UserError(f"{what}: it exists and is not {kind}; {remedy}")


def check_format(option: str, path: str, *, suffixes: tuple[str, ...], written: str) -> None:
    """Raise UserError if the name has the suffix of another format than those of `suffixes`."""
    promised = Path(path).suffix.lower()
    if not path.lower().endswith(suffixes) and _FORMATS.fullmatch(promised):
        if promised in _PACKED:
            promised = Path(Path(path).stem).suffix.lower() + promised
        *others, last = suffixes
        known = f"{', '.join(others)} or {last}" if others else last
        raise UserError(
            f"{option} {path}: nothing is written as {promised}; {written}. Use a name that ends "
            f"in {known}"
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
    """Return a value that is equal for all names of a file; None if it is not a regular file.

    It is the device and the inode, or for a file that does not exist yet the path without links.
    """
    try:
        status = os.fstat(stream.fileno()) if path == "-" else os.stat(path)
    except (OSError, ValueError):
        return None if path == "-" else os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def write_file(path: str | Path, content: bytes) -> None:
    """Replace the content of a file; a link is followed. An OSError leaves the file as it was."""
    replace_file(path, lambda stream: stream.write(content)).close()


def write_json(path: Path, document: dict[str, Any], fault: str) -> None:
    """Replace a JSON file in one step; values that JSON cannot hold are written as text.

    A symbolic link is kept, and a stream like /dev/stdout is written to. A failure is a
    MachineError that begins with `fault`.
    """
    text = json.dumps(document, indent=2, default=str) + "\n"
    with os_errors_as(MachineError, fault):
        if (number := descriptor_of(path)) is None:
            write_file(path, text.encode("utf-8"))
            return
        sys.stdout.flush()
        with open(number, "w", encoding="utf-8", closefd=False) as stream:
            stream.write(text)


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


def open_locked(path: str, what: str, taken: str) -> IO[bytes]:
    """Open a file to read and append, under an exclusive lock, for one that grows line by line.

    UserError if that fails; the message says `what` the file is, or that it is `taken`.
    """
    with os_errors_as(UserError, f"{path}: cannot write {what}"):
        while True:
            stream = open(path, "a+b")  # noqa: SIM115 - the caller closes it
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.close()
                raise UserError(f"{path}: {taken}") from None
            if is_at(stream, path):
                return stream
            stream.close()  # another process replaced the file in between


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

    Further suffixes stay: NAME.saved.jsonl.gz.

    If the folder no longer exists, the copy goes to the temporary folder.
    """
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        place = Path(tempfile.gettempdir(), place.name)
    suffix = place.suffix
    if suffix.lower() in _PACKED:
        suffix = Path(place.stem).suffix + suffix
    for number in itertools.count(1):
        name = place.with_name(
            f"{place.name.removesuffix(suffix)}.saved{'' if number == 1 else f'-{number}'}{suffix}"
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


# The PNG text chunk that names the program
_CHART = b"tEXtSoftware\0bass"


def check_chart(file: str, *, overwrite: bool) -> None:
    """Raise UserError or MachineError before any measurement if `save_chart` could not work later.

    A file that is not a chart of bass is not replaced.
    """
    if Path(file).suffix.lower() != ".png":
        raise UserError(f"`plot` {file}: the file must end in .png")
    check_place(f"`plot` {file}", file)
    if not overwrite:
        refuse_foreign(
            f"`plot` {file}", file, lambda content: _CHART in content[:1024], kind="a chart of bass"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(
            "`plot` needs matplotlib, which is not installed here: pip install 'bass-cli[plot]'"
        )


@contextlib.contextmanager
def two_panels(file: str, title: str, *, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Yield the axes of a chart with two panels, then save it as a PNG. `size`: in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=size)
    yield list(axes)
    axes[0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    save_chart(figure, file)
    pyplot.close(figure)


def save_chart(figure: Any, file: str) -> None:
    """Write the figure to a PNG file atomically. MachineError if it cannot be written."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=144, metadata={"Software": "bass"})
    with os_errors_as(MachineError, f"`plot` {file}: cannot write the chart"):
        write_file(file, picture.getvalue())
