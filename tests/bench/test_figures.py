"""Figures of `bass bench`: times of rows, acceptance and the floor, of rounds that are made up."""

from __future__ import annotations

import pytest

from bass_cli.bench.figures import (
    Run,
    Step,
    counts,
    finish_times,
    latency,
    round_seconds,
    spread,
    tokens_per_second,
)
from bass_cli.bench.floor import Ceilings, FloorInputs, Sizes, Work, floor_of, pass_work


def run_of(*steps: tuple[float, int, dict[int, int]], tokens: int = 4, rows: int = 2) -> Run:
    return Run(
        tuple(Step(e, w, tuple(kept), tuple(kept.values())) for e, w, kept in steps),
        (10, 20)[:rows],
        tokens,
    )


RAGGED = run_of((1.0, 2, {0: 2, 1: 0}), (3.0, 2, {0: 1, 1: 1}), (4.5, 1, {1: 1}))


def test_first_last_and_mean_row() -> None:
    assert finish_times(RAGGED) == [3.0, 4.5]  # row 0: 3 + 2 of 4 tokens; row 1: 1 + 2 + 2
    assert latency(RAGGED) == pytest.approx((750.0, 1125.0, 937.5))
    assert tokens_per_second(RAGGED) == pytest.approx(8 / 4.5)
    assert latency(RAGGED, [1.0, 1.0, 2.0]) == pytest.approx((250.0, 500.0, 375.0))
    with pytest.raises(AssertionError, match="never ended"):
        finish_times(run_of((1.0, 2, {0: 2, 1: 0})))


def test_acceptance_is_counted_over_rows_and_rounds() -> None:
    found = counts(RAGGED)
    assert found.rounds == 3
    assert found.rate == pytest.approx(5 / 9)  # 2 + 0 + 1 + 1 + 1 of 2 rows x 2, twice, and 1
    assert found.trials == pytest.approx(
        5 / 8
    )  # three rejections: row 1 at once, and both rows after one
    assert found.mean == pytest.approx(1.0)
    plain = counts(run_of(*((float(i + 1), 0, {0: 0}) for i in range(4)), rows=1))
    assert (plain.rounds, plain.rate, plain.trials, plain.mean) == (4, None, None, 0.0)


def test_rounds_of_a_length_count_only_while_all_rows_are_live() -> None:
    assert round_seconds(RAGGED, 2) == [1.0, 2.0]
    assert round_seconds(RAGGED, 1) == []
    assert spread([3.0, 1.0, 8.0]) == (3.0, 1.0, 8.0)


def test_the_work_of_a_pass() -> None:
    cost = Sizes(body=10, head=5, item=2, keys=4, attention=8, windows=(0, 3))
    found = pass_work(cost, contexts=[7, 2], shared=1, fed=2, logits=1)
    # Weights once; layer 0 reads 7 + 2 - 1 positions, layer 1 3 + 2. Products: 2 rows x (2 x 10
    # + 5) x 2.
    assert found == Work(15 * 2 + (8 + 5) * 4 * 2, 100 + 8 * 2 * (9 + 5))


def test_the_floor_follows_the_rounds() -> None:
    target, ceilings = Sizes(100, 10, 1, 0, 0, (0,)), Ceilings(10.0, 1e9, "known")
    found = floor_of(RAGGED, FloorInputs(target, None, 1, ceilings))
    assert found.ends == pytest.approx((11.0, 22.0, 33.0))  # 110 bytes a round at 10 a second
    assert found.work.bytes == 330
    with_draft = floor_of(RAGGED, FloorInputs(target, Sizes(40, 0, 1, 0, 0, (0,)), 1, ceilings))
    assert with_draft.ends == pytest.approx((19.0, 38.0, 53.0))  # and 2, 2 and 1 steps of 40 bytes
    # bound by arithmetic: 2 rows x 3 tokens x 110 x 2 operations at 10 a second
    slow = Ceilings(1e9, 10.0, "known")
    assert floor_of(RAGGED, FloorInputs(target, None, 1, slow)).ends[0] == pytest.approx(132.0)
    keys = Sizes(0, 0, 1, 1, 0, (0,))
    apart = floor_of(RAGGED, FloorInputs(keys, None, 1, ceilings)).work.bytes
    together = floor_of(
        RAGGED._replace(contexts=(10, 10)), FloorInputs(keys, None, 2, ceilings)
    ).work.bytes
    assert apart == (10 + 20) + (13 + 21) + 23
    assert together == 10 + 0 + (13 + 11 - 10) + 13
