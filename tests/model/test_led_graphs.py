"""A follower's graphs are captured, replayed, run call by call, and freed. Without a device: a capture
here records the calls made meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from fakes import recorded

from bass_cli.tensor_parallel.follower import CAPTURED, Call, Follower

FORWARD, FEED, END = (1, "forward", (2, 3)), (2, "feed", (2, 1)), CAPTURED


class Captured:
    """A fake graph, and the function that captures one."""

    def __init__(self, done: list[Any], function: Callable[[], None]):
        self._done, before = done, len(done)
        function()
        self.calls = done[before:]
        del done[before:]  # a capture runs nothing

    def replay(self) -> None:
        self._done.append(("replayed", *self.calls))

    def reset(self) -> None:
        self._done.append("reset")


class Ranks:
    """The follower's member of the group; leaving it is recorded."""

    def __init__(self, done: list[Any]):
        self._done = done

    def leave(self) -> None:
        self._done.append("left")


class Fake(Follower):
    """A follower that receives `calls`, and a record of what it did."""

    def __init__(self, device: str, calls: list[Call]):
        self.done: list[Any] = []
        self.versions, self.calls = {1: 1, 2: 1}, calls
        self.store = recorded(lambda function, pool: Captured(self.done, function))
        self.store.enabled = device == "cuda"
        unused: Any = None
        ranks: Any = Ranks(self.done)
        super().__init__(unused, ranks, unused, self.store)

    def listen(self) -> Call:
        return self.calls.pop(0)

    def perform(self, call: Call) -> None:
        self.done.append(call)

    def version(self, runners: frozenset[int]) -> Hashable:
        return frozenset((number, self.versions[number]) for number in runners)


def test_consecutive_graphs_have_their_own_calls() -> None:
    one = Fake("cuda", [FORWARD, FEED, END, FEED, END])
    one.capture(1, ())
    one.capture(2, {1})
    assert one.done == []
    one.replay(2)
    one.replay(1)
    assert one.done == [("replayed", FEED), ("replayed", FORWARD, FEED)]


def test_graph_with_moved_memory_is_run_call_by_call() -> None:
    one = Fake("cuda", [FORWARD, FEED, END, FORWARD, END])
    one.capture(1, ())
    one.capture(2, {1})
    one.versions[2] = 2
    one.replay(1)
    one.replay(2)  # which has nothing of what has moved
    assert one.done == [FORWARD, FEED, ("replayed", FORWARD)]


def test_cpu_runs_the_calls_of_a_graph_at_replay() -> None:
    one = Fake("cpu", [FORWARD, FEED, END])
    one.capture(1, ())
    assert one.done == []
    one.replay(1)
    assert one.done == [FORWARD, FEED]


def test_graph_without_calls_captures_nothing_in_the_follower() -> None:
    """For example, a draft model that catches up. CUDA would warn of an empty graph."""
    one = Fake("cuda", [END])
    one.capture(1, ())
    one.replay(1)
    one.store.close()
    assert one.done == []


def test_follower_frees_its_graphs_before_it_leaves_the_group() -> None:
    """NCCL cannot leave a group whose exchanges are in live graphs."""
    replay, leave = (0, "replay", 1), (0, "leave")
    one = Fake("cuda", [(0, "capture", 1, ()), FORWARD, END, FEED, replay, leave])
    one.run()
    assert one.done == [FEED, ("replayed", FORWARD), "reset", "left"]


def test_follower_frees_graphs_that_the_leader_dropped() -> None:
    calls: list[Call] = [FORWARD, END] * 3
    one = Fake("cuda", calls)
    for number, live in ((1, ()), (2, {1}), (3, {2})):
        one.capture(number, live)
    with pytest.raises(KeyError):
        one.replay(1)
    one.replay(2)
    one.store.close()  # a group is left when no graph has its exchanges
    assert one.done == [("replayed", FORWARD), "reset", "reset"]
