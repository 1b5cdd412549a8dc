"""Drafting that ends when the draft's confidence is low: when it stops, that it pays, and that
it changes no token."""

import pytest
import torch
from fakes import Ticks
from test_profile import Timed
from toys import Markov, begin, drive, loop_for, plain

from bass_cli.drafts.factory import DraftParts, NoDrafter, make_drafter
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import EarlyStopping
from bass_cli.lengths.controllers import Fixed
from bass_cli.lengths.goodput import Goodput
from bass_cli.lengths.surface import make_surface

VOCAB = 16
SURFACE = make_surface((1, 8), (0, 8), verify=[[0.01, 0.012]] * 2, draft=[[0.0, 0.032]] * 2)


def tables():
    """Target and draft agree after ids below 13 with high confidence; after the others the draft
    is unsure and wrong."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(1, VOCAB, VOCAB, generator=generator)
    target[0, torch.arange(VOCAB), (torch.arange(VOCAB) * 5 + 3) % VOCAB] += 9.0
    draft = target.clone()
    draft[0, 13:] = 0.1 * torch.randn(3, VOCAB, generator=generator)
    return target, draft


def run(stops, *, lengths=None, rows=1, ticks=None):
    """Return seconds and rounds of a job on a device like SURFACE's. `stops`: whether drafting
    may end inside a round."""
    target, draft = tables()
    ticks = ticks or Ticks()
    loop = loop_for(
        Timed(target, 1, ticks, lambda rows, width: 0.01 + 0.00025 * (width - 1)),
        Timed(draft, 2, ticks, lambda rows, width: 0.004),
        rows=rows,
        lengths=lengths or Goodput(limit=16, surface=SURFACE),
    )
    loop.clock.now = ticks
    if not stops:
        loop._executor._stopping = None
    seen = []
    jobs = [
        Row("0", sample, 5, [sample % VOCAB], 300, sampling=RowSampling(temperature=0.0))
        for sample in range(rows)
    ]
    drive(loop, jobs, on_round=lambda done, live_rows: seen.append(done))
    return ticks.seconds, seen


def test_stopping_pays_if_confidence_predicts_acceptance():
    with_it, seen = run(True)
    without, _ = run(False)
    assert with_it < 0.93 * without
    assert len({done.width for done in seen}) > 2
    drafted, kept = sum(done.width for done in seen), sum(sum(done.accepted) for done in seen)
    assert kept > 0.7 * drafted


def test_fixed_lengths_never_stop_early():
    _, seen = run(True, lengths=Fixed(5))
    assert {done.width for done in seen[:-3]} == {5}
    assert not Fixed(5).stops
    assert Goodput(limit=4).stops


def test_stopping_keeps_tokens_and_the_draft_cache_intact():
    """A rejected or stopped draft must leave nothing behind: the target drafting for itself
    accepts everything."""
    target, draft = tables()
    jobs = [
        Row(str(p), s, 3, [p, 5, 2 * s], 24 - 5 * s, sampling=RowSampling(temperature=0.9 * s))
        for p in range(3)
        for s in range(2)
    ]

    def fresh():
        return [
            Row(row.key, row.sample, 3, list(row.tokens), row.limit, sampling=row.sampling)
            for row in jobs
        ]

    for batch in (1, 4):
        loop = loop_for(
            Markov(target, 1),
            Markov(draft, 2),
            rows=batch,
            lengths=Goodput(limit=9, surface=SURFACE),
        )
        assert drive(loop, fresh()) == plain(Markov(target, 1), fresh())
    own = loop_for(
        Markov(target, 1), Markov(target, 2), rows=4, lengths=Goodput(limit=9, surface=SURFACE)
    )
    seen = []
    drive(own, fresh(), on_round=lambda done, live_rows: seen.append(done))
    assert all(kept == done.width for done in seen for kept in done.accepted)


def test_stopped_draft_counts_only_tokens_it_has_read():
    target, _ = tables()
    drafter = make_drafter(
        "model", DraftParts(runner=Markov(target, 2), coupling="shared", temperature=None)
    )
    assert drafter.stops_short
    loop = loop_for(Markov(target, 1), drafter, rows=2, lengths=Fixed(0))
    row = Row("0", 0, 0, [1, 2, 3], 40)
    begin(loop, row)
    drafter.expect(loop.batch, 6)
    proposal = drafter.propose_while(loop.batch, 6, lambda confidence: False)
    assert proposal.tokens.shape == (1, 1)
    assert drafter._fed[: len(loop.batch)].tolist() == [3]
    with pytest.raises(AssertionError):
        make_drafter(
            "model", DraftParts(runner=Markov(target, 2), coupling="maximal", temperature=None)
        ).propose_while(loop.batch, 2, lambda confidence: True)


class Half(Fixed):
    """Half of the rows must be expected to accept all drafts."""

    stops = True

    def least(self, drafted):
        return 0.5


def test_confidence_is_calibrated_by_earlier_rounds():
    """Drafts of high confidence that are never accepted, and of low confidence that always are."""
    target, _ = tables()
    stopping, taken = EarlyStopping(), {}
    loop = loop_for(Markov(target, 1), "none", rows=1)

    class Told(NoDrafter):
        stops_short = True

        def __init__(self, confidence):
            self._confidence = confidence

        def propose_while(self, batch, length, goes_on):
            steps = 0
            while steps < length:
                steps += 1
                if not goes_on(torch.tensor([self._confidence])):
                    break
            taken[self._confidence] = steps

    loop.batch.live_rows.append(Row("0", 0, 0, [1], 9))
    for _ in range(60):
        for confidence, kept in ((0.95, 0), (0.1, 1)):
            stopping.propose(Told(confidence), loop.batch, 8, Half(8))
            stopping.observe([min(kept * 8, taken[confidence])])
    assert taken == {0.95: 1, 0.1: 8}
    EarlyStopping().propose(Told(0.8), loop.batch, 8, Half(8))
    assert taken[0.8] == 3, "the chances of all drafts so far: 0.79, 0.63, 0.496"
