"""Rows that come, go and grow, and which pieces of a store each has: a run of one, two, four ... of
them, the more the longer the row becomes (buddy allocation, Knowlton 1965).

Only numbers: keys and values are copied elsewhere (kv_cache.py), and when a row has outgrown its
pieces others know (engine/batch.py). The same calls give the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[numpy.int64]
Worth = NDArray[numpy.float64]


# Sent at once without waiting: a round's changes are two or three, and two rounds may be under way.
_PARTS = 8


class Copied(NamedTuple):
    """What `pieces` from `source` on hold is to stand from `target` on."""

    source: int
    target: int
    pieces: int


class Pieces(NamedTuple):
    """How a store of rows' own keys is cut: into `total` equal pieces of `size` slots, of which a
    row takes a power of two, up to `most`, which hold the longest. `beside`: the slots that a row
    may need besides one for every token that it has generated."""

    total: int
    most: int = 1
    size: int = 0
    beside: int = 0

    def needed(self, generated: Integers) -> Integers:
        """How many pieces rows [N] take that have generated so many tokens."""
        least = numpy.maximum(-(-(generated + self.beside) // self.size), 1)
        power = numpy.ceil(numpy.log2(least)).astype(numpy.int64)
        return numpy.minimum(2**power, self.most)

    def slot(self, piece: Integers) -> Integers:
        """Where in the store these pieces begin."""
        return self.beside + self.size * piece

    def slots(self, copied: Iterable[Copied]) -> Integers:
        """From which slots of the store to which, [2, N]; none where a row stays in place."""
        found = [numpy.zeros((2, 0), dtype=numpy.int64)]
        for source, target, pieces in copied:
            if source != target:
                begin = self.slot(numpy.array([[source], [target]]))
                found.append(begin + numpy.arange(pieces * self.size))
        return numpy.concatenate(found, axis=1)


class Change(NamedTuple):
    """Rows that come, go and grow at once. The rows at `ended` are over; then row `source` of each
    (source, target) in `moved` becomes row `target`; then the places of each (places, key) in
    `begun` are rows of that prompt. `runs` [2, rows]: the first piece of each row then, and how
    many it has (None: as they were); pieces are `copied` in this order, where rows have grown."""

    ended: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]
    begun: tuple[tuple[tuple[int, ...], str], ...]
    runs: Integers | None = None
    copied: tuple[Copied, ...] = ()


class Sender:
    """Sends the host's numbers to a device, from pinned memory: the host waits for nothing that
    runs there. The memory is its own, in so many parts by turns: torch gives up its own whenever a
    graph is captured, and to get some again the host waits for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        # by turns: a part, and what tells that it has been copied from
        self._parts = [
            (torch.zeros(0, dtype=torch.int64), torch.cuda.Event())
            for _ in range(_PARTS if device.type == "cuda" else 0)
        ]
        self._next = 0

    def send(self, array: Integers) -> Tensor:
        """The same numbers there; on a CPU in the same memory."""
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


class Slabs:
    """The pieces of up to `rows` rows. `runs` [2, rows]: the first piece of each, by place, and how
    many it has: none where there is no row."""

    def __init__(self, rows: int, pieces: Pieces):
        assert pieces.most & (pieces.most - 1) == 0
        assert pieces.total >= pieces.most
        self.pieces = pieces
        self.runs: Integers = numpy.zeros((2, rows), dtype=numpy.int64)
        # free runs by size; one of `size` begins at a multiple of it
        self._free: dict[int, set[int]] = {}
        at, size = 0, pieces.most
        while size:
            whole = (pieces.total - at) // size * size
            self._free[size] = set(range(at, at + whole, size))
            at, size = at + whole, size // 2

    @property
    def free(self) -> int:
        """Pieces that no row has."""
        return self.pieces.total - int(self.runs[1].sum())

    def swap_rows(
        self, ended: Sequence[int], moved: Iterable[tuple[int, int]], begun: Iterable[int]
    ) -> None:
        """Rows end; then of each (source, target) row `source` becomes row `target`; then rows
        begin, with a piece each, which must be free."""
        for row in ended:
            self._give(*self._run(row))
            self.runs[:, row] = 0
        for source, target in moved:
            self.runs[:, target], self.runs[:, source] = self.runs[:, source], 0
        for row in begun:
            start = self._take(1)
            assert start is not None, "rows are admitted where there are pieces"
            self.runs[:, row] = start, 1

    def grow(self, row: int, size: int) -> Copied | None:
        """Give a row `size` pieces for those it has, a power of two; what is to be copied before
        any other row grows, if only from where it is to where it is. None: there are not so many
        together, and nothing has changed."""
        start, old = self._run(row)
        self._give(start, old)
        found = self._take(size)
        if found is None:
            again = self._take(old, start)
            assert again == start
            return None
        self.runs[:, row] = found, size
        return Copied(start, found, old)

    def least(self, size: int, worth: Worth, *, grows: int) -> list[int]:
        """The rows that have to go before row `grows` can have `size` pieces: those in the run
        whose rows are worth least, by `worth` [rows]; that row itself counts for nothing."""
        starts, sizes = self.runs
        cost = numpy.zeros(self.pieces.total // size)
        others = numpy.nonzero(sizes * (numpy.arange(len(sizes)) != grows))[0]
        firsts, ends = starts // size, -(-(starts + sizes) // size)
        for row in others:
            cost[firsts[row] : ends[row]] += worth[row]
        run = cost.argmin()
        return [int(row) for row in others if firsts[row] <= run < ends[row]]

    def _run(self, row: int) -> tuple[int, int]:
        start, size = self.runs[:, row].tolist()
        return start, size

    def _take(self, size: int, start: int | None = None) -> int | None:
        """The first free run of so many pieces, or the one at `start`, no longer free."""
        whole = size
        while whole <= self.pieces.most:
            there = self._free[whole]
            if start is None and there:
                start = min(there)
            if start is not None and start // whole * whole in there:
                there.remove(start // whole * whole)
                return self._split(start, whole, size)
            whole *= 2
        return None

    def _split(self, start: int, whole: int, size: int) -> int:
        """Of a run of `whole` pieces around `start`, all but `size` from there on are free."""
        while whole > size:
            whole //= 2
            self._free[whole].add((start // whole * whole) ^ whole)
        return start

    def _give(self, start: int, size: int) -> None:
        """A run is free, and with what is free beside it one of twice the size."""
        while size < self.pieces.most and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free[size].add(start)
