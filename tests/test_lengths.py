"""Draft-length controllers and the clock: golden traces, and what one row may and may not do to the others."""

import pytest

from bass_cli.engine.clock import Clock
from bass_cli.engine.lengths import Bass, Fixed, make_lengths


def trace(controller, rounds, accept):
    out = []
    for _ in range(rounds):
        out.append(controller.next(4))
        controller.observe(out[-1], accept(out[-1]))
    return out


def test_algorithm_1_when_nothing_is_accepted():
    assert trace(Bass(), 7, lambda k: [0, 0, 0]) == [7, 6, 4, 2, 1, 1, 1]
    assert trace(Bass(start=32), 12, lambda k: [0]) == [32, 28, 24, 20, 17, 14, 11, 8, 6, 4, 2, 1]


def test_algorithm_1_grows_by_two_while_one_row_keeps_everything():
    assert trace(Bass(), 15, lambda k: [0, k, 1]) == [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 32, 32]


def test_algorithm_1_never_goes_below_what_a_row_kept_and_forgets_the_shrinking_after_success():
    controller = Bass(start=10)
    kept = iter([[9, 2], [9], [3], [6], [0], [0]])
    assert trace(controller, 6, lambda k: next(kept)) == [10, 9, 11, 9, 7, 5]


def test_a_clipped_draft_that_is_kept_whole_is_not_all_accepted():
    controller = Bass()
    assert controller.next(1) == 7
    controller.observe(3, [3])
    assert controller.next(1) == 6


def test_a_round_without_drafts_teaches_nothing():
    controller = Bass()
    controller.observe(0, [0, 0])
    assert controller.next(2) == 7


@pytest.mark.parametrize(("length", "due"), [(0, 0), (5, 5), (64, 12)])
def test_fixed_lengths_keep_to_the_limit(length, due):
    controller = make_lengths(length, limit=12)
    assert isinstance(controller, Fixed)
    assert controller.next(3) == due


def test_the_clock_shortens_a_round_that_would_end_late():
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.longest_in_time(8, 100.5) == 8  # nothing is known yet
    clock.observe(0, 0.1)
    clock.observe(4, 0.3)
    clock.observe(8, 0.9)
    assert clock.longest_in_time(8, None) == 8
    assert clock.longest_in_time(8, 101.0) == 8
    assert clock.longest_in_time(8, 100.5) == 4
    assert clock.longest_in_time(8, 100.2) == 0
    assert clock.predict(2) == 0.3
    assert clock.predict(20) == 0.9
    assert clock.predict(0) == 0.1


def test_the_clock_follows_what_rounds_really_take():
    clock = Clock(lambda: 0.0)
    clock.observe(2, 1.0)
    for _ in range(30):
        clock.observe(2, 0.2)
    assert abs(clock.predict(2) - 0.2) < 0.01
