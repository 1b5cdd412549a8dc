"""Lookup by `auto` in short jobs, on a simulated GPU: what is found in plain rounds and would have
stood is reason enough for a first use, what would not have costs next to nothing."""

import pytest
from retold import Texts, speeds

from bass_cli.lengths.goodput import Goodput


@pytest.mark.parametrize(
    ("rows", "text", "due"),
    [
        (16, {"prompts": 16, "n": 16, "off": 0.2, "copied": 0.5}, (1.05, 1.08)),
        (16, {"prompts": 16, "n": 16, "off": 0.05, "copied": 0.9}, (1.5, 1.9)),
        (1, {"prompts": 8, "n": 1, "off": 0.05, "copied": 0.9, "mean": 120}, (1.1, 2.0)),
    ],
)
def test_drafts_that_would_have_stood_are_tried(rows, text, due):
    """800 rounds, of which a first use takes up to 50: all that is known of a pass that was never
    run is what the very first one took. Two jobs, one after the other."""
    found = speeds(Goodput(limit=32), Texts(**text), rows=rows)
    assert [speed > least for speed, least in zip(found, due, strict=True)] == [True, True], found


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (16, {"prompts": 16, "n": 16, "off": 1.0, "copied": 0.0}),
        (16, {"prompts": 16, "n": 16, "off": 0.4, "copied": 0.5}),
        (8, {"prompts": 8, "n": 1, "off": 0.4, "copied": 0.5, "mean": 120}),
        (1, {"prompts": 8, "n": 1, "off": 1.0, "copied": 0.0, "mean": 120}),
        (1, {"prompts": 8, "n": 1, "off": 0.05, "copied": 0.9, "until": 3, "mean": 120}),
    ],
)
def test_looks_in_vain_count_with_all_that_they_cost(rows, text):
    """A look is given its own time, and that in which the device waits for it, since the round
    before is over first. Also where drafts stand for three prompts and then no more."""
    found = speeds(Goodput(limit=32), Texts(**text), rows=rows)
    assert min(found) > 0.983, found
