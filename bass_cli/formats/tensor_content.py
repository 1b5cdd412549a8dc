"""The content of stored tensors, a few megabytes at a time, on the device that is to have it.

Quantised blocks go to the device as they are stored and become float32 there. Not here: what is
stored where (tensor_files.py, gguf_file.py), where it belongs (weights.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.quantised import block_bytes, dequantise
from bass_cli.formats.tensor_files import FLOATS, Entry

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in FLOATS.items()}
# The most of a tensor at once: elements, which quantised ones take some 15 bytes of for a while
# (on a CPU they should stay in a core's cache; on a GPU a part takes some 40 launches, and these
# longer than what they do), and bytes.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
_BYTES = 1 << 23


class Bytes(NamedTuple):
    """Of a stored tensor: `length` bytes from `offset` on, in each of `lines` rows that lie `pitch`
    bytes apart."""

    offset: int
    length: int
    lines: int = 1
    pitch: int = 0

    @property
    def size(self) -> int:
        return self.length * self.lines


class Stage(Protocol):
    """What a thread reads files through."""

    device: torch.device

    def turn(self) -> contextlib.AbstractContextManager[object]:
        """Where all that is done with what is fetched is to be done."""
        ...

    def fetch(self, file: BinaryIO, entry: Entry, wanted: Bytes) -> Tensor:
        """These of an entry's bytes, uint8 on the device; valid until the next are fetched."""
        ...


class HostStage:
    """Bytes for the CPU, in one buffer."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def turn(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def fetch(self, file: BinaryIO, entry: Entry, wanted: Bytes) -> Tensor:
        if wanted.size > len(self._buffer):
            self._buffer = torch.empty(wanted.size, dtype=torch.uint8)
        raw = self._buffer[: wanted.size]
        read_into(file, entry, wanted, raw)
        return raw


class CudaStage:
    """Bytes for a CUDA device, in a stream of its own, through two pinned buffers: while one is
    copied to the device the other is read into."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Memory that is filled may have been used by what the default stream still has to do.
        self._stream.wait_stream(torch.cuda.default_stream(device))
        self._pinned = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]

    def turn(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def fetch(self, file: BinaryIO, entry: Entry, wanted: Bytes) -> Tensor:
        host, copied, count = self._pinned[0], self._copied[0], wanted.size
        copied.synchronize()
        if count > len(host):
            host = torch.empty(max(count, _BYTES), dtype=torch.uint8, pin_memory=True)
        read_into(file, entry, wanted, host[:count])
        raw = host[:count].to(self.device, non_blocking=True)
        copied.record()
        self._pinned = [self._pinned[1], host]
        self._copied.reverse()
        return raw


def stage_for(device: torch.device) -> Stage:
    """A new stage, for the thread that asks."""
    return CudaStage(device) if device.type == "cuda" else HostStage()


def parts(
    file: BinaryIO,
    entry: Entry,
    stage: Stage | None = None,
    rows: range | None = None,
    columns: range | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """The tensor's rows in order, or these of them and of their columns, some at a time: how many
    came before and rows [n, ...] on the stage's device (the CPU without one), float32 where it is
    quantised. A part is valid until the next is asked for."""
    stage = stage or HostStage()
    rows = range(entry.shape[0]) if rows is None else rows
    line, inside = bytes_of(entry, range(1), columns), _first_byte(entry, columns)
    width = max(entry.size // entry.shape[0], 1)
    elements = max(math.prod(entry.shape) // entry.shape[0], 1)
    step = max(min(_ELEMENTS[stage.device.type] * width // elements, _BYTES) // max(line, 1), 1)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        if line == width:
            wanted = Bytes(first * width, count * width)
        else:
            wanted = Bytes(first * width + inside, line, count, width)
        raw = stage.fetch(file, entry, wanted)
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
    """How many are read for these rows and columns (None: all). Quantised rows are read whole where
    columns do not begin and end with a block, and are cut then."""
    width = entry.size // max(entry.shape[0], 1)
    if columns is None:
        return len(rows) * width
    unit, elements = _unit(entry)
    if columns.start % elements or columns.stop % elements:
        return len(rows) * width
    return len(rows) * (len(columns) // elements) * unit


def _first_byte(entry: Entry, columns: range | None) -> int:
    """Where in a row these columns begin, if they are cut as they are stored."""
    unit, elements = _unit(entry)
    return 0 if columns is None else columns.start // elements * unit


def _unit(entry: Entry) -> tuple[int, int]:
    """The bytes that cannot be read apart, and of how many numbers they are."""
    if entry.dtype in DTYPES:
        return DTYPES[entry.dtype].itemsize, 1
    unit = block_bytes(entry.dtype)
    return unit, math.prod(entry.shape) * unit // entry.size


def read_into(file: BinaryIO, entry: Entry, wanted: Bytes, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with these of an entry's bytes."""
    whole = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for line in range(wanted.lines):
        view = whole[line * wanted.length : (line + 1) * wanted.length]
        file.seek(entry.start + wanted.offset + line * wanted.pitch)
        while view:
            got = file.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise UserError(f"{entry.file}: the file was cut short while it was read")
            view = view[got:]
