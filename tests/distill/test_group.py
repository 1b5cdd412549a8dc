"""The supervisor of a group of processes, with a fake clock: who takes part, deaths, and what is
shown."""

from __future__ import annotations

import os
import platform

import pytest

from bass_cli.cluster.fleet import Fault, Lost, Place
from bass_cli.distill.exchange import RankInfo
from bass_cli.distill.group import (
    HOPELESS,
    PATIENCE,
    PEERS,
    Group,
    RankReady,
    RankReport,
    assign_ranks,
)
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen


def place(number):
    return Place(None, number)


class Fleet:
    """Processes by number. `late`: seconds until they are ready. `groups`: for each group, events
    that replace the normal end, by process."""

    def __init__(self, count=3, *, late=(), groups=(), steps=3):
        self.count, self.late, self.groups, self.steps = count, dict(late), list(groups), steps
        self.now, self.running, self.pending = 0.0, {}, []
        self.made, self.infos, self.late_after_a_loss = [], {}, {}

    def places(self):
        return {place(number) for number in range(self.count)}

    def start(self, where):
        assert where not in self.running
        self.running[where] = self.now
        number = where.number
        answer = RankReady(f"node{number // 2}", f"10.0.0.{number // 2}", 1000 + number)
        self.pending.append((self.now + self.late.get(number, 0.0), where, answer))

    def ask(self, where, info, beat):
        assert where in self.running
        assert not any(other == where for _, other, _ in self.pending), "one question at a time"
        if info is not None:
            if not self.infos:
                self.made.append({})
            self.infos[where] = info
            self.made[-1][where.number] = info
            self.left = self.steps
        events = self.groups[len(self.made) - 1] if len(self.made) <= len(self.groups) else {}
        # the others are done before the first
        answer = RankReport("step 1", 0.5, (), {} if self.left < self.steps - 1 else None)
        if where.number in events and self.left < self.steps:
            answer = events[where.number]
        elif self.infos[where].rank == 0:
            self.left -= 1
            notes = ("a note",) if self.left == 1 else ()
            done = {"done": len(self.made)} if self.left == 0 else None
            answer = RankReport("step 2", 0.7, notes, done)
        self.pending.append((self.now + 0.5, where, answer))

    def wait(self, timeout):
        self.now += timeout
        ready = [one for one in self.pending if one[0] <= self.now]
        self.pending = [one for one in self.pending if one[0] > self.now]
        if self.late_after_a_loss and any(isinstance(answer, Lost) for *_, answer in ready):
            self.late = self.late_after_a_loss
        return [(where, answer) for _, where, answer in ready]

    def stop(self, where):
        self.running.pop(where, None)
        self.infos.pop(where, None)
        self.pending = [one for one in self.pending if one[1] != where]


def train(fleet, tmp_path):
    training = Group(fleet, Screen(), tmp_path / "c.pt", now=lambda: fleet.now)
    return training.run()


def test_all_processes_take_part_and_rank_0_reports(tmp_path, capsys):
    fleet = Fleet(3)
    assert train(fleet, tmp_path) == {"done": 1}
    assert fleet.made == [{0: RankInfo(0, 3, "10.0.0.0", 1000, 2), 1: RankInfo(1, 3, "10.0.0.0", 1000, 2),
                           2: RankInfo(2, 3, "10.0.0.0", 1000, 1)}]  # fmt: skip
    assert not fleet.running
    output = capsys.readouterr().err
    assert "3 actors train together" in output
    assert output.count("a note") == 1


def test_late_processes_join_the_next_group(tmp_path, capsys):
    fleet = Fleet(3, late={2: 10 * PATIENCE}, groups=[{1: Lost("killed")}])
    fleet.late[1] = 0.5 * PATIENCE
    assert train(fleet, tmp_path) == {"done": 2}
    assert [set(group) for group in fleet.made] == [{0, 1}, {0, 1}]
    assert capsys.readouterr().err.count("2 of 3 actors train together") == 2
    fleet = Fleet(3, late={2: 10 * PATIENCE}, groups=[{0: Lost("killed")}])
    fleet.late_after_a_loss = {1: 10 * PATIENCE}  # another one
    assert train(fleet, tmp_path) == {"done": 2}
    assert [set(group) for group in fleet.made] == [{0, 1}, {0, 2}]


@pytest.mark.parametrize("events", [
    {2: Lost("killed")},
    {0: RankReport("", None, (), None, Fault(PEERS, "closed by peer", "node0")), 2: Lost("killed")},
])  # fmt: skip
def test_a_death_is_reported_and_a_new_group_resumes(tmp_path, capsys, events):
    """Whether the death is reported first, or a peer's error."""
    fleet = Fleet(3, groups=[events])
    assert train(fleet, tmp_path) == {"done": 2}
    output = " ".join(capsys.readouterr().err.split())
    assert "an actor on node1 died; the others resume from the last checkpoint: killed" in output
    assert [set(group) for group in fleet.made] == [{0, 1, 2}] * 2


def test_repeated_deaths_without_a_checkpoint_end_the_run(tmp_path):
    fleet = Fleet(2, groups=[{1: Lost("killed")}] * 100)
    with pytest.raises(MachineError, match=f"{HOPELESS + 1} actors died without a checkpoint"):
        train(fleet, tmp_path)
    assert len(fleet.made) == HOPELESS + 1
    assert not fleet.running
    kept = tmp_path / "c.pt"
    fleet = Fleet(2, groups=[{1: Lost("killed")}] * 12)
    ask = fleet.ask

    def asked(where, info, beat):
        if len(fleet.made) % 4 == 0:
            kept.touch()
            os.utime(kept, ns=(1, len(fleet.made)))
        ask(where, info, beat)

    fleet.ask = asked
    assert train(fleet, tmp_path) == {"done": 13}


@pytest.mark.parametrize(("kind", "raised"), [
    ("user", UserError), ("machine", MachineError), ("bug", RuntimeError)
])  # fmt: skip
def test_an_error_of_one_process_ends_the_run(tmp_path, kind, raised):
    fault = Fault(kind, "no such thing", "node7")
    for groups in ([{1: RankReport("", None, (), None, fault)}], [{1: fault}]):
        fleet = Fleet(2, groups=groups)
        with pytest.raises(raised, match="on node7: no such thing"):
            train(fleet, tmp_path)
        assert not fleet.running
    fleet = Fleet(1)
    fleet.wait = lambda timeout: [(place(0), fault)]
    with pytest.raises(raised, match="on node7"):
        train(fleet, tmp_path)


def test_ranks_start_on_this_node_and_are_grouped_by_node():
    ready = {place(0): RankReady("b", "10.0.0.2", 1), place(1): RankReady("a", "10.0.0.1", 2),
             place(2): RankReady("b", "10.0.0.2", 3), place(3): RankReady(platform.node(), "10.0.0.9", 4)}  # fmt: skip
    found = assign_ranks(ready)
    assert [found[place(number)].rank for number in range(4)] == [2, 1, 3, 0]
    assert {(info.host, info.port, info.ranks) for info in found.values()} == {("10.0.0.9", 4, 4)}
    assert [found[place(number)].beside for number in range(4)] == [2, 1, 2, 1]
