"""The estimated acceptance rate: unlike rows, changes, positions, and filler tokens that are no
drafts."""

import pytest

from bass_cli.engine.contracts import SkippedDrafts
from bass_cli.lengths.acceptance import Acceptance


def acceptance(rows, *, limit=8):
    found = Acceptance(limit)
    found.follow(tuple(range(rows)))
    return found


def test_one_round_of_many_rows_outweighs_the_prior():
    many, one = acceptance(8), acceptance(1)
    many.observe((0,) * 8, (4,) * 8)
    one.observe((0,), (4,))
    assert many.rate < 0.25
    assert one.rate > 0.4


def test_unlike_rows_have_their_own_rates_and_affect_the_choice():
    """Half of the rows accept almost everything, half little: rounds a token decide, not tokens
    a round. When the fast rows have ended, the rate of the others is not the former mean."""
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


def test_skipped_drafts_count_for_the_pool_and_for_no_row():
    """Knowledge about them does not age in plain rounds that report more of them."""
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


def test_change_outweighs_everything_before_it():
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


def test_similar_rows_share_one_rate():
    keeping = acceptance(4)
    for kept in ([3, 4, 2, 4], [4, 3, 4, 2], [2, 4, 4, 3], [4, 2, 3, 4]) * 3:
        keeping.observe(kept, [4] * 4)
    assert len(set(keeping.rates(4).tolist())) == 1


def test_filler_tokens_teach_nothing():
    """Row 1 never has a third draft, row 2 none at all; what is accepted in their filled places
    is luck."""
    honest, filled = acceptance(3), acceptance(3)
    for keeping, luck in ((honest, 0), (filled, 2)):
        for number in range(20):
            keeping.observe([number % 5, 2 + luck, luck], [4, 2, 0])
    assert filled.rate == honest.rate
    assert filled.tokens([4, 4, 4]).tolist() == honest.tokens([4, 4, 4]).tolist()
    assert 0.6 < honest.rate < 0.9, "row 1 accepted all of its drafts, row 0 two of three"


def test_rows_gain_no_more_than_their_drafts():
    keeping = acceptance(4)
    for _ in range(60):
        keeping.observe([4, 1, 1, 1], [4, 1, 1, 1])
    assert keeping.tokens([4, 4, 4, 4])[-1] == pytest.approx(5, abs=0.1), (
        "a place without a draft is no failure"
    )
    assert keeping.tokens([4, 2, 0, 0]).tolist() == pytest.approx([1, 1.5, 2, 2.25, 2.5], abs=0.05)
    assert keeping.tokens([3] * 7).tolist() == pytest.approx([1, 2, 3, 4], abs=0.1), (
        "rows that were not set by `follow`"
    )


def test_positions_with_less_acceptance_than_the_rate_are_learnt():
    """Two drafts are always accepted, the third never: three tokens a round for any longer
    draft."""
    keeping = acceptance(4)
    for _ in range(30):
        keeping.observe([2] * 4, [5] * 4)
    rounds = keeping.rounds(4)
    assert rounds[2] == pytest.approx(1 / 3, rel=0.05)
    assert rounds[8] == pytest.approx(1 / 3, rel=0.12)
