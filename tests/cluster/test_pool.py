"""The assignment of samples: none is lost or duplicated, for any workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from bass_cli.cluster.worker_pool import Part, Pool
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", f"text {i}", None, {}, None, f"x:{i}") for i in range(count)
    ]  # fmt: skip


def sample(id_: str, number: int) -> Completion:
    return Completion(id_, number, "", "eos", 3, None, None, 0.0, 1, 0, 0, 0, 2)


def failed(id_: str) -> Completion:
    return Completion.failed(id_, "too long", seed=0, meta={})


def pool_of(
    count: int,
    n: int,
    done: Iterable[tuple[str, int]] = (),
    *,
    known: bool = True,
    alike: bool = False,
) -> Pool:
    given = iter(prompts(count))
    return Pool(given, set(done), n=n, count=count if known else None, alike=alike)


def keys(parts: list[Part]) -> list[tuple[str, int]]:
    return [(part.prompt.id, number) for part in parts for number in part.samples]


@pytest.mark.parametrize("count_is_known", [True, False])
def test_each_sample_is_delivered_once_for_any_workers(count_is_known: bool) -> None:
    """Workers of unequal speed join, die and report again in random order."""
    for seed in range(60):
        chance = random.Random(seed)
        count, n = chance.randint(1, 30), chance.randint(1, 9)
        expected = {(f"p{i}", number) for i in range(count) for number in range(n)}
        done = {key for key in expected if chance.random() < 0.2}
        pool = pool_of(count, n, done, known=count_is_known)
        hands: dict[int, list[tuple[str, int]]] = {}
        ghosts: list[tuple[int, tuple[str, int]]] = []  # what lost workers may still say
        taken, hired = Counter[tuple[str, int]](), 0
        while not pool.over():
            if not hands or chance.random() < 0.1:
                pool.hire(hired)
                hands[hired] = []
                hired += 1
            worker = chance.choice(list(hands))
            if chance.random() < 0.05 and hired < 200:
                assert pool.lose(worker) == len(hands[worker])
                ghosts += [(worker, key) for key in hands.pop(worker)]
                continue
            hands[worker] += keys(pool.chunk(worker, rows=4))
            chance.shuffle(hands[worker])
            for _ in range(chance.randint(0, len(hands[worker]))):
                key = hands[worker].pop()
                assert pool.deliver(worker, sample(*key))
                assert not pool.deliver(worker, sample(*key))
                taken[key] += 1
            if ghosts:
                worker, key = ghosts.pop()
                assert not pool.deliver(worker, sample(*key))
        assert taken == Counter(expected - done)
        assert not any(hands.values())


def test_a_chunk_grows_with_the_samples_that_ended() -> None:
    pool = pool_of(1000, 2)
    pool.hire("a")
    first = pool.chunk("a", rows=16)
    assert len(keys(first)) == 18  # the rows, and an eighth in reserve
    assert pool.chunk("a", rows=16) == []
    for key in keys(first)[:6]:
        pool.deliver("a", sample(*key))
    assert len(keys(pool.chunk("a", rows=16))) == 6
    for key in keys(first)[6:14]:
        pool.deliver("a", sample(*key))
    assert len(keys(pool.chunk("a", rows=16))) == 18  # back to 16 rows, and twice 6
    assert pool.held("a") == 28


def test_samples_of_one_length_are_shared_equally() -> None:
    """All slots of a worker end at once. It may not take what the other one needs then."""
    pool, drawn, hands = pool_of(36, 16), Counter[str](), dict[str, list[Any]]()
    for worker in ("a", "b"):
        pool.hire(worker)
        hands[worker] = []
    while not pool.over():
        for worker, hand in hands.items():  # a report after each wave, and others meanwhile
            running, hand[:] = hand[:96], hand[96:]
            drawn[worker] += len(running)
            for key in running:
                assert pool.deliver(worker, sample(*key))
            for _ in range(3):
                hand += keys(pool.chunk(worker, rows=96))
    assert drawn["a"] + drawn["b"] == 576
    assert abs(drawn["a"] - drawn["b"]) < 96 // 2, drawn


def test_prompts_are_split_only_near_the_end() -> None:
    """Two workers, four prompts of 40 samples: the last are split into at most 8 parts."""
    pool = pool_of(4, 40)
    for worker in ("a", "b"):
        pool.hire(worker)
    sizes = []
    while not pool.over():
        for worker in ("a", "b"):
            parts = pool.chunk(worker, rows=4)
            sizes += [len(part.samples) for part in parts]
            for key in keys(parts):
                assert pool.deliver(worker, sample(*key))
    assert sizes[:3] == [40, 40, 40]
    assert max(sizes[3:]) == 20
    assert min(sizes[:-1]) >= 5
    assert sum(sizes) == 160
    alone = pool_of(4, 40)
    alone.hire("a")
    assert [len(part.samples) for part in alone.chunk("a", rows=200)] == [40] * 4


def test_a_worker_holds_one_part_of_a_prompt() -> None:
    pool = pool_of(1, 16)
    for worker in ("a", "b", "c"):
        pool.hire(worker)
    (first,) = pool.chunk("a", rows=1)
    pool.deliver("a", sample("p0", first.samples[0]))
    assert pool.chunk("a", rows=100) == []  # the rest waits, and is for others
    (second,) = pool.chunk("b", rows=100)
    assert not set(first.samples) & set(second.samples)


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_prompt_is_one_line_for_all_its_parts(lost: bool) -> None:
    pool = pool_of(1, 16)
    for worker in ("a", "b"):
        pool.hire(worker)
    pool.chunk("a", rows=1)
    pool.chunk("b", rows=1)
    assert pool.deliver("a", failed("p0"))
    if lost:
        assert pool.lose("b") > 0
    else:
        assert not pool.deliver("b", failed("p0"))
    assert pool.over()  # what it had is not drawn again


def test_copies_stay_together_and_need_one_slot() -> None:
    pool = pool_of(20, 8, alike=True)
    pool.hire("a")
    pool.hire("b")
    parts = pool.chunk("a", rows=4)
    assert [len(part.samples) for part in parts] == [8] * 5
    assert pool.held("a") == 5
    for key in keys(parts[:1]):
        assert pool.deliver("a", sample(*key))
    assert pool.held("a") == 4
    assert len(pool.chunk("a", rows=4)) == 1  # back to four rows, and one
