"""A follower's graphs: what is captured, replayed, done call by call, and forgotten. No device: a
capture here notes which calls came meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bass_cli.tensor_parallel import led_graphs
from bass_cli.tensor_parallel.led_graphs import Call, FollowedGraphs

FORWARD, FEED, END = (1, "forward", (2, 3)), (2, "feed", (2, 1)), (0, "captured")


class Captured:
    """Stands for a graph, and for the function that captures one."""

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
    """Graphs that are told `calls`, and what they did."""

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


def test_a_graph_has_the_calls_up_to_its_end_and_the_next_one_those_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = follower(monkeypatch, "cuda", [FORWARD, FEED, END, FEED, END])
    one.graphs.capture(1, ())
    one.graphs.capture(2, {1})
    assert one.done == []
    one.graphs.replay(2)
    one.graphs.replay(1)
    assert one.done == [("replayed", FEED), ("replayed", FORWARD, FEED)]


def test_what_has_moved_here_alone_is_done_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(monkeypatch, "cuda", [FORWARD, FEED, END, FORWARD, END])
    one.graphs.capture(1, ())
    one.graphs.capture(2, {1})
    one.versions[2] = 2
    one.graphs.replay(1)
    one.graphs.replay(2)  # which has nothing of what has moved
    assert one.done == [FORWARD, FEED, ("replayed", FORWARD)]


def test_a_cpu_does_the_calls_of_a_graph_when_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = follower(monkeypatch, "cpu", [FORWARD, FEED, END])
    one.graphs.capture(1, ())
    assert one.done == []
    one.graphs.replay(1)
    assert one.done == [FORWARD, FEED]


def test_a_graph_of_the_leaders_alone_is_none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that catches up, for one: CUDA would warn of an empty graph."""
    one = follower(monkeypatch, "cuda", [END])
    one.graphs.capture(1, ())
    one.graphs.replay(1)
    one.graphs.close()
    assert one.done == []


def test_what_the_leader_replays_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = [FORWARD, END] * 3
    one = follower(monkeypatch, "cuda", calls)
    for number, live in ((1, ()), (2, {1}), (3, {2})):
        one.graphs.capture(number, live)
    with pytest.raises(KeyError):
        one.graphs.replay(1)
    one.graphs.replay(2)
    one.graphs.close()  # a group is left when no graph has its exchanges
    assert one.done == [("replayed", FORWARD), "reset", "reset"]
