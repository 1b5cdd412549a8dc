"""Selection of the drafts to verify, and calibration of the draft's confidence: Triton against the
definition.

They run on a CUDA device if there is one, otherwise in Triton's interpreter.
"""

import math

import pytest
import torch
from test_triton import DEVICE

import bass_kernels as ops
from bass_cli.engine.verify import prior_confidence
from bass_kernels.segments import pack_queries


@pytest.fixture(params=["reference", "triton"])
def form(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    ops.use(request.param)
    return request.param


def unlearnt():
    return prior_confidence(DEVICE)


def ones(count):
    return torch.ones(count, dtype=torch.int64, device=DEVICE)


def choose(standing, total):
    """Choose drafts for rows whose tokens and positions encode their row and place."""
    rows, width = standing.shape
    tokens = torch.arange(rows * (width + 1), device=DEVICE).view(rows, -1)
    return ops.choose_drafts(standing, total, tokens, 100 * torch.arange(rows, device=DEVICE))


@pytest.mark.parametrize(
    ("rows", "width", "total"),
    [(1, 4, 2), (5, 8, 20), (33, 7, 100), (3, 4, 12), (7, 3, 1), (260, 6, 1100)],
)
def test_the_likeliest_prefixes_are_chosen(form, rows, width, total):
    """Exactly `total` drafts, each with a prefix at least as likely as any that is not chosen."""
    made = torch.Generator().manual_seed(total)
    standing = torch.rand(rows, width, generator=made).cumprod(1).to(DEVICE)
    counts, packed, tokens, places = choose(standing, total)
    assert int(counts.sum()) == total
    assert int(counts.max()) <= width
    taken = torch.arange(width, device=DEVICE) < counts[:, None]
    assert bool(taken.all()) or standing[taken].min() >= standing[~taken].max()
    due = pack_queries(counts + 1, rows + total, width + 1)
    assert all(map(torch.equal, packed[:3], due[:3]))
    assert packed.widest == width + 1
    assert torch.equal(tokens, due.row * (width + 1) + due.place)
    assert torch.equal(places, 100 * due.row + due.place)


def test_ties_choose_the_first_drafts_of_a_row(form):
    alike = torch.ones(64, 8, device=DEVICE)
    assert choose(alike, 512).counts.tolist() == [8] * 64
    for standing in (alike, 0 * alike, math.nan * alike):
        counts = choose(standing, 300).counts
        assert int(counts.sum()) == 300
        assert int(counts.max()) <= 8
    sure = torch.tensor([[1.0, 1.0, 1.0], [0.5, 0.25, 0.1], [0.0, 0.0, 0.0]], device=DEVICE)
    assert choose(sure, 4).counts.tolist() == [3, 1, 0]
    assert choose(sure, 8).counts.tolist() == [3, 3, 2], "drafts without a chance come last"


def test_chances_are_running_products(form):
    """Chances are products along a row. NaN counts as no confidence. Padding rows have chance 0."""
    scores = torch.tensor([[0.0, -0.1, -3.0], [math.nan, 0.0, 0.0], [-math.inf, -0.1, 0.0]])
    found = ops.prefix_chances(scores.to(DEVICE), unlearnt(), ones(3))
    assert bool((found.diff(dim=1) <= 0).all())
    assert found[0, 0] > 0.99
    assert found[1, 0] == found[2, 0]
    assert 0.4 < found[1, 0] < 0.6
    torch.testing.assert_close(found[0, 1] / found[0, 0], found[2, 1] / found[2, 0])
    dead = ops.prefix_chances(scores.to(DEVICE), unlearnt(), torch.tensor([1, 0, 1], device=DEVICE))
    assert torch.equal(dead[1], torch.zeros(3, device=DEVICE))
    assert torch.equal(dead[0], found[0])


def rising(confidence):
    """A chance of acceptance that differs from the confidence."""
    return 0.3 + 0.6 * confidence**2


def simulate(chances_of, *, accepted_with=rising, rounds=400, rows=16, width=6, total=48):
    """Run rounds of drafts with random confidence, chosen by `chances_of(scores, stats)`. Returns
    the final statistics, and accepted and verified drafts of each round."""
    made, stats, seen = torch.Generator().manual_seed(3), unlearnt(), []
    for _ in range(rounds):
        confidence = torch.rand(rows, width, generator=made)
        equal = torch.rand(rows, width, generator=made) < accepted_with(confidence)
        scores = confidence.log().to(DEVICE)
        chosen = choose(chances_of(scores, stats), total)
        targets = torch.nn.functional.pad(~equal, (0, 1), value=True).long().to(DEVICE)
        targets = targets[chosen.packed.row, chosen.packed.place]
        drafts, told = torch.zeros_like(scores).long(), torch.rand(len(targets)).to(DEVICE)
        accepted, table = ops.accept_chosen(
            drafts, scores, chosen, targets, told, stats, ones(rows)
        )
        due = torch.minimum(equal.long().cumprod(1).sum(1), chosen.counts.cpu())
        assert accepted.tolist() == table[:, 0].tolist() == due.tolist()
        assert table[:, -1].tolist() == chosen.counts.tolist()
        seen.append((accepted.tolist(), chosen.counts.tolist()))
    return stats, seen


@pytest.mark.parametrize("total", [96, 48])
def test_acceptance_by_confidence_is_learnt(total):
    """All drafts and chosen drafts give the same estimate: a cut draft is not assumed to be
    rejected."""
    stats, _ = simulate(
        lambda scores, stats: ops.prefix_chances(scores, stats, ones(16)), total=total
    )
    confidence = torch.tensor([[0.2], [0.4], [0.6], [0.8], [0.95]])
    rates = ops.prefix_chances(confidence.log().to(DEVICE), stats, ones(5)).cpu()
    torch.testing.assert_close(rates, rising(confidence), atol=0.06, rtol=0)


def test_bins_without_observations_keep_their_prior():
    """After any number of rounds: forgetting moves estimates towards the prior."""
    stats = unlearnt()
    stats.accepted[2], stats.trials[5] = 0.0, 90.0
    for _ in range(20_000):
        stats.fade()
    for count, first in zip(stats[:2], stats.prior, strict=True):
        torch.testing.assert_close(count, first, atol=1e-3, rtol=1e-3)


def test_the_likeliest_drafts_give_more_tokens():
    """With equally many verified drafts."""
    even = torch.ones(16, 6, device=DEVICE) * torch.tensor([1, 1, 1, 0, 0, 0], device=DEVICE)
    kept = []
    for chances_of in (
        lambda scores, stats: ops.prefix_chances(scores, stats, ones(16)),
        lambda *_: even,
    ):
        _, seen = simulate(chances_of, accepted_with=lambda confidence: confidence, rounds=100)
        assert all(sum(counts) == 48 for _, counts in seen)
        kept.append(sum(sum(accepted) for accepted, _ in seen))
    assert kept[0] > 1.04 * kept[1]


def test_kernels_settle_like_the_definition():
    """Accepted drafts, the table bit by bit, and the statistics. Padding rows change nothing. A
    draft that was not verified never counts as accepted, even if it equals the target's token."""
    pytest.importorskip("triton")
    made, rows, width, total = torch.Generator().manual_seed(1), 9, 5, 22
    scores = torch.rand(rows, width, generator=made).log().to(DEVICE)
    scores[3, 2] = math.nan
    alive = ones(rows)
    alive[-2:] = 0
    drafts = torch.randint(0, 2, (rows, width), generator=made).to(DEVICE)
    targets = torch.randint(0, 2, (rows + total,), generator=made).to(DEVICE)
    told = -torch.rand(rows + total, generator=made).to(DEVICE)
    found = {}
    for form in ("reference", "triton"):
        ops.use(form)
        stats = unlearnt()
        standing = ops.prefix_chances(scores, stats, alive)
        chosen = choose(standing.round(decimals=4), total)
        given = (drafts, scores, chosen, targets, told, stats, alive)
        found[form] = (standing, *ops.accept_chosen(*given), *stats[:2], *chosen[::2])
    counts, accepted = found["reference"][5], found["reference"][1]
    assert bool((accepted <= counts).all())
    assert bool(((accepted == counts) & (counts < width)).any())
    for plain, kernels in zip(found["reference"], found["triton"], strict=True):
        if plain.is_floating_point():
            torch.testing.assert_close(kernels, plain, atol=1e-5, rtol=1e-5)
    for which in (1, 5, 6):
        assert torch.equal(found["triton"][which], found["reference"][which])
    (plain, kernels), within = (
        (found[form][2] for form in found),
        torch.arange(width + 1, device=DEVICE),
    )
    valid = within <= accepted[:, None]
    for part in (slice(1, width + 2), slice(width + 2, 2 * width + 3)):
        assert torch.equal(kernels[:, part][valid], plain[:, part][valid])
    assert torch.equal(kernels[:, [0, -1]], plain[:, [0, -1]])
