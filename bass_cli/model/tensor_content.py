"""The content of stored tensors, a few megabytes at a time, on the device that is to have it.

Quantised blocks go to the device as they are stored and become float32 there. Not here: what is
stored where (tensor_files.py, gguf_file.py), where it belongs (weights.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.model.quantised import dequantise
from bass_cli.model.tensor_files import DTYPES, Entry

# The most of a tensor at once: elements, which quantised ones take some 15 bytes of for a while
# (on a CPU they should stay in a core's cache, on a GPU be many enough to fill it), and bytes.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
_BYTES = 1 << 23


class Stage(Protocol):
    """What a thread reads files through."""

    device: torch.device

    def turn(self) -> contextlib.AbstractContextManager[object]:
        """Where all that is done with what is fetched is to be done."""
        ...

    def fetch(self, file: BinaryIO, entry: Entry, offset: int, count: int) -> Tensor:
        """`count` of an entry's bytes from `offset` on, uint8 on the device; valid until the next
        are fetched."""
        ...


class HostStage:
    """Bytes for the CPU, in one buffer."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def turn(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def fetch(self, file: BinaryIO, entry: Entry, offset: int, count: int) -> Tensor:
        if count > len(self._buffer):
            self._buffer = torch.empty(count, dtype=torch.uint8)
        raw = self._buffer[:count]
        read_into(file, entry, offset, raw)
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

    def fetch(self, file: BinaryIO, entry: Entry, offset: int, count: int) -> Tensor:
        host, copied = self._pinned[0], self._copied[0]
        copied.synchronize()
        if count > len(host):
            host = torch.empty(max(count, _BYTES), dtype=torch.uint8, pin_memory=True)
        read_into(file, entry, offset, host[:count])
        raw = host[:count].to(self.device, non_blocking=True)
        copied.record()
        self._pinned = [self._pinned[1], host]
        self._copied.reverse()
        return raw


def stage_for(device: torch.device) -> Stage:
    """A new stage, for the thread that asks."""
    return CudaStage(device) if device.type == "cuda" else HostStage()


def parts(file: BinaryIO, entry: Entry, stage: Stage | None = None) -> Iterator[tuple[int, Tensor]]:
    """The tensor's rows in order, some at a time: index of the first and rows [n, ...] on the
    stage's device (the CPU without one), float32 where it is quantised. A part is valid until
    the next is asked for."""
    stage = stage or HostStage()
    rows = entry.shape[0]
    width = max(entry.size // rows, 1)
    elements = max(math.prod(entry.shape) // rows, 1)
    step = max(min(_ELEMENTS[stage.device.type] // elements, _BYTES // width), 1)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = stage.fetch(file, entry, first * width, count * width)
        if entry.dtype in DTYPES:
            yield first, raw.view(DTYPES[entry.dtype]).view(count, *entry.shape[1:])
        else:
            yield first, dequantise(raw.view(count, width), entry.dtype)


def read_into(file: BinaryIO, entry: Entry, offset: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with an entry's bytes from `offset` on."""
    view = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    file.seek(entry.start + offset)
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise UserError(f"{entry.file}: the file was cut short while it was read")
        view = view[got:]
