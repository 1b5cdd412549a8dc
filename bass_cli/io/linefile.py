"""Read and write files of result lines in any format: plain, compressed, parquet with its journal.

A row group cannot be added to a parquet file after a kill. So the lines of a parquet output go to a
journal beside it, NAME.parquet.jsonl.zst, until the job is complete (io/parquet.py). A compressed
file has one member, because some readers stop after the first. It is written again when a killed
run goes on. `LineFile` is an output that grows (io/results.py). `read_records` reads any file of
samples; `write_lines` writes a whole one in one step.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from bass_cli.errors import MachineError, UserError
from bass_cli.io.compressed import (
    BrokenDataError,
    Chunks,
    Compressor,
    Expanded,
    compression_by_name,
    compression_by_start,
    compression_in,
)
from bass_cli.io.parquet import MAGIC as PARQUET
from bass_cli.io.parquet import is_parquet, lines_of_parquet, write_parquet
from bass_cli.io.saving import replace_file
from bass_cli.reading import open_regular, os_errors_as, parse_json

# Suffixes of outputs; other names, without the suffix of a known format, are plain JSON lines
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
OUTPUTS = (*LINES, ".parquet")
_BLOCK = 2**20
Record = tuple[int, bytes, dict[str, Any]]  # line number from 1, the line, its object
LINE_BYTES = 1 << 26  # most bytes of a line; a small gzip file can hold a line of any length
# A run of NUL bytes of this length in compressed data is a block that a power cut left unwritten
_HOLE = bytes(64)


def stem_of(output: str) -> str:
    """Return an output's name without the suffix of its format."""
    suffix = next((one for one in OUTPUTS if output.lower().endswith(one)), "")
    return output[: len(output) - len(suffix)]


def name_beside(output: str, suffix: str) -> str:
    """Return the name of a file on an output: o.jsonl gives o and the suffix. Other formats stay in
    the name (o.jsonl.zst: o.zst), so that two outputs never share it."""
    stem = stem_of(output)
    return stem + output[len(stem) :].lower().removeprefix(LINES[0]) + suffix


def is_parquet_name(output: str) -> bool:
    """Whether an output of this name is a parquet file."""
    return Path(output).suffix.lower() == ".parquet"


def journal_of(output: str) -> str | None:
    """Return the name of the journal of a parquet output; None for other outputs."""
    return f"{output}.jsonl.zst" if is_parquet_name(output) else None


def live_path(output: str) -> str:
    """Return the file that has an output's newest lines: its journal if that has content."""
    journal = journal_of(output)
    has_journal = journal and os.path.exists(journal) and os.path.getsize(journal)
    return journal if journal and has_journal else output


class LineFile:
    """An open and locked file of lines that grows.

    Args:
        stream: Open to read and append.
        name: Its path; the suffix says how it is compressed.

    Attributes:
        end: The size of the file, in bytes, if nothing else writes to it.
    """

    def __init__(self, stream: IO[bytes], name: str):
        self.stream, self.name = stream, name
        self._kind = compression_by_name(name)
        self._compressor: Compressor | None = None
        self._is_whole = True  # whether the compressed file is one member with an end
        self.end = 0

    def lines(self) -> Iterator[bytes]:
        """Yield the lines from the start; the last one may be torn.

        Compressed data is read as far as it was written. UserError if it is broken; data after a
        hole that a power cut left is passed over, and counts as torn.
        """
        self.stream.seek(0)
        if self._kind is None:
            yield from self.stream
            return
        inner = Expanded(self.stream, self._kind, torn=True)
        try:
            yield from io.BufferedReader(inner, _BLOCK)
        except BrokenDataError as error:
            if not self._has_hole(self.stream.tell()):
                raise UserError(
                    f"{self.name}: {error}; repair it, or start again with `overwrite`"
                ) from None
            inner.is_whole = False
        self._is_whole = inner.is_whole and inner.members <= 1

    def _has_hole(self, place: int) -> bool:
        self.stream.seek(max(place - 2 * 4096, 0))
        return _HOLE in self.stream.read(4 * 4096)

    def begin(self, kept: Iterable[bytes], end: int, *, changed: bool, appending: bool) -> None:
        """Remove what is not kept, before the first new line or the end of the run.

        Args:
            kept: The lines to keep, without line ends that are missing.
            end: The size of the kept lines, if they are the beginning of a plain file.
            changed: Whether they are not the beginning of the file.
            appending: Whether lines will be added.
        """
        if self._kind is not None and end:
            changed |= appending or not self._is_whole
        if changed:
            self._replace(kept)
        elif self._kind is None or not end:
            self.stream.truncate(end)
        self.end = os.fstat(self.stream.fileno()).st_size

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Replace the content in one step. The new stream holds the lock of the new file."""

        def copy(fresh: IO[bytes]) -> None:
            for line in lines:
                fresh.write(self._packed(line, flush=False))
            fresh.write(self._packed(b""))

        fresh = replace_file(self.name, copy)
        self.stream.close()
        self.stream = fresh

    def add(self, line: bytes) -> None:
        """Append a line. It can be read at once."""
        packed = self._packed(line)
        self.stream.write(packed)
        self.stream.flush()
        self.end += len(packed)

    def _packed(self, line: bytes, *, flush: bool = True) -> bytes:
        if self._kind is None:
            return line
        if self._compressor is None:
            self._compressor = Compressor(self._kind)
        return self._compressor.add(line, flush=flush)

    def sync(self) -> None:
        """Write the lines to the disk."""
        os.fsync(self.stream.fileno())

    def finish(self) -> None:
        """End the compressed data, if this run has written any."""
        if self._compressor is not None:
            ending, self._compressor = self._compressor.end(), None
            self.stream.write(ending)
            self.stream.flush()
            self.end += len(ending)


def result_lines(stream: IO[bytes], name: str) -> IO[bytes]:
    """Return the lines of a file of samples, in any format of an output, as a stream.

    The format is that of the content. A compressed file may be cut short. BrokenDataError, also
    while the stream is read, if the data is broken.
    """
    if is_parquet(stream):
        return io.BufferedReader(Chunks(lines_of_parquet(stream, name)), _BLOCK)
    kind = compression_in(stream)
    return stream if kind is None else io.BufferedReader(Expanded(stream, kind, torn=True), _BLOCK)


def seekable_lines(stream: IO[bytes], name: str) -> IO[bytes]:
    """Return `result_lines` as a stream with places: the file itself, or a temporary one."""
    found = result_lines(stream, name)
    if found is stream:
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        shutil.copyfileobj(found, copy, _BLOCK)
    except BrokenDataError as error:
        raise UserError(f"{name}: {error}") from None
    copy.seek(0)
    return copy


# Files of samples that do not grow


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
    kind = compression_by_start(start)
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
        kind = compression_by_name(path)
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
