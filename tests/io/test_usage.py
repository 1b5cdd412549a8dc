"""Test the counts of rows and seconds against a made-up run."""

from __future__ import annotations

import pytest

from bass_cli.io.usage import Gain, Usage, describe, together


def test_every_second_is_in_one_phase_and_rows_are_counted(now: list[float]) -> None:

    def spend(seconds: float) -> None:
        now[0] += seconds

    usage = Usage(4, 20)
    spend(1.0)
    usage.phase("loading the weights")
    spend(5.0)
    usage.phase("reading the first prompts")
    spend(2.0)
    for rows, seconds, capturing in ((4, 1.0, 0.5), (4, 1.0, 0.0), (3, 1.0, 0.0), (4, 2.0, 0.0)):
        spend(seconds + capturing)
        usage.round(rows, seconds, capturing)
        spend(0.25)  # the host's
    for _ in range(19):
        usage.sample()
    for rows in (2, 1):
        spend(1.5)
        usage.round(rows, 1.5)
    usage.sample()
    found = usage.summary()
    assert found["phases"] == {
        "starting": 1.0,
        "loading the weights": 5.0,
        "reading the first prompts": 2.0,
        "decoding": 5.0,
        "draining": 3.0,
        "capturing graphs": 0.5,
        "between rounds": 1.0,
    }
    assert sum(found["phases"].values()) == now[0]
    assert found["rows_busy"] == pytest.approx(18 / 24)
    assert found["rows_busy_early"] == pytest.approx(15 / 16, abs=1e-4)
    assert (found["rows"], found["rounds"]) == (4, 6)
    assert describe(found) == [
        "rows busy: 75% of 4 (94% until the last 5% of samples)",
        "seconds: starting 1.0, loading the weights 5.0, reading the first prompts 2.0, decoding "
        "5.0, draining 3.0, capturing graphs 0.5, between rounds 1.0",
    ]


def test_the_line_of_a_very_short_run_has_no_empty_list_of_seconds(now: list[float]) -> None:
    usage = Usage(2, 2)
    for seconds in (0.01, 0.02):
        now[0] += seconds
        usage.round(2, seconds)
    assert describe(usage.summary()) == ["rows busy: 100% of 2"]
    assert describe(usage.summary() | {"actors": 3}) == ["rows busy: 100% of 2"]


def test_a_run_without_rounds_has_its_phases(now: list[float]) -> None:
    usage = Usage(4, None)
    usage.phase("loading the weights")
    now[0] = 3.0
    found = usage.summary()
    assert (found["rows_busy"], found["rows_busy_early"]) == (None, None)
    assert found["phases"] == {"starting": 0.0, "loading the weights": 3.0}


def test_batch_with_fewer_samples_than_rows_is_not_draining(now: list[float]) -> None:
    usage = Usage(64, 3)
    for rows in (3, 3, 1):
        now[0] += 1.0
        usage.round(rows, 1.0)
    phases = usage.summary()["phases"]
    assert (phases["decoding"], phases["draining"]) == (2.0, 1.0)


def test_batch_drains_only_when_no_sample_waits_for_a_row(now: list[float]) -> None:
    """A row that has just ended is empty for a round, so a busy batch seldom has all rows live."""
    usage = Usage(8, 20)
    for rows, refills in ((8, True), (7, True), (6, True), (7, False), (2, False)):
        now[0] += 1.0
        usage.round(rows, 1.0, refills=refills)
    phases = usage.summary()["phases"]
    assert (phases["decoding"], phases["draining"]) == (3.0, 2.0)


def test_busy_rows_are_relative_to_the_capacity(now: list[float]) -> None:
    """After memory ran out, half the rows are used. They are all busy, and the batch does not drain."""
    usage = Usage(8, 20)
    for rows, capacity in ((8, 8), (8, None), (4, 4), (4, None), (4, 4), (2, 4)):
        now[0] += 1.0
        usage.round(rows, 1.0, 0.0, capacity)
    found = usage.summary()
    assert (found["rows"], found["rows_busy"]) == (4, round(30 / 32, 4))
    assert (found["phases"]["decoding"], found["phases"]["draining"]) == (5.0, 1.0)


def test_the_gain_of_drafts_is_what_plain_rounds_would_have_taken() -> None:
    """10 tokens a row in plain rounds of 0.1 s, against 4 rounds: 2 plain ones and 2 of 0.3 s."""
    gain = Gain()
    assert gain.seconds is None  # nothing was drafted
    for _ in range(2):
        gain.round(0, 2, 0, 0.1, 0.1)
    assert gain.seconds is None
    for _ in range(2):
        gain.round(8, 2, 6, 0.3, 0.1)  # 3 accepted drafts and one more token in each row
    assert gain.seconds == pytest.approx(10 * 0.1 - (2 * 0.1 + 2 * 0.3))
    for _ in range(8):
        gain.round(8, 2, 0, 0.3, 0.1)  # drafts that cost more than they save
    assert gain.seconds == pytest.approx(0.2 - 8 * 0.2)
    gain.round(8, 2, 8, 0.1, 0.0)  # a round without a known cost
    assert gain.seconds == pytest.approx(0.2 - 8 * 0.2)
    gain.round(8, 2, 8, 0.1, 0.0)
    assert gain.seconds is None  # more than 5 % of the seconds


def test_drafts_are_counted_by_their_place() -> None:
    """A row with 3 drafts of which 1 is accepted has drafts at places 1 to 3, and keeps place 1."""
    one, other, plain = Usage(2, 2), Usage(1, 1), Usage(1, 1)
    one.drafts((3, 3), (1, 3))
    one.drafts((0, 2), (0, 0))
    other.drafts((4,), (4,))
    found = one.summary()["by_place"]
    assert found == {"drafted": [3, 3, 2], "accepted": [2, 1, 1]}
    assert "by_place" not in plain.summary()
    usages = [usage.summary() for usage in (one, other, plain)]
    assert together(usages)["by_place"] == {"drafted": [4, 4, 3, 1], "accepted": [3, 2, 2, 1]}
    assert "by_place" not in together([plain.summary()])
