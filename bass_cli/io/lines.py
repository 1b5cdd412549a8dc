"""Read a file of samples line by line: of bass in any of its formats, or JSON lines of other tools.

A killed run leaves a torn last line, which is left out with a note. io/resume.py reads the same
files before a run continues them, and repairs them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from bass_cli.errors import UserError
from bass_cli.io.compressed import BrokenDataError, Expanded, begun
from bass_cli.io.linefile import live_path, result_lines
from bass_cli.reading import open_regular, parse_json

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
    stream = sys.stdin.buffer
    kind = begun(stream.peek(4)) if isinstance(stream, io.BufferedReader) else None
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
