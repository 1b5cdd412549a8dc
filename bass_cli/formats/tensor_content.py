"""Read the content of stored tensors, a few megabytes at a time, to a device.

Quantised blocks of GGUF are copied to the device as stored and become float32 there. The result is
bit for bit that of the gguf package's numpy code: every product and sum is rounded as there, and
none is fused. Layouts: ggml-common.h of llama.cpp. Not here: places in files (tensor_files.py), the
decoder's tensors (weights.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.tensor_files import FLOATS, Entry

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in FLOATS.items()}
# Maximum elements and bytes of a part. Dequantising takes about 15 bytes an element meanwhile: on a
# CPU that should stay in a core's cache. On a GPU a part takes about 40 launches, whose cost
# exceeds that of their work.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
_BYTES = 1 << 23


class Bytes(NamedTuple):
    """A region of a stored tensor: `length` bytes from `offset`, in each of `lines` rows that are
    `pitch` bytes apart."""

    offset: int
    length: int
    lines: int = 1
    pitch: int = 0

    @property
    def size(self) -> int:
        return self.length * self.lines


class Stage:
    """The buffers through which a thread reads files to a device. This one reads to the CPU,
    through one buffer."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context. Everything done with fetched bytes must be done inside it."""
        return contextlib.nullcontext()

    def fetch(self, file: BinaryIO, entry: Entry, region: Bytes) -> Tensor:
        """Return a region of an entry, uint8 on the device. It is valid until the next call."""
        if region.size > len(self._buffer):
            self._buffer = torch.empty(region.size, dtype=torch.uint8)
        raw = self._buffer[: region.size]
        read_into(file, entry, region, raw)
        return raw


class CudaStage(Stage):
    """Reads to a CUDA device in a stream of its own, through two pinned buffers: one is filled
    while the other is copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Pending work of the default stream may still use the memory that is filled here.
        self._stream.wait_stream(torch.cuda.default_stream(device))
        self._pinned = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def fetch(self, file: BinaryIO, entry: Entry, region: Bytes) -> Tensor:
        host, copied, count = self._pinned[0], self._copied[0], region.size
        copied.synchronize()
        if count > len(host):
            host = torch.empty(max(count, _BYTES), dtype=torch.uint8, pin_memory=True)
        read_into(file, entry, region, host[:count])
        raw = host[:count].to(self.device, non_blocking=True)
        copied.record()
        self._pinned = [self._pinned[1], host]
        self._copied.reverse()
        return raw


def stage_for(device: torch.device) -> Stage:
    """Return a new stage for the calling thread."""
    return CudaStage(device) if device.type == "cuda" else Stage()


def parts(
    file: BinaryIO,
    entry: Entry,
    stage: Stage | None = None,
    rows: range | None = None,
    columns: range | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor's rows in order, some at a time.

    Args:
        stage: default: the CPU.
        rows, columns: the part to read. Default: all.

    Yields:
        The number of rows before these, and the rows [n, ...] on the stage's device, float32 if
        the tensor is quantised. They are valid until the next step.
    """
    stage = stage or Stage()
    rows = range(entry.shape[0]) if rows is None else rows
    line, inside = bytes_of(entry, range(1), columns), _first_byte(entry, columns)
    width = max(entry.size // entry.shape[0], 1)
    elements = max(math.prod(entry.shape) // entry.shape[0], 1)
    step = max(min(_ELEMENTS[stage.device.type] * width // elements, _BYTES) // max(line, 1), 1)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        if line == width:
            region = Bytes(first * width, count * width)
        else:
            region = Bytes(first * width + inside, line, count, width)
        raw = stage.fetch(file, entry, region)
        if entry.dtype in DTYPES:
            shape = entry.shape[1:] if columns is None else (len(columns),)
            yield first - rows.start, raw.view(DTYPES[entry.dtype]).view(count, *shape)
        else:
            part = dequantise(raw.view(count, line), entry.dtype)
            whole = columns is None or part.shape[1] == len(columns)
            yield (
                first - rows.start,
                part if whole or columns is None else part[:, columns.start : columns.stop],
            )


def bytes_of(entry: Entry, rows: range, columns: range | None) -> int:
    """Return how many bytes are read for these rows and columns (None: all). Quantised rows are
    read whole and cut afterwards if the columns do not begin and end with a block."""
    width = entry.size // max(entry.shape[0], 1)
    if columns is None:
        return len(rows) * width
    unit, elements = _unit(entry)
    if columns.start % elements or columns.stop % elements:
        return len(rows) * width
    return len(rows) * (len(columns) // elements) * unit


def _first_byte(entry: Entry, columns: range | None) -> int:
    """Return the first byte in a row of these columns, if stored bytes are cut."""
    unit, elements = _unit(entry)
    return 0 if columns is None else columns.start // elements * unit


def _unit(entry: Entry) -> tuple[int, int]:
    """Return the bytes of the smallest readable unit, and its number of elements."""
    if entry.dtype in DTYPES:
        return DTYPES[entry.dtype].itemsize, 1
    unit, _ = _KINDS[entry.dtype]
    return unit, math.prod(entry.shape) * unit // entry.size


def read_into(file: BinaryIO, entry: Entry, region: Bytes, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with a region of an entry."""
    whole = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for line in range(region.lines):
        view = whole[line * region.length : (line + 1) * region.length]
        file.seek(entry.start + region.offset + line * region.pitch)
        while view:
            got = file.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise UserError(f"{entry.file}: the file was truncated while it was read")
            view = view[got:]


# Quantised blocks of GGUF

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SCALES = 12  # bytes of the sixteen packed 6-bit scales and minima of Q4_K and Q5_K


def dequantise(raw: Tensor, dtype: str) -> Tensor:
    """Convert contiguous rows of whole blocks [n, bytes] uint8 to [n, elements] float32."""
    size, decode = _KINDS[dtype]
    return decode(raw.view(-1, size)).view(len(raw), -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _bits(packed: Tensor, width: int, run: int) -> Tensor:
    """Unpack fields of `width` bits, [n, bytes] uint8 to [n, bytes / run, 8 / width, run]. Of every
    `run` bytes first all lowest fields, then all next ones."""
    groups = packed.reshape(len(packed), -1, 1, run)
    shifts = range(0, 8, width)
    fields = torch.cat([groups >> shift for shift in shifts], dim=2)
    return fields.bitwise_and_((1 << width) - 1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack fields of four bits to [n, 2 * bytes], in the order of `_bits`."""
    groups = packed.reshape(len(packed), -1, 1, run)
    return torch.cat([groups & 15, groups >> 4], dim=2).flatten(1)


def _flags(packed: Tensor) -> Tensor:
    """Unpack single bits to [n, 8 * bytes], byte by byte, the lowest first."""
    return _bits(packed, 1, 1).flatten(1)


def _sub_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima, float32 [n, 8, 1] each. They are six-bit values in the
    twelve bytes after two float16, which they are multiplied by."""
    packed = blocks[:, 4 : 4 + _SCALES].clone(memory_format=torch.contiguous_format)
    words = packed.view(torch.int32)
    first, both = words[:, :2], words[:, 2:]  # four bytes at a time
    low = first & 0x3F3F3F3F
    high = (torch.cat([both, both >> 4], 1) & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    whole = torch.stack([low, high], 2).view(torch.uint8).float()
    scales, minima = (whole * blocks[:, :4].view(torch.float16).float()[..., None]).unbind(1)
    return scales.unsqueeze(2), minima.unsqueeze(2)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:], 16) | (_flags(blocks[:, 2:6]) << 4)
    return values.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:], 16) | (_flags(blocks[:, 4:8]) << 4)
    return values.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    packed, values = blocks[:, :16], _bits(blocks[:, 16:80], 2, 32)
    scales = (_half(blocks, 80) * (packed & 15).float()).unsqueeze(2)
    minima = (_half(blocks, 82) * (packed >> 4).float()).unsqueeze(2)
    return values.view(-1, 16, 16).float().mul_(scales).sub_(minima)


def _q3_k(blocks: Tensor) -> Tensor:
    missing = _bits(blocks[:, :32], 1, 32).view(-1, 256) ^ 1  # a bit that is set takes nothing off
    values = _bits(blocks[:, 32:96], 2, 32).view(-1, 256) - missing.mul_(4)  # wraps, as int8 does
    low = _nibbles(blocks[:, 96:104], 8)
    high = _bits(blocks[:, 104:108], 2, 4).view(-1, 16)
    scales = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    return values.view(torch.int8).float().view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _sub_scales(blocks)
    values = _nibbles(blocks[:, 4 + _SCALES :], 32).view(-1, 8, 32).float()
    return values.mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _sub_scales(blocks)
    high = _bits(blocks[:, 16:48], 1, 32).view(-1, 256)
    values = (_nibbles(blocks[:, 48:], 32) | (high << 4)).view(-1, 8, 32).float()
    return values.mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks[:, 128:192], 2, 32).view(-1, 256)
    values = (_nibbles(blocks[:, :128], 64) | (high << 4)).float().sub_(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return values.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _looked_up(_nibbles(blocks[:, 2:], 16)) * _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 4:8], 4, 1).flatten(1)
    high = _bits(blocks[:, 2:4], 2, 1).flatten(1)
    scales = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return _looked_up(_nibbles(blocks[:, 8:], 16)).view(-1, 8, 32) * scales.unsqueeze(2)


def _looked_up(places: Tensor) -> Tensor:
    table = torch.tensor(_IQ4, dtype=torch.float32, device=places.device)
    return table[places.int()]


# By the name of a type: bytes of a block, and what decodes blocks [n, bytes].
_KINDS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
}
QUANTISED = tuple(_KINDS)
