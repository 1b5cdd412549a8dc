"""Every compiled form of the kernels once, against its definition in plain torch.

A kernel is compiled for each dtype, head size, tiling and option. The compiler may be wrong for one
of them alone: heads of 256 in bfloat16 with a window and 24 lines of 32 once saw no keys on Hopper.
The cases have every combination of three settings, or of two. Without a CUDA device a few of them
run in Triton's interpreter, which compiles nothing.
"""

import math

import pytest
import test_delta_kernels as delta
import test_eight_bits as eight
import test_experts as mixtures
import test_head as heads_in_8_bits
import test_quantised_products as quantised
import test_ragged as plain
import test_rejection as coupling
import torch
from covering import covering
from test_packed_attention import packed
from test_triton import BOUND, DEVICE, DTYPES, LAWS, close, randn, triton  # noqa: F401 (a fixture)
from thinned import thinned_on_cpu

import bass_kernels as ops
from bass_kernels import experts, reference, residual, sampling

fused_attention = pytest.importorskip("bass_kernels.fused_attention")
linear_kernels = pytest.importorskip("bass_kernels.linear_kernels")
products = pytest.importorskip("bass_kernels.products")
quantised_products = pytest.importorskip("bass_kernels.quantised_products")
ragged = pytest.importorskip("bass_kernels.ragged")

ON_GPU = DEVICE.type == "cuda"
SIZES = [64, 80, 128, 256] if ON_GPU else [16, 24]
EPS = 1e-6
# Schedule, members of a shared-prefix group, queries of a row, query heads of a key head. One tile
# has members * queries * heads lines, of 16, 32 or 64.
LINES = [
    ("ragged", 1, 1, 1),
    ("ragged", 1, 2, 8),
    ("ragged", 1, 3, 8),
    ("ragged", 1, 4, 8),
    ("ragged", 1, 9, 5),
    ("ragged", 1, 33, 3),
    ("ragged", 8, 1, 7),
    ("ragged", 4, 2, 8),
    ("packed", 1, 9, 3),
    ("packed", 1, 9, 7),
    ("pad", 1, 3, 8),
]
ATTENTION = {
    "lines": LINES,
    "size": SIZES,
    "dtype": DTYPES,
    "window": [0, 40],
    "sunk": [False, True],
    "cap": [0.0, 1.5],
    "bits": [16, 8],
    "splits": [1, 3],
    "crowded": [False, True],
}
QUERIES = [1, 5, 3, 9, 1, 2, 9, 1]  # of each packed row


def expected(given, **options):
    """Do reference.attention in float32. A window that hides nothing makes it mask the prompt by
    position too."""
    q, own, prompt, segments = given
    if len(own) > 2:
        own, prompt = eight.floats(own), eight.floats(prompt)
    own, prompt = (tuple(part.float() for part in store) for store in (own, prompt))
    options["window"] = options["window"] or 10**6
    return reference.attention(q.float(), own, prompt, segments, **options)


def poisoned(given):
    """Make the keys NaN that no query sees."""
    return (eight if len(given[1]) > 2 else plain).poisoned(given)


def skip_slow_compilation(dtype, tile):
    """Skip tiles of so many numbers in float32, which tensor cores cannot multiply exactly."""
    if dtype == torch.float32 and tile > 5000:
        pytest.skip("takes 10 to 40 s to compile")


@pytest.mark.parametrize(tuple(ATTENTION), thinned_on_cpu(covering(ATTENTION, 3), 40))
def test_attention(lines, size, dtype, window, sunk, cap, bits, splits, crowded, monkeypatch):
    schedule, members, width, group = lines
    skip_slow_compilation(dtype, size * members * width * group)
    given = plain.case(width, dtype, heads=2 * group, size=size)
    given = eight.in_eight_bits(given) if bits == 8 else given
    sinks = randn(2 * group, dtype=dtype, seed=5) if sunk else None
    options = {"scale": size**-0.5, "window": window, "cap": cap, "sinks": sinks}
    queries, hidden = [min(width, one) for one in QUERIES], poisoned(given)
    if schedule == "packed":
        given, hidden = packed(given, queries, width), packed(hidden, queries, width)
    wanted = expected(given, **options)
    ops.attention_schedule("pad" if schedule == "pad" else "ragged")
    monkeypatch.setattr(ragged, "processors", lambda device: 1 if crowded else 1000)
    found = ragged.attention(
        *hidden, **options, splits=splits, group_splits=splits, members=members
    )
    close(found, wanted, dtype)


FUSED = {
    # queries of a row, query heads of a key head
    "lines": [(1, 1), (1, 7), (4, 4), (3, 8), (4, 8), (9, 7), (16, 4)],
    "size": SIZES,
    "dtype": DTYPES,
    "window": [0, 40],
    "norms": [False, True],
    "rotated": [0, 2],  # pairs of a head that are not rotated
    "bits": [16, 8],
    "splits": [1, 3],
    "peaks": [False, True],
    "early": [False, True],
}


@pytest.mark.parametrize(tuple(FUSED), thinned_on_cpu(covering(FUSED), 20))
def test_fused_attention(lines, size, dtype, window, norms, rotated, bits, splits, peaks, early):
    width, group = lines
    heads = 2 * group
    skip_slow_compilation(dtype, size * width * group)
    given = plain.case(width, dtype, heads=heads, size=size)
    given = eight.in_eight_bits(given) if bits == 8 else given
    (q, own, clean, segments), (_, mine, prompt, _) = given, poisoned(given)
    rows, scale = len(q), size**-0.5
    qkv, angles, weights, slots = plain.projected(given, norms=norms, rotated=rotated)
    largest = torch.zeros(rows * width, dtype=torch.int32, device=DEVICE) if peaks else None
    found = fused_attention.attend(
        qkv,
        angles.flatten(1, 2),
        weights,
        segments,
        mine,
        prompt,
        heads=heads,
        eps=EPS,
        scale=scale,
        window=window,
        splits=splits,
        peaks=largest,
        early=early,
    )
    due_own = tuple(part.clone() for part in own)
    line = qkv.view(rows, width, -1)
    if bits == 16:
        line, due_own = line.float(), tuple(part.float() for part in due_own)
        weights = None if weights is None else tuple(weight.float() for weight in weights)
    q = reference.rope_write(
        line, tuple(angles), slots, due_own, heads=heads, norms=weights, eps=EPS
    )
    wanted = expected((q, due_own, clean, segments), scale=scale, window=window)
    close(found.view(rows, width, -1), wanted, dtype, factor=2)
    written = (eight.floats(mine), eight.floats(due_own)) if bits == 8 else (mine, due_own)
    for one, other in zip(*written, strict=True):
        one, other = one[:, slots].float(), other[:, slots]
        if bits == 16:
            close(one, other, dtype)
        else:  # kernel and definition may round a value to two neighbours
            assert ((one - other).abs() <= 0.13 * other.abs() + 1e-3).all()
            assert (one != other).float().mean() < 0.02
    if peaks:
        assert torch.equal(largest.view(torch.float32), found.float().abs().amax(1))


def begun(dtype, count, width, *, early=False, peaks=None, most=16):
    """Return a stream of random tokens, its norm's weight, and its normed residual in float64."""
    embed, norm = randn(count, width, dtype=dtype), randn(width, seed=1) + 1
    tokens, inverse = torch.arange(count, device=DEVICE), randn(12, seed=2).abs()
    words = {"early": early, "peaks": peaks, "most": most}
    stream, _ = residual.begin(tokens, tokens, embed, norm, inverse, **words)
    scale = torch.rsqrt(stream.residual.double().square().mean(1, keepdim=True) + EPS)
    assert torch.equal(stream.residual, embed.float())
    return stream, norm, scale


KINDS = ["silu", "gelu", "gelu_tanh", "relu", "relu2"]
PRODUCTS = {
    "kind": KINDS,
    "dtype": DTYPES,
    # tokens; rows and depth of a weight, with one or several splits and steps
    "count": [1, 9, 16],
    "sizes": [(75, 300), (600, 1536)] if ON_GPU else [(75, 300)],
    "few": [False, True],  # processors, so that a program has 16 or 32 rows of a weight
    "biased": [False, True],
    "early": [False, True],
}


@pytest.mark.parametrize(tuple(PRODUCTS), thinned_on_cpu(covering(PRODUCTS), 20))
def test_products_of_few_tokens(kind, dtype, count, sizes, few, biased, early, monkeypatch):
    monkeypatch.setattr(products, "processors", lambda device: 4 if few else 1000)
    lines, depth = sizes
    stream, norm, scale = begun(dtype, count, depth, early=early)
    normed = stream.residual.double() * norm.double() * scale
    weight = randn(lines, depth, dtype=dtype, seed=3) / depth**0.5
    bias = randn(lines, dtype=dtype, seed=4) if biased else None
    found = products.project(stream, weight, bias, eps=EPS, early=early)
    close(found, normed @ weight.double().T + (bias.double() if biased else 0.0), dtype)

    both = randn(2 * lines, depth, dtype=dtype, seed=7) / depth**0.5
    found = products.gate_up(stream, both, eps=EPS, activation=kind, early=early)
    wanted = reference.activation(normed @ both.double().T, kind, gated=True)
    close(found, wanted, dtype, factor=4)

    down = randn(depth, lines, dtype=dtype, seed=6) / lines**0.5
    longer = products.add(found, down, stream, norm, early=early)
    total = stream.residual.double() + found.double() @ down.double().T
    close(longer.residual, total, torch.float32, factor=4)
    close(longer.x, total * norm.double(), dtype)
    close(longer.squares.sum(0)[:count], total.square().sum(1), torch.float32, factor=4)
    wanted = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * norm.double()
    close(residual.finish(longer, norm, eps=EPS, early=early), wanted, dtype)


ROWS = {
    "kind": KINDS,
    "dtype": DTYPES,
    "rows": [1, 16, 17, 64],
    # of the weight: rows and depth, in one to eight splits, of whole tiles and not
    "sizes": [(70, 200), (48, 1040), (96, 4096)] if ON_GPU else [(70, 200)],
    "biased": [False, True],
    "layer": [False, True],
    "gated": [False, True],
}


@pytest.mark.parametrize(tuple(ROWS), thinned_on_cpu(covering(ROWS), 20))
def test_norms_products_and_activations(kind, dtype, rows, sizes, biased, layer, gated):
    lines, depth = sizes
    x, weight = randn(rows, 1, depth, dtype=dtype), randn(2 * lines, depth, dtype=dtype, seed=1)
    weight = weight / depth**0.5
    bias = randn(2 * lines, dtype=dtype, seed=2) if biased else None
    norm, shift = randn(depth, dtype=dtype, seed=4), randn(depth, dtype=dtype, seed=5)
    norms, how = (norm, shift if layer else None), "layer" if layer else "rms"
    words = {"eps": EPS, "kind": how, "activation": kind, "gated": gated}
    found = ops.norm_up(x, norms, (weight, bias), **words)
    wide = (None if one is None else one.double() for one in norms)
    normed = reference.norm(None, x.double(), *wide, eps=EPS, kind=how)[0].to(dtype).double()
    mapped = normed @ weight.double().T + (bias.double() if biased else 0.0)
    close(found, reference.activation(mapped, kind, gated=gated), dtype, factor=4)
    added = randn(rows, 1, 2 * lines, dtype=dtype, seed=6)
    found = ops.linear_add(x, weight, bias, added.clone())
    mapped = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    close(found, added.double() + mapped, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("size", [3584, 5376, 16384] if ON_GPU else [300])
def test_norms_of_wide_models(dtype, layer, size):
    x, added = randn(3, size, dtype=dtype), randn(3, size, dtype=dtype, seed=1)
    weights = randn(2, size, dtype=dtype, seed=2)
    norms, kind = (weights[0], weights[1] if layer else None), "layer" if layer else "rms"
    normed, total = ops.norm(added, x, *norms, eps=EPS, kind=kind)
    wide = (None if one is None else one.double() for one in norms)
    due, due_total = reference.norm(added.double(), x.double(), *wide, eps=EPS, kind=kind)
    close(total, due_total, dtype)
    close(normed, due, dtype)


ROPE = {
    "tokens": [(3, 4), (70, 4)] if ON_GPU else [(3, 4)],  # with one warp and with two
    "size": SIZES,
    "dtype": DTYPES,
    "heads": [(1, 1), (6, 2), (16, 8)],
    "rotated": ["none", "half", "all"],
    "normed": [False, True],
    "bits": [16, 8],
}


@pytest.mark.parametrize(tuple(ROPE), thinned_on_cpu(covering(ROPE), 8))
def test_rope_and_cache_write(tokens, size, dtype, heads, rotated, normed, bits):
    (rows, width), (queries, keys) = tokens, heads
    qkv = randn(rows, width, (queries + 2 * keys) * size, dtype=dtype)
    slots = torch.randperm(rows * width + 5, generator=torch.Generator().manual_seed(3))
    slots = slots[: rows * width].view(rows, width).to(DEVICE)
    half = {"none": 0, "half": size // 4, "all": size // 2}[rotated]
    turns = slots[..., None] * (0.3 + torch.arange(half, device=DEVICE))
    angles = (turns.cos(), turns.sin()) if half else None
    norms = tuple(randn(size, dtype=dtype, seed=seed) for seed in (5, 6)) if normed else None
    plain_own = tuple(torch.zeros(keys, rows * width + 5, size, device=DEVICE) for _ in range(2))
    own = eight.stored(*plain_own) if bits == 8 else tuple(part.to(dtype) for part in plain_own)
    words = {"heads": queries, "eps": EPS}
    found = ops.rope_write(qkv, angles, slots, own, norms=norms, **words)
    norms = None if norms is None else tuple(norm.float() for norm in norms)
    wanted = reference.rope_write(qkv.float(), angles, slots, plain_own, norms=norms, **words)
    close(found, wanted, dtype)
    own = eight.floats(own) if bits == 8 else own
    for one, other in zip(own, plain_own, strict=True):
        if bits == 8:  # a number of e4m3 is within 1/16 of its value
            assert ((one - other).abs() <= 0.08 * other.abs() + 1e-3 * other.abs().max()).all()
        else:
            close(one, other, dtype)


EIGHT_BITS = {
    "count": [1, 16, 17, 64, 100],
    # rows and depth of the weight, with one to five splits
    "sizes": [(100, 300), (100, 1040), (100, 2064), (100, 8208)] if ON_GPU else [(100, 300)],
    "dtype": DTYPES,
    "layout": list(ops.LAYOUTS),
    "few": [False, True] if ON_GPU else [True],  # processors
    "kind": KINDS[:3],
    "early": [False, True],
}


@pytest.mark.parametrize(tuple(EIGHT_BITS), thinned_on_cpu(covering(EIGHT_BITS), 20))
def test_products_in_8_bits(count, sizes, dtype, layout, few, kind, early, monkeypatch):
    monkeypatch.setattr(quantised_products, "processors", lambda device: 4 if few else 132)
    (lines, depth), close = sizes, quantised.close
    if layout == "int8":  # tiles of 64 rows
        skip_slow_compilation(dtype, 64 * count)
    weight, both = (
        quantised.weight_of(rows, depth, layout, seed=rows) for rows in (lines, 2 * lines)
    )
    x, bias = randn(count, depth, dtype=dtype), randn(lines, dtype=dtype, seed=5)
    added, like = randn(count, lines, dtype=dtype, seed=6), (dtype, layout)
    wanted = quantised.due(x, weight) + bias.double() + added.double()
    close(quantised_products.linear(x, weight, bias, added), wanted, *like)
    rounded, scales = quantised_products.factor(x, both)
    found = quantised_products.gated(rounded, scales, both, like=x, activation=kind)
    wanted = reference.activation(quantised.due(x, both), kind, gated=True)
    close(found, wanted, *like, factor=3)
    if count > quantised_products.MOST_TOKENS:
        return
    peaks = torch.full((70,), 7, dtype=torch.int32, device=DEVICE)
    room = quantised_products.room(count)
    stream, norm, scale = begun(dtype, count, depth, early=early, peaks=peaks, most=room)
    words = {"eps": EPS, "early": early}
    found = quantised_products.project(stream, weight, bias, **words)
    close(found, quantised.due(stream.x, weight) * scale + bias.double(), *like)
    words |= {"activation": kind, "peaks": peaks[:room]}
    found = quantised_products.gate_up(stream, both, **words)
    wanted = reference.activation(quantised.due(stream.x, both) * scale, kind, gated=True)
    close(found, wanted, *like, factor=3)
    assert torch.equal(peaks[:room], quantised.magnitudes(found, room))
    down, largest = quantised.weight_of(depth, lines, layout), torch.zeros_like(peaks[:room])
    words = {"peaks": peaks[:room], "largest": largest, "early": early}
    longer = quantised_products.add(found, down, stream, norm, **words)
    due = quantised.due(found, down)
    close(longer.residual - stream.residual, due, torch.float32, layout, factor=4)
    close(longer.x, longer.residual.double() * norm.double(), *like)
    assert torch.equal(largest, quantised.magnitudes(longer.x, room))


EXPERTS = {
    "tokens": [3, 40, 80, 140],  # of which each of four experts has a half
    "dtype": DTYPES,
    "layout": ["plain", *ops.LAYOUTS],
    "gate": mixtures.GATES,
    "biased": [False, True],
    "shared": [False, True],
    "sizes": [(640, 320), (1030, 72)] if ON_GPU else [(40, 24)],  # width, and inner of an expert
}


@pytest.mark.parametrize(tuple(EXPERTS), thinned_on_cpu(covering(EXPERTS), 12))
def test_experts(tokens, dtype, layout, gate, biased, shared, sizes):
    (width, inner), (activation, clamp) = sizes, gate
    x, maps = (
        randn(tokens, width, dtype=dtype),
        mixtures.maps_of(4, width, inner, dtype, biased=biased),
    )
    maps = maps if layout == "plain" else mixtures.in_8_bits(maps, layout)
    router = randn(4, width, dtype=dtype, seed=1)
    ids, weights = experts.route(x, router, None, chosen=2, normalised=True)
    every = randn(tokens, width, dtype=dtype, seed=5), randn(1, width, dtype=dtype, seed=6) / 30
    one = ops.Shared(*every) if shared else None
    words = {"experts": 4, "activation": activation, "clamp": clamp}
    found = ops.mix_experts(x, ids, weights, maps, x, one, **words)
    if layout == "plain":
        maps = ops.Maps(*(None if part is None else part.float() for part in maps))
        x, one = x.float(), ops.Shared(*(part.float() for part in every)) if shared else None
    wanted = experts.mix_experts(x, ids, weights, maps, x, one, **words)
    factor = 2.0
    if layout == "fp8":  # see test_experts.py
        factor = max(factor, math.sqrt((4e-4 if ON_GPU else BOUND[dtype]) / 8) / BOUND[dtype])
    close(found, wanted, dtype, factor=factor)


SAMPLES = {
    "vocab": [70, 8300, 151936],
    "dtype": DTYPES,
    "least": [False, True],
    "shape": ["flat", "peaked"],
}


@pytest.mark.skipif(not ON_GPU, reason="test_triton.py runs the same with fewer tokens")
@pytest.mark.parametrize(tuple(SAMPLES), covering(SAMPLES, 3))
def test_samples(vocab, dtype, least, shape):
    temperature, top_k, top_p = (
        torch.tensor(column, device=DEVICE) for column in zip(*LAWS, strict=True)
    )
    rows = len(LAWS)
    logits = ((0.5 if shape == "flat" else 3.0) * randn(rows, vocab, seed=vocab)).to(dtype)
    keys = torch.randint(0, 2**32, (rows, 2), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    params = (temperature, top_k, top_p, keys, torch.arange(rows, device=DEVICE) * 1000)
    floor = torch.linspace(0, 0.2, rows, device=DEVICE) if least else None
    tokens, scores = ops.sample_scored(logits, *params, floor)
    due, due_scores = sampling.sample_scored(logits, *params, floor)
    assert tokens.tolist() == due.tolist()
    torch.testing.assert_close(scores, due_scores, atol=1e-4, rtol=1e-4)


VERDICTS = {
    "vocab": [70, 8300, 151936],
    "dtype": DTYPES,
    "drafts": ["likely", "point masses"],
    "most": [None, 1],
}


@pytest.mark.skipif(not ON_GPU, reason="test_rejection.py runs the same with smaller chunks")
@pytest.mark.parametrize(tuple(VERDICTS), covering(VERDICTS))
def test_verdicts(vocab, dtype, drafts, most):
    mixed, width = coupling.LAYOUTS, 2
    rows = len(mixed)
    logits = (2 * randn(rows, width + 1, vocab, seed=1)).to(dtype)
    guess = (logits[:, :width].float() + 0.7 * randn(rows, width, vocab, seed=2)).to(dtype)
    keys, lengths = coupling.keys_for(rows), torch.arange(rows, device=DEVICE) * 37 + 5
    (tokens, dist), (due_tokens, due_dist) = coupling.drafted(guess, mixed, keys, lengths)
    assert tokens.tolist() == due_tokens.tolist()
    given = (dist, due_dist) if drafts == "likely" else (None, None)
    limit = None if most is None else torch.tensor(most, device=DEVICE)
    coupling.compare(tokens, given, logits, mixed, keys, lengths, limit)


DELTA = {
    "rows": [1, 5, 9] if ON_GPU else [1],
    "width": [1, 2, 4, 9],
    "dtype": list(delta.BOUNDS),
    # key heads, heads, and sizes of keys and values
    "shape": [(2, 2, 8, 40), (4, 8, 64, 64), (16, 48, 128, 128)] if ON_GPU else [(1, 3, 5, 7)],
}


@pytest.mark.parametrize(tuple(DELTA), thinned_on_cpu(covering(DELTA), 8))
def test_rounds_of_the_delta_rule(rows, width, dtype, shape):
    weights, state, given = delta.layer_of(shape, (rows, width), dtype, slots=rows, width=width)
    first = 3 + torch.arange(rows)
    delta.compare(
        "delta_round",
        weights,
        state,
        given,
        dtype,
        [],
        slots=torch.arange(rows).flip(0).to(DEVICE),
        positions=(first[:, None] + torch.arange(width)).to(DEVICE),
        advance=(torch.arange(rows) % width + 1).to(DEVICE),
    )


LOGITS = {
    "count": [1, 19, 40, 200] if ON_GPU else [1, 19],
    "dtype": heads_in_8_bits.DTYPES,
    "depth": [150, 3584] if ON_GPU else [150],
    "biased": [False, True],
}


@pytest.mark.parametrize(tuple(LOGITS), thinned_on_cpu(covering(LOGITS), 4))
def test_logits_of_a_head_in_8_bits(count, dtype, depth, biased):
    x, head = randn(count, depth, dtype=dtype), heads_in_8_bits.head_of(203, depth)
    bias = randn(203, dtype=dtype, seed=5) if biased else None
    found = ops.logits(x, head, bias)
    assert heads_in_8_bits.error_of(found, x, head, bias) < heads_in_8_bits.BOUND[dtype]
