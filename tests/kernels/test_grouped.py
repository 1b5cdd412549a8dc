"""Matrices in groups of 32 numbers: their product against float64, and against itself with other
tokens beside a token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bass_kernels as ops
from bass_kernels import GROUP, Grouped, grouped, grouped_works

pytestmark = pytest.mark.skipif(not grouped_works(), reason="torch has no such product here")


def numbers(rows: int, width: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    most = 1 << (bits - 1)
    values = torch.randint(-most, most, (rows, width), generator=generator).to(torch.int8)
    scales, minima = torch.randn(2, rows, width // GROUP, generator=generator) / 100
    return values, scales, minima


def weight_of(values: Tensor, scales: Tensor, minima: Tensor, bits: int) -> Tensor:
    """The matrix in float64 with scales and minima in bfloat16: for 8 bits, the minimum of the
    lower plane is 8 scales more."""
    more = 8 if bits == 8 else 0
    each = [one.bfloat16().double() for one in (scales, minima + more * scales)]
    scale, minimum = (one.repeat_interleave(GROUP, 1) for one in each)
    return values.double() * scale + minimum - more * scale


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(5, 32), (49, 96), (4200, 64)])
def test_product_is_that_of_float64_rounded_to_bfloat16(shape: tuple[int, int], bits: int) -> None:
    """Also with rows that are no multiple of torch's unit, and with more than are packed at
    once."""
    given = numbers(*shape, bits)
    x = torch.randn(3, 7, shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.bfloat16().double() @ weight_of(*given, bits).t()
    found = ops.linear(x, Grouped.of(*given, bits), None)
    assert found.dtype == x.dtype
    assert found.shape == (3, 7, shape[0])
    slack = 1e-6 * x.abs().sum(-1, keepdim=True)  # of float32 sums whose terms cancel
    assert ((found - expected).abs() <= expected.abs() * 2**-8 + slack).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_product_of_a_token_does_not_depend_on_the_others(bits: int) -> None:
    """Bit for bit: drafts then change no token."""
    weight = Grouped.of(*numbers(576, 192, bits), bits)
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(1))
    expected = weight.product(x)
    for count in (1, 2, 3, 4, 5, 8, 9, 33, 64):
        assert torch.equal(weight.product(x[3 : 3 + count]), expected[3 : 3 + count]), count


def test_map_with_residual_or_bias_is_the_product_and_a_sum() -> None:
    weight = Grouped.of(*numbers(48, 64, 4), 4)
    x, residual, bias = torch.randn(2, 3, 64), torch.randn(2, 3, 48), torch.randn(48)
    product = weight.product(x.view(6, 64)).view(2, 3, 48).float()
    assert torch.equal(ops.linear(x, weight, bias), product + bias)
    assert torch.equal(ops.linear_add(x, weight, None, residual.clone()), residual + product)
    both = residual + (product + bias)
    assert torch.equal(ops.linear_add(x, weight, bias, residual.clone()), both)


def test_feed_forward_rounds_its_inner_values_to_bfloat16() -> None:
    weight, x, norm = Grouped.of(*numbers(96, 64, 4), 4), torch.randn(2, 3, 64), torch.rand(64)
    found = ops.norm_up(
        x, (norm, None), (weight, None), eps=1e-5, kind="rms", activation="silu", gated=True
    )
    normed = x * norm * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    gate, up = weight.product(normed.view(6, 64)).view(2, 3, 96).double().chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    assert found.dtype == torch.bfloat16
    assert ((found - expected).abs() <= 2**-6 * expected.abs() + 1e-6).all()


def test_first_rows_share_the_memory_of_the_matrix() -> None:
    weight = Grouped.of(*numbers(80, 64, 8), 8)
    x = torch.randn(2, 64)
    some = weight.first_rows(50)
    assert len(some) == 50
    assert some.packed.data_ptr() == weight.packed.data_ptr()
    assert torch.equal(some.product(x), weight.product(x)[:, :50])


def test_processor_without_a_fast_product_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    assert not grouped.grouped_works.__wrapped__()


def test_stacked_matrices_have_the_products_of_each() -> None:
    """Of 50 rows, which torch pads, in both numbers of bits."""
    for bits in (4, 8):
        values, scales, minima = numbers(50, 96, bits)
        parts = [Grouped.of(values, factor * scales, minima, bits) for factor in (1, 2)]
        stacked, x = Grouped.stack(parts), torch.randn(3, 96)
        assert (len(stacked), stacked.shape) == (100, (100, 96))
        for i, part in enumerate(parts):
            assert torch.equal(stacked.rows(50 * i, 50 * i + 50).product(x), part.product(x))
        assert torch.equal(stacked.dequantise(), torch.cat([part.dequantise() for part in parts]))
