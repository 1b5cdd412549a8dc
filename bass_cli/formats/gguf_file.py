"""The header of a GGUF file: metadata, and the place of each tensor.

The reader of the gguf package takes 3 to 10 s for a large vocabulary. Not here: the meaning of
metadata and tensors (gguf_config.py), a tensor's content (tensor_content.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.formats.tensor_files import DIMENSIONS, HEADER_LIMIT, Entry, check_places, opened
from bass_cli.io.reading import LARGEST

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_ENTRIES = 1 << 16  # most fields or tensors of a file; a model has hundreds
_ITEMS = 1 << 22  # most numbers in one array; a vocabulary has hundreds of thousands
_LENGTH = struct.Struct("<Q")
_EMBEDDING = "token_embd.weight"

# A tensor in the header: shape, rows first; number of its type; offset in bytes.
_Info = tuple[tuple[int, ...], int, int]


class Texts(NamedTuple):
    """The place of an array of strings in a file: offset of its first byte, number of strings."""

    start: int
    length: int


class Header(NamedTuple):
    """The header of a file.

    metadata: values by key, with `Texts` in place of arrays of strings (the vocabulary).
    entries: tensors by name.
    vocabulary: digest of everything that the tokenizer is read from.
    """

    metadata: dict[str, Any]
    entries: dict[str, Entry]
    vocabulary: str


def read_gguf(path: Path) -> Header:
    """Read the header of a file. The result is cached: do not change it.

    Raises:
        UserError: the file cannot be read or its header is corrupt.
    """
    identity: tuple[int, ...] = ()
    with contextlib.suppress(OSError):  # _read reports the error
        status = path.stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return _read(path, identity)


def read_texts(path: Path, texts: Texts) -> list[bytes]:
    """Read an array of strings, which need not be UTF-8.

    Raises:
        UserError: the file cannot be read, or has changed since its header was read.
    """
    length_at, at, found = _LENGTH.unpack_from, texts.start, list[bytes]()
    with opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for _ in range(texts.length):
                begin = at + _LENGTH.size
                at = begin + length_at(data, at)[0]
                found.append(data[begin:at])
        except (struct.error, OverflowError):
            raise UserError(f"{path}: the header is truncated or corrupt near byte {at}") from None
        if at > len(data):
            raise UserError(f"{path}: the header is truncated or corrupt near byte {at}")
    return found


# Tokenizer and checkpoint read the same header. Two entries: a target and a draft.
@functools.lru_cache(maxsize=2)
def _read(path: Path, identity: tuple[int, ...]) -> Header:
    with opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        if total < 24:
            raise UserError(
                f"{path}: the file is truncated: it has {total} bytes, too few for a GGUF file"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, infos, end, digest = _header(path, data)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise UserError(f'{path}: key "general.alignment": {alignment!r} is not valid')
    begin = -(-end // alignment) * alignment
    entries = {
        name: _entry(path, name, dims, kind, begin + offset)
        for name, (dims, kind, offset) in infos.items()
    }
    check_places(path, total, entries)
    rows = infos[_EMBEDDING][0][:1] if _EMBEDDING in infos else ()
    named = [metadata.get(f"general.{key}") for key in ("architecture", "name")]
    digest.update(repr((*named, rows)).encode())
    return Header(metadata, entries, digest.hexdigest())


def _header(
    path: Path, data: mmap.mmap
) -> tuple[dict[str, Any], dict[str, _Info], int, hashlib._Hash]:
    """Return metadata, tensors by name, the header's end, and a digest of the tokenizer's keys."""
    magic, version, tensors, fields = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in _VERSIONS:
        raise UserError(
            f"{path}: not a GGUF file of version 2 or 3 (it begins with {magic!r}, {version})"
        )
    if max(tensors, fields) > _ENTRIES:
        raise UserError(
            f"{path}: the header is corrupt: {tensors} tensors and {fields} fields are too many "
            f"for a model; the limit is {_ENTRIES}"
        )
    cursor, metadata, digest = _Cursor(data), dict[str, Any](), hashlib.sha256()
    try:
        for _ in range(fields):
            begin, name = cursor.at, cursor.text()
            metadata[name] = cursor.value(cursor.scalar("I"))
            if name.startswith("tokenizer."):
                digest.update(data[begin : cursor.at])
        infos = dict(cursor.tensor_info() for _ in range(tensors))
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError):
        raise UserError(
            f"{path}: the header is truncated or corrupt near byte {cursor.at}"
        ) from None
    if len(metadata) < fields or len(infos) < tensors:
        raise UserError(f"{path}: the header is corrupt: a field or a tensor occurs twice")
    return metadata, infos, cursor.at, digest


class _Cursor:
    """Read a GGUF header from front to back.

    Methods raise struct.error or OverflowError where the header is truncated or has impossible
    values.
    """

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 24

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        begin = self.at + _LENGTH.size
        self._skip_texts(1)
        return self.data[begin : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        """Read a field's value of the given type; an array of strings gives `Texts`."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            texts = Texts(self.at, length)
            self._skip_texts(length)
            return texts
        if length > _ITEMS:
            raise OverflowError
        code = _SCALARS[kind]
        values = struct.unpack_from(f"<{length}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{length}{code}")
        return list(values)

    def tensor_info(self) -> tuple[str, _Info]:
        """Read the name of a tensor, and its _Info."""
        name, dimensions = self.text(), self.scalar("I")
        if dimensions > DIMENSIONS:
            raise OverflowError
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return name, (shape, self.scalar("I"), self.scalar("Q"))

    def _skip_texts(self, count: int) -> None:
        """Skip strings without decoding them: a vocabulary and its merges have 300,000."""
        length_at, data, at = _LENGTH.unpack_from, self.data, self.at
        limit = min(len(data), HEADER_LIMIT)
        for _ in range(count):
            at += _LENGTH.size + length_at(data, at)[0]
            if at > limit:
                raise OverflowError
        self.at = at


def _entry(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        dtype = GGMLQuantizationType(kind)
    except ValueError:
        raise UserError(
            f'{path}: tensor "{name}" has type {kind}, which the gguf package does not know'
        ) from None
    block, size = GGML_QUANT_SIZES[dtype]
    if not all(shape) or not shape or shape[-1] % block or math.prod(shape) > LARGEST:
        raise UserError(
            f'{path}: the header is corrupt: tensor "{name}" of type {dtype.name} has shape {shape}'
        )
    return Entry(path, dtype.name, shape, start, math.prod(shape) // block * size)
