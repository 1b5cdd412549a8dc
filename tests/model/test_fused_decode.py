"""The kernels for few tokens (products, fused_attention) against their definitions, on a CUDA device or in
Triton's interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_ragged import case, poisoned, projected
from test_triton import DEVICE, close, randn, triton  # noqa: F401 (a fixture)

import bass_kernels as ops
from bass_kernels import reference

products = pytest.importorskip("bass_kernels.products")
fused_attention = pytest.importorskip("bass_kernels.fused_attention")
residual_stream = pytest.importorskip("bass_kernels.residual")
Cut = products.Cut
DTYPES = [torch.float32] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
EPS = 1e-6


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def begun(dtype, *, count=3, width=300, scale=1.0):
    """A stream, its residual and its norm's weight in float64."""
    embed, norm = randn(20, width, dtype=dtype), randn(width, dtype=dtype, seed=1) + 1
    tokens = torch.tensor([7, 99, 0, 3, 3, 11, 19, 1], device=DEVICE)[:count]
    positions, inverse = torch.arange(count, device=DEVICE) * 977, randn(12, seed=2).abs()
    stream, angles = residual_stream.begin(tokens, positions, embed, norm, inverse, scale=scale)
    rounded = torch.tensor(scale, dtype=dtype).item()
    residual = (embed[tokens.clamp(max=19)].float() * rounded).to(dtype).double()
    turns = positions[:, None].float() * inverse
    torch.testing.assert_close(
        angles, torch.stack((turns.cos(), turns.sin())), atol=1e-5, rtol=1e-5
    )
    return stream, residual, norm.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 6.92])
def test_fused_embedding_and_norm_match_the_definition(dtype, scale):
    stream, residual, norm = begun(dtype, scale=scale)
    assert torch.equal(stream.residual.double(), residual)
    close(stream.x, residual * norm, dtype)
    close(stream.squares.sum(0)[:3], residual.square().sum(1), torch.float32)
    close(residual_stream.finish(stream, norm.to(dtype), eps=EPS), normed(residual, norm), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cut", "count"),
    [(None, 8), (None, 1), (Cut(20, 32, 3, 64, 4), 8), (Cut(27, 32, 2, 128, 4), 1)],
)
def test_fused_products_match_the_definition(dtype, cut, count):
    """Norm and product; product and addition to the stream; norm and gated product: for odd
    sizes and every way to deal."""
    stream, residual, norm = begun(dtype, count=count)
    weight, bias = randn(75, 300, dtype=dtype, seed=3) / 17, randn(75, dtype=dtype, seed=4)
    for b in (bias, None):
        due = normed(residual, norm) @ weight.double().T + (0 if b is None else b.double())
        close(products.project(stream, weight, b, eps=EPS, cut=cut), due, dtype)

    x, down, following = (
        randn(count, 200, dtype=dtype, seed=5),
        randn(300, 200, dtype=dtype, seed=6),
        norm.to(dtype) + 1,
    )
    total = residual + x.double() @ down.double().T
    longer = products.add(x, down, stream, following, cut=cut)
    close(longer.residual, total, torch.float32 if dtype == torch.float32 else dtype)
    close(longer.x, total * following.double(), dtype)
    close(longer.squares.sum(0)[:count], total.square().sum(1), dtype)
    close(
        residual_stream.finish(longer, following, eps=EPS), normed(total, following.double()), dtype
    )

    both = randn(2 * 70, 300, dtype=dtype, seed=7) / 17
    gate, up = (normed(total, following.double()) @ both.double().T).chunk(2, -1)
    one = cut and cut._replace(splits=1)
    for kind in ("silu", "gelu_tanh"):
        found = products.gate_up(longer, both, eps=EPS, activation=kind, cut=one)
        close(found, reference.activation(torch.cat((gate, up), -1), kind, gated=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("wide", "window", "norms"),
    [(1, 0, True), (3, 0, False), (2, 20, True), (16, 75, False), (1, 1, False)],
)
def test_fused_attention_matches_the_definition(dtype, splits, wide, window, norms):
    """Attention with rope and cache write in one, for rows on two prompts and none; slots that
    no row may read are loud, and what is written was NaN."""
    given = case(wide, dtype)
    q, own, clean, segments = given
    _q, mine, prompt, _segments = poisoned(given)
    rows, heads = len(q), q.shape[2]
    qkv, angles, weights, slots = projected(given, norms=norms)
    for tensor in mine:
        for row in range(rows):
            tensor[:, slots[row]] = torch.nan
    due_own = tuple(t.clone().float() for t in own)
    found = fused_attention.attend(
        qkv,
        angles.flatten(1, 2),
        weights,
        segments,
        mine,
        prompt,
        heads=heads,
        eps=EPS,
        scale=0.25,
        window=window,
        splits=splits,
        keys=32,
    )
    wider = None if weights is None else tuple(w.float() for w in weights)
    q = reference.rope_write(
        qkv.float().view(rows, wide, -1),
        tuple(angles),
        slots,
        due_own,
        heads=heads,
        norms=wider,
        eps=EPS,
    )
    due = reference.attention(
        q, due_own, tuple(t.float() for t in clean), segments, scale=0.25, window=window
    )
    close(found.view(rows, wide, -1), due, dtype, factor=2)
    for a, b in zip(mine, due_own, strict=True):
        for row in range(rows):
            close(a[:, slots[row]], b[:, slots[row]], dtype)
        assert torch.equal(a.isnan(), poisoned(given)[1][0].isnan())


def test_token_fed_twice_is_attended_to_once():
    """If a draft catches up from before a row's span, positions are raised to its start: tokens repeat."""
    _q, own, prompt, segments = case(1, torch.float32)
    rows = len(segments.base)
    qkv = randn(rows, (6 + 4) * 16, seed=8)
    angles = torch.ones(2, rows, 8, device=DEVICE)
    once = fused_attention.attend(
        qkv,
        angles,
        None,
        segments,
        tuple(t.clone() for t in own),
        prompt,
        heads=6,
        eps=EPS,
        scale=0.25,
    )
    often = replace(segments, positions=segments.positions.expand(rows, 3).contiguous())
    thrice = fused_attention.attend(
        qkv.repeat_interleave(3, 0),
        angles.repeat_interleave(3, 1),
        None,
        often,
        tuple(t.clone() for t in own),
        prompt,
        heads=6,
        eps=EPS,
        scale=0.25,
    )
    close(thrice.view(rows, 3, -1), once[:, None].expand(rows, 3, -1), torch.float32)


def test_fused_decode_serves_supported_passes_only():
    from bass_cli.bench.shapes import spec_of
    from bass_cli.models.fused_decode import supports_fused
    from bass_cli.models.spec import Norm

    spec, like = spec_of("tiny", option="--shape"), randn(1)
    step, prefill, block, packed = (
        SimpleNamespace(prefill=span, mutual=mutual, segments=SimpleNamespace(packed=queries))
        for span, mutual, queries in (
            (None, False, None),
            ("a span", False, None),
            (None, True, None),
            (None, False, "some"),
        )
    )
    few, many = torch.zeros(4, 4), torch.zeros(3, 6)
    assert supports_fused(spec, few, like, step)
    rich = replace(
        spec, biases=frozenset({"qkv"}), norm=Norm("rms", EPS, qk=True), windows=(0, 7, 0, 7)
    )
    assert supports_fused(rich, few, like, step)
    assert not supports_fused(spec, many, like, step)
    for layout in ops.LAYOUTS:
        assert supports_fused(spec, few, like, step, {layout})
        assert not supports_fused(spec, many, like, step, {layout})
        assert not supports_fused(spec, few, like, step, {layout, None})
    assert not supports_fused(spec, few, like, prefill)
    assert not supports_fused(spec, few, like, block)
    assert not supports_fused(spec, few, like, packed)
    assert not supports_fused(spec, few, like.half(), step)
    for other in (
        {"biases": frozenset({"qkv", "o"})},
        {"parallel": True},
        {"gated": False},
        {"rope": None},
        {"norm": Norm("layer", EPS)},
        {"norm": Norm("rms", EPS, sandwich=True)},
        {"local_rope": spec.rope},
    ):
        assert not supports_fused(replace(spec, **other), few, like, step), other
    ops.attention_schedule("pad")  # is a kernel of its own
    assert not supports_fused(spec, few, like, step)
    ops.attention_schedule("ragged")
    ops.use("reference")
    assert not supports_fused(spec, few, like, step)
