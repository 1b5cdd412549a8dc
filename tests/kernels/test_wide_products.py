"""Products of many tokens in e4m3 with e4m3 weights against their definition in float64, on a Hopper
GPU, and the kernel that adds a product to the residual stream, also in Triton's interpreter."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from test_quantised_products import close, due, weight_of
from test_triton import DEVICE, randn, triton  # noqa: F401 (a fixture)

from bass_kernels import reference

wide = pytest.importorskip("bass_kernels.wide_products")
kernels = pytest.importorskip("bass_kernels.quantised_kernels")
products = pytest.importorskip("bass_kernels.quantised_products")
BF16 = torch.bfloat16
on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"
)


@on_hopper
@pytest.mark.parametrize("count", [65, 129, 256, 301])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_the_definition(count, biased):
    x, weight = randn(count, 1040, dtype=BF16), weight_of(1168, 1040, "fp8")
    bias = randn(1168, seed=1, dtype=BF16) if biased else None
    residual = randn(count, 1168, seed=2, dtype=BF16)
    assert wide.supports(x, weight)
    expected = due(x, weight) + (bias.double() if biased else 0.0)
    close(products.linear(x, weight, bias), expected, BF16, "fp8", factor=3)
    expected = expected + residual.double()
    found = products.linear(x, weight, bias, residual.clone())
    close(found, expected, BF16, "fp8", factor=3)


@on_hopper
def test_a_product_of_many_tiles_is_added_too(monkeypatch):
    x, weight = randn(301, 1040, dtype=BF16), weight_of(1168, 1040, "fp8")
    residual = randn(301, 1168, seed=2, dtype=BF16)
    few = products.linear(x, weight, None, residual.clone())
    monkeypatch.setattr(wide, "processors", lambda device: 1)
    many = products.linear(x, weight, None, residual.clone())
    close(many, few.double(), BF16, "fp8", factor=3)


@on_hopper
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("count", [65, 130, 384])
@pytest.mark.parametrize("size", [1000, 1024])
def test_gate_up_matches_the_definition(count, activation, size):
    x, weight = randn(count, 912, dtype=BF16), weight_of(2 * size, 912, "fp8")
    rounded, scales = products.factor(x, weight)
    found = products.gated(rounded, scales, weight, like=x, activation=activation)
    expected = reference.activation(due(x, weight), activation, gated=True)
    close(found, expected, BF16, "fp8", factor=3)


def test_gate_up_has_one_form_for_all_numbers_of_tokens(monkeypatch):
    """A small model's tiles may be fewer than the processors; then some programs have none."""
    forms = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **constants: forms.append((grid, constants))

    made = SimpleNamespace(gate_up_kernel=Kernel(), TOKENS=128, LINES=64)
    monkeypatch.setattr(wide, "wide", made)
    monkeypatch.setattr(wide, "_described", lambda matrix, rows: matrix)
    monkeypatch.setattr(wide, "processors", lambda device: 132)
    x, weight = randn(512, 16), weight_of(2 * 1536, 16, "fp8")
    for count in (65, 129, 257, 512):
        wide.gate_up(x, weight.scales, weight, count=count, activation="silu")
    assert len(forms) == 4
    assert all(form == forms[0] for form in forms)


@on_hopper
def test_feed_forward_without_the_kernel_of_gate_and_up(monkeypatch):
    x, norm = randn(200, 256, dtype=BF16), randn(256, seed=1) + 1
    up, down = weight_of(2 * 512, 256, "fp8"), weight_of(256, 512, "fp8", seed=5)
    words = {"eps": 1e-6, "kind": "rms", "activation": "silu"}
    found = products.feed_forward(x.clone(), (norm, None), up, down, None, **words)
    monkeypatch.setattr(wide, "wide", None)
    other = products.feed_forward(x.clone(), (norm, None), up, down, None, **words)
    close(other - x, found.double() - x.double(), BF16, "fp8", factor=8)


@pytest.mark.parametrize(("version", "has"), [("3.5.1", False), ("3.10.0+git1", True)])
def test_gate_and_up_have_their_kernel_from_triton_3_6_on(version, has, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.delitem(sys.modules, wide.__name__)
    assert runpy.run_module(wide.__name__)["gates"]() == has


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_added_with_scales_and_bias(biased):
    sums, residual = randn(7, 1100), randn(5, 1100, seed=4)
    scales, weight_scales = randn(7, seed=1).abs(), randn(1100, seed=2).abs()
    bias = randn(1100, seed=3)
    expected = sums.double()[:5] * scales.double()[:5, None] * weight_scales.double()
    expected = expected + residual.double() + (bias.double() if biased else 0.0)
    kernels.add_product_kernel[(5, 2)](
        sums, scales, weight_scales, bias, residual, 1100, BIAS=biased, BLOCK=1024, EARLY=False
    )
    assert torch.allclose(residual.double(), expected, rtol=1e-5, atol=1e-5)
