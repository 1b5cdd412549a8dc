"""Logits of a head with int8 weights against plain torch, on a CUDA device or in Triton's
interpreter. The sizes are no multiples of the tiles'."""

import pytest
import torch
from test_triton import DEVICE, randn, triton  # noqa: F401 (a fixture)

import bass_kernels as ops
from bass_kernels.quantised import Quantised

head_kernels = pytest.importorskip("bass_kernels.head_kernels")
Tiling = head_kernels.Tiling
DTYPES = [torch.float32] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
# Relative error. The steps of a token are its largest number over 32512, and an error is a step over
# root 12: 3e-5 for normal numbers, whose largest is three to four times the usual one. bfloat16
# results are rounded to 8 bits.
BOUND = {torch.float32: 4e-5, torch.bfloat16: 4e-3}


def head_of(lines, depth):
    return Quantised.of(randn(lines, depth, seed=3) / depth**0.5, "int8")


def error_of(found, x, head, bias=None):
    due = x.double() @ (head.values.double() * head.scales.double()[:, None]).T
    due = due if bias is None else due + bias.double()
    return float((found.double() - due).norm() / due.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "tiling"),
    [(1, None), (19, None), (70, Tiling(64, 64, 64, 4, 3)), (19, Tiling(128, 16, 128, 8, 2))],
)
def test_logits_match_the_product_in_float64(dtype, count, tiling):
    x, head, bias = randn(count, 150, dtype=dtype), head_of(203, 150), randn(203, seed=5)
    for given in (bias.to(dtype), None):
        found = head_kernels.logits(x[None], head, given, tiling=tiling)
        assert found.shape == (1, count, 203)
        assert found.dtype == dtype
        assert error_of(found[0], x, head, given) < BOUND[dtype]


def test_tokens_with_one_large_number_keep_the_others():
    """A token's scale is that of its largest number, here 30 times the others."""
    x, head = randn(4, 128), head_of(64, 128)
    x[:, 7] = 30.0
    assert error_of(head_kernels.logits(x, head, None), x, head) < 1e-4


def test_a_token_has_the_same_bits_at_every_width():
    x, head = randn(70, 150), head_of(203, 150)
    whole = head_kernels.logits(x, head, None, tiling=Tiling(64, 64, 64, 4, 3))
    for count in (1, 5, 17):
        assert torch.equal(head_kernels.logits(x[:count], head, None), whole[:count]), count


def test_whole_numbers_of_tokens_are_the_nearest_ones():
    """With a largest number of 127 * 256 the scale is 1. Ties go to the even number."""
    steps = torch.arange(-32512, 32513, 129, device=DEVICE).float()
    x = torch.cat((torch.tensor([32512.0, 0.5, 1.5, -0.5, -2.5], device=DEVICE), steps))[None]
    size = x.shape[1]
    head = Quantised(
        torch.eye(size, device=DEVICE).to(torch.int8), torch.ones(size, device=DEVICE), "int8"
    )
    assert torch.equal(head_kernels.logits(x, head, None), x.round())


def test_zeros_and_numbers_that_are_not_finite_stay_with_their_token():
    x, head = randn(4, 64), head_of(20, 64)
    x[0] = 0.0
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    found = head_kernels.logits(x, head, None)
    assert not found[0].any()
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[3], head_kernels.logits(x[3:], head, None)[0])


def test_op_equals_its_reference():
    x, head, bias = randn(2, 3, 100), head_of(60, 100), randn(60, seed=5)
    ops.use("triton")
    found = ops.logits(x, head, bias)
    ops.use("reference")
    torch.testing.assert_close(found, ops.logits(x, head, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shared", [227, 163, 99])
def test_tilings_fit_the_shared_memory_of_each_gpu(monkeypatch, shared):
    capability = (9, 0) if shared == 227 else (8, 0)
    limits = head_kernels.card(DEVICE)._replace(capability=capability, shared=shared * 1024)
    monkeypatch.setattr(head_kernels, "card", lambda device: limits)
    for count in (1, 8, 64, 512):
        assert head_kernels.tiling_for(count, DEVICE).shared <= shared * 1024
