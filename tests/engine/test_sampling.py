"""Processed distributions, the noisy argmax and the acceptance arithmetic, against naive
definitions."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import acceptance, sampling
from bass_kernels.noise import bits_all, gumbel


def parameters(rows, *, temperature=1.0, top_k=0, top_p=1.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
    )


def keys_for(rows):
    return torch.arange(2 * rows).view(rows, 2) + 17


def naive(logits, temperature, top_k, top_p):
    """Return the processed distribution of one row in float64; ties with the last kept token are
    kept."""
    x = logits.double()
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    p = (x / temperature).softmax(-1)
    if top_k:
        p = torch.where(p >= p.sort(descending=True).values[min(top_k, len(p)) - 1], p, 0.0)
        p = p / p.sum()
    if top_p < 1:
        ordered = p.sort(descending=True).values
        count = int((ordered.cumsum(-1) < top_p).sum()) + 1
        p = torch.where(p >= ordered[min(count, len(p)) - 1], p, 0.0)
        p = p / p.sum()
    return p


LAYOUTS = [
    (1.0, 0, 1.0),
    (0.3, 0, 0.9),
    (0.0, 0, 0.5),
    (1.7, 5, 1.0),
    (0.8, 40, 0.6),
    (2.0, 1, 1.0),
    (5.0, 0, 0.999),
    (1.0, 700, 0.95),
]


@pytest.mark.parametrize("vocab", [5, 127, 1000])
def test_processed_distribution_equals_naive_definition(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(LAYOUTS), vocab, generator=generator) * 3
    columns = [torch.tensor(column) for column in zip(*LAYOUTS, strict=True)]
    law = sampling.process(logits, columns[0], columns[1], columns[2])
    for row, mixed in enumerate(LAYOUTS):
        torch.testing.assert_close(
            law[row].double(), naive(logits[row], *mixed), atol=2e-6, rtol=1e-4
        )
        alone = sampling.process(logits[row : row + 1], *(c[row : row + 1] for c in columns))
        torch.testing.assert_close(law[row], alone[0], atol=1e-7, rtol=1e-5)


def test_ties_at_the_cutoff_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0], [1.0, 0.0, 2.0, 1.0]])
    law = sampling.process(logits, *parameters(2, top_k=2))
    assert (law[0] > 0).tolist() == [True, True, True, False]
    assert (law[1] > 0).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.2, 7, 1.0), (0.9, 20, 0.5)]
)
def test_sample_is_the_argmax_of_log_probability_plus_noise(temperature, top_k, top_p):
    logits = torch.randn(200, 301, generator=torch.Generator().manual_seed(1)) * 2
    keys, positions = keys_for(200), torch.arange(200) * 3
    columns = parameters(200, temperature=temperature, top_k=top_k, top_p=top_p)
    noise = gumbel(bits_all(keys, positions, 301, stream=ops.SHARED))
    due = (sampling.process(logits, *columns).log() + noise).argmax(-1)
    assert torch.equal(ops.sample(logits, *columns, keys, positions), due)


def test_row_in_a_mixed_batch_samples_as_if_alone():
    logits = torch.randn(len(LAYOUTS), 90, generator=torch.Generator().manual_seed(4)) * 2
    columns = [torch.tensor(column) for column in zip(*LAYOUTS, strict=True)]
    keys, positions = keys_for(len(LAYOUTS)), torch.arange(len(LAYOUTS)) + 9
    together = ops.sample(logits, *columns, keys, positions)
    for row in range(len(LAYOUTS)):
        one = slice(row, row + 1)
        assert (
            together[row]
            == ops.sample(logits[one], *(c[one] for c in columns), keys[one], positions[one])[0]
        )


def test_greedy_takes_the_first_of_equal_maxima():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert ops.sample(
        logits, *parameters(2, temperature=0.0), keys_for(2), torch.arange(2)
    ).tolist() == [1, 0]
    mixed = (torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), torch.tensor([1.0, 1.0]))
    assert ops.sample(logits, *mixed, keys_for(2), torch.arange(2))[0] == 1
    assert sampling.process(logits, *parameters(2, temperature=0.0)).tolist() == [
        [0, 1, 0, 0],
        [1, 0, 0, 0],
    ]


@pytest.mark.parametrize("temperature", [1e-45, 3e-39, 1e-37, 9e-31, 1e-29, 1e-20])
def test_tiny_temperatures_are_greedy_and_huge_ones_uniform(temperature):
    logits = torch.randn(40, 301, generator=torch.Generator().manual_seed(1)) * 60
    logits[::2] -= 500
    keys, positions = keys_for(40), torch.arange(40)
    greedy = logits.argmax(-1)
    for top_k, top_p in ((0, 1.0), (0, 0.9), (7, 0.9)):
        columns = parameters(40, temperature=temperature, top_k=top_k, top_p=top_p)
        assert torch.equal(ops.sample(logits, *columns, keys, positions), greedy)
        assert torch.equal(
            sampling.process(logits, *columns), torch.nn.functional.one_hot(greedy, 301).float()
        )
    law = sampling.process(logits, *parameters(40, temperature=3e38))
    torch.testing.assert_close(law, torch.full_like(law, 1 / 301))


def test_log_probability_is_at_temperature_one_without_truncation():
    logits = torch.randn(3, 2, 11, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([[1, 2], [10, 0], [5, 5]])
    due = logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(
        sampling.log_probability(logits, tokens).double(), due, atol=1e-6, rtol=1e-6
    )


def test_shared_acceptance_counts_the_equal_prefix():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    targets = torch.tensor([[1, 2, 3, 4]]).expand(4, -1)
    assert ops.accept_shared(drafts, targets).tolist() == [3, 1, 0, 2]
    most = torch.tensor([2, 2, 2, 1])
    assert ops.accept_shared(drafts, targets, most).tolist() == [2, 1, 0, 1]


def test_maximal_acceptance_with_an_empty_residual_draws_from_p():
    """p == q: rounding may still reject; the draw then comes from p."""
    law = torch.tensor([0.0, 0.25, 0.75])
    # a token with probability 0 under both distributions: always rejected, and what a draw from an
    # empty residual would give
    drafts = torch.tensor([[0]])
    accepted, following = acceptance.accept_maximal(
        drafts, law[None, None], law.expand(1, 2, 3), keys_for(1), torch.tensor([4])
    )
    assert accepted.tolist() == [0]
    assert following[0] in (1, 2)


def test_maximal_point_mass_is_accepted_with_its_probability_and_never_drawn_again():
    rows, p = 40_000, torch.tensor([0.3, 0.6, 0.1])
    drafts = torch.zeros(rows, 1, dtype=torch.int64)
    keys = torch.stack((torch.arange(rows), torch.zeros(rows, dtype=torch.int64)), 1)
    accepted, following = acceptance.accept_maximal(
        drafts, None, p.expand(rows, 2, 3), keys, torch.full((rows,), 3)
    )
    assert abs(accepted.float().mean() - 0.3) < 0.012
    rejected = following[accepted == 0]
    assert (rejected != 0).all()
    assert abs((rejected == 1).float().mean() - 6 / 7) < 0.012
    bonus = following[accepted == 1]
    assert abs((bonus == 0).float().mean() - 0.3) < 0.022


def test_uniform_draw_of_zero_does_not_accept_an_impossible_token(monkeypatch):
    monkeypatch.setattr(
        "bass_kernels.acceptance.uniform",
        lambda random: torch.zeros_like(random, dtype=torch.float32),
    )
    params, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    accepted, following = acceptance.accept_maximal(
        torch.tensor([[0]]), q, params, keys_for(1), torch.tensor([2])
    )
    assert accepted.tolist() == [0]
    assert following.tolist() == [1]
