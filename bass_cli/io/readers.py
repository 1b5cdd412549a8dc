"""Read the records of prompt files, standard input and Hugging Face datasets, by format.

A Source can be read more than once: it yields pairs of a line (or row) number and a JSON value, one
at a time. A fault is a UserError that names file and line. Prompts are made of records in
io/prompts.py. Datasets of the hub are in io/hub.py.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import hashlib
import io
import json
import re
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from bass_cli.errors import MachineError, UserError, first_line, nearest
from bass_cli.io.compressed import (
    BrokenDataError,
    Expanded,
    Kind,
    compression_by_name,
    compression_by_start,
)
from bass_cli.io.hub import hub_records, plain
from bass_cli.reading import RefusedJsonError, broken_json, no_constant, os_errors_as, unquoted

Records = Iterator[tuple[int, Any]]
BOM = b"\xef\xbb\xbf"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
IN_MEMORY = 64 * 2**20  # bytes of standard input, before they go to a temporary file
# bytes; a million tokens take some 5 MB, and several copies of a line are in memory
LONGEST_LINE = 64 * 2**20
# bytes of a .json file; the whole file and its values are in memory
_LONGEST_LIST = 2**30
_BLOCK = 2**20
_NOT_BLANK = re.compile(r"[^ \t\r\n]")
# Columns of a table whose cells hold JSON
_STRUCTURED = ("messages", "conversations", "token_ids", "meta", "tools", "template_args")


@dataclass(frozen=True, slots=True)
class Source:
    """A source of prompts that can be read more than once.

    `kind` is a file format or "hf". `spooled` is the content of standard input. `separator` stands
    between the prompts of a text file; None if each line is one. `compression` is the file's.
    `constants`: JSON may have NaN and Infinity, as Python writes it.
    `id_column` is the field with the id of every prompt; None for "id", where there is one.
    `change` returns the records to use in place of a stored one: none, one or several. Its second
    argument is the place of the stored record, for messages.
    """

    name: str
    kind: str
    spooled: IO[bytes] | None = None
    separator: str | None = None
    compression: Kind | None = None
    id_column: str | None = None
    constants: bool = False
    change: Callable[[Any, str], Iterable[Any]] | None = None

    def records(self) -> Records:
        """Yield the records in order, one at a time; UserError at a fault of the format.

        A record is a JSON value, or the text of a line; its number is that of its line or row.
        """
        found, change = self._stored(), self.change
        if change is None:
            yield from found
            return
        for at, record in found:
            yield from ((at, one) for one in change(record, f"{self.label}:{at}"))

    def _stored(self) -> Records:
        if self.kind == "hf":
            yield from hub_records(self.name)
            return
        with self.open() as stream:
            if self.separator is not None:
                yield from _read_pieces(stream, self.label, self.separator)
            elif self.constants and self.kind in ("jsonl", "json"):
                read = _read_json if self.kind == "json" else _read_jsonl
                yield from read(stream, self.label, _PYTHON_DECODER)
            else:
                yield from _READERS[self.kind](stream, self.label)

    @property
    def is_remote(self) -> bool:
        """Whether it is a dataset of the hub, not of a folder here."""
        folder = Path(self.name.removeprefix("hf:").partition(":")[0])
        return self.kind == "hf" and not folder.is_dir()

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.name if self.spooled is None else "stdin"

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the content, expanded, at its start. UserError if the compressed data is broken."""
        if self.spooled is not None:
            self.spooled.seek(0)
            yield self.spooled
            return
        with open(self.name, "rb") as stream:
            if self.compression is None:
                yield stream
                return
            try:
                yield io.BufferedReader(Expanded(stream, self.compression), _BLOCK)
            except BrokenDataError as error:
                raise UserError(f"{self.label}: {error}") from None

    def digest(self) -> str | None:
        """Return the SHA-256 of the content, in hexadecimal; None for a dataset of the hub."""
        if self.kind == "hf":
            return None
        with self.open() as stream:
            summary = hashlib.sha256()
            while block := stream.read(_BLOCK):
                summary.update(block)
            return summary.hexdigest()


def open_source(source: str, separator: str | None = None) -> Source:
    """Open "-", "hf:NAME[:CONFIG][:SPLIT]" or a path. Standard input is read to its end.

    `separator`: see Source; UserError if the source is not text.
    """
    found = _opened(source, text=separator is not None)
    if separator is None:
        return found
    if found.kind != "txt":
        raise UserError(f"`separator`: {found.label} is not a text file; leave it out")
    return replace(found, separator=separator)


def _opened(source: str, *, text: bool) -> Source:
    """Open a source. `text`: standard input is text."""
    if source == "-":
        if sys.stdin is None:
            raise UserError("stdin: it is closed; name a prompt file, or redirect one: < FILE")
        return _spool(sys.stdin.buffer, text=text)
    if source.startswith("hf:"):
        return Source(source, "hf")
    path, packed = Path(source), compression_by_name(source)
    suffix = (path.with_suffix("") if packed else path).suffix
    kind = suffix.lower().removeprefix(".")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(
                f"{source}: this is a folder; name a prompt file, or write hf:{source} for a data "
                "set of Hugging Face"
            )
        if not stat.S_ISREG(mode):  # it is read twice, and a device may have no end
            raise UserError(
                f"{source}: this is a pipe or a device, not a file; read it from standard input "
                f"instead: - < {source}"
            )
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file's name
        raise UserError(f"{source}: there is no such prompt file") from None
    except OSError as error:
        raise UserError(f"{source}: cannot read the prompt file: {error.strerror}") from None
    if kind not in _READERS or (packed and kind == "parquet"):
        hint = nearest(suffix, (f".{kind}" for kind in _READERS))
        last = suffix + (path.suffix if packed else "")
        raise UserError(f'{source}: a prompt file cannot end in "{last}"; {hint}')
    return Source(source, kind, compression=packed)


def _spool(stream: IO[bytes], *, text: bool) -> Source:
    fault = f"stdin: input of more than {IN_MEMORY >> 20} MB needs a temporary file"
    remedy = "set TMPDIR to a folder with free space, or name a prompt file"
    spooled = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
    with os_errors_as(UserError, "stdin: cannot read it"):
        start = stream.peek(4) if isinstance(stream, io.BufferedReader) else b""
    if (packed := compression_by_start(start)) is not None:
        stream = io.BufferedReader(Expanded(stream, packed), _BLOCK)
    try:
        for block in _until_fault(stream):
            with os_errors_as(MachineError, fault, remedy):
                spooled.write(block)
    except BrokenDataError as error:
        raise UserError(f"stdin: {error}") from None
    source = Source("-", "txt", spooled)
    with source.open() as lines:
        return source if text else Source("-", format_of(lines), spooled)


def _until_fault(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield standard input in blocks, up to its end or just beyond a fault.

    Input that is not UTF-8, or has no line ends, may be endless. The format's reader reports the
    fault.
    """
    decoder, length = codecs.getincrementaldecoder("utf-8")(), 0
    read = stream.read1 if isinstance(stream, io.BufferedReader) else stream.read
    while True:
        with os_errors_as(UserError, "stdin: cannot read it"):
            block = read(_BLOCK)
        if not block:
            return
        yield block
        end = block.rfind(b"\n")
        length = length + len(block) if end < 0 else len(block) - end - 1
        try:
            decoder.decode(block)
        except UnicodeDecodeError:
            return
        if length > LONGEST_LINE:
            return


def format_of(lines: Iterable[bytes]) -> str:
    """Guess the format of input without a file name from its first line that is not blank.

    "{" means JSON lines. "[" followed by an object, a string or nothing means JSON. All else is
    text, such as "[INST]".
    """
    start = next((line.lstrip(BOM + b" \t") for line in lines if line.strip(BOM + b" \t\r\n")), b"")
    if start.startswith(b"{"):
        return "jsonl"
    listed = start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b'"', b"")
    listed = listed or start.strip() == b"[]"
    return "json" if listed else "txt"


def _text_lines(
    stream: IO[bytes], name: str, *, longest: int = LONGEST_LINE
) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, from 1, without a byte-order mark at the start.

    UserError at a line of more than `longest` bytes; no more of it is read.
    """
    for number, raw in enumerate(iter(functools.partial(stream.readline, longest + 1), b""), 1):
        if len(raw) > longest:
            raise UserError(
                f"{name}:{number}: the line has more than {longest >> 20} MB, the most that a "
                "prompt may have"
            )
        line = raw.removeprefix(BOM) if number == 1 else raw
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
            if number == 1 and raw.startswith(_UTF16):
                bad = "it begins like UTF-16"
            raise UserError(
                f"{name}:{number}: the text is not valid UTF-8: {bad}; save the file as UTF-8"
            ) from None


def _read_txt(stream: IO[bytes], name: str) -> Records:
    """Yield the lines that are not blank, without their line ends."""
    return (
        (number, line.rstrip("\r\n")) for number, line in _text_lines(stream, name) if line.strip()
    )


def _read_pieces(stream: IO[bytes], name: str, separator: str) -> Records:
    """Yield the texts between separators that are not blank, each with the line of its start.

    Line ends are those of Unix. The last text is without the line end of the file.
    """
    text, line, next_line, searched = "", 1, 1, 0
    for number, one in _text_lines(stream, name):
        text += one[:-2] + "\n" if one.endswith("\r\n") else one
        next_line = number + 1
        while (at := text.find(separator, searched)) >= 0:
            if text[:at].strip():
                yield line, text[:at]
            text, searched = text[at + len(separator) :], 0
            open_line = bool(text) and not text.endswith("\n")
            line = next_line - text.count("\n") - open_line
        searched = max(0, len(text) - len(separator) + 1)
        if len(text) > LONGEST_LINE:
            raise UserError(
                f"{name}:{line}: the text up to the next separator has more than "
                f"{LONGEST_LINE >> 20} MB, the most that a prompt may have"
            )
    if text.strip():
        yield line, text.removesuffix("\n")


def _read_csv(stream: IO[bytes], name: str, *, delimiter: str = ",") -> Records:
    """Yield the rows of a table with a header, as objects; an empty cell is null.

    A cell of a column with structured values holds JSON. Each row has the line of its start.
    """
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(
        (line for _, line in _text_lines(stream, name)), delimiter=delimiter, strict=True
    )
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            reason = "the end of a quoted cell is missing" if "end of data" in str(error) else error
            raise UserError(f"{name}:{start}: broken table: {reason}") from None
        if cells is None:
            return
        if cells and header is None:
            header = [cell or f"column {place}" for place, cell in enumerate(cells, 1)]
            if (twice := Counter(header).most_common(1)[0])[1] > 1:
                raise UserError(f'{name}:{start}: two columns are called "{unquoted(twice[0])}"')
        elif header is not None and cells:
            if len(cells) != len(header):
                raise UserError(
                    f"{name}:{start}: the row has {len(cells)} cells, and the header has "
                    f"{len(header)}"
                )
            yield (
                start,
                {
                    key: _cell(cell, key, f"{name}:{start}")
                    for key, cell in zip(header, cells, strict=True)
                },
            )
        start = rows.line_num + 1


def _cell(cell: str, column: str, place: str) -> Any:
    if not cell or column not in _STRUCTURED:
        return cell or None
    try:
        return _DECODER.decode(cell)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'{place}: field "{column}": it must hold JSON: {broken_json(error)}'
        ) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; refuse a key that is given twice, because one of its values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = (Counter(key for key, _ in pairs)).most_common(1)
        raise RefusedJsonError(f'the key "{unquoted(key)}" is given twice in one object')
    return found


_DECODER = json.JSONDecoder(parse_constant=no_constant, object_pairs_hook=_without_duplicates)
_PYTHON_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _read_jsonl(stream: IO[bytes], name: str, decoder: json.JSONDecoder = _DECODER) -> Records:
    """Yield one JSON value a line; skip blank lines."""
    for number, line in _read_txt(stream, name):
        try:
            yield number, decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}:{number}: {broken_json(error)}") from None


def _read_json(stream: IO[bytes], name: str, decoder: json.JSONDecoder = _DECODER) -> Records:
    """Yield the items of one JSON list, each with the line on which it starts."""
    content = stream.read(_LONGEST_LIST + 1)
    if len(content) > _LONGEST_LIST:
        raise UserError(
            f"{name}:1: a .json file may have at most {_LONGEST_LIST >> 20} MB, because it is read "
            "as a whole; convert it to .jsonl"
        )
    text = "".join(
        line for _, line in _text_lines(io.BytesIO(content), name, longest=_LONGEST_LIST)
    )
    position, line = 0, 1

    def sign(start: int) -> str:
        """Go to the first character from `start` on that is not blank; return it, "" at the end."""
        nonlocal position, line
        found = _NOT_BLANK.search(text, start)
        end = found.start() if found else len(text)
        line += text.count("\n", position, end)
        position = end
        return text[end : end + 1]

    if sign(0) != "[":
        lines = "; rename a file of JSON lines to .jsonl" if sign(position) == "{" else ""
        raise UserError(
            f"{name}:{line}: a .json file of prompts is one list: [{{...}}, ...]{lines}"
        )
    following = sign(position + 1)
    while following != "]":
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            here = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise UserError(f"{name}:{here}: {broken_json(error, with_line=False)}") from None
        yield line, value
        following = sign(end)
        if following == ",":
            following = sign(position + 1)
            if following == "]":
                raise UserError(f'{name}:{line}: broken JSON: "," before the closing "]"')
        elif following != "]":
            raise UserError(
                f'{name}:{line}: broken JSON: a "," or the closing "]" of the list is missing'
            )
    if sign(position + 1):
        raise UserError(f"{name}:{line}: broken JSON: something follows the end of the list")


def _read_parquet(stream: IO[bytes], name: str) -> Records:
    """Yield the rows of a parquet file, numbered from 1; a small batch is in memory at a time."""
    import pyarrow.parquet

    number = 1
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        for column, count in Counter(file.schema_arrow.names).items():
            if count > 1:
                raise ValueError(f'{count} columns are called "{column}"')
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield number, plain(row)
                number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{name}:{number}: broken parquet: {first_line(error)}") from None


_READERS: dict[str, Callable[[IO[bytes], str], Records]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "txt": _read_txt,
    "parquet": _read_parquet,
    "csv": _read_csv,
    "tsv": functools.partial(_read_csv, delimiter="\t"),
}
