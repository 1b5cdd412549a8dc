"""Causal attention of many tokens of one prompt compared with torch, by relative RMS error: partial
blocks, heads smaller than a block, shared keys, and supported devices."""

import pytest
import torch
from test_triton import DEVICE, DTYPES, close, randn, triton  # noqa: F401 (a fixture)

ragged = pytest.importorskip("bass_kernels.ragged")
from bass_kernels import launch  # noqa: E402

HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]
SMALL = ragged.CausalTile(16, 32, 4, 2)


def due(q, keys, values, scale):
    """Compute causal attention in float64, written out from its definition."""
    count, length, share = len(q), keys.shape[1], q.shape[1] // len(keys)
    k, v = (it.double().repeat_interleave(share, 0) for it in (keys, values))
    scores = torch.einsum("mhd,hnd->hmn", q.double(), k) * scale
    seen = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hmn,hnd->mhd", weights, v)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("count", "length", "size", "tile"),
    [
        (53, 53, 16, SMALL),
        (53, 150, 24, SMALL),
        (16, 32, 16, SMALL),
        (1, 97, 64, SMALL),
        (70, 141, 64, None),
        (70, 141, 128, None),
    ],
)
def test_causal_attention(dtype, count, length, size, tile):
    """Values before and behind the prompt must have no effect, in q and out as well."""
    q = randn(count + 3, 6, size, dtype=dtype, seed=0)
    out = torch.full_like(q, 7.0)
    q[count:] = torch.nan
    stored = [randn(2, length + 40, size, dtype=dtype, seed=seed) for seed in (1, 2)]
    for it in stored:
        it[:, :8] = it[:, length + 8 :] = torch.nan
    keys, values = (it[:, 8 : length + 8] for it in stored)
    ragged.causal_attention(q[:count], keys, values, out[:count], scale=0.3, tile=tile)
    close(out[:count], due(q[:count], keys, values, 0.3), dtype)
    assert torch.equal(out[count:], torch.full_like(out[count:], 7.0))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="thousands of programs")
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_causal_attention_of_long_prompts(size):
    """Large heads use torch's own attention."""
    q, dtype = randn(1500, 12, size, dtype=torch.bfloat16, seed=0), torch.bfloat16
    keys, values = (randn(2, 6000, size, dtype=dtype, seed=seed) for seed in (1, 2))
    out = torch.empty_like(q)
    ragged.causal_attention(q, keys, values, out, scale=size**-0.5)
    close(out, due(q, keys, values, size**-0.5), dtype)


def test_supported_dtypes_sizes_and_devices(monkeypatch):
    def suits(dtype, size):
        ragged.suits_causal.cache_clear()
        return ragged.suits_causal(dtype, size, torch.device("cpu"))

    assert suits(torch.bfloat16, 128)
    assert suits(torch.float16, 80)
    assert not suits(torch.float32, 128)
    assert not suits(torch.bfloat16, 100)
    assert not suits(torch.bfloat16, 256)
    monkeypatch.setattr(launch, "card", lambda device: launch.Card((8, 0), 163 * 1024))
    assert not suits(torch.bfloat16, 128)
    monkeypatch.undo()
    ragged.suits_causal.cache_clear()
