"""Tensor files: what they hold and where, from their header alone, and a tensor's content in small parts.

Formats: safetensors, GGUF, and torch's own zip format. Each header is held against the file's size, so a truncated or
corrupt file is a UserError before anything large is read. Not here: what the tensors mean (families.py).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from bass_cli.job import UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

_PART = 1 << 20  # elements that are read or dequantised at once
_RUN = 1 << 13  # elements in what gguf is told are rows: sixteen of them at a time should fit into a core's cache
_HEADER_LIMIT = 100 * 2**20  # bytes; the limit of the safetensors format
_SAFETENSORS_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_VERSIONS = (2, 3)
_GGUF_ALIGNMENT = 32


class Entry(NamedTuple):
    """One stored tensor: `shape`, rows first, in bytes [start, start + size) of `file`. `dtype`: a name in DTYPES,
    QUANTISED, or another of the file's format that cannot be loaded."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_safetensors(path: Path) -> dict[str, Entry]:
    """The tensors of a .safetensors file; UserError if it is unreadable, truncated or corrupt."""
    total = _size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, _HEADER_LIMIT):
            raise UserError(f"{path}: truncated or not safetensors: the header does not fit into {total} bytes")
        header = _parsed(file.read(length), path)
    entries = {}
    try:
        for name, item in header.items():
            if name != "__metadata__":
                first, last = item["data_offsets"]
                entries[name] = Entry(path, item["dtype"], tuple(item["shape"]), 8 + length + first, last - first)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path}: the header is corrupt: its entries are not those of safetensors") from None
    for name, entry in entries.items():
        width = _SAFETENSORS_BYTES.get(entry.dtype)
        if width is not None and math.prod(entry.shape) * width != entry.size:
            raise UserError(f'{path}: the header is corrupt: the size of "{name}" does not fit its shape')
    _check_end(path, total, entries)
    return entries


def read_torch(path: Path) -> dict[str, Entry]:
    """The tensors of a .bin file that torch.save wrote (its zip format); no code in it is run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    total = _size(path)
    try:
        with FakeTensorMode():
            state = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        offsets = {name: int(t.untyped_storage()._checkpoint_offset) for name, t in tensors.items()}  # type: ignore
    except Exception as error:  # a pickle that is broken, or from before the zip format, may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: torch cannot read the file (truncated, or in the format of torch before 1.6): {reason}"
        ) from None
    entries = {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise UserError(f'{path}: the tensor "{name}" is not stored contiguously; convert the checkpoint')
        start = offsets[name] + int(tensor.storage_offset()) * tensor.element_size()
        size = int(tensor.numel()) * tensor.element_size()
        entries[name] = Entry(path, names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), start, size)
    _check_end(path, total, entries)
    return entries


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata and tensors of a .gguf file. Arrays of strings (the vocabulary) are left out of the metadata."""
    total = _size(path)
    if total < 24:
        raise UserError(f"{path}: the file is truncated: {total} bytes are no GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, tensors, fields = struct.unpack_from("<4sIQQ", data)
        if magic != b"GGUF" or version not in _GGUF_VERSIONS:
            raise UserError(f"{path}: not a GGUF file of version 2 or 3 (it begins with {magic!r}, {version})")
        cursor = _Cursor(data)
        try:
            metadata = {cursor.text(): cursor.value(cursor.scalar("I")) for _ in range(fields)}
            infos = [cursor.tensor_info() for _ in range(tensors)]
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError):
            raise UserError(f"{path}: the header is truncated or corrupt near byte {cursor.at}") from None
    alignment = metadata.get("general.alignment", _GGUF_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise UserError(f'{path}: key "general.alignment": {alignment!r} is not valid')
    begin = -(-cursor.at // alignment) * alignment
    entries = {name: _gguf_entry(path, name, dims, kind, begin + offset) for name, dims, kind, offset in infos}
    _check_end(path, total, entries)
    return metadata, entries


def parts(file: BinaryIO, entry: Entry) -> Iterator[tuple[int, Tensor]]:
    """The tensor's rows in order, some at a time: index of the first and rows [n, ...] on the CPU, float32 where it is
    quantised. A part is valid until the next is asked for."""
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
    """Walks through a GGUF header."""

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
        code = _GGUF_SCALARS[kind]
        values = struct.unpack_from(f"<{length}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{length}{code}")
        return list(values)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (rows first), type number, offset."""
        name, dimensions = self.text(), self.scalar("I")
        if dimensions > 8:
            raise OverflowError
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def _skip_text(self) -> int:
        """Move past a string; where its bytes begin."""
        begin = self.at + 8
        self.at = begin + self.scalar("Q")
        if self.at > len(self.data):
            raise OverflowError
        return begin


def _gguf_entry(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        dtype = GGMLQuantizationType(kind)
    except ValueError:
        raise UserError(f'{path}: tensor "{name}" has type {kind}, which the gguf package does not know') from None
    block, size = GGML_QUANT_SIZES[dtype]
    if not shape or shape[-1] % block:
        raise UserError(f'{path}: the header is corrupt: tensor "{name}" of type {dtype.name} has shape {shape}')
    return Entry(path, dtype.name, shape, start, math.prod(shape) // block * size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None


def _parsed(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{path}: the header is corrupt: it is not a JSON object")
    return header


def _check_end(path: Path, total: int, entries: dict[str, Entry]) -> None:
    end = max((entry.start + entry.size for entry in entries.values()), default=0)
    if not entries:
        raise UserError(f"{path}: the file holds no tensors")
    if end > total:
        raise UserError(f"{path}: the file is truncated: it has {total} bytes, its tensors need {end}")
