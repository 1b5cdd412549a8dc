"""A follower's graphs are captured, replayed, run call by call, and freed. Without a device: a capture
here records the calls made meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bass_cli.tensor_parallel import led_graphs
from bass_cli.tensor_parallel.led_graphs import Call, FollowedGraphs

FORWARD, FEED, END = (1, "forward", (2, 3)), (2, "feed", (2, 1)), (0, "captured")


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


class Follower:
    """FollowedGraphs that receive `calls`, and a record of what they did."""

    def __init__(self, device: str, calls: list[Call]):
        self.done: list[Any] = []
        self.versions = {1: 1, 2: 1}
        self.graphs = FollowedGraphs(
            torch.device(device),
            listen=lambda: calls.pop(0),
            perform=self.done.append,
            version=lambda runners: frozenset((n, self.versions[n]) for n in runners),
        )


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))


def follower(monkeypatch: pytest.MonkeyPatch, device: str, calls: list[Call]) -> Follower:
    made = Follower(device, calls)
    monkeypatch.setattr(led_graphs, "capture", lambda function, pool: Captured(made.done, function))
    return made


def test_consecutive_graphs_have_their_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(monkeypatch, "cuda", [FORWARD, FEED, END, FEED, END])
    one.graphs.capture(1, ())
    one.graphs.capture(2, {1})
    assert one.done == []
    one.graphs.replay(2)
    one.graphs.replay(1)
    assert one.done == [("replayed", FEED), ("replayed", FORWARD, FEED)]


def test_graph_with_moved_memory_is_run_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(monkeypatch, "cuda", [FORWARD, FEED, END, FORWARD, END])
    one.graphs.capture(1, ())
    one.graphs.capture(2, {1})
    one.versions[2] = 2
    one.graphs.replay(1)
    one.graphs.replay(2)  # which has nothing of what has moved
    assert one.done == [FORWARD, FEED, ("replayed", FORWARD)]


def test_cpu_runs_the_calls_of_a_graph_at_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(monkeypatch, "cpu", [FORWARD, FEED, END])
    one.graphs.capture(1, ())
    assert one.done == []
    one.graphs.replay(1)
    assert one.done == [FORWARD, FEED]


def test_graph_without_calls_captures_nothing_in_the_follower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, a draft model that catches up. CUDA would warn of an empty graph."""
    one = follower(monkeypatch, "cuda", [END])
    one.graphs.capture(1, ())
    one.graphs.replay(1)
    one.graphs.close()
    assert one.done == []


def test_follower_frees_graphs_that_the_leader_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = [FORWARD, END] * 3
    one = follower(monkeypatch, "cuda", calls)
    for number, live in ((1, ()), (2, {1}), (3, {2})):
        one.graphs.capture(number, live)
    with pytest.raises(KeyError):
        one.graphs.replay(1)
    one.graphs.replay(2)
    one.graphs.close()  # a group is left when no graph has its exchanges
    assert one.done == [("replayed", FORWARD), "reset", "reset"]
