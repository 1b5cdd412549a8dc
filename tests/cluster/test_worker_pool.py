"""The driver on a fake clock, with workers that die, join, leave, lag and fail.

Its results are those of one process.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bass_cli.cluster.fleet import Lost, Place
from bass_cli.cluster.worker import Part, Ready, Report
from bass_cli.cluster.worker_pool import WorkerPool
from bass_cli.config.job import Job, Pair
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion
from bass_cli.io.usage import Usage
from bass_cli.run.manifest import Facts
from bass_cli.system.children import Fault

Event = Ready | Report | Fault | Lost
JOB = Job(pair=Pair(name="m", target="x/m"))
FACTS = Facts({"results": {"target": "m", "dtype": "fp32"}}, 4, (), False, JOB)


class Fleet:
    """Workers that draw a few samples a tick. `deaths`: the chance that one dies in a tick;
    `joined`: by tick, how many places there are. A worker that has died still has an answer under
    way as often as not, which comes late."""

    def __init__(self, *, places: int = 4, deaths: float = 0.0, seed: int = 0) -> None:
        self.chance, self.deaths, self.now, self.kills = random.Random(seed), deaths, 0.0, 0
        self.there = {Place(None, number) for number in range(places)}
        self.answers: dict[Place, Event] = {}  # of prepare, where it is not Ready
        self._held: dict[Place, list[tuple[str, int]]] = {}
        self._pending: dict[Place, Event | None] = {}  # None: an exchange, answered when it is time

    def places(self) -> set[Place]:
        return set(self.there)

    def start(self, place: Place) -> None:
        assert place not in self._held
        self._held[place] = []
        self._pending[place] = self.answers.get(place, Ready(f"node{place.number}", FACTS))

    def ask(self, place: Place, parts: list[Part], beat: float) -> None:
        assert place not in self._pending, "one question at a time"
        self._held[place] += [(part.prompt.id, i) for part in parts for i in part.samples]
        self._pending[place] = None

    def stop(self, place: Place) -> None:
        self._held.pop(place, None)
        self._pending.pop(place, None)

    def wait(self, timeout: float) -> list[tuple[Place, Event]]:
        self.now += timeout
        found: list[tuple[Place, Event]] = []
        for place in list(self._pending):
            if self.chance.random() < self.deaths:
                self.kills += 1
                if self.chance.random() < 0.5:  # its answer arrives
                    found.append((place, self._pending.pop(place) or self._report(place)))
                found.append((place, Lost("killed")))
            elif self.chance.random() < 0.7:  # others take longer
                found.append((place, self._pending.pop(place) or self._report(place)))
        return found

    def _report(self, place: Place) -> Report:
        held = self._held[place]
        self.chance.shuffle(held)
        some = [held.pop() for _ in range(min(len(held), self.chance.randint(0, 3)))]
        usage = Usage(4, None).summary()
        done = tuple(completion(*key) for key in some)
        return Report(done, (), None, 4, len(held), 10, 5, 5, usage)


def completion(id_: str, number: int) -> Completion:
    return Completion(id_, number, f"{id_}:{number}", "eos", 3, None, None, 0.0, 1, 0, 0, 0, 2)


def pool_of(fleet: Fleet, n: int = 3, **given: Any) -> WorkerPool:
    return WorkerPool(fleet, Screen(quiet=True), n=n, alike=False, now=lambda: fleet.now, **given)


def prompts(count: int) -> Iterator[Prompt]:
    return (Prompt(f"p{i}", "text", None, {}, None, f"x:{i}") for i in range(count))


def expected(count: int, n: int = 3) -> Counter[tuple[str, int]]:
    return Counter((f"p{i}", number) for i in range(count) for number in range(n))


def run(fleet: Fleet, count: int, done: set[tuple[str, int]] = frozenset()) -> Counter[Any]:  # type: ignore[assignment]
    pool = pool_of(fleet)
    pool.gather()
    return Counter((one.id, one.sample) for one in pool.draw(prompts(count), done, count))


def test_a_thousand_deaths_lose_and_duplicate_no_sample() -> None:
    kills = 0
    for seed in range(24):
        fleet = Fleet(deaths=0.06, seed=seed)
        done = {("p3", 1), ("p7", 0), ("p7", 1), ("p7", 2)}
        assert run(fleet, 300, done) == expected(300) - Counter(done)
        kills += fleet.kills
    assert kills > 1000


@pytest.mark.parametrize("kind", [UserError, KeyboardInterrupt])
def test_samples_are_yielded_though_no_more_can_be_assigned(kind: type[BaseException]) -> None:
    """The worker is to get new samples before those that ended are written, which takes time."""
    fleet, found = Fleet(places=1), list[Completion]()
    pool, events, ask = pool_of(fleet), list[str](), fleet.ask
    pool.gather()

    def source() -> Iterator[Prompt]:
        yield from prompts(4)
        raise kind("line 5")

    def asked(*given: Any) -> None:
        ask(*given)
        events.append("asked")

    def write() -> None:
        for one in pool.draw(source(), set(), None):
            found.append(one)
            events.append("written")

    fleet.ask = asked  # type: ignore[method-assign]
    with pytest.raises(kind):
        write()
    assert events[:3] == ["asked", "asked", "written"]
    assert events[-1] == "written"
    ended = 12 - len(fleet._held[Place(None, 0)])
    assert len(found) == ended > 0


def test_nodes_may_join_and_leave() -> None:
    fleet = Fleet(places=1, deaths=0.01)
    found, seen = Counter[tuple[str, int]](), set()
    pool = pool_of(fleet)
    pool.gather()
    for one in pool.draw(prompts(300), set(), 300):
        found[one.id, one.sample] += 1
        seen.add(pool.line().partition(" actors")[0])
        if sum(found.values()) == 100:
            fleet.there = {Place("b", number) for number in range(6)}  # and the first one is gone
        if sum(found.values()) == 500:
            fleet.there = {Place("b", 5)}
    assert found == expected(300)
    assert {"1 of 1", "6 of 6"} <= seen


def test_a_node_with_other_models_is_refused_by_name() -> None:
    fleet = Fleet()
    other = Facts({"results": {"target": "m", "dtype": "bf16"}}, 4, (), False, JOB)
    fleet.answers[Place(None, 2)] = Ready("spare", other)
    with pytest.raises(UserError, match=r"^on spare: .*dtype: 'bf16' there, 'fp32' elsewhere"):
        run(fleet, 300)


@pytest.mark.parametrize(("kind", "error"), [("user", UserError), ("machine", MachineError),
                                             ("bug", RuntimeError)])  # fmt: skip
def test_a_fault_ends_the_job_after_its_samples(kind: str, error: type[Exception]) -> None:
    fleet = Fleet()
    pool = pool_of(fleet)
    pool.gather()
    answer, found = fleet._report, []

    def report(place: Place) -> Report:
        fault = Fault(kind, "no model", f"node{place.number}") if len(found) > 20 else None
        return answer(place)._replace(fault=fault)

    fleet._report = report  # type: ignore[method-assign]
    with pytest.raises(error, match=r"^on node\d: no model"):
        found.extend(pool.draw(prompts(300), set(), 300))
    assert len(found) > 20


@pytest.mark.parametrize("at_once", [True, False])
def test_a_node_that_joins_without_the_model_is_left_out(at_once: bool) -> None:
    """Also if the node fails later, while it holds samples."""
    fleet, fault = Fleet(places=2), Fault("machine", "no memory")
    report = fleet._report
    if at_once:
        fleet.answers[Place("new", 0)] = fault
    fleet._report = lambda place: report(place)._replace(  # type: ignore[method-assign]
        fault=fault if place.node == "new" else None
    )
    pool = pool_of(fleet)
    pool.gather()
    found = Counter[tuple[str, int]]()
    for one in pool.draw(prompts(100), set(), 100):
        found[one.id, one.sample] += 1
        fleet.there |= {Place("new", 0)}
    assert found == expected(100)


def test_actors_that_die_in_a_row_end_the_job() -> None:
    fleet = Fleet(places=3)
    pool = pool_of(fleet)
    pool.gather()
    fleet.deaths = 1.0
    fleet._report = lambda place: Report(
        (), (), None, 4, 4, 0, 0, 0, {"phases": {}, "rounds": 0, "rows": 4, "rows_busy": None}
    )  # type: ignore[method-assign]
    with pytest.raises(MachineError, match="actors died in a row without drawing a sample"):
        list(pool.draw(prompts(10), set(), 10))
    assert 10 < fleet.kills < 20
