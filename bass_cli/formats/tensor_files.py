"""Read the headers of tensor files: names, types, shapes and places of their tensors.

Formats: safetensors, torch's zip format, both in a folder, and GGUF with its metadata (the reader
of the gguf package takes 3 to 10 s for a large vocabulary). Each header is checked against the
file's size, so a truncated or corrupt file is a UserError before anything large is read. torch is
imported for its own format only. Not here: a tensor's content (tensor_content.py), the meaning of
names (families.py) and of metadata (gguf_config.py).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import math
import mmap
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from bass_cli.errors import UserError, first_line, first_of
from bass_cli.formats.sources import read_json
from bass_cli.reading import (
    LARGEST,
    open_regular,
    os_errors_as,
    parse_object,
    refuse_pointer,
    shown,
    text,
    whole,
)
from bass_cli.system.postponed import complete_torch

if TYPE_CHECKING:
    from torch import Tensor

# Our names of unquantised types, by torch's names.
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Maximum bytes of a header: the limit of the safetensors format. GGUF headers are far smaller.
HEADER_LIMIT = 100 * 2**20
DIMENSIONS = 8  # maximum of a tensor; a decoder's have two
_SAFETENSORS_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
# GGUF: the numbers of its types
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_ENTRIES = 1 << 16  # most fields or tensors of a file; a model has hundreds
_ITEMS = 1 << 22  # most numbers in one array; a vocabulary has hundreds of thousands
_LENGTH = struct.Struct("<Q")
_EMBEDDING = "token_embd.weight"
# Names of the pieces of a model, and their keys
_PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PIECES, _NUMBER = "split.count", "split.no"
# A tensor in a GGUF header: shape, rows first; number of its type; offset in bytes.
_Info = tuple[tuple[int, ...], int, int]


class Entry(NamedTuple):
    """One stored tensor, in bytes [start, start + size) of `file`.

    dtype: one of FLOATS or gguf_blocks.QUANTISED, or another name that cannot be loaded.
    shape: rows first.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_safetensors(path: Path) -> dict[str, Entry]:
    """Return the tensors of a .safetensors file.

    Raises:
        UserError: the file is unreadable, truncated or corrupt.
    """
    with opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, HEADER_LIMIT):
            raise UserError(
                f"{path}: truncated or not safetensors: the header does not fit into {total} "
                "bytes; download or copy it again"
            )
        raw = file.read(length)
    try:
        header = parse_object(raw)
        entries = {
            name: _safetensors_entry(path, name, item, 8 + length)
            for name, item in header.items()
            if name != "__metadata__"
        }
    except ValueError as error:
        raise UserError(f"{path}: the header is corrupt: {error}") from None
    check_places(path, total, entries)
    return entries


def _safetensors_entry(path: Path, name: str, item: Any, begin: int) -> Entry:
    """Return the tensor that an item of a header describes. `begin`: the file's first byte of data.

    Raises:
        ValueError: names the tensor and the fault.
    """
    try:
        first, last = (whole(place) for place in item["data_offsets"])
        dtype, shape = text(item["dtype"]), tuple(whole(size) for size in item["shape"])
        size = last - first
        width = _SAFETENSORS_BYTES.get(dtype)
        if (
            len(shape) > DIMENSIONS
            or size < 0
            or (width is not None and math.prod(shape) * width != size)
        ):
            raise ValueError("its size does not fit its shape")
    except KeyError as error:
        raise ValueError(f'tensor "{name}" has no {error}') from None
    except TypeError:
        raise ValueError(f'tensor "{name}" is not described as in safetensors') from None
    except ValueError as error:
        raise ValueError(f'tensor "{name}": {error}') from None
    return Entry(path, dtype, shape, begin + first, size)


def read_torch(path: Path) -> dict[str, Entry]:
    """Return the tensors of a .bin file that torch.save wrote in its zip format. No code in it is
    run."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    complete_torch()
    entries: dict[str, Entry] = {}
    try:
        with opened(path) as file:
            total = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                if any(record.file_size != record.compress_size for record in archive.infolist()):
                    raise ValueError("its records are compressed")
            file.seek(0)
            with FakeTensorMode():
                state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("it holds no mapping of names to tensors")
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                entries[name] = _torch_entry(path, name, tensor)
    except UserError:
        raise
    except pickle.UnpicklingError:  # torch's own text advises to run code of the file
        raise UserError(
            f"{path}: the file is damaged or holds more than tensors, and no code in it is run; "
            "convert the checkpoint to safetensors"
        ) from None
    # a broken pickle, or one from before the zip format, may raise anything
    except Exception as error:
        reason = first_line(error)
        raise UserError(
            f"{path}: torch cannot read the file (truncated, or in the format of torch before "
            f"1.6): {reason}"
        ) from None
    check_places(path, total, entries, shared=True)
    return entries


def _torch_entry(path: Path, name: str, tensor: Tensor) -> Entry:
    if not tensor.is_contiguous():
        raise UserError(
            f'{path}: the tensor "{name}" is not stored contiguously; convert the checkpoint'
        )
    begin = tensor.untyped_storage()._checkpoint_offset
    if begin is None:
        raise ValueError(f'the tensor "{name}" has no place in the file')
    start = begin + int(tensor.storage_offset()) * tensor.element_size()
    dtype = str(tensor.dtype)
    return Entry(
        path,
        FLOATS.get(dtype.removeprefix("torch."), dtype),
        tuple(tensor.shape),
        start,
        int(tensor.numel()) * tensor.element_size(),
    )


class Texts(NamedTuple):
    """The place of an array of strings in a file: offset of its first byte, number of strings."""

    start: int
    length: int


class Header(NamedTuple):
    """The header of a GGUF file.

    metadata: values by key, with `Texts` in place of arrays of strings (the vocabulary).
    entries: tensors by name.
    vocabulary: digest of everything that the tokenizer is read from.
    """

    metadata: dict[str, Any]
    entries: dict[str, Entry]
    vocabulary: str


def read_gguf(path: Path) -> Header:
    """Read the header of a GGUF file, or of all pieces of one. The result is cached: do not change
    it.

    Raises:
        UserError: a file cannot be read or its header is corrupt, or the file is not the first
            piece.
    """
    identity: list[int] = []
    named = _PIECE.fullmatch(path.name)
    others = [] if named is None else path.parent.glob(f"{glob.escape(named['stem'])}-*.gguf")
    for file in (path, *sorted(others)):
        with contextlib.suppress(OSError):  # _read_gguf reports the error
            status = file.stat()
            identity += [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
    return _read_gguf(path, tuple(identity))


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
def _read_gguf(path: Path, identity: tuple[int, ...]) -> Header:
    metadata, entries, digest = _read_piece(path)
    for other in _other_pieces(path, metadata):
        for name, entry in _read_piece(other, piece_of=(path, metadata))[1].items():
            if name in entries:
                raise UserError(f'{other}: tensor "{name}" is in {entries[name].file.name} too')
            entries[name] = entry
    total = metadata.get("split.tensors.count")
    if total is not None and total != len(entries):
        raise UserError(
            f'{path}: key "split.tensors.count": {total!r}, but all pieces have {len(entries)} '
            "tensors; download the pieces again"
        )
    rows = entries[_EMBEDDING].shape[:1] if _EMBEDDING in entries else ()
    named = [metadata.get(f"general.{key}") for key in ("architecture", "name")]
    digest.update(repr((*named, rows)).encode())
    return Header(metadata, entries, digest.hexdigest())


def _read_piece(
    path: Path, piece_of: tuple[Path, dict[str, Any]] | None = None
) -> tuple[dict[str, Any], dict[str, Entry], hashlib._Hash]:
    """Return metadata and tensors of one file, and a digest of the tokenizer's keys.

    Args:
        piece_of: the first piece and its metadata, if the file is another one.
    """
    with opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        if total < 24:
            raise UserError(
                f"{path}: the file is truncated: it has {total} bytes, too few for a GGUF file"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, infos, end, digest = _gguf_header(path, data)
    first, known = piece_of or (path, metadata)
    count = metadata.get(_PIECES)
    if piece_of is not None and (count, metadata.get(_NUMBER)) != (known[_PIECES], _number(path)):
        raise UserError(
            f'{path}: keys "{_PIECES}" and "{_NUMBER}": {count!r} and {metadata.get(_NUMBER)!r} '
            f"do not fit its name; it is not a piece of {first.name}"
        )
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise UserError(f'{path}: key "general.alignment": {alignment!r} is not valid')
    begin = -(-end // alignment) * alignment
    entries = {
        name: _gguf_entry(path, name, dims, kind, begin + offset)
        for name, (dims, kind, offset) in infos.items()
    }
    if entries or count in (None, 0, 1):  # the first of several pieces may have no tensors
        check_places(path, total, entries)
    return metadata, entries, digest


def _other_pieces(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the files of the other pieces of a model whose first file this is; none if it is
    whole."""
    count = metadata.get(_PIECES)
    if count in (None, 0, 1):
        return []
    if type(count) is not int or not 1 < count <= _ENTRIES:
        raise UserError(f'{path}: key "{_PIECES}": a number of pieces is needed, not {count!r}')
    named = _PIECE.fullmatch(path.name)
    if named is None or int(named["count"]) != count or metadata.get(_NUMBER) != _number(path):
        raise UserError(
            f'{path}: key "{_PIECES}": the file is one of {count} pieces; give all of them their '
            f"own names, which end in -00001-of-{count:05}.gguf and so on"
        )
    pieces = [
        path.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if path != pieces[0]:
        raise UserError(f"{path}: the file is one of {count} pieces; name the first, {pieces[0]}")
    if missing := [piece for piece in pieces if not piece.exists()]:
        raise UserError(
            f"{missing[0]}: the file is missing; {path.name} is one of {count} pieces of a model"
        )
    return pieces[1:]


def _number(path: Path) -> int | None:
    """Return the number of a piece by its name, from 0."""
    named = _PIECE.fullmatch(path.name)
    return None if named is None else int(named["number"]) - 1


def _gguf_header(
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


def _gguf_entry(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
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


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        UserError: it cannot be opened.
    """
    with os_errors_as(UserError, f"{path}: cannot read the file"):
        file = open_regular(path)
        refuse_pointer(path, file.read(64))
        file.seek(0)
        return file


def check_places(
    path: Path, total: int, entries: dict[str, Entry], *, shared: bool = False
) -> None:
    """Raise a UserError unless all tensors lie within the file and none overlap.

    Args:
        total: bytes of the file.
        shared: whether tensors may overlap.
    """
    if not entries:
        raise UserError(f"{path}: the file holds no tensors")
    end = max(entry.start + entry.size for entry in entries.values())
    if end > total:
        raise UserError(
            f"{path}: the file is truncated: it has {total} bytes, its tensors need {end}; "
            "download or copy it again"
        )
    placed = sorted(
        (entry.start, entry.size, name) for name, entry in entries.items() if entry.size
    )
    for (start, size, name), (after, _, other) in itertools.pairwise([] if shared else placed):
        if start + size > after:
            raise UserError(
                f'{path}: the header is corrupt: tensors "{name}" and "{other}" overlap'
            )


# Folders

_OTHER_NAMES = "consolidated"  # Mistral's second copy, with other tensor names
# Weight formats in order of preference: the single file, a pattern of shards, the reader.
_FORMATS: tuple[tuple[str, str, Callable[[Path], dict[str, Entry]]], ...] = (
    ("model.safetensors", "*.safetensors", read_safetensors),
    ("pytorch_model.bin", "pytorch_model*.bin", read_torch),
)


def read_folder(folder: Path) -> dict[str, Entry]:
    """Return all tensors of a folder's weight files: the single file, else those of its index, else
    all that match the pattern of shards. The first format with files is used.

    Raises:
        UserError: there are none, or a file or tensor of the index is missing.
    """
    for single, pattern, read in _FORMATS:
        index, named = folder / f"{single}.index.json", {}
        if (folder / single).exists():
            files = [folder / single]
        elif index.exists():
            named = _weight_map(index)
            files = [folder / name for name in sorted(set(named.values()))]
            if lost := [file.name for file in files if not file.exists()]:
                raise UserError(
                    f"{index}: {len(lost)} of the {len(files)} files that it lists are missing, "
                    f"such as {lost[0]}; download the model again"
                )
        else:
            files = [
                file
                for file in sorted(folder.glob(pattern))
                if not file.name.startswith(_OTHER_NAMES)
            ]
        entries = {name: entry for file in files for name, entry in read(file).items()}
        if missing := [name for name in named if name not in entries]:
            raise UserError(f"{index}: {listed(missing)} not in the files that it lists")
        if files:
            return entries
    raise UserError(f"{folder}: no weights found; files like model.safetensors are needed")


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict):
        raise UserError(f'{index}: key "weight_map": a mapping of tensors to files is needed')
    for name in found.values():
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise UserError(
                f'{index}: key "weight_map": the name of a file in the same folder is needed, not '
                f"{shown(name)}"
            )
    return found


def listed(names: list[str]) -> str:
    """Return names of tensors as the subject of a sentence, with its verb."""
    quoted = first_of(f'"{name}"' for name in names)
    return f"tensors {quoted} are" if len(names) > 1 else f"tensor {quoted} is"
