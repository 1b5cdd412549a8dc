"""Tensor files: what they hold and where, from their header alone, and a tensor's content in small
parts.

Formats: safetensors, GGUF, and torch's own zip format. Each header is held against the file's
size, so a truncated or corrupt file is a UserError before anything large is read. Not here: what
the tensors mean (families.py).
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.io.reading import LARGEST, open_regular, parse_object, text, whole

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)

_PART = 1 << 20  # elements that are read or dequantised at once
_RUN = (
    1 << 13
    # elements in what gguf is told are rows: sixteen of them at a time should fit into a core's
    # cache
)
_HEADER_LIMIT = (
    100 * 2**20
)  # bytes; the limit of the safetensors format, which no GGUF header comes near either
_DIMENSIONS = 8  # that a tensor may have: the decoder's have two
_SAFETENSORS_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_GGUF_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_VERSIONS = (2, 3)
_GGUF_ALIGNMENT = 32
_GGUF_ENTRIES = 1 << 16  # fields or tensors of a file, and
_GGUF_ITEMS = (
    1 << 22
)  # numbers in one array: a model has hundreds, and a vocabulary hundreds of thousands


_Info = tuple[
    tuple[int, ...], int, int
]  # of a GGUF file's tensor: shape, rows first; number of its type; offset


class Entry(NamedTuple):
    """One stored tensor: `shape`, rows first, in bytes [start, start + size) of `file`. `dtype`:
    a name in DTYPES, QUANTISED, or another of the file's format that cannot be loaded."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_safetensors(path: Path) -> dict[str, Entry]:
    """The tensors of a .safetensors file; UserError if it is unreadable, truncated or corrupt."""
    with _opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, _HEADER_LIMIT):
            raise UserError(
                f"{path}: truncated or not safetensors: the header does not fit into {total} bytes"
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
    _check_places(path, total, entries)
    return entries


def _safetensors_entry(path: Path, name: str, item: Any, begin: int) -> Entry:
    """The tensor that a header's item describes, data beginning at `begin`; ValueError names it."""
    try:
        first, last = (whole(place) for place in item["data_offsets"])
        dtype, shape = text(item["dtype"]), tuple(whole(size) for size in item["shape"])
        size = last - first
        width = _SAFETENSORS_BYTES.get(dtype)
        if (
            len(shape) > _DIMENSIONS
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
    """The tensors of a .bin file that torch.save wrote (its zip format); no code in it is run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    entries: dict[str, Entry] = {}
    try:
        with _opened(path) as file:
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
    except pickle.UnpicklingError:  # its own text advises to run what is in the file
        raise UserError(
            f"{path}: the file is damaged or holds more than tensors, and no code in it is run; "
            "convert the "
            "checkpoint to safetensors"
        ) from None
    except (
        Exception
    ) as error:  # a pickle that is broken, or from before the zip format, may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path}: torch cannot read the file (truncated, or in the format of torch before "
            f"1.6): {reason}"
        ) from None
    _check_places(path, total, entries, shared=True)
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
    names = {dtype: name for name, dtype in DTYPES.items()}
    return Entry(
        path,
        names.get(tensor.dtype, str(tensor.dtype)),
        tuple(tensor.shape),
        start,
        int(tensor.numel()) * tensor.element_size(),
    )


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata and tensors of a .gguf file. Arrays of strings (the vocabulary) are left out of
    the metadata."""
    with _opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        if total < 24:
            raise UserError(f"{path}: the file is truncated: {total} bytes are no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, infos, end = _gguf_header(path, data)
    alignment = metadata.get("general.alignment", _GGUF_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise UserError(f'{path}: key "general.alignment": {alignment!r} is not valid')
    begin = -(-end // alignment) * alignment
    entries = {
        name: _gguf_entry(path, name, dims, kind, begin + offset)
        for name, (dims, kind, offset) in infos.items()
    }
    _check_places(path, total, entries)
    return metadata, entries


def _gguf_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], dict[str, _Info], int]:
    """Metadata, what is said of each tensor, and where the header ends. The gguf package's own
    reader takes 3 to 10 s for a large vocabulary."""
    magic, version, tensors, fields = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in _GGUF_VERSIONS:
        raise UserError(
            f"{path}: not a GGUF file of version 2 or 3 (it begins with {magic!r}, {version})"
        )
    if max(tensors, fields) > _GGUF_ENTRIES:
        raise UserError(
            f"{path}: the header is corrupt: {tensors} tensors and {fields} fields are more than "
            "a model has"
        )
    cursor = _Cursor(data)
    try:
        metadata = {cursor.text(): cursor.value(cursor.scalar("I")) for _ in range(fields)}
        infos = dict(cursor.tensor_info() for _ in range(tensors))
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError):
        raise UserError(
            f"{path}: the header is truncated or corrupt near byte {cursor.at}"
        ) from None
    if len(metadata) < fields or len(infos) < tensors:
        raise UserError(f"{path}: the header is corrupt: a field or a tensor is there twice")
    return metadata, infos, cursor.at


def parts(file: BinaryIO, entry: Entry) -> Iterator[tuple[int, Tensor]]:
    """The tensor's rows in order, some at a time: index of the first and rows [n, ...] on the
    CPU, float32 where it is quantised. A part is valid until the next is asked for."""
    rows = entry.shape[0]
    # A power of two, so that the blocks in a part can be cut into runs of full length.
    step = 1 << (max(_PART * rows // max(math.prod(entry.shape), 1), 1).bit_length() - 1)
    width = entry.size // rows
    buffer = torch.empty(min(step, rows) * width, dtype=torch.uint8)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = buffer[: count * width]
        read_into(file, entry, first * width, raw)
        if entry.dtype in DTYPES:
            yield first, raw.view(DTYPES[entry.dtype]).view(count, *entry.shape[1:])
        else:
            yield first, _dequantise(raw.view(count, width), entry.dtype)


def _dequantise(raw: Tensor, dtype: str) -> Tensor:
    """Rows of blocks [n, bytes] uint8 to [n, ...] float32."""
    from gguf import GGMLQuantizationType, quants
    from gguf.constants import GGML_QUANT_SIZES

    kind = GGMLQuantizationType[dtype]
    block, size = GGML_QUANT_SIZES[kind]
    run = math.gcd(raw.numel() // size, _RUN // block) * size
    return torch.from_numpy(quants.dequantize(raw.view(-1, run).numpy(), kind)).view(len(raw), -1)


def read_into(file: BinaryIO, entry: Entry, offset: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with an entry's bytes from `offset` on."""
    view = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    file.seek(entry.start + offset)
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise UserError(f"{entry.file}: the file was cut short while it was read")
        view = view[got:]


class _Cursor:
    """Walks through a GGUF header; struct.error or OverflowError where it ends too soon or says
    what cannot be."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 24

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        raw = self._skip_text()
        return self.data[raw : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        """A field's value; None for an array of strings."""
        if kind == _GGUF_STRING:
            return self.text()
        if kind != _GGUF_ARRAY:
            return self.scalar(_GGUF_SCALARS[kind])
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _GGUF_STRING:
            for _ in range(length):
                self._skip_text()
            return None
        if length > _GGUF_ITEMS:
            raise OverflowError
        code = _GGUF_SCALARS[kind]
        values = struct.unpack_from(f"<{length}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{length}{code}")
        return list(values)

    def tensor_info(self) -> tuple[str, _Info]:
        """Name; shape (rows first), type number, offset."""
        name, dimensions = self.text(), self.scalar("I")
        if dimensions > _DIMENSIONS:
            raise OverflowError
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return name, (shape, self.scalar("I"), self.scalar("Q"))

    def _skip_text(self) -> int:
        """Move past a string; where its bytes begin."""
        begin = self.at + 8
        self.at = begin + self.scalar("Q")
        if self.at > min(len(self.data), _HEADER_LIMIT):
            raise OverflowError
        return begin


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


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None


def _check_places(
    path: Path, total: int, entries: dict[str, Entry], *, shared: bool = False
) -> None:
    """UserError unless all tensors lie within the file, none over another unless they may be
    `shared`."""
    if not entries:
        raise UserError(f"{path}: the file holds no tensors")
    end = max(entry.start + entry.size for entry in entries.values())
    if end > total:
        raise UserError(
            f"{path}: the file is truncated: it has {total} bytes, its tensors need {end}"
        )
    placed = sorted(
        (entry.start, entry.size, name) for name, entry in entries.items() if entry.size
    )
    for (start, size, name), (after, _, other) in itertools.pairwise([] if shared else placed):
        if start + size > after:
            raise UserError(
                f'{path}: the header is corrupt: tensors "{name}" and "{other}" lie over each other'
            )
