"""Every kernel compiles for all GPUs, and fits those that have less shared memory than the GPUs that
it was measured on."""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from sanitize import kernels
from test_compiling import run_compiling
from test_fused_decode import EPS, begun, normed
from test_ragged import case
from test_triton import DEVICE, close, randn, triton  # noqa: F401 (a fixture)

import bass_kernels as ops
from bass_kernels import dispatch, host, reference

products = pytest.importorskip("bass_kernels.products")
from bass_kernels import (  # noqa: E402
    fused_attention,
    launch,
    linear_kernels,
    quantised,
    quantised_products,
    ragged,
)

SOME = (
    "86,float32,mix-256",
    "90,bfloat16,gate-up,attend-long",
    "120,float32,few-tokens,attend-256-in-8-bits",
)


def hold(lines):
    """Check that every kernel fits, and return their number."""
    lines = [line for line in lines if line]  # an empty line: no kernel is compiled for that GPU
    for capability, dtype, name, kernel, taken, there in (line.split() for line in lines):
        assert int(taken) <= int(there), (
            f"{name} in {dtype} for sm_{capability}: {kernel} takes {taken} bytes of {there}"
        )
    return len(lines)


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        ("few-tokens,mix-64-wide-in-8-bits,attend-256-windowed", 7),
        # the same kernels as in the first case, with other tiles
        pytest.param("mix-16-in-8-bits,attend-16-in-8-bits", 2, marks=pytest.mark.slow),
    ],
)
def test_launches_of_few_tokens_compile_for_hopper(names, kernels, tmp_path):
    """To machine code, with the instructions of Hopper that they ask for. Rows with more lines than
    new keys too, heads of 16 in 8 bits, and windows."""
    wanted = f"90,bfloat16,{names}"
    assert hold(run_compiling("compile_launches.py", "whole", wanted, cache=tmp_path)) == kernels


@pytest.mark.slow  # compiles for other GPUs
def test_the_largest_launches_fit_every_gpu(tmp_path):
    """The launches that need most on small GPUs, and those with the longer pipelines of Hopper and
    Blackwell."""
    assert hold(run_compiling("compile_launches.py", "quick", *SOME, cache=tmp_path)) == 9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_all_launches_fit_every_gpu(capability, dtype, tmp_path):
    """In the dtype of models down to machine code, which takes four times as long."""
    how = "whole" if dtype == "bfloat16" else "quick"
    lines = run_compiling("compile_launches.py", how, f"{capability},{dtype}", cache=tmp_path)
    # linear_kernels.gate_up, ragged.causal_attention and wide_products (two) support 16 bits on
    # Hopper only. With little shared memory float32 has one launch fewer.
    hopper = (capability, dtype) == (90, "bfloat16")
    small = dtype == "float32" and capability in (86, 89, 120)
    assert hold(lines) == 119 + 4 * hopper - small
    names = {name.rpartition(".")[2] for name in kernels()}
    names -= {line.split()[3] for line in lines if line}
    assert names == (set() if hopper else {"_attend_causal", "add_product_kernel"})


def card(monkeypatch, shared, capability=(8, 6)):
    for module in (linear_kernels, fused_attention, products, quantised_products, ragged):
        monkeypatch.setattr(module, "card", lambda device: launch.Card(capability, shared))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hopper_gets_the_measured_launches(monkeypatch, dtype):
    card(monkeypatch, 227 * 1024, (9, 0))
    like = torch.empty(1, dtype=dtype)
    for module in (linear_kernels, fused_attention, products, ragged):
        monkeypatch.setattr(
            module, "fitting", lambda options, needs, shared: first_of(list(options), needs, shared)
        )
    for kind in ({}, {"pair": True}, {"split": True}):
        for lines, depth in ((4608, 3584), (3584, 18944), (960, 576)):
            assert products.cut_for(lines, depth, like, **kind) == products._measured(
                lines, depth, like, **{"pair": False, "split": False} | kind
            )
    assert linear_kernels._stream_stages(like) == 5
    assert fused_attention.tiling_for(like, 7, 128) == (64, 3)
    for lines, members, size in (
        (7, 1, 128),
        (32, 1, 128),
        (63, 1, 128),
        (7, 8, 128),
        (7, 1, 256),
        (63, 1, 256),
        (7, 8, 256),
    ):
        for stored, crowded in itertools.product((dtype.itemsize, 1), (False, True)):
            ragged._fitted(lines, members, size, like, stored, crowded)


@pytest.mark.parametrize("layout", quantised.LAYOUTS)
@pytest.mark.parametrize(("count", "pair"), [(8, False), (64, False), (300, False), (64, True)])
def test_hopper_gets_the_measured_tilings_of_8_bits(monkeypatch, layout, count, pair):
    card(monkeypatch, 227 * 1024, (9, 0))
    monkeypatch.setattr(quantised_products, "processors", lambda device: 132)
    for lines, depth in ((4608, 3584), (37888, 3584), (3584, 18944)):
        weight = quantised.Quantised.empty((lines, depth), layout, torch.device("meta"))
        x = torch.empty(count, depth, dtype=torch.bfloat16, device="meta")
        tiling = quantised_products.tiling_for(count, weight, x, pair=pair)
        assert tiling == quantised_products._measured(count, weight, x, pair=pair)
        assert tiling.tokens >= min(count, 64)


@pytest.mark.parametrize("layout", quantised.LAYOUTS)
def test_smaller_tilings_of_8_bits_give_the_same_products(monkeypatch, layout):
    weight = quantised.Quantised.of(randn(75, 300, seed=3) / 17, layout)
    x, found = randn(40, 300), []
    for shared in (227, 40):
        card(monkeypatch, shared * 1024, (8, 6))
        product = quantised_products.linear(x, weight, None)
        found.append((quantised_products.tiling_for(40, weight, x).deep, product))
    assert found[0][0] > found[1][0]
    close(found[1][1], found[0][1], torch.float32)


def first_of(options, needs, shared):
    assert launch.fitting(options, needs, shared) == options[0]
    return options[0]


def test_smaller_cuts_give_the_same_products(monkeypatch):
    for shared in (99, 24, 8):
        card(monkeypatch, shared * 1024)
        stream, residual, norm = begun(torch.float32, count=5)
        weight, down = randn(75, 300, seed=3) / 17, randn(300, 200, seed=6)
        close(
            products.project(stream, weight, None, eps=EPS),
            normed(residual, norm) @ weight.double().T,
            torch.float32,
        )
        x = randn(5, 200, seed=5)
        longer = products.add(x, down, stream, norm.float())
        close(longer.residual, residual + x.double() @ down.double().T, torch.float32)
        due = reference.activation(
            normed(longer.residual.double(), norm) @ randn(150, 300, seed=7).double().T / 17,
            "silu",
            gated=True,
        )
        close(
            products.gate_up(longer, randn(150, 300, seed=7) / 17, eps=EPS, activation="silu"),
            due,
            torch.float32,
        )


def attended(width, segments, given, **options):
    q, own, prompt, _ = given
    return ops.attention(q, own, prompt, segments, scale=0.25, **options)


@pytest.mark.parametrize("shared", [14, 9])
def test_smaller_tiles_give_the_same_attention(monkeypatch, shared):
    given = case(3, torch.float32)
    due = reference.attention(*given, scale=0.25)
    card(monkeypatch, shared * 1024)
    heads = given[0].shape[2] // given[1][0].shape[0]
    assert ragged._fitted(3 * heads, 1, given[0].shape[3], given[0], 4, False).keys < 64
    close(attended(3, given[3], given), due, torch.float32)


def test_a_launch_that_does_not_fit_uses_the_reference_with_one_warning(monkeypatch, caplog):
    """Also if the host does not know the rows of each prompt, as in a captured round."""
    monkeypatch.setattr(dispatch, "_too_large", set())
    given = case(3, torch.float32)
    due = host.attention(*given, scale=0.25)  # a fallback runs the CPU's op, bit for bit
    close(due, reference.attention(*given, scale=0.25), torch.float32)
    card(monkeypatch, 1024)
    assert not fused_attention.fits(given[0], 8, 16)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(attended(3, given[3], given), due)
        close(attended(3, replace(given[3], groups=None), given), due, torch.float32)
    assert [record.message for record in caplog.records] == [caplog.records[0].message]
    assert "attention does not fit this device" in caplog.records[0].message
