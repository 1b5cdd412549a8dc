"""One function as a CUDA graph: captured, then replayed. Not here: what is captured and when
(engine/graphs.py for rounds, models/prefill.py for prompts)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

# from a warm function to what runs it again
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


# from a warm function, and a memory pool, to a graph of it
Capture = Callable[[Callable[[], None], Any], Graph]


def capture(function: Callable[[], None], pool: Any) -> Graph:
    """A graph of what `function` launches, its intermediate results in the memory pool `pool`
    (a torch.cuda.graph_pool_handle). The function must have run
    before: compiling and loading cannot be captured. Other threads may go on: NCCL's own asks
    what its device has done."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    with _no_garbage_collection(), recording:
        function()
    return graph


def recorder(device: torch.device) -> Recorder | None:
    """Captures functions that run one after the other, in one memory pool; None where there are
    no graphs."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda function: capture(function, pool).replay


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph of some dead loop that happens to be freed while another is captured ends the
    process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
