"""A round's bookkeeping of tokens and counts: Triton against the definition. The tests run on a
CUDA device if there is one, otherwise in Triton's interpreter."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import acceptance, reference, rounds, sampling

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def triton():
    ops.use("triton")


def integers(*shape, most, seed=0):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_pending_tokens_and_their_positions(width):
    texts, lengths = integers(3, 40, most=1000), torch.tensor([1, 9, 33], device=DEVICE)
    drafts = integers(3, width + 2, most=1000, seed=1)[:, 1 : width + 1]  # rows are not contiguous
    found, due = ops.pending(texts, lengths, drafts), rounds.pending(texts, lengths, drafts)
    for one, other in zip(found, due, strict=True):
        assert torch.equal(one, other)
    same = torch.tensor([5], device=DEVICE).expand(3, width)  # one limit for all
    assert torch.equal(ops.pending(texts, lengths, same)[0][:, 1:], same)


@pytest.mark.parametrize("most", [None, 2, [3, 0, 1, 7]])
def test_drafts_equal_to_the_targets_tokens_are_accepted(most):
    drafts, targets = integers(4, 5, most=2), integers(4, 6, most=2, seed=1)
    targets[0, :5] = drafts[0]
    bound = None if most is None else torch.tensor(most, device=DEVICE)
    found = ops.accept_shared(drafts, targets, bound)
    assert torch.equal(found, acceptance.accept_shared(drafts, targets, bound))
    assert found[0] == (5 if most is None else 2 if most == 2 else 3)
    assert ops.accept_shared(drafts[:, :0], targets[:, :1], bound).tolist() == [0] * 4


@pytest.mark.parametrize("reported", [False, True])
def test_commit_appends_accepted_tokens_to_live_rows(reported):
    """Only live rows advance, and nothing is written beyond a row's memory, which is followed by
    the next row's."""
    alive, accepted = (
        torch.tensor([1, 0, 1, 1], device=DEVICE),
        torch.tensor([[2, 9], [1, 9], [0, 9], [3, 9]], device=DEVICE)[:, 0],
    )
    block, scores = integers(4, 5, most=1000, seed=1)[:, :4], randn(4, 4)
    scores[1, 2], scores[2, 0] = float("nan"), float("-inf")
    held = []
    for commit, report in ((ops.commit, ops.report), (rounds.commit, rounds.report)):
        store = integers(4, 30, most=1000)
        texts, lengths = store[:, :20], torch.tensor([3, 1, 12, 18], device=DEVICE)
        given = texts, lengths, alive, accepted, block
        table = report(*given, scores) if reported else commit(*given)
        assert lengths.tolist() == [6, 1, 13, 22]
        assert torch.equal(store[:, 20:], integers(4, 30, most=1000)[:, 20:])
        held.append((store[:, :19], table))  # the last place of an ended row may hold any token
    assert torch.equal(held[0][0], held[1][0])
    if reported:
        assert torch.equal(held[0][1], held[1][1])


def test_angles_of_far_positions():
    positions = torch.tensor([[0, 1, 131071], [7, 4096, 999]], device=DEVICE)
    inverse = 1.0 / 1e6 ** (torch.arange(24, device=DEVICE) / 24)
    for one, other in zip(
        ops.angles(positions, inverse), reference.angles(positions, inverse), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=0)


def params_of(rows, seed=3):
    """One row of each kind: T = 0, nothing truncated, top-p, top-k, both; then the same again."""
    columns = [(0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 0, 0.9), (0.7, 5, 1.0), (1.3, 20, 0.6)]
    kinds = [columns[row % len(columns)] for row in range(rows)]
    temperature, top_k, top_p = (torch.tensor(c, device=DEVICE) for c in zip(*kinds, strict=True))
    return temperature, top_k, top_p, integers(rows, 2, most=2**32, seed=seed)


def test_sampling_parameters_shared_by_several_rows():
    logits, positions = 3 * randn(12, 1100), torch.arange(12, device=DEVICE) * 7
    params = params_of(4)
    tokens, scores = ops.sample_scored(logits, *params, positions)
    each = [one.repeat_interleave(3, 0) for one in params]
    due, due_scores = sampling.sample_scored(logits, *each, positions)
    assert tokens.tolist() == due.tolist() == sampling.sample(logits, *params, positions).tolist()
    torch.testing.assert_close(scores, due_scores, atol=1e-5, rtol=1e-5)
