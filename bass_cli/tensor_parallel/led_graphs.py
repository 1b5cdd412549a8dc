"""CUDA graphs that all processes of a split model have a part of: the leader captures what it does,
each of the others the passes that it is told meanwhile, and from then on they are told by number
which graph is next.

What they exchange is in the graphs too (ranks.py), so they meet on their devices: no host waits for
another. All of them capture at the same time, since a library may want to meet for that. Not here:
which rounds are captured (engine/), how calls are told (leader.py, follower.py).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from bass_cli.models.capture import Graph, capture

# a call as it is told: number of a runner, what it does, the arguments
Call = tuple[Any, ...]
_CAPTURED = (0, "captured")  # told behind the last call of a graph


class Channel(Protocol):
    """The leader's way to the others (leader.Followers)."""

    def tell(self, *message: Any) -> None: ...

    def taking_part(self) -> contextlib.AbstractContextManager[None]: ...


class LedGraph:
    """One graph's part on the leader's device."""

    def __init__(self, graphs: LedGraphs, number: int, graph: Graph):
        self._graphs, self.number, self._graph = graphs, number, graph

    def replay(self) -> None:
        """Begin it everywhere."""
        with self._graphs.told(self.number):
            self._graph.replay()

    def reset(self) -> None:
        """It will not be run again."""
        self._graph.reset()


class LedGraphs:
    """All graphs that the leader has with the others. `wanted`: whether there are to be any."""

    def __init__(self, channel: Channel):
        self.wanted = False
        self._channel, self._numbers = channel, itertools.count(1)
        # what nobody replays any more is forgotten by the others too
        self._live: weakref.WeakValueDictionary[int, LedGraph] = weakref.WeakValueDictionary()

    def capture(self, function: Callable[[], None], pool: Any) -> LedGraph:
        """capture.capture, and the same in all processes."""
        with self.recorded() as number:
            graph = capture(function, pool)
        made = self._live[number] = LedGraph(self, number, graph)
        return made

    @contextlib.contextmanager
    def recorded(self) -> Iterator[int]:
        """What the others are told meanwhile they do when this number is told, not now."""
        number = next(self._numbers)
        with self._channel.taking_part():
            self._channel.tell(0, "capture", number, frozenset(self._live))
            yield number
            self._channel.tell(*_CAPTURED)

    @contextlib.contextmanager
    def told(self, number: int) -> Iterator[None]:
        """Around what the leader does while the others run this graph."""
        with self._channel.taking_part():
            self._channel.tell(0, "replay", number)
            yield

    def close(self) -> None:
        """Drop all: a group waits for graphs that have its exchanges before it can be left."""
        for graph in list(self._live.values()):
            graph.reset()


class _Held(NamedTuple):
    """What was captured (None: nothing), the calls that are in it, of which runners, and what
    these read then."""

    graph: Graph | None
    calls: list[Call]
    runners: frozenset[int]
    version: Hashable


class FollowedGraphs:
    """A follower's parts. `listen` gives the next call that is told, `perform` does one; a graph
    holds as long as the `version` of the runners in its calls is what it was. On a CPU the calls of
    a graph are done one by one."""

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
        """The calls that come next, up to the last one, are a graph of that number; of the
        others only those that are `live` will be run again."""
        calls, call = list[Call](), self._listen()

        def pass_on() -> None:
            nonlocal call
            while call != _CAPTURED:
                calls.append(call)
                if self._pool is not None:
                    self._perform(call)
                call = self._listen()

        graph = None
        if self._pool is None or call == _CAPTURED:  # the latter: the leader's own business
            pass_on()
        else:
            graph = capture(pass_on, self._pool)
        # Not before: the memory that all share must not be without any (engine/graphs.py).
        self._held = {one: held for one, held in self._held.items() if one in live}
        runners = frozenset(call[0] for call in calls)
        self._held[number] = _Held(graph, calls, runners, self._version(runners))

    def replay(self, number: int) -> None:
        """Run a graph, or its calls, which meet those of the others in the same order: what it
        reads may have moved here and nowhere else, since devices may differ in what is free."""
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
