"""Buddy allocation (Knowlton 1965) of the rows' private key/value blocks. A row has a run of one,
two, four ... blocks, and takes a run of twice the size when it outgrows its own.

Only bookkeeping, and deterministic. Not here: copying keys and values (kv_cache.py), when a row
outgrows its run (engine/batch.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[numpy.int64]


# Copies in flight without waiting: a round sends two or three, and two rounds may be in flight.
_PARTS = 8


class BlockCopy(NamedTuple):
    """Copy `blocks` blocks from block `source` to block `target`."""

    source: int
    target: int
    blocks: int


class BlockLayout(NamedTuple):
    """How the store of private keys and values is divided.

    total: number of blocks.
    most: blocks of the longest row. A row has a power of two of blocks, up to this.
    size: slots of a block.
    extra: slots that a row needs beyond one for each generated token.
    """

    total: int
    most: int = 1
    size: int = 0
    extra: int = 0

    def needed(self, generated: Integers) -> Integers:
        """Return how many blocks rows [N] need that have generated so many tokens."""
        least = numpy.maximum(-(-(generated + self.extra) // self.size), 1)
        power = numpy.ceil(numpy.log2(least)).astype(numpy.int64)
        return numpy.minimum(2**power, self.most)

    def slot(self, block: Integers) -> Integers:
        """Return the first slot of each of these blocks."""
        return self.extra + self.size * block

    def slots(self, copied: Iterable[BlockCopy]) -> Integers:
        """Return the source and target slots of these copies, [2, N]. Copies of a block onto
        itself are left out."""
        found = [numpy.zeros((2, 0), dtype=numpy.int64)]
        for source, target, blocks in copied:
            if source != target:
                begin = self.slot(numpy.array([[source], [target]]))
                found.append(begin + numpy.arange(blocks * self.size))
        return numpy.concatenate(found, axis=1)


class Change(NamedTuple):
    """Changes to the rows of a batch between two rounds, applied in this order.

    ended: rows that end.
    moved: (source, target): row `source` becomes row `target`.
    begun: (rows, key): these rows begin, with the prompt of that key.
    runs: [2, rows], the first block of each row afterwards and its number of blocks; None if
        unchanged.
    copied: copies for rows that have grown, to be made in this order.
    """

    ended: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]
    begun: tuple[tuple[tuple[int, ...], str], ...]
    runs: Integers | None = None
    copied: tuple[BlockCopy, ...] = ()


class Sender:
    """Copies host arrays to a device from pinned memory, without waiting for the device.

    It rotates through `_PARTS` pinned buffers of its own. torch's pinned cache would not do:
    torch frees it whenever a graph is captured, and a new allocation waits for the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # each buffer with an event: the last copy from it is done
        self._parts = [
            (torch.zeros(0, dtype=torch.int64), torch.cuda.Event())
            for _ in range(_PARTS if device.type == "cuda" else 0)
        ]
        self._next = 0

    def send(self, array: Integers) -> Tensor:
        """Return the array on the device. On a CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        if not self._parts:
            return tensor
        host, copied = self._parts[self._next]
        copied.synchronize()
        if array.size > len(host):
            host = torch.empty(2 * array.size, dtype=torch.int64, pin_memory=True)
            self._parts[self._next] = host, copied
        self._next = (self._next + 1) % len(self._parts)
        staged = host[: array.size].view(array.shape).copy_(tensor)
        there = staged.to(self._device, non_blocking=True)
        copied.record()
        return there


class BlockAllocator:
    """The blocks of up to `rows` rows. `runs` [2, rows]: the first block of each row and its number
    of blocks, 0 for a place without a row."""

    def __init__(self, rows: int, blocks: BlockLayout):
        assert blocks.most & (blocks.most - 1) == 0
        assert blocks.total >= blocks.most
        self.blocks = blocks
        self.runs: Integers = numpy.zeros((2, rows), dtype=numpy.int64)
        # free runs by size; one of `size` begins at a multiple of it
        self._free: dict[int, set[int]] = {}
        at, size = 0, blocks.most
        while size:
            whole = (blocks.total - at) // size * size
            self._free[size] = set(range(at, at + whole, size))
            at, size = at + whole, size // 2

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self.blocks.total - int(self.runs[1].sum())

    def swap_rows(
        self, ended: Sequence[int], moved: Iterable[tuple[int, int]], begun: Iterable[int]
    ) -> None:
        """Apply `ended`, `moved` and `begun` (see Change). A row begins with one block, which must
        be free."""
        for row in ended:
            self._give(*self._run(row))
            self.runs[:, row] = 0
        for source, target in moved:
            self.runs[:, target], self.runs[:, source] = self.runs[:, source], 0
        for row in begun:
            start = self._take(1)
            assert start is not None, "rows are admitted where there are blocks"
            self.runs[:, row] = start, 1

    def grow(self, row: int, size: int) -> BlockCopy | None:
        """Move a row to a run of `size` blocks, a power of two.

        Returns:
            The copy to make before any other row grows (possibly of blocks onto themselves), or
            None if there is no free run of that size; then nothing has changed.
        """
        start, old = self._run(row)
        self._give(start, old)
        found = self._take(size)
        if found is None:
            again = self._take(old, start)
            assert again == start
            return None
        self.runs[:, row] = found, size
        return BlockCopy(start, found, old)

    def rows_to_evict(self, size: int, cost: NDArray[numpy.float64], *, grows: int) -> list[int]:
        """Choose the rows to evict so that row `grows` can have a run of `size` blocks: the rows
        in the run with the smallest sum of `cost` [rows], in which row `grows` counts as 0."""
        starts, sizes = self.runs
        by_run = numpy.zeros(self.blocks.total // size)
        others = numpy.nonzero(sizes * (numpy.arange(len(sizes)) != grows))[0]
        firsts, ends = starts // size, -(-(starts + sizes) // size)
        for row in others:
            by_run[firsts[row] : ends[row]] += cost[row]
        run = by_run.argmin()
        return [int(row) for row in others if firsts[row] <= run < ends[row]]

    def _run(self, row: int) -> tuple[int, int]:
        start, size = self.runs[:, row].tolist()
        return start, size

    def _take(self, size: int, start: int | None = None) -> int | None:
        """Allocate the first free run of `size` blocks, or the one at `start`. None if none is
        free."""
        whole = size
        while whole <= self.blocks.most:
            there = self._free[whole]
            if start is None and there:
                start = min(there)
            if start is not None and start // whole * whole in there:
                there.remove(start // whole * whole)
                return self._split(start, whole, size)
            whole *= 2
        return None

    def _split(self, start: int, whole: int, size: int) -> int:
        """Split a run of `whole` blocks around `start`: keep `size` from `start`, free the rest."""
        while whole > size:
            whole //= 2
            self._free[whole].add((start // whole * whole) ^ whole)
        return start

    def _give(self, start: int, size: int) -> None:
        """Free a run, and merge it with its free buddies."""
        while size < self.blocks.most and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free[size].add(start)
