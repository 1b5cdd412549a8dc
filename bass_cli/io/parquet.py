"""Convert result lines to a parquet file and back, without any loss.

A column has the type of its field; a field of any JSON value, such as `meta`, is a text that holds
JSON. `messages` are lists of objects with role and content where all messages have just these, as
chat data sets do, else JSON as well. A field that no line has gets no column, except `error`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from bass_cli.errors import UserError, first_line
from bass_cli.reading import is_unicode, parse_object

if TYPE_CHECKING:
    import pyarrow

MAGIC = b"PAR1"
_ROWS, _BYTES = 2048, 32 * 2**20  # the most rows and bytes of lines in a row group
_ALWAYS = "error"
_JSON = {b"bass": b"json"}  # metadata of a column whose texts hold JSON
_PAIRS = {b"bass": b"pairs"}  # metadata of a column of lists of [id, number] pairs
_OPTIONAL = {b"bass.optional": b"1"}  # metadata of a column whose nulls are missing fields
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def is_parquet(stream: IO[bytes]) -> bool:
    """Whether a stream begins like a parquet file; it is then at its start."""
    start = stream.read(4)
    stream.seek(0)
    return start == MAGIC


def write_parquet(lines: Iterable[bytes], again: Iterable[bytes], out: IO[bytes]) -> None:
    """Write result lines to a stream. OSError if that fails.

    Args:
        lines: The lines, from which the columns are found.
        again: The same lines, which are written.
    """
    import pyarrow

    shape = _Shape()
    for line in lines:
        shape.add(parse_object(line))
    try:
        _write(again, shape.schema(), out)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise OSError(f"pyarrow: {error}") from None


def _write(again: Iterable[bytes], schema: pyarrow.Schema, out: IO[bytes]) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        rows, size = list[dict[str, Any]](), 0
        for line in again:
            rows.append(_packed(parse_object(line), schema))
            size += len(line)
            if len(rows) == _ROWS or size > _BYTES:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows, size = [], 0
        if rows:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def lines_of_parquet(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines that a parquet file was made of, or those of its rows if bass did not make
    it. UserError if it is broken."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(stream)
        schema = file.schema_arrow
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield _line(_unpacked(row, schema)) + b"\n"
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        reason = first_line(error)
        raise UserError(f"{name}: broken parquet: {reason}") from None


def _line(row: dict[str, Any]) -> bytes:
    """Format a row as JSON; lone surrogates are escaped."""
    try:
        return _encode(row).encode()
    except UnicodeEncodeError:
        return json.dumps(row, allow_nan=False).encode()


class _Shape:
    """The columns that rows need, found row by row. Inside `samples` it is the same by sample."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}  # by key, in the order of a line
        self._seen: dict[str, int] = {}  # the number of rows that have it
        self._rows = 0
        self._inner: _Shape | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        before: str | None = None
        self._rows += 1
        for key, value in row.items():
            kind = _kind_of(key, value)
            if key not in self._kinds:
                self._insert(key, before)
            self._kinds[key] = _wider(self._kinds[key], kind)
            self._seen[key] = self._seen.get(key, 0) + 1
            before = key
            if kind == "samples":
                self._inner = self._inner or _Shape()
                for sample in value:
                    self._inner.add(sample)

    def _insert(self, key: str, before: str | None) -> None:
        """Add a column after the one that precedes it in the line that first has it."""
        keys = list(self._kinds)
        place = 0 if before is None else keys.index(before) + 1
        keys.insert(place, key)
        self._kinds = {one: self._kinds.get(one, "null") for one in keys}

    def schema(self) -> pyarrow.Schema:
        import pyarrow

        return pyarrow.schema(self._fields(top=True))

    def _fields(self, *, top: bool = False) -> list[Any]:
        import pyarrow

        fields = []
        if top and _ALWAYS not in self._kinds:
            self._kinds[_ALWAYS] = "null"
        for key, kind in self._kinds.items():
            note = {"json": _JSON, "pairs": _PAIRS}.get(kind, {})
            if self._seen.get(key, 0) < self._rows:
                note = note | _OPTIONAL
            if kind == "samples":
                inner = self._inner._fields() if self._inner else []
                type_ = pyarrow.list_(pyarrow.struct(inner)) if inner else pyarrow.string()
                note = note if inner else note | _JSON
            else:
                type_ = _arrow(key, kind)
            fields.append(pyarrow.field(key, type_, metadata=note or None))
        return fields


def _kind_of(key: str, value: Any) -> str:
    """Return the kind of column that a value needs."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float, str)):
        return type(value).__name__
    if not isinstance(value, list):
        return "json"
    if key == "samples" and all(isinstance(one, dict) for one in value):
        return "samples"
    if key == "messages" and all(_is_plain_message(one) for one in value):
        return "messages"
    if all(one is None for one in value):  # as the log-probabilities of a prompt of one token
        return "empty"
    if all(type(one) is int for one in value):
        return "ints"
    if all(one is None or type(one) in (int, float) for one in value):
        return "floats"
    places = [place for place in value if place is not None]
    pairs = all(isinstance(place, list) and all(map(_is_pair, place)) for place in places)
    return "pairs" if pairs else "json"


def _is_plain_message(message: Any) -> bool:
    plain = isinstance(message, dict) and set(message) == {"role", "content"}
    return plain and all(isinstance(value, str) for value in message.values())


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and type(value[0]) is int
        and type(value[1]) in (int, float)
    )


_WIDER = {
    ("int", "float"): "float",
    ("ints", "floats"): "floats",
    **{("empty", kind): kind for kind in ("ints", "floats", "pairs", "messages", "samples")},
}


def _wider(one: str, other: str) -> str:
    """Return the kind of a column that has values of both kinds."""
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    return _WIDER.get((one, other)) or _WIDER.get((other, one)) or "json"


def _arrow(key: str, kind: str) -> Any:
    import pyarrow as pa

    number, text = pa.float64(), pa.string()
    if kind == "null":
        number_key = key.endswith("logprob")
        return number if number_key else text
    return {
        "bool": pa.bool_(),
        "int": pa.int64(),
        "float": number,
        "str": text,
        "json": text,
        "ints": pa.list_(pa.int64()),
        "empty": pa.list_(pa.int64()),
        "floats": pa.list_(number),
        "messages": pa.list_(pa.struct([("role", text), ("content", text)])),
        "pairs": pa.list_(pa.list_(pa.struct([("id", pa.int64()), ("logprob", number)]))),
    }[kind]


def _packed(row: Mapping[str, Any], fields: Iterable[Any]) -> dict[str, Any]:
    """Return a line's object as a row of a table with these fields."""
    found: dict[str, Any] = {}
    for field in fields:
        value, note = row.get(field.name), field.metadata or {}
        if value is None:
            found[field.name] = None
        elif note.get(b"bass") == b"json":
            found[field.name] = _text(_encode(value))
        elif note.get(b"bass") == b"pairs":
            found[field.name] = [
                place and [{"id": id_, "logprob": number} for id_, number in place]
                for place in value
            ]
        elif field.name == "samples":
            inner = list(field.type.value_type)
            found[field.name] = [_packed(sample, inner) for sample in value]
        else:
            found[field.name] = _text(value) if isinstance(value, str) else value
    return found


def _text(text: str) -> str:
    """Return a text that UTF-8 can hold; lone surrogates become escapes."""
    return text if is_unicode(text) else text.encode("utf-8", "backslashreplace").decode()


def _unpacked(row: Mapping[str, Any], fields: Iterable[Any]) -> dict[str, Any]:
    """Return the line's object that `_packed` made the row of."""
    found: dict[str, Any] = {}
    for field in fields:
        value, note = row[field.name], field.metadata or {}
        if value is None:
            if b"bass.optional" not in note:
                found[field.name] = None
        elif note.get(b"bass") == b"json":
            found[field.name] = json.loads(value)
        elif note.get(b"bass") == b"pairs":
            found[field.name] = [
                place and [[one["id"], one["logprob"]] for one in place] for place in value
            ]
        elif field.name == "samples" and isinstance(value, list):
            inner = list(field.type.value_type)
            found[field.name] = [_unpacked(sample, inner) for sample in value]
        else:
            found[field.name] = value
    return found
