"""Ops for training: Triton against the definition, and the definition against autograd."""

import pytest
import torch

import bass_kernels as ops
from bass_kernels import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def angles(half):
    angle = 5.0 * randn(2, 5, 1, half, seed=3)
    return angle.cos(), angle.sin()


def both(function):
    found = []
    for kind in ("triton", "reference"):
        try:
            ops.use(kind)
            found.append(function())
        finally:
            ops.use(None)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("size", "half"), [(64, 32), (24, 12), (20, 6)])
def test_rotate(dtype, back, size, half):
    """A part of a longer tensor, three heads, and dimensions that are not rotated."""
    pytest.importorskip("triton")
    x, (cos, sin) = randn(2, 5, 7, size, dtype=dtype)[:, :, 2:5], angles(half)
    one, other = both(lambda: ops.rotate(x, cos, sin, back=back))
    torch.testing.assert_close(
        one, other, **({} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5})
    )
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # with another memory layout
    one, other = both(lambda: ops.rotate(turned, cos, sin, back=back))
    torch.testing.assert_close(
        one, other, **({} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5})
    )


def test_rotating_back_is_the_gradient():
    x, (cos, sin) = randn(2, 5, 3, 20).requires_grad_(), angles(6)
    outer = randn(2, 5, 3, 20, seed=1)
    (reference.rotate(x, cos, sin) * outer).sum().backward()
    torch.testing.assert_close(reference.rotate(outer, cos, sin, back=True), x.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1500])
def test_gate_gradient(dtype, size):
    pytest.importorskip("triton")
    x, outer = randn(2, 3, 2 * size, dtype=dtype), randn(2, 3, size, dtype=dtype, seed=1)
    one, other = both(lambda: ops.gate_gradient(x, outer))
    wide = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 1e-2}
    torch.testing.assert_close(one, other, **wide)


def test_the_gate_gradient_agrees_with_autograd():
    x, outer = randn(4, 30).requires_grad_(), randn(4, 15, seed=1)
    gate, up = x.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up * outer).sum().backward()
    torch.testing.assert_close(reference.gate_gradient(x.detach(), outer), x.grad)
