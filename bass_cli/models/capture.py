"""Captured CUDA graphs: capturing one function, the graphs of many, and the rule for which of them
are captured.

Passes over prompts (prefill.py) and rounds (engine/graphs.py) use the same `Graphs` and the same
`SkiRental`. Not here: which shapes there are and what each costs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from bass_kernels import has_triton

_Key = TypeVar("_Key", bound=Hashable)


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


# takes a function that has run before and a memory pool, returns its graph
Capture = Callable[[Callable[[], None], Any], Graph]
Note = Callable[[str], None]


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


class Running(NamedTuple):
    """A replay in flight.

    over: returns whether the device has finished it.
    wait: waits, and returns its result on the host. The result is valid until the second replay
        after this one begins.
    proceed: does the host's part and launches the rest, if something is left to launch.
    """

    over: Callable[[], bool]
    wait: Callable[[], Tensor | None]
    proceed: Callable[[], None] = lambda: None


class Graphs:
    """Captured functions without arguments, by key. Each returns a tensor that is copied to the
    host, or None.

    `captures` counts captures: a measured run should add none. All graphs share the memory of
    intermediate results, because they run one after the other.

    Args:
        wanted: whether to capture anything. Other devices than GPUs have no graphs.
        record: captures one function.
        check: raises an error if results that the device has finished may not be used.
        compiles: whether `compile` does something.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        wanted: bool = True,
        record: Capture = capture,
        check: Callable[[], None] = lambda: None,
        compiles: bool = True,
    ):
        self.compiles, self.check = compiles, check
        self.enabled, self.record, self._device = wanted and device.type == "cuda", record, device
        self.captures = 0
        # A graph, its result, and two host copies used in turn, because two replays may be in
        # flight.
        self._held: dict[Hashable, tuple[Graph, Tensor | None, list[Tensor]]] = {}
        self._dropped = self._held  # no longer run, see `renew`
        self._warm: dict[Hashable, Tensor | None] = {}  # what ran uncaptured, with one result
        self._version: Hashable = None
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def renew(self, version: Hashable) -> bool:
        """Drop all graphs if `version` has changed, because memory that they read has moved.
        Returns: whether it has."""
        if version == self._version:
            return False
        # Keep the old graphs until the next capture: CUDA's allocator may refuse to capture into
        # a memory pool that no graph uses.
        self._dropped, self._held = self._held or self._dropped, {}
        self._warm.clear()
        self._version = version
        return True

    def holds(self, key: Hashable) -> bool:
        """Return whether a graph with this key exists."""
        return key in self._held

    def held(self) -> Iterable[Hashable]:
        """Return the keys of all graphs."""
        return self._held.keys()

    def keep(self, keys: Container[Hashable]) -> None:
        """Free the graphs of all other keys."""
        self._held = {key: graph for key, graph in self._held.items() if key in keys}

    def close(self) -> None:
        """Free all graphs: NCCL cannot leave a group whose exchanges are in live graphs."""
        for graph, _, _ in self._held.values():
            graph.reset()
        self._held = {}

    def is_warm(self, key: Hashable) -> bool:
        """Return whether `key` has run uncaptured, so that its kernels are compiled and its
        libraries set up."""
        return key in self._warm

    def compile(self, functions: Iterable[Callable[[], object]], note: Note | None = None) -> bool:
        """Compile the kernels that these functions launch, many at a time, without launching them.

        Args:
            note: called with a line if that fails; kernels are then compiled when they first run.
                None: raise the error.

        Returns:
            whether they are compiled.
        """
        if not self.compiles or not has_triton():
            return False
        from bass_kernels.launch import compile_ahead

        try:
            compile_ahead(functions)
        except Exception as error:
            if note is None:
                raise
            note(
                "kernels will be compiled one by one, because compiling them together failed: "
                f"{type(error).__name__}: {error}"
            )
            return False
        return True

    def run(self, key: Hashable, function: Callable[[], Tensor | None]) -> Tensor | None:
        """Run `function` uncaptured and return its result on the host."""
        found = function()
        self._warm[key] = None if found is None else found.cpu()
        synchronise(self._device)
        self.check()
        return self._warm[key]

    def capture(self, key: Hashable, function: Callable[[], Tensor | None]) -> None:
        """Capture `function`. It must be warm (see `run`), because compiling and loading cannot
        be captured."""
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

    def replay(self, key: Hashable) -> None:
        """Replay the graph of `key`. The host waits for nothing and receives nothing."""
        self._held[key][0].replay()

    def launch(self, key: Hashable) -> Running:
        """Launch the graph of `key` after all work that the device has already."""
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
            self.check()
            return host

        return Running(done.query, wait)


class SkiRental(Generic[_Key]):
    """The ski-rental rule: other graphs, or uncaptured passes, serve a wanted one until the time
    lost by that reaches the cost of its capture. What was lost still counts after memory has moved
    and the graphs have been dropped, unless `restart` was called."""

    def __init__(self) -> None:
        # By wanted key: how often something else served, and what was lost by that.
        self._lost: dict[_Key, tuple[int, float]] = {}

    def lose(self, wanted: _Key, loss: float) -> None:
        """Note that something else served `wanted`, at this loss."""
        times, lost = self._lost.get(wanted, (0, 0.0))
        self._lost[wanted] = times + 1, lost + loss

    def restart(self, wanted: _Key, lost: float) -> None:
        """Count this loss only: what was lost before has paid for a capture."""
        self._lost[wanted] = 0, lost

    def pays(self, wanted: _Key, price: float, *, left: float | None = None) -> bool:
        """Return whether a capture pays, given its cost in the unit of losses.

        Args:
            left: how often it will be wanted at the most. None: unknown.
        """
        times, lost = self._lost.get(wanted, (0, 0.0))
        return lost >= price and (left is None or left * lost >= price * times)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
