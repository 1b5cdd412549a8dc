"""What rows keep of their drafts: unlike rows, a change, places, drafts that were not meant."""

import pytest

from bass_cli.engine.contracts import SkippedDrafts
from bass_cli.lengths.acceptance import Acceptance


def acceptance(rows, *, limit=8):
    found = Acceptance(limit)
    found.follow(tuple(range(rows)))
    return found


def test_one_round_of_many_rows_outweighs_the_first_guess():
    many, one = acceptance(8), acceptance(1)
    many.observe((0,) * 8, (4,) * 8)
    one.observe((0,), (4,))
    assert many.rate < 0.25
    assert one.rate > 0.4


def test_unlike_rows_are_told_apart_and_shape_the_choice():
    """Half the rows keep nearly all, half little: rounds a token, not tokens a round, decide.
    When the fast ones have ended, the rest is not taken for what all were together."""
    keeping = acceptance(8, limit=16)
    for _ in range(12):
        keeping.observe([6, 0] * 4, [6] * 8)
        keeping.observe([5, 1] * 4, [6] * 8)
    rates = keeping.rates(8).tolist()
    assert min(rates[::2]) > 0.85
    assert max(rates[1::2]) < 0.45
    both = keeping.rounds(8)
    keeping.follow((1, 3, 5, 7))
    slow = keeping.rounds(4)
    assert slow[8] > 0.6 > both[8]
    keeping.follow((1, 3, "new"))
    assert keeping.rounds(3)[8] < slow[8], "a new row begins as the pool"


def test_drafts_that_nobody_verified_tell_of_the_pool_and_of_no_row():
    """Nor do they grow old in plain rounds, in which others like them come."""
    keeping = acceptance(4)
    keeping.recall(None)
    assert (keeping.trials, keeping.unsure) == (0, True)
    keeping.recall(SkippedDrafts((4, 0, 4, 0), (4, 4, 4, 4)))
    keeping.recall(SkippedDrafts((4, 0), (4, 4)))
    assert not keeping.unsure
    assert len(set(keeping.rates(4))) == 1
    assert keeping.rate == pytest.approx(0.75, abs=0.07)
    known = keeping.trials
    for _ in range(200):
        keeping.idle()
    assert keeping.trials == known
    verified = acceptance(4)
    verified.observe((4, 0, 4, 0), (4,) * 4)
    for _ in range(200):
        verified.idle()
    assert verified.unsure


def test_a_change_weighs_more_than_all_that_was_before_it():
    keeping = acceptance(2)
    for number in range(60):
        keeping.observe([6, 5] if number % 2 else [4, 6], [6, 6])
    assert keeping.rate > 0.85
    for _ in range(4):
        keeping.observe([0, 0], [6, 6])
    assert keeping.rate < 0.6
    for _ in range(4):
        keeping.observe([6, 6], [6, 6])
    assert keeping.rate > 0.45


def test_rows_that_are_alike_share_one_rate():
    keeping = acceptance(4)
    for kept in ([3, 4, 2, 4], [4, 3, 4, 2], [2, 4, 4, 3], [4, 2, 3, 4]) * 3:
        keeping.observe(kept, [4] * 4)
    assert len(set(keeping.rates(4).tolist())) == 1


def test_drafts_that_were_not_meant_tell_nothing():
    """Row 1 never has a third draft, row 2 none at all; what stands in their filled-up places is
    luck."""
    honest, filled = acceptance(3), acceptance(3)
    for keeping, luck in ((honest, 0), (filled, 2)):
        for number in range(20):
            keeping.observe([number % 5, 2 + luck, luck], [4, 2, 0])
    assert filled.rate == honest.rate
    assert filled.tokens([4, 4, 4]).tolist() == honest.tokens([4, 4, 4]).tolist()
    assert 0.6 < honest.rate < 0.9, "row 1 kept all it had, row 0 two of three"


def test_rows_bring_no_more_than_their_drafts():
    keeping = acceptance(4)
    for _ in range(60):
        keeping.observe([4, 1, 1, 1], [4, 1, 1, 1])
    assert keeping.tokens([4, 4, 4, 4])[-1] == pytest.approx(5, abs=0.1), (
        "a place where a row had no draft is no failure"
    )
    assert keeping.tokens([4, 2, 0, 0]).tolist() == pytest.approx([1, 1.5, 2, 2.25, 2.5], abs=0.05)
    assert keeping.tokens([3] * 7).tolist() == pytest.approx([1, 2, 3, 4], abs=0.1), (
        "rows that nobody followed"
    )


def test_positions_that_keep_less_than_the_rate_says_are_learnt():
    """Two drafts always stand, the third never: three tokens a round, however many are drafted."""
    keeping = acceptance(4)
    for _ in range(30):
        keeping.observe([2] * 4, [5] * 4)
    rounds = keeping.rounds(4)
    assert rounds[2] == pytest.approx(1 / 3, rel=0.05)
    assert rounds[8] == pytest.approx(1 / 3, rel=0.12)
