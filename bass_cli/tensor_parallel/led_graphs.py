"""CUDA graphs of a split model. The leader captures a round; each follower captures the passes of
the calls that it receives meanwhile. Afterwards one message, the graph's number, replays it.

The exchanges between processes (ranks.py) are inside the graphs, so processes wait for each other
on their devices and no host waits for another. All processes capture at the same time, because
NCCL may synchronise its members during a capture. Not here: which rounds are captured (engine/),
how calls are sent (leader.py, follower.py).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from bass_cli.models.capture import Graph, capture

# a call as sent: number of a runner, method, arguments
Call = tuple[Any, ...]
_CAPTURED = (0, "captured")  # sent after the last call of a graph


class Channel(Protocol):
    """Sends calls to the followers (leader.Followers)."""

    def tell(self, *message: Any) -> None: ...

    def taking_part(self) -> contextlib.AbstractContextManager[None]: ...


class LedGraph:
    """The leader's part of a graph."""

    def __init__(self, graphs: LedGraphs, number: int, graph: Graph):
        self._graphs, self.number, self._graph = graphs, number, graph

    def replay(self) -> None:
        """Replay the graph in all processes."""
        with self._graphs.told(self.number):
            self._graph.replay()

    def reset(self) -> None:
        """Free the graph. It cannot be replayed afterwards."""
        self._graph.reset()


class LedGraphs:
    """All graphs of a split model, in the leader. `wanted`: whether rounds may be captured."""

    def __init__(self, channel: Channel):
        self.wanted = False
        self._channel, self._numbers = channel, itertools.count(1)
        # followers free the graphs that are no longer referenced here
        self._live: weakref.WeakValueDictionary[int, LedGraph] = weakref.WeakValueDictionary()

    def capture(self, function: Callable[[], None], pool: Any) -> LedGraph:
        """Capture `function` in all processes (capture.capture)."""
        with self.recorded() as number:
            graph = capture(function, pool)
        made = self._live[number] = LedGraph(self, number, graph)
        return made

    @contextlib.contextmanager
    def recorded(self) -> Iterator[int]:
        """Have the followers record the calls of the block under the number that this yields,
        instead of running them."""
        number = next(self._numbers)
        with self._channel.taking_part():
            self._channel.tell(0, "capture", number, frozenset(self._live))
            yield number
            self._channel.tell(*_CAPTURED)

    @contextlib.contextmanager
    def told(self, number: int) -> Iterator[None]:
        """Have the followers replay this graph while the leader runs the block."""
        with self._channel.taking_part():
            self._channel.tell(0, "replay", number)
            yield

    def close(self) -> None:
        """Free all graphs: NCCL cannot leave a group whose exchanges are in live graphs."""
        for graph in list(self._live.values()):
            graph.reset()


class _Held(NamedTuple):
    """A captured graph, or None; the calls in it; the runners of those calls, and their version
    at the capture."""

    graph: Graph | None
    calls: list[Call]
    runners: frozenset[int]
    version: Hashable


class FollowedGraphs:
    """The graphs of a follower. On a CPU the calls of a graph are run one by one instead.

    Args:
        listen: returns the next call.
        perform: runs a call.
        version: returns a value for a set of runners. A graph is valid while the value for its
            runners is unchanged.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        listen: Callable[[], Call],
        perform: Callable[[Call], None],
        version: Callable[[frozenset[int]], Hashable],
    ):
        self._listen, self._perform, self._version = listen, perform, version
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._held: dict[int, _Held] = {}

    def capture(self, number: int, live: Collection[int]) -> None:
        """Capture the next calls, up to `_CAPTURED`, as a graph.

        Args:
            number: of the new graph.
            live: numbers of the older graphs that may be replayed again. The rest are freed.
        """
        calls, call = list[Call](), self._listen()

        def run_calls() -> None:
            nonlocal call
            while call != _CAPTURED:
                calls.append(call)
                if self._pool is not None:
                    self._perform(call)
                call = self._listen()

        graph = None
        if self._pool is None or call == _CAPTURED:  # the latter: the graph has no calls
            run_calls()
        else:
            graph = capture(run_calls, self._pool)
        # After the capture: CUDA cannot capture into a pool without a graph (engine/graphs.py).
        self._held = {one: held for one, held in self._held.items() if one in live}
        runners = frozenset(call[0] for call in calls)
        self._held[number] = _Held(graph, calls, runners, self._version(runners))

    def replay(self, number: int) -> None:
        """Replay a graph. If memory that it reads has moved, run its calls instead: their
        exchanges come in the same order. Memory may move in one process only, because devices
        differ in what is free."""
        graph, calls, runners, version = self._held[number]
        if graph is not None and version == self._version(runners):
            graph.replay()
            return
        for call in calls:
            self._perform(call)

    def close(self) -> None:
        """See LedGraphs.close."""
        for held in self._held.values():
            if held.graph is not None:
                held.graph.reset()
        self._held = {}
