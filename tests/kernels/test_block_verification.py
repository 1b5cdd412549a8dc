"""Block verification by its definition, without noise (arXiv 2403.10444). Over all blocks of drafts
of a tiny vocabulary it gives the target's joint distribution and the paper's number of accepted
drafts. Also the Triton kernels on whole blocks. Sampling from these chances: test_laws.py."""

import itertools

import pytest
import torch

from bass_kernels import acceptance, noise, sampling

pytest.importorskip("triton")
from test_rejection import DEVICE, drawn, for_all, keys_for, pytestmark, randn

from bass_kernels import acceptance_kernels

__all__ = ["pytestmark"]  # warning filter for the interpreter

WIDTH, VOCAB = 3, 3
TINY = 1e-6  # tolerance of float32 probabilities, summed some hundred times


def tables(seed, spread):
    """Conditional distributions [k + 1, V, V] by place and last token: the target's, and a draft's.
    The draft's lacks some tokens, and so does the target's where it was truncated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(WIDTH + 1, VOCAB, VOCAB, generator=generator)
    guess = logits + spread * torch.randn(logits.shape, generator=generator)
    guess[1, 0, 2] = guess[2, 1, 0] = logits[1, 1, 1] = logits[2, 0, 0] = -torch.inf
    return logits.softmax(-1), guess.softmax(-1)


def all_blocks(p, q, *, point=None):
    """All blocks of drafts [N, k], their probabilities [N], and the distributions that their rows
    see: q [N, k, V] and p [N, k + 1, V]. `point`: only this block, proposed with certainty."""
    blocks = [point] if point else list(itertools.product(range(VOCAB), repeat=WIDTH))
    drafts = torch.tensor(blocks)
    last = torch.cat((torch.zeros(len(drafts), 1, dtype=torch.int64), drafts), 1)
    places = torch.arange(WIDTH + 1)
    own, due = q[places[:-1], last[:, :-1]], p[places, last]
    chances = own.gather(-1, drafts[..., None])[..., 0].prod(1)
    return (drafts, torch.ones(1), None, due) if point else (drafts, chances, own, due)


def outcomes(drafts, own, due, most):
    """For every block the probability of each number of accepted drafts, [N, k + 1], and the
    distribution of the token after them, [N, k + 1, V]: accept_maximal for uniform numbers u."""
    weights, chances = acceptance.block_chances(drafts, own, due, most)
    missed = torch.cat((1 - chances[:, 1:], torch.ones(len(drafts), 1)), 1)
    by_number = chances * missed.flip(1).cumprod(1).flip(1)
    end = WIDTH if most is None else most.clamp(max=WIDTH)
    after = []
    for kept in range(WIDTH + 1):
        accepted = torch.full((len(drafts),), kept)
        dist = acceptance.recovered_probs(drafts, own, due, weights, accepted, accepted == end)
        after.append(dist / dist.sum(-1, keepdim=True))
    return weights, by_number, torch.stack(after, 1)


def emitted(p, drafts, chances, by_number, after):
    """The joint distribution of k + 1 tokens: the result of a block, continued by the target."""
    joint = torch.zeros((VOCAB,) * (WIDTH + 1))
    for block, chance, by_kept, distributions in zip(
        drafts.tolist(), chances, by_number, after, strict=True
    ):
        for kept, share in enumerate(by_kept):
            rest = chance * share * distributions[kept]
            # `rest` [.., V] by the tokens after the drafts
            for place in range(kept + 1, WIDTH + 1):
                rest = rest[..., None] * p[place]
            joint[tuple(block[:kept])] += rest
    return joint


def joint(p):
    joint = p[0, 0]
    for place in range(1, WIDTH + 1):
        joint = joint[..., None] * p[place]
    return joint


CASES = [(0, 0.3, None), (1, 1.0, None), (2, 3.0, None), (1, 1.0, 0), (1, 1.0, 2), (2, 3.0, 9)]


@pytest.mark.parametrize("point", [None, (1, 0, 2)])
@pytest.mark.parametrize(("seed", "spread", "most"), CASES)
def test_emitted_tokens_have_the_targets_joint_distribution(seed, spread, most, point):
    p, q = tables(seed, spread)
    drafts, chances, own, due = all_blocks(p, q, point=point)
    bound = None if most is None else torch.tensor(most)
    _, by_number, after = outcomes(drafts, own, due, bound)
    counted = WIDTH if most is None else min(most, WIDTH)
    assert not by_number[:, counted + 1 :].any()
    torch.testing.assert_close(by_number.sum(1), torch.ones(len(drafts)), atol=TINY, rtol=0)
    found = emitted(p, drafts, chances, by_number, after)
    torch.testing.assert_close(found, joint(p), atol=TINY, rtol=0)


@pytest.mark.parametrize("point", [None, (1, 0, 2)])
@pytest.mark.parametrize(("seed", "spread"), [(0, 0.3), (1, 1.0), (2, 3.0)])
def test_accepted_drafts_equal_the_papers_number_and_exceed_token_verification(seed, spread, point):
    """The mean is the sum of the weights over places, the maximum of rules of this kind (theorem
    2). Token by token it is the sum of the products of min(1, p / q)."""
    p, q = tables(seed, spread)
    drafts, chances, own, due = all_blocks(p, q, point=point)
    weights, by_number, _ = outcomes(drafts, own, due, None)
    number = chances @ (by_number * torch.arange(WIDTH + 1)).sum(1)
    torch.testing.assert_close(number, chances @ weights[:, 1:].sum(1), atol=TINY, rtol=0)
    given = due[:, :-1].gather(-1, drafts[..., None])[..., 0]
    drawn = 1.0 if own is None else own.gather(-1, drafts[..., None])[..., 0]
    single = chances @ (given / drawn).clamp(max=1).nan_to_num(0.0).cumprod(1).sum(1)
    if point:
        torch.testing.assert_close(number, single, atol=TINY, rtol=0)
    else:
        assert number > single + 0.001


def test_the_papers_example():
    """Two tokens with probability 1/3 and 2/3 in every context, and a draft with these exchanged.
    Of two drafts 11/9 are accepted, token by token 10/9 (section 2)."""
    drafts = torch.tensor(list(itertools.product(range(2), repeat=2)))
    due = torch.tensor([1 / 3, 2 / 3]).expand(4, 3, 2)
    own = torch.tensor([2 / 3, 1 / 3]).expand(4, 2, 2)
    weights, _ = acceptance.block_chances(drafts, own, due)
    chances = own.gather(-1, drafts[..., None])[..., 0].prod(1)
    assert abs(float(chances @ weights[:, 1:].sum(1)) - 11 / 9) < TINY


def test_a_block_ends_at_a_distribution_with_nan():
    """NaN in the target's distribution after a draft, or in the next draft's: earlier drafts are
    accepted as if the block ended there, and no later one is."""
    p, q = tables(1, 1.0)
    drafts, _, own, due = all_blocks(p, q)
    for broken in ("target", "draft"):
        ours, theirs = own.clone(), due.clone()
        (theirs if broken == "target" else ours)[:, 1] = torch.nan
        weights, chances = acceptance.block_chances(drafts, ours, theirs)
        assert chances[:, 1].tolist() == weights[:, 1].tolist()
        assert not chances[:, 2:].any()
        short = acceptance.block_chances(drafts, own, due, torch.tensor(1))[1]
        assert chances[:, :2].tolist() == short[:, :2].tolist()


def test_a_long_block():
    """Twelve drafts a row, with distributions that differ much between places. Rows reject where
    the definition does."""
    rows, width, vocab = 6, 12, 6
    guess, keys, lengths = (
        2 * randn(width, vocab, seed=8),
        keys_for(rows, 6),
        torch.arange(rows, device=DEVICE) + 3,
    )
    target = torch.cat((guess + 0.7 * randn(width, vocab, seed=9), guess[:1]))
    distributions = [for_all(rows, logits, (1.0, 0, 1.0)) for logits in (guess, target)]
    q, p = (x.softmax(-1).expand(rows, -1, -1) for x in (guess, target))
    drafts = drawn(q[0], keys, lengths)
    accepted, following, _, _ = acceptance_kernels.verify(
        drafts, distributions[0], distributions[1], keys, lengths
    )
    due = acceptance.accept_maximal(drafts, q, p, keys, lengths)
    assert accepted.tolist() == due[0].tolist()
    assert following.tolist() == due[1].tolist()
    assert len(set(accepted.tolist())) >= 3


@pytest.mark.parametrize("end", ["weight", "most", "nan"])
def test_rows_that_distinguish_wrong_rules_of_block_verification(end):
    """Among a thousand rows of three drafts, those in which wrong rules give another result:
    weights of 1 in the residual, no limit of the number of drafts, or no end of a block at NaN."""
    rows, width, vocab, shown = 1000, 3, 12, 5
    guess, keys, lengths = 2 * randn(width, vocab, seed=11), keys_for(rows), keys_for(rows)[:, 0]
    target = torch.cat((guess + 1.2 * randn(width, vocab, seed=12), guess[:1]))
    most = torch.tensor(2, device=DEVICE) if end == "most" else None
    q, whole = (x.softmax(-1).repeat(rows, 1, 1) for x in (guess, target))
    p = whole.clone()
    p[:, 2] = torch.nan if end == "nan" else p[:, 2]
    drafts = drawn(q[0], keys, lengths)
    weights, _ = acceptance.block_chances(drafts, q, p, most)
    due = torch.stack(acceptance.accept_maximal(drafts, q, p, keys, lengths, most), 1)
    if end == "weight":
        every = acceptance.recovered_probs(
            drafts, q, p, torch.ones_like(weights), due[:, 0], due[:, 0] == width
        )
        stream = torch.where(due[:, 0] == width, noise.BONUS, noise.RESIDUAL)
        other = sampling.draw(every, keys, lengths + due[:, 0], stream=stream, origin=lengths)
        differ = due[:, 1] != other
    else:
        other = acceptance.accept_maximal(drafts, q, whole, keys, lengths)[0]
        differ = due[:, 0] != other.clamp(max=2)
    some = differ.nonzero()[:shown, 0]
    assert len(some) == shown
    distributions = [for_all(shown, logits, (1.0, 0, 1.0)) for logits in (guess, target)]
    distributions[1].edges[:, 2, 3] *= torch.nan if end == "nan" else 1.0
    found = acceptance_kernels.verify(drafts[some], *distributions, keys[some], lengths[some], most)
    assert found[0].tolist() == due[some, 0].tolist()
    # any token is legal where the distribution is NaN
    lawful = due[some, 0] < (2 if end == "nan" else width + 1)
    assert found[1][lawful].tolist() == due[some, 1][lawful].tolist()
