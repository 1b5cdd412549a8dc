"""`auto` with a budget of 0.1 s a prompt: a job of many small prompts whose text differs."""

import pytest
from timed_job import BLOCK, timed_job

ROUND = 0.005  # of eight drafts for 16 rows


@pytest.mark.parametrize(
    ("off", "spread", "limit", "seeds"),
    [
        (0.12, 0.2, 32, (1,)),
        *(
            pytest.param(*case, (0, 1), marks=pytest.mark.slow)
            for case in ((0.0, 0.05, 8), (0.06, 0.1, 8), (0.12, 0.2, 8), (0.12, 0.2, 32))
        ),
    ],
)
def test_auto_generates_as_much_as_the_best_fixed_length(off, spread, limit, seeds):
    """With equal prompts, and with prompts of which some profit from drafting and others do not;
    with limits at and beyond the drafter's training."""
    chances = [chance - off for chance in BLOCK]
    fixed, auto = 0, 0
    for seed in seeds:
        told = {"chances": chances, "spread": spread, "seed": seed}
        fixed += max(timed_job(length, limit=32, **told).tokens for length in (0, 6, 8))
        found = timed_job("auto", limit=limit, **told)
        auto += found.tokens
        assert max(found.late) <= ROUND
        assert {how for how, _ in found.graphs.done} == {"replay"}
    assert auto >= 0.97 * fixed
    if spread > 0.1:
        assert auto >= 0.99 * fixed, "the best length differs between prompts, and is learnt"


def test_shortened_round_is_no_later_than_others():
    """It is chosen and launched when the last result is known."""
    found = timed_job("auto", chances=[chance - 0.06 for chance in BLOCK], spread=0.1, limit=32)
    late = sorted(found.late)
    assert late[int(0.9 * len(late))] <= 0.0008, "the host's millisecond at most"


def test_token_by_token_drafts_are_not_late():
    found = timed_job("auto", chances=[0.75] * 64, spread=0.2, limit=32, at_once=False)
    assert max(found.late) <= ROUND
    assert {how for how, _ in found.graphs.done} == {"replay"}
