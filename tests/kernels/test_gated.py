"""The gate and up product of 17 to 64 tokens compared with torch, by relative RMS error: sizes that
no tile divides, and which tokens and weights use it in a decoder's layer."""

import pytest
import torch
from test_triton import DEVICE, DTYPES, close, randn, triton  # noqa: F401 (a fixture)

import bass_kernels as ops

linear_kernels = pytest.importorskip("bass_kernels.linear_kernels")
from bass_kernels import launch  # noqa: E402

HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]


def due_of(x, weight, activation):
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    kinds = {"silu": torch.nn.functional.silu, "relu": torch.relu}
    return kinds[activation](gate) * up


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tokens", "activation"), [(17, "silu"), (64, "relu")])
def test_gate_up(dtype, tokens, activation):
    x, weight = (
        randn(tokens, 168, dtype=dtype, seed=0),
        randn(2 * 72, 168, dtype=dtype, seed=1) / 12,
    )
    found = linear_kernels.gate_up(x[None], weight, activation=activation)
    assert found.shape == (1, tokens, 72)
    close(found[0], due_of(x, weight, activation), dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [16, 17, 64, 65])
def test_a_layer_uses_gate_up_from_17_to_64_tokens(monkeypatch, dtype, tokens):
    """The result equals the library's product with the activation."""
    taken, own = [], linear_kernels.gate_up
    monkeypatch.setattr(linear_kernels, "gate_up", lambda *a, **o: taken.append(a) or own(*a, **o))
    residual, weight = (
        randn(tokens, 64, dtype=dtype, seed=2),
        randn(48, 64, dtype=dtype, seed=3) / 8,
    )
    norm = randn(64, dtype=torch.float32, seed=4)
    words = {"eps": 1e-6, "kind": "rms", "activation": "silu", "gated": True}
    found = ops.norm_up(residual[None], (norm, None), (weight, None), **words)
    normed = ops.norm(None, residual[None], norm, None, eps=1e-6, kind="rms")[0][0]
    close(found[0], due_of(normed, weight, "silu"), dtype)
    assert len(taken) == (17 <= tokens <= 64)


@pytest.mark.parametrize(("programs", "stages"), [(76, 4), (192, 4), (264, 4), (265, 3), (296, 3)])
def test_all_programs_that_share_a_processor_fit_into_it(monkeypatch, programs, stages):
    """An H200 has 132 processors with 227 KB each. A stage is a tile of both weights and one of 64
    tokens, 24 KB."""
    monkeypatch.setattr(linear_kernels, "processors", lambda device: 132)
    assert linear_kernels._gate_stages(programs, DEVICE) == stages
    assert -(-programs // 132) * (stages * 24 + 2) <= 227


def test_unsupported_weights_and_devices(monkeypatch):
    weight = torch.empty(48, 64, dtype=torch.float16, device=DEVICE)
    assert linear_kernels.gates(40, weight)
    assert not linear_kernels.gates(40, weight.float())
    assert not linear_kernels.gates(40, weight[:, :60].contiguous())
    assert not linear_kernels.gates(40, weight[:, :56])
    monkeypatch.setattr(launch, "card", lambda device: launch.Card((8, 0), 163 * 1024))
    assert not linear_kernels.gates(40, weight)
