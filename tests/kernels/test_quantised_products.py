"""Products with 8-bit weights against their definition in plain torch, on a CUDA device or in Triton's
interpreter. The sizes are no multiples of the tiles'."""

import itertools
from functools import partial

import pytest
import torch
from test_fused_decode import EPS
from test_triton import BOUND, DEVICE, randn, triton  # noqa: F401 (a fixture)
from thinned import thinned_on_cpu

import bass_kernels as ops
from bass_kernels import reference, residual
from bass_kernels.quantised import LAYOUTS, Quantised

products = pytest.importorskip("bass_kernels.quantised_products")
kernels = pytest.importorskip("bass_kernels.quantised_kernels")
Tiling = products.Tiling
DTYPES = [torch.float32] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
TILINGS = [None, Tiling(64, 16, 3, 64, 4), Tiling(16, 16, 2, 128, 4)]


def weight_of(lines, depth, layout, seed=3):
    return Quantised.of(randn(lines, depth, seed=seed) / depth**0.5, layout)


def close(found, expected, dtype, layout, factor=1):
    """Compare by relative RMS error. A GPU's tensor cores sum 128 products of e4m3 with some 13
    bits: an error of up to 4e-4 on an H100."""
    found, expected = found.double().cpu(), expected.double().cpu()
    bound = factor * BOUND[dtype]
    if layout == "fp8" and DEVICE.type == "cuda":
        bound = max(bound, 1e-3)
    error = (found - expected).norm() / expected.norm()
    assert error < bound, f"relative error {error:.2e}"


def due(x, weight):
    """The definition, in float64: x [M, K] in its own dtype, rounded to e4m3 by token for fp8."""
    x, weights = x.float(), weight.values.double() * weight.scales.double()[:, None]
    if weight.layout == "int8":
        return x.double() @ weights.T
    # by a tensor, because CUDA multiplies by the reciprocal of a number instead
    scales = x.abs().amax(1, keepdim=True) / torch.full((), 448.0, device=x.device)
    return (x * (1 / scales)).to(torch.float8_e4m3fn).double() * scales.double() @ weights.T


def magnitudes(x, room):
    """The largest magnitudes of tokens x [M, K], as products take them: [room] int32."""
    found = torch.zeros(room, device=DEVICE)
    found[: len(x)] = x.float().abs().amax(1)
    return found.view(torch.int32)


def stream_of(count, width, dtype):
    """A stream with largest magnitudes, the norm's weight and zeroed peaks."""
    embed, norm = randn(count, width, dtype=dtype), randn(width, seed=1) + 1
    tokens = torch.arange(count, device=DEVICE)
    peaks = torch.full((70,), 7, dtype=torch.int32, device=DEVICE)
    room = products.room(count)
    stream, _ = residual.begin(
        tokens, tokens, embed, norm, randn(12, seed=2).abs(), peaks=peaks, most=room
    )
    assert not peaks.any()
    assert torch.equal(stream.largest.amax(0), magnitudes(stream.x, room))
    return stream, norm


@pytest.mark.parametrize(
    ("dtype", "layout", "tiling", "count"),
    thinned_on_cpu(itertools.product(DTYPES, LAYOUTS, TILINGS, [1, 9, 37]), 4),
)
def test_products_of_a_stream_match_the_definition(dtype, layout, tiling, count):
    stream, norm = stream_of(count, 300, dtype)
    scale = torch.rsqrt(stream.residual.double().square().mean(1, keepdim=True) + EPS)
    weight, bias = weight_of(75, 300, layout), randn(75, dtype=dtype, seed=4)
    for b in (bias, None):
        mapped = due(stream.x, weight) * scale + (0 if b is None else b.double())
        close(products.project(stream, weight, b, eps=EPS, tiling=tiling), mapped, dtype, layout)

    both, room = weight_of(2 * 70, 300, layout, seed=7), products.room(count)
    peaks = torch.zeros(room, dtype=torch.int32, device=DEVICE)
    one = tiling and tiling._replace(splits=1)
    gate_and_up = (due(stream.x, both) * scale).float()
    for kind in ("gelu_tanh", "silu"):
        peaks.zero_()
        inner = products.gate_up(stream, both, eps=EPS, activation=kind, peaks=peaks, tiling=one)
        close(inner, reference.activation(gate_and_up, kind, gated=True), dtype, layout, factor=2)
        assert torch.equal(peaks, magnitudes(inner, room))

    down = weight_of(300, 70, layout, seed=6)
    largest = torch.zeros_like(peaks)
    found = {"peaks": peaks, "largest": largest, "tiling": tiling}
    longer = products.add(inner, down, stream, norm, **found)
    close(longer.residual - stream.residual, due(inner, down), torch.float32, layout, factor=4)
    close(longer.x, longer.residual.double() * norm.double(), dtype, layout)
    close(longer.squares.sum(0)[:count], longer.residual.double().square().sum(1), dtype, layout)
    assert torch.equal(largest, magnitudes(longer.x, room))
    rounded = products.add(inner, down, stream, norm, tiling=tiling)
    assert torch.equal(rounded.residual, longer.residual)
    assert rounded.largest is None
    alone = stream._replace(largest=None)
    assert torch.equal(
        products.project(alone, weight, None, eps=EPS, tiling=tiling),
        products.project(stream, weight, None, eps=EPS, tiling=tiling),
    )
    assert torch.equal(products.gate_up(alone, both, eps=EPS, activation=kind, tiling=one), inner)


@pytest.mark.parametrize(
    ("dtype", "layout", "tiling", "sizes"),
    thinned_on_cpu(
        itertools.product(
            DTYPES,
            LAYOUTS,
            TILINGS,
            [(1, 150, 300), (3, 150, 300), (40, 150, 300), (130, 160, 304)],
        ),
        5,
    ),
)
def test_linear_matches_the_definition(dtype, layout, tiling, sizes):
    """The last one is a product of the library on a Hopper GPU: more than 128 tokens, and
    sizes that are multiples of 16."""
    count, lines, depth = sizes
    x, weight = randn(count, depth, dtype=dtype), weight_of(lines, depth, layout)
    bias, added = randn(lines, dtype=dtype, seed=5), randn(count, lines, dtype=dtype, seed=6)
    expected = due(x, weight) + bias.double() + added.double()
    found = products.linear(x[None], weight, bias, added[None], tiling=tiling)
    close(found[0], expected, dtype, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_of_a_layer_equal_the_reference(layout):
    """linear, linear_add and norm_up take quantised weights: gated and not, with biases, both
    norms."""
    x, weight = randn(2, 3, 100), weight_of(60, 100, layout)
    bias, added, norm = randn(60, seed=5), randn(2, 3, 60, seed=6), randn(100, seed=1) + 1
    for map_bias in (bias, None):
        calls = [lambda b=map_bias: ops.linear(x, weight, b)]
        calls.append(lambda b=map_bias: ops.linear_add(x, weight, b, added.clone()))
        for gated in (True, False):
            calls += [
                lambda b=map_bias, g=gated, k=kind, s=shift: ops.norm_up(
                    x, (norm, s), (weight, b), eps=EPS, kind=k, activation="silu", gated=g
                )
                for kind, shift in (("rms", None), ("layer", norm))
            ]
        for call in calls:
            ops.use("triton")
            found = call()
            ops.use("reference")
            expected = call()
            close(found, expected, torch.float32, layout, factor=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_beside_any_tokens(layout, dtype):
    """With 1, 3, 9 or 40 tokens, as a stream and not, in one tile of tokens and in several."""
    x, weight = randn(40, 300, dtype=dtype), weight_of(150, 300, layout)
    tiling = Tiling(64, 64, 3, 64, 4)
    stream = residual.Stream(
        torch.zeros(40, 150, device=DEVICE),
        torch.zeros(40, 150, dtype=dtype, device=DEVICE),
        torch.zeros(1, 64, device=DEVICE),
    )
    whole = products.linear(x, weight, None, tiling=tiling)
    for count in (1, 3, 9, 40):
        found = products.linear(x[:count], weight, None, tiling=tiling)
        assert torch.equal(found, whole[:count]), count
        part = stream._replace(residual=stream.residual[:count], x=stream.x[:count])
        added = products.add(
            x[:count], weight, part, torch.ones(150, device=DEVICE),
            peaks=magnitudes(x[:count], 64), tiling=tiling,
        )  # fmt: skip
        assert torch.equal(added.residual.to(dtype), whole[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", [("fp8", "fp8"), ("int8", "fp8"), ("int8", "int8")])
def test_feed_forward_equals_its_parts(dtype, layouts):
    """Also where the library multiplies: the gated activation is rounded as a separate launch
    rounds it."""
    x, norm = randn(130, 96, dtype=dtype), randn(96, seed=1) + 1
    up, down = weight_of(2 * 80, 96, layouts[0]), weight_of(96, 80, layouts[1], seed=4)
    words = {"eps": EPS, "kind": "rms", "activation": "silu"}
    bias = randn(96, dtype=dtype, seed=5)
    inner = ops.norm_up(x, (norm, None), (up, None), **words, gated=True)
    found = ops.feed_forward(x.clone(), (norm, None), (up, None), (down, bias), **words, gated=True)
    expected = ops.linear_add(inner, down, bias, x.clone())
    bound = 1 if layouts[0] == "int8" or dtype == torch.float32 else 4
    close(found, expected, dtype, layouts[0], factor=bound)


def test_gated_factor_equals_activation_and_factor():
    both = randn(5, 2 * 5000, seed=8)
    expected = products.factor(ops.activation(both, "silu", gated=True), weight_of(16, 5000, "fp8"))
    found = products.gated_factor(both, "silu")
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].float(), expected[0].float())


@pytest.mark.parametrize("layout", ["int8", "fp8"])
def test_tokens_padded_to_a_block_have_the_products_of_tokens_without(layout):
    x, weight = randn(5, 96), weight_of(2 * 40, 96, layout)
    plain, padded = products.factor(x, weight), products.factor(x, weight, block=8)
    assert len(padded[0]) == (8 if layout == "fp8" else 5)
    for make in (partial(products.product, bias=None, residual=None), gated_silu):
        expected = make(*plain, weight, like=x)
        assert torch.equal(make(*padded, weight, like=x), expected)
    both = randn(5, 2 * 96, seed=8)
    rounded, scales = products.gated_factor(both, "silu", block=8)
    assert len(rounded) == len(scales) == 8
    expected = products.gated_factor(both, "silu")
    assert torch.equal(rounded[:5].float(), expected[0].float())
    assert torch.equal(scales[:5], expected[1])


def gated_silu(x, scales, weight, *, like):
    return products.gated(x, scales, weight, like=like, activation="silu")


def every_number():
    """All numbers of bfloat16 of at most 448, and float32 beside each tie of e4m3: [N, 64]."""
    some = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    some = some[some.abs() <= 448]  # NaN is not
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (grid[1:] + grid[:-1]) / 2
    beside = torch.cat((ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0)))
    numbers = torch.cat((some, beside, -beside, torch.zeros(-len(some) % 63 + 63)))
    numbers = numbers[: len(numbers) // 63 * 63].view(-1, 63)
    return torch.cat((torch.full((len(numbers), 1), 448.0), numbers), 1).to(DEVICE)


def test_tokens_are_rounded_to_the_nearest_e4m3_and_ties_to_even():
    """The scale of tokens with a largest magnitude of 448 is 1."""
    x = every_number()
    rounded, scales = products.factor(x, weight_of(16, 64, "fp8"))
    assert torch.equal(rounded.float(), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(scales, torch.ones_like(scales))


def test_all_e4m3_weights_are_read():
    """Each of the 254 finite numbers, zeros of both signs included, as a weight times 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()].to(DEVICE)[:, None]
    numbers = torch.cat(
        (numbers.view(torch.uint8), torch.zeros_like(numbers, dtype=torch.uint8).expand(-1, 15)), 1
    )
    weight = Quantised(
        numbers.contiguous().view(torch.float8_e4m3fn), torch.ones(254, device=DEVICE), "fp8"
    )
    x = torch.zeros(1, 16, device=DEVICE)
    x[0, 0] = 448.0
    assert torch.equal(products.linear(x, weight, None)[0], 448.0 * weight.values[:, 0].float())


def test_tokens_of_zeros_and_tokens_that_are_not_finite():
    """Zeros give zeros. What is not finite stays so, for that token alone."""
    x, weight = randn(4, 64), weight_of(20, 64, "fp8")
    x[0] = 0.0
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    found = products.linear(x, weight, None)
    assert not found[0].any()
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[3], products.linear(x[3:], weight, None)[0])
