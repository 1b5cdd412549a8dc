"""Read the content of stored tensors, a few megabytes at a time, to a device.

Quantised blocks of GGUF are copied to the device as stored and become float32 there
(gguf_blocks.py). Not here: places in files (tensor_files.py), the decoder's tensors (weights.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.gguf_blocks import BLOCKS, dequantise
from bass_cli.formats.tensor_files import FLOATS, Entry

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in FLOATS.items()}
# Maximum elements and bytes of a part. Dequantising takes about 15 bytes an element meanwhile: on a
# CPU that should stay in a core's cache. On a GPU a part takes about 40 launches, whose cost
# exceeds that of their work.
ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
BYTES = 1 << 23


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
            host = torch.empty(max(count, BYTES), dtype=torch.uint8, pin_memory=True)
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
    line, inside = bytes_of(entry, range(1), columns), 0
    if columns is not None:  # the first byte of these columns in a row
        unit, block = _unit(entry)
        inside = columns.start // block * unit
    width = max(entry.size // entry.shape[0], 1)
    elements = max(math.prod(entry.shape) // entry.shape[0], 1)
    step = max(min(ELEMENTS[stage.device.type] * width // elements, BYTES) // max(line, 1), 1)
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


def _unit(entry: Entry) -> tuple[int, int]:
    """Return the bytes of the smallest readable unit, and its number of elements."""
    if entry.dtype in DTYPES:
        return DTYPES[entry.dtype].itemsize, 1
    unit, _ = BLOCKS[entry.dtype]
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
