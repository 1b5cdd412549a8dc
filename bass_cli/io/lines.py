"""Read a file of samples line by line: of bass in any of its formats, or JSON lines of other tools.

A killed run leaves a torn last line, which is left out with a note. `write_lines` writes a whole
file in one step. Files that a run continues are read and repaired by io/resume.py, and written
line by line by io/results.py.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from bass_cli.errors import MachineError, UserError
from bass_cli.io.compressed import BrokenDataError, Compressor, Expanded, begun, compression_of
from bass_cli.io.linefile import is_parquet_name, live_path, result_lines
from bass_cli.io.parquet import MAGIC as PARQUET
from bass_cli.io.parquet import write_parquet
from bass_cli.io.saving import replace_file
from bass_cli.reading import open_regular, os_errors_as, parse_json

LINE_BYTES = 1 << 26  # most bytes of a line; a small gzip file can hold a line of any length
Record = tuple[int, bytes, dict[str, Any]]  # line number from 1, the line, its object


def read_records(
    path: str,
    notes: list[str],
    *,
    what: str = "the generation file",
    on_open: Callable[[IO[bytes]], None] = lambda stream: None,
) -> Iterator[Record]:
    """Yield the lines that are not blank, one at a time, so that a file may exceed the memory.

    Args:
        path: The file; "-" for standard input, which may be compressed.
        notes: Gets a sentence for each thing that was left out.
        what: The name of the file in messages.
        on_open: Called with the open file.

    Raises:
        UserError: A line other than the last is broken, or the file cannot be read.
    """
    if path == "-":
        yield from _records(_standard_input(), "stdin", notes)
        return
    try:
        live = live_path(path)
        if live != path:
            notes.append(f"the run has not ended; its samples so far are in {live}")
        with open_regular(live) as file:
            on_open(file)
            yield from _records(result_lines(file, live), path, notes)
    except OSError as error:
        raise UserError(f"{path}: cannot read {what}: {error.strerror or error}") from None


def _standard_input() -> IO[bytes]:
    if sys.stdin is None:
        raise UserError("stdin: it is closed; name a file, or redirect one: < FILE")
    found: Any = sys.stdin.buffer
    stream = found if isinstance(found, io.BufferedReader) else io.BufferedReader(found)
    start = stream.peek(4)
    if start.startswith(PARQUET):
        raise UserError("stdin: this is a parquet file, which is read by its name only")
    kind = begun(start)
    return stream if kind is None else io.BufferedReader(Expanded(stream, kind, torn=True))


def _records(stream: IO[bytes], name: str, notes: list[str]) -> Iterator[Record]:
    broken: tuple[int, str] | None = None
    try:
        for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise UserError(f"{name}:{number}: the line has more than {LINE_BYTES >> 20} MB")
            if not line.strip():
                continue
            if broken is not None:
                raise UserError(f"{name}:{broken[0]}: {broken[1]}")
            value = _parse(line)
            if isinstance(value, dict):
                yield number, line, value
            else:
                broken = number, value
    except BrokenDataError as error:
        raise UserError(f"{name}: {error}") from None
    if not getattr(getattr(stream, "raw", None), "is_whole", True):
        notes.append("the compressed data is cut short; later lines are missing")
    if broken is not None:
        notes.append(f"line {broken[0]}, the last one, is incomplete and was left out")


def _parse(line: bytes) -> dict[str, Any] | str:
    """Return a line's object, or the reason why it has none."""
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "the text is not valid UTF-8"
    except ValueError as error:
        return str(error)
    return value if isinstance(value, dict) else "a line must be a JSON object, {...}"


def write_lines(path: str, lines: Iterable[bytes]) -> None:
    """Replace a file by result lines, in the format of its name; a reader never sees a part of it.

    Args:
        path: A name as `bass generate --out` takes it.
        lines: Each with its line end. A parquet file's are held in a temporary file meanwhile.

    Raises:
        MachineError: The file cannot be written; it is as it was.
    """

    def write(out: IO[bytes]) -> None:
        kind = compression_of(path)
        if is_parquet_name(path):
            with tempfile.TemporaryFile() as held:
                held.writelines(lines)
                write_parquet(_from_start(held), _from_start(held), out)
        elif kind is None:
            out.writelines(lines)
        else:
            compressor = Compressor(kind)
            for line in lines:
                out.write(compressor.add(line, flush=False))
            out.write(compressor.end())

    with os_errors_as(MachineError, f"{path}: cannot write the lines"):
        replace_file(path, write).close()


def _from_start(stream: IO[bytes]) -> Iterator[bytes]:
    stream.seek(0)
    yield from stream
