"""Capture one function as a CUDA graph. Not here: what is captured and when (engine/graphs.py for
rounds, models/prefill.py for prompts)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

# takes a function that has run before, returns one that replays it
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


# takes a function that has run before and a memory pool, returns its graph
Capture = Callable[[Callable[[], None], Any], Graph]


def capture(function: Callable[[], None], pool: Any) -> Graph:
    """Capture what `function` launches.

    Args:
        function: must have run before, because compiling and loading cannot be captured.
        pool: memory for intermediate results, a torch.cuda.graph_pool_handle.

    The capture is thread-local: NCCL's own thread queries events of its device meanwhile.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    with _no_garbage_collection(), recording:
        function()
    return graph


def recorder(device: torch.device) -> Recorder | None:
    """Return a recorder for functions that run one after the other and share a memory pool. None
    if the device has no graphs."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda function: capture(function, pool).replay


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing an old graph while another one is captured would end the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
