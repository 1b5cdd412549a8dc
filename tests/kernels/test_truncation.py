"""Processed distributions in Triton, found without a sort, against their definition. The tests run
on a CUDA device if there is one, otherwise in Triton's interpreter."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import sampling

pytest.importorskip("triton")
from test_rejection import DEVICE, DTYPES, LAYOUTS, columns, randn

from bass_kernels import truncation

MORE = [*LAYOUTS, (0.2, 0, 0.5), (0.0, 4, 0.3), (1.0, 1, 1.0), (1.0, 0, 0.01), (2.0, 9999, 0.99)]


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """Use the Triton kernels, with several chunks a row for few tokens."""
    monkeypatch.setattr(truncation, "CHUNK", 1024)
    ops.use("triton")


def processed(logits, temperature, top_k, top_p, min_p=None):
    """Return the probabilities of all tokens by the edges of their distributions."""
    edges = truncation.edges(logits, temperature, top_k, top_p, min_p)
    divisor, threshold, peak, mass, only = edges[:, :5, None].unbind(1)
    x, tokens = logits.float() / divisor, torch.arange(logits.shape[1], device=DEVICE)
    probs = torch.where(x >= threshold, (x - peak).exp() / mass, 0.0)
    return torch.where(only < 0, probs, (tokens == only).float())


@pytest.mark.parametrize(
    ("dtype", "vocab", "spread"),
    [(DTYPES[0], 70, 0.1), (DTYPES[-1], 70, 3.0), (DTYPES[1], 1100, 2.0)],
)
def test_distributions_equal_the_definition(dtype, vocab, spread):
    """Near and far logits, ties at the thresholds of some rows, one and two chunks. The same tokens
    are kept."""
    mixed = MORE[3:8] if dtype == torch.float32 else MORE  # float32 needs the most passes
    logits = (spread * randn(len(mixed), vocab, seed=vocab)).to(dtype)
    logits[:, 7] = logits[:, 3]
    logits[:3, 20:40] = logits[:3].amax(-1, keepdim=True) - spread / 2
    found, due = processed(logits, *columns(mixed)), sampling.process(logits, *columns(mixed))
    assert ((found > 0) == (due > 0)).all()
    torch.testing.assert_close(found, due, atol=1e-6, rtol=1e-5)


def test_a_search_with_many_passes_finds_the_threshold():
    """Values over 30 orders of magnitude and both signs, many of them equal, tokens of -inf, and a
    flat distribution."""
    logits = torch.zeros(4, 600, device=DEVICE)
    logits[0] = randn(600).sign() * 10.0 ** (-30 * torch.arange(600, device=DEVICE) / 600)
    logits[1] = 100 * randn(600, seed=1).round()
    logits[2, 300:], logits[3, 1:] = -torch.inf, -1e-30
    mixed = columns([(1.0, 0, 0.5), (1.3, 450, 0.7), (0.9, 37, 1.0), (1.0, 0, 0.99)])
    torch.testing.assert_close(
        processed(logits, *mixed), sampling.process(logits, *mixed), atol=1e-6, rtol=1e-5
    )


def test_extreme_temperatures_equal_the_definition():
    temperature = torch.tensor([1e-45, 3e-39, 1e-37, 9e-31, 1e-29, 1e-29, 3e38], device=DEVICE)
    top_k = torch.tensor([0, 0, 3, 0, 0, 4, 0], device=DEVICE)
    top_p = torch.tensor([1.0, 0.9, 0.8, 1.0, 0.9, 1.0, 1.0], device=DEVICE)
    logits = 60 * randn(len(temperature), 300) - 200
    torch.testing.assert_close(
        processed(logits, temperature, top_k, top_p),
        sampling.process(logits, temperature, top_k, top_p),
        atol=1e-6,
        rtol=1e-5,
    )
