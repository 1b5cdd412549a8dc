"""Lookup with `auto` in short jobs, on a simulated GPU. Drafts found in plain rounds that would
have been accepted lead to a first use; others cost almost nothing."""

import pytest
from retold import Texts, speeds

from bass_cli.lengths.goodput import Goodput


@pytest.mark.parametrize(
    ("rows", "text", "due"),
    [
        pytest.param(
            16,
            {"prompts": 16, "n": 16, "off": 0.2, "copied": 0.5},
            (1.05, 1.08),
            marks=pytest.mark.slow,
        ),
        (16, {"prompts": 16, "n": 16, "off": 0.05, "copied": 0.9}, (1.5, 1.9)),
        (1, {"prompts": 8, "n": 1, "off": 0.05, "copied": 0.9, "mean": 120}, (1.1, 2.0)),
    ],
)
def test_drafts_that_would_have_been_accepted_are_tried(rows, text, due):
    """800 rounds, of which a first use takes up to 50: before a pass ran, only the time of the
    very first pass is known. Two jobs, one after the other."""
    found = speeds(Goodput(limit=32), Texts(**text), rows=rows)
    assert [speed > least for speed, least in zip(found, due, strict=True)] == [True, True], found


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        pytest.param(
            16, {"prompts": 16, "n": 16, "off": 1.0, "copied": 0.0}, marks=pytest.mark.slow
        ),
        (16, {"prompts": 16, "n": 16, "off": 0.4, "copied": 0.5}),
        (8, {"prompts": 8, "n": 1, "off": 0.4, "copied": 0.5, "mean": 120}),
        (1, {"prompts": 8, "n": 1, "off": 1.0, "copied": 0.0, "mean": 120}),
        (1, {"prompts": 8, "n": 1, "off": 0.05, "copied": 0.9, "until": 3, "mean": 120}),
    ],
)
def test_lookups_without_result_count_with_their_full_cost(rows, text):
    """A lookup costs its own time, and the time in which the device waits because the round
    before must end first. Also if drafts are accepted for three prompts and then no more."""
    found = speeds(Goodput(limit=32), Texts(**text), rows=rows)
    assert min(found) > 0.983, found
