"""8-bit weights: rounding, scales and products against definitions that are written here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bass_kernels as ops
from bass_kernels.quantised import LAYOUTS, Quantised, quantise

CPU = torch.device("cpu")
MOST = {"int8": 127.0, "fp8": 448.0}


def grid(layout: str) -> Tensor:
    """All finite values of a layout, sorted, in float64."""
    if layout == "int8":
        return torch.arange(-127, 128, dtype=torch.float64)
    found = [
        sign * (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        for sign in (-1, 1)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]
    return torch.tensor(sorted(set(found)), dtype=torch.float64)


def nearest(x: Tensor, layout: str) -> Tensor:
    """x [N, K] over its rows' scales, rounded to the nearest value, [N, K] float64."""
    scaled = (x / (x.abs().amax(1, keepdim=True) / MOST[layout])).double()
    values = grid(layout)
    return values[(scaled[..., None] - values).abs().argmin(-1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_the_nearest_to_each_row_over_its_scale(layout: str) -> None:
    weight = torch.randn(37, 53) * torch.logspace(-6, 4, 37)[:, None]
    found = Quantised.of(weight, layout)
    assert torch.equal(found.values.double(), nearest(weight, layout))
    assert torch.equal(found.scales, weight.abs().amax(1) / MOST[layout])
    error = (found.dequantise() - weight).abs() / weight.abs().amax(1, keepdim=True)
    assert 0 < error.max() <= (1 / 28 if layout == "fp8" else 0.5 / 127) + 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ties_are_rounded_to_even(layout: str) -> None:
    pairs = {"int8": ((0.5, 0.0), (1.5, 2.0)), "fp8": ((17.0, 16.0), (19.0, 20.0))}
    halves = pairs[layout]
    row = torch.tensor([[MOST[layout], *(half for half, _ in halves)]])
    assert Quantised.of(row, layout).values.float().tolist() == [
        [MOST[layout], *(even for _, even in halves)]
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_zeros_and_tiny_rows_give_zeros(layout: str) -> None:
    found = Quantised.of(torch.tensor([[0.0, 0.0], [1e-42, -1e-44]]), layout)
    assert found.scales.tolist() == [1.0, 1.0]
    assert not found.dequantise().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_is_not_finite_has_such_a_scale_alone(layout: str, value: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    assert Quantised.of(weight, layout).scales.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_written_in_place_in_any_order_and_part_of_columns(layout: str) -> None:
    weight = torch.randn(9, 20)
    whole = Quantised.of(weight, layout)
    found = Quantised.empty((9, 8), layout, CPU)
    places = found.values.data_ptr(), found.scales.data_ptr()
    order = torch.randperm(6)
    found.write_rows(order, weight[order].bfloat16().float(), range(5, 13))
    found.write_rows(order, weight[order], range(5, 13))
    found.write_rows(6, weight[6:], range(5, 13))
    assert torch.equal(found.dequantise(), whole.dequantise()[:, 5:13])
    assert (found.values.data_ptr(), found.scales.data_ptr()) == places
    part = found.rows(2, 5)
    part.write_rows(0, torch.zeros(3, 8))
    assert not found.dequantise()[2:5].any()
    assert found.dequantise()[5].any()


def expected(x: Tensor, weight: Tensor, layout: str) -> Tensor:
    """x W^T in float64 with rounded weights, and in fp8 rounded activations."""
    scales = weight.abs().amax(1).double() / MOST[layout]
    if layout == "int8":
        return x.double() @ nearest(weight, layout).T * scales
    tokens = x.abs().amax(1, keepdim=True).double() / MOST[layout]
    return nearest(x, layout) @ nearest(weight, layout).T * tokens * scales


@pytest.mark.parametrize("rows", [1, 4, 5, 31])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_equals_the_definition_in_float64(layout: str, rows: int) -> None:
    x, weight, bias = torch.randn(rows, 67), torch.randn(29, 67), torch.randn(29)
    wanted = expected(x, weight, layout) + bias
    got = ops.linear(x, Quantised.of(weight, layout), bias)
    assert got.dtype == torch.float32
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_op_takes_quantised_weights(layout: str) -> None:
    x, weight, norm = torch.randn(2, 3, 32), torch.randn(24, 32), torch.rand(32)
    residual, quantised = torch.randn(2, 3, 24), Quantised.of(weight, layout)
    product = ops.linear(x, quantised, None)
    assert torch.equal(ops.linear_add(x, quantised, None, residual.clone()), residual + product)
    normed = ops.norm(None, x, norm, None, eps=1e-5, kind="rms")[0]
    gate, up = ops.linear(normed, quantised, None).chunk(2, -1)
    options = {"eps": 1e-5, "kind": "rms", "activation": "silu", "gated": True}
    got = ops.norm_up(x, (norm, None), (quantised, None), **options)
    # in its last bits torch's own SiLU depends on where a number lies in memory
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-6)
    both = torch.cat((gate, up), -1)
    assert torch.equal(got, ops.activation(both, "silu", gated=True))
    own = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    queries, _ = ops.project(
        x, (norm, None), (quantised, None), None, torch.arange(6).view(2, 3), own,
        heads=1, norms=None, eps=1e-5, kind="rms",
    )  # fmt: skip
    q, k, v = ops.linear(normed, quantised, None).split(8, -1)
    assert torch.equal(queries[..., 0, :], q)
    assert torch.equal(own[0][0, :6].view(2, 3, 8), k)
    assert torch.equal(own[1][0, :6].view(2, 3, 8), v)


@pytest.mark.parametrize("shape", [(600, 300), (48, 32), (1200, 576), (576, 1536)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_of_a_token_does_not_depend_on_the_other_tokens(
    layout: str, shape: tuple[int, int]
) -> None:
    x, weight = torch.randn(40, shape[1]), Quantised.of(torch.randn(shape), layout)
    whole = ops.linear(x, weight, None)
    for first, last in ((0, 1), (7, 9), (3, 7), (3, 8), (5, 38)):
        assert torch.equal(ops.linear(x[first:last], weight, None), whole[first:last])


def test_fp8_product_is_exact_for_the_largest_sums() -> None:
    """Sums of 2^15 products at most 2^18 in steps of 2^-18, in integers."""
    values = torch.randint(0, 255, (3, 1 << 15)).to(torch.uint8)
    values[values == 127] = 126
    weight = Quantised(values.view(torch.float8_e4m3fn), torch.ones(3), "fp8")
    x = weight.values[:1].float()
    assert float(x.abs().amax()) == 448.0
    steps = (weight.values.float() * 512).long()
    wanted = (steps[:1] * steps).sum(1).double() / 2**18
    assert torch.equal(ops.linear(x, weight, None)[0], wanted.float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_that_are_not_finite_reach_their_own_outputs_only(layout: str) -> None:
    x = torch.randn(3, 16)
    x[1, 4] = torch.nan
    got = ops.linear(x, Quantised.of(torch.randn(5, 16), layout), None)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_scale_of_a_token_is_its_own() -> None:
    values, scales = quantise(torch.tensor([[1.0, 2.0], [100.0, -50.0]]), "fp8")
    assert scales.tolist() == [[pytest.approx(2 / 448)], [pytest.approx(100 / 448)]]
    assert values.float().tolist() == [[224.0, 448.0], [448.0, -224.0]]
