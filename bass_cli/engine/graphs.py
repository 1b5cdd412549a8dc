"""Capture and replay of rounds whose shapes do not change, by key; off CUDA everything is simply
called.

Not here: what is in a round (step.py), which keys there are and when one is captured
(graph_policy.py), CUDA itself (model/capture.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bass_cli.model.capture import Capture, Graph, capture
from bass_kernels import has_triton

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
LONGEST = 64  # the longest draft length that a job may ask for


def bucket(rows: int, capacity: int) -> int:
    """The number of rows, dummies included, that a graph for `rows` live ones takes."""
    at = bisect.bisect_left(ROWS, rows)
    return min(ROWS[at] if at < len(ROWS) else capacity, capacity)


def step_down(width: int) -> int:
    """The longest draft length that graphs are made for, up to `width`."""
    return WIDTHS[bisect.bisect_right(WIDTHS, width) - 1]


def step_up(width: int) -> int:
    """The shortest draft length that graphs are made for, from `width` up; the longest there is
    beyond that."""
    return WIDTHS[min(bisect.bisect_left(WIDTHS, width), len(WIDTHS) - 1)]


def cover(width: int) -> int:
    """The same, but beyond the longest there is, `width` itself."""
    return max(step_up(width), width)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Running(NamedTuple):
    """A replay under way. `over`: whether the device is done with it; `wait`: its result on the
    host, which stays what it is until the second replay after this one begins."""

    over: Callable[[], bool]
    wait: Callable[[], Tensor | None]


class Graphs:
    """Captured functions of no arguments, each with a result that is copied to the host, or None.

    `captures` counts how many were captured so far: a measured run should add none. Memory of
    intermediate results is shared by all graphs: they run one after the other. `wanted`: whether
    there are to be any; `record` captures one.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True, record: Capture = capture):
        self.enabled, self.record = wanted and device.type == "cuda", record
        self.captures = 0
        # A graph, its result, and where that is copied to on the host: in turn, since two
        # replays may be under way.
        self._held: dict[Hashable, tuple[Graph, Tensor | None, list[Tensor]]] = {}
        self._dropped = self._held  # not run any more, see renew
        self._warm: dict[Hashable, Tensor | None] = {}  # what ran uncaptured, and a result of it
        self._version: Hashable = None
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def renew(self, version: Hashable) -> bool:
        """Forget all graphs if `version` is another than last time (what they read has moved);
        says whether it was."""
        if version == self._version:
            return False
        # The memory that all of them share must not be without any: CUDA's allocator may refuse
        # to capture into it then.
        self._dropped, self._held = self._held or self._dropped, {}
        self._warm.clear()
        self._version = version
        return True

    def holds(self, key: Hashable) -> bool:
        return key in self._held

    def held(self) -> Iterable[Hashable]:
        """The keys of all graphs."""
        return self._held.keys()

    def is_warm(self, key: Hashable) -> bool:
        """Whether `key` has run uncaptured: its kernels are compiled, its libraries set up."""
        return key in self._warm

    def compile(self, functions: Iterable[Callable[[], object]]) -> None:
        """Compile the kernels that these functions launch, many at a time, without launching
        them."""
        if has_triton():
            from bass_kernels.ahead import compile_ahead

            compile_ahead(functions)

    def run(self, key: Hashable, function: Callable[[], Tensor | None]) -> Tensor | None:
        """Run `function` uncaptured; returns its result on the host."""
        found = function()
        self._warm[key] = None if found is None else found.cpu()
        torch.cuda.synchronize()
        return self._warm[key]

    def capture(self, key: Hashable, function: Callable[[], Tensor | None]) -> None:
        """Capture `function`, which must be warm (see `run`): compiling and loading cannot be
        captured."""
        found: list[Tensor | None] = []
        graph = self.record(lambda: found.append(function()), self._pool)
        result = found[0]
        hosts = (
            []
            if result is None
            else [torch.empty_like(result, device="cpu").pin_memory() for _ in range(2)]
        )
        self._held[key] = graph, result, hosts
        self._dropped = {}
        self.captures += 1

    def replay(self, key: Hashable, meanwhile: Callable[[], None] = lambda: None) -> Tensor | None:
        """Run what was captured under `key`, and `meanwhile` on the host; returns its result on the
        host (see Running)."""
        running = self.launch(key)
        meanwhile()
        return running.wait()

    def launch(self, key: Hashable) -> Running:
        """Begin what was captured under `key`, behind all that the device was given before."""
        graph, result, hosts = self._held[key]
        graph.replay()
        hosts.reverse()
        host = None
        if result is not None:
            host = hosts[0].copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> Tensor | None:
            done.synchronize()
            return host

        return Running(done.query, wait)
