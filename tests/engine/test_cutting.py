"""Drafts of rows cut by the draft's own confidence: when rounds are cut, what controllers learn
from it, and that the tokens equal those of plain decoding whatever is chosen. The choice itself:
kernels/test_selection.py."""

import pytest
import torch
from test_ahead import Settled, ready
from test_captured import Tour, captured, pair, plainly, rows  # noqa: F401 (a fixture)
from toys import AtOnce, Markov, begin, drive, loop_for

from bass_cli.engine.contracts import ControllerInput, RoundResult
from bass_cli.engine.graphs import Shape
from bass_cli.engine.sizes import LONGEST
from bass_cli.engine.verify import CHEAP, Cut
from bass_cli.lengths.acceptance import Acceptance
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.lengths.surface import make_surface

CPU = torch.device("cpu")
MASK = 1
ALWAYS = Cut(LONGEST, 0, 3)


def cutting(most=LONGEST, above=0, more=4):
    return Cut(most, above, more)


def test_rounds_are_cut_only_above_the_threshold():
    assert not cutting(above=64).pays(8, 7), "a pass of few tokens takes all"
    assert cutting(above=64).pays(8, 8)
    assert not cutting().pays(8, 0)
    assert not cutting(most=4).pays(64, 4), "there is nothing to choose from"
    assert [cutting(most=12).drafted(n) for n in (1, 4, 8, 10, 12, 16)] == [5, 8, 12, 12, 12, 16]
    assert CHEAP["cpu"] < CHEAP["cuda"]


def test_rates_count_only_verified_drafts():
    """A row that accepted all of its few drafts says nothing about the next one. The rate is the
    same as with equal numbers of drafts, if cutting is independent of acceptance."""
    made, rates = torch.Generator().manual_seed(5), []
    for uneven in (False, True):
        known = Acceptance(8)
        for _ in range(300):
            stands = (torch.rand(16, 8, generator=made) < 0.7).long().cumprod(1).sum(1)
            counts = (
                torch.randint(0, 9, (16,), generator=made) if uneven else torch.tensor([4] * 16)
            )
            kept = torch.minimum(stands, counts)
            known.observe(tuple(kept.tolist()), tuple(counts.tolist()))
        rates.append(known.rate)
    assert rates == pytest.approx([0.7, 0.7], abs=0.03)


def test_auto_learns_the_gain_of_choosing_drafts():
    """Of four rows, in changing order, one accepts 4 drafts of 4, one 1 of 2, two none of 1:
    2.25 tokens for the cost of 2, where rates by position predict 1.75 for two drafts of each."""
    verify = [[1.0, 1.85, 1.9, 3.9]]
    surface = make_surface((4,), (0, 1, 2, 4), verify=verify, draft=[[0.0, 0.1, 0.1, 0.1]])
    controller, lengths = Goodput(limit=4, surface=surface, at_once=True), []
    kept, counts = [4, 1, 0, 0], [4, 2, 1, 1]
    for number in range(400):
        lengths.append(controller.next(4, ControllerInput(left=5000.0)))
        accepted, verified = (
            tuple(part[(number + row) % 4] for row in range(4)) for part in (kept, counts)
        )
        drafted = RoundResult(2, accepted, 2.0, drafted=verified)
        controller.observe(drafted if lengths[-1] else RoundResult(0, (0,) * 4, 1.0))
    assert lengths[200:].count(2) > 150


def watched(loop):
    """Record what the loop's rounds chose: accepted drafts of each row and their number.
    Confidence and choice are arbitrary."""
    seen, run, propose = [], loop._executor._cut_round, loop.drafter.propose
    made = torch.Generator().manual_seed(1)

    def proposed(batch, length):
        proposal = propose(batch, length)
        if proposal.scores is None:
            return proposal
        return proposal._replace(scores=torch.rand(proposal.scores.shape, generator=made).log())

    def noted(shape):
        table = run(shape)
        width = (table.shape[1] - 4) // 2
        seen.append((width, shape.width, table[:, -1].tolist(), table[:, 0].tolist()))
        return table

    loop._executor._cut_round, loop.drafter.propose = noted, proposed
    return seen


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        (1, lambda: Fixed(3)),
        (2, Tour),
        (3, lambda: Fixed(1)),
        (5, Tour),
        (5, lambda: Goodput(limit=8)),
    ],
)
def test_cut_rounds_give_the_tokens_of_plain_decoding(pair, plainly, batch, lengths):
    """With rows of unequal length that end one by one, and drafts that are accepted or rejected."""
    target, draft = pair
    for drafter in (target, draft):
        given = AtOnce(drafter, MASK)
        loop, done = loop_for(target, given, rows=batch, lengths=lengths(), cut=ALWAYS), []
        seen, live = watched(loop), rows()
        assert drive(loop, live, on_round=lambda one, _, kept=done: kept.append(one)) == plainly
        assert seen
        for width, each, counts, accepted in seen:
            assert width > each == sum(counts) / len(counts)
            assert max(counts) <= width
            assert all(kept <= count for kept, count in zip(accepted, counts, strict=True))
        assert batch == 1 or any(len(set(counts)) > 1 for _, _, counts, _ in seen)
        cut = [one for one in done if one.drafted is not None]
        assert len(cut) == len(seen)
        assert [list(one.num_drafts) for one in cut] == [counts for _, _, counts, _ in seen]
        assert sum(row.drafted for row in live) == sum(sum(one.num_drafts) for one in done)


@pytest.mark.parametrize(
    ("batch", "ahead", "of_target", "lengths", "above"),
    [
        (5, True, False, Settled, 0),
        (2, True, True, lambda: Fixed(4), 0),
        (5, False, False, Settled, 14),
        (5, True, False, lambda: Goodput(limit=8, at_once=True), 0),
        (2, False, False, Tour, 0),
    ],
)
def test_cut_rounds_captured_and_launched_ahead(
    pair, plainly, batch, ahead, of_target, lengths, above
):
    """With padding rows, other lengths than wanted, and rounds between that are not cut."""
    given = AtOnce(pair[0] if of_target else pair[1], MASK)
    loop = captured(pair[0], given, batch=batch, lengths=lengths(), cut=Cut(12, above, 3))
    flights, seen = ready(loop), watched(loop)
    assert drive(loop, rows(), ahead=ahead) == plainly
    assert loop.graphs.count("replay", "cut") > 2
    assert not ahead or flights.behind > 3
    assert all(sum(counts) == each * len(counts) for _, each, counts, _ in seen)


def test_cut_round_may_serve_an_uncut_one(pair):
    """If any length may serve: fewer captures as rows end."""
    target, draft = pair
    loop = captured(target, AtOnce(draft, MASK), batch=4, lengths=Fixed(3), cut=Cut(12, 8, 3))
    loop.prepare([4], [3])
    live = rows()[:4]
    begin(loop, *live)
    loop.round()
    loop.retire(3, 2, 1)
    loop.round()
    assert [shape for how, shape in loop.graphs.done if how == "replay"] == [Shape("cut", 4, 3)] * 2


@pytest.mark.parametrize(
    ("coupling", "lengths", "acceptance"),
    [("maximal", Fixed(3), None), ("shared", Bass(), None), ("shared", Fixed(3), (0.8,))],
)
def test_no_cutting_if_drafts_must_not_depend_on_confidence(pair, coupling, lengths, acceptance):
    """Under maximal coupling, with Algorithm 1, and with drafts without meaningful confidence."""
    target, draft = pair
    for made in (loop_for, captured):
        loop = made(
            target,
            AtOnce(draft, MASK),
            **{"batch" if made is captured else "rows": 3},
            lengths=lengths,
            coupling=coupling,
            acceptance=acceptance,
            cut=ALWAYS,
        )
        seen = watched(loop)
        drive(loop, rows(16))
        assert seen == []


def test_no_cutting_without_support_by_drafter_and_target(pair):
    """Drafts made one after the other or on the host; a target that needs equal numbers of
    tokens."""
    target, draft = pair
    toy = Markov(torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(0)), pending=1)
    slow = Markov(toy.table, pending=2)
    for one, drafter in ((target, draft), (target, "lookup"), (toy, AtOnce(slow, 3))):
        loop = loop_for(one, drafter, rows=3, lengths=Fixed(3), cut=ALWAYS)
        seen = watched(loop)
        drive(
            loop, rows(12) if one is target else [row for row in rows(12) if max(row.tokens) < 12]
        )
        assert seen == []
