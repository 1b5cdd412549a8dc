"""Capture and replay of rounds whose shapes do not change, by key; off CUDA everything is simply called.

Not here: what is in a round (loop.py), which keys there are (Ladder rounds rows and draft lengths to a few).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def bucket(rows: int, capacity: int) -> int:
    """The number of rows, dummies included, that a graph for `rows` live ones takes."""
    at = bisect.bisect_left(ROWS, rows)
    return min(ROWS[at] if at < len(ROWS) else capacity, capacity)


def step_down(width: int) -> int:
    """The longest draft length that graphs are made for, up to `width`."""
    return WIDTHS[bisect.bisect_right(WIDTHS, width) - 1]


class Graphs:
    """Captured functions of no arguments, each with a result that is copied to the host.

    `captures` counts how many were captured so far: a measured run should add none. Memory of intermediate results is
    shared by all graphs: they run one after the other.
    """

    def __init__(self, device: torch.device):
        self.enabled = device.type == "cuda"
        self.captures = 0
        self._held: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._version: Hashable = None
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def renew(self, version: Hashable) -> None:
        """Forget all graphs if `version` is another than last time: what they read has moved."""
        if version != self._version:
            self._held.clear()
            self._version = version

    def holds(self, key: Hashable) -> bool:
        return key in self._held

    def capture(self, key: Hashable, function: Callable[[], Tensor]) -> None:
        """Run `function` once, to compile kernels and set up libraries, then capture it."""
        warm = function()
        host = torch.empty(warm.shape, dtype=warm.dtype, pin_memory=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            host.copy_(function(), non_blocking=True)
        self._held[key] = graph, host
        self.captures += 1

    def replay(self, key: Hashable) -> Tensor:
        """Run what was captured under `key`; returns its result on the host, which the next replay overwrites."""
        graph, host = self._held[key]
        graph.replay()
        torch.cuda.current_stream().synchronize()
        return host
