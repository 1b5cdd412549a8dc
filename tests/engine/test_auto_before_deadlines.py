"""`auto` where each prompt has a tenth of a second: a job of many small ones, on text that differs
from prompt to prompt."""

import pytest
from timed_job import BLOCK, timed_job

ROUND = 0.005  # of eight drafts for 16 rows


@pytest.mark.parametrize(
    ("off", "spread", "limit"), [(0.0, 0.05, 8), (0.06, 0.1, 8), (0.12, 0.2, 8), (0.12, 0.2, 32)]
)
def test_auto_keeps_what_the_best_fixed_length_does(off, spread, limit):
    """Of all prompts alike, and where it pays in some to draft and in others not; with limits at
    and beyond what the draft was trained for."""
    chances = [chance - off for chance in BLOCK]
    fixed, auto = 0, 0
    for seed in (0, 1):
        told = {"chances": chances, "spread": spread, "seed": seed}
        fixed += max(timed_job(length, limit=32, **told).tokens for length in (0, 6, 8))
        found = timed_job("auto", limit=limit, **told)
        auto += found.tokens
        assert max(found.late) <= ROUND
        assert {how for how, _ in found.graphs.done} == {"replay"}
    assert auto >= 0.97 * fixed
    if spread > 0.1:
        assert auto >= 0.99 * fixed, "what pays differs from prompt to prompt, and is found out"


def test_a_round_cut_short_by_its_deadline_is_as_late_as_any_other():
    """It begins when the last one's tokens are known, and is asked for then."""
    found = timed_job("auto", chances=[chance - 0.06 for chance in BLOCK], spread=0.1, limit=32)
    late = sorted(found.late)
    assert late[int(0.9 * len(late))] <= 0.0008, "the host's millisecond at most"


def test_a_draft_token_by_token_is_not_late_either():
    found = timed_job("auto", chances=[0.75] * 64, spread=0.2, limit=32, at_once=False)
    assert max(found.late) <= ROUND
    assert {how for how, _ in found.graphs.done} == {"replay"}
