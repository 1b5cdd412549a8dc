"""Keys and values in eight bits: the definition against a table of all e4m3 numbers, and the Triton
kernels against attention over the dequantised numbers.

They run on a CUDA device if there is one, otherwise in Triton's interpreter.
"""

import contextlib
import itertools
import math
from dataclasses import replace

import pytest
import torch
from bounds import bounded
from test_ragged import SPAN, SPANS, STORE, USED, case, projected
from test_triton import DEVICE, DTYPES, close, randn
from thinned import thinned_on_cpu

import bass_kernels as ops
from bass_kernels import reference
from bass_kernels.segments import dequantise, quantise

pytest.importorskip("triton")


@pytest.fixture(params=["by integers", "by instructions"])
def conversion(request, monkeypatch):
    """Both ways to read e4m3 in a kernel. The first one works on every device."""
    native = request.param == "by instructions"
    if native and (DEVICE.type != "cuda" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("this device has no such instructions")
    for module in ("ragged", "fused_attention"):
        monkeypatch.setattr(f"bass_kernels.{module}.converts", lambda device: native)


@pytest.fixture(autouse=True)
def triton():
    ops.use("triton")


def numbers():
    """All finite e4m3 numbers by their bits, from the format's definition."""
    found = {}
    for bits in range(256):
        exponent, mantissa = (bits >> 3) & 15, bits & 7
        if (exponent, mantissa) != (15, 7):
            size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
            found[bits] = -size if bits & 128 else size
    return found


def nearest(value):
    """The bits of the e4m3 number nearest to a value; of two, the one with an even mantissa."""
    sign = 128 if math.copysign(1, value) < 0 else 0
    return min(
        (bits for bits in numbers() if bits & 128 == sign),
        key=lambda bits: (abs(numbers()[bits] - value), bits & 1),
    )


def scale_of(values):
    """The smallest power of two with which all values are at most 448, within the limits."""
    largest = max(map(abs, values))
    exponent = -22
    while exponent < 6 and largest > 448 * 2.0**exponent:
        exponent += 1
    return 2.0**exponent


def rows_of_all_sizes():
    """Rows of odd length: all magnitudes, ties, zeros, and largest numbers at the edge of e4m3."""
    found = randn(20, 13) * torch.exp2(8 * randn(20, 1, seed=1) + 3 * randn(20, 13, seed=2))
    found[0] = 0.0
    found[1, 3] = -0.0
    for row, largest in enumerate((448.0, 448.0001, 464.0, 255.9, 256.0, 1e6, 28672.0, 1e-8), 2):
        found[row] = torch.linspace(-largest, largest, 13)
    found[10] = torch.arange(13) / 512.0 + 1 / 1024.0  # between two subnormal numbers
    found[10, 0] = 448.0
    found[11] = 16.0 + torch.arange(13)  # every second one is between two numbers
    return found.cpu()


def test_numbers_are_the_nearest_under_the_smallest_scale():
    x = rows_of_all_sizes()
    bits, scales = quantise(x)
    for row, line in enumerate(x.tolist()):
        scale = scale_of(line)
        assert scales[row].item() == scale
        assert bits[row].tolist() == [nearest(value / scale) for value in line]
    held = torch.tensor([[numbers()[bit] for bit in line] for line in bits.tolist()])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantise(bits, scales, dtype).float(), held * scales[:, None].float())


def test_a_stored_number_depends_on_its_own_token_and_head_only():
    x = randn(5, 3, 16).cpu()
    bits, scales = quantise(x)
    for token in range(5):
        alone = quantise(x[token : token + 1])
        assert torch.equal(alone[0][0], bits[token])
        assert torch.equal(alone[1][0], scales[token])


def test_numbers_that_are_not_finite_poison_their_token_alone():
    x = randn(4, 16).cpu()
    x[1, 3], x[2, 5] = torch.nan, -torch.inf
    found = dequantise(*quantise(x), torch.float32)
    assert found[1:3].isnan().all()
    assert found[[0, 3]].isfinite().all()


def stored(keys, values):
    """A store in eight bits with these keys and values."""
    (key_bits, key_scales), (value_bits, value_scales) = quantise(keys), quantise(values)
    return key_bits, value_bits, key_scales, value_scales


def floats(store):
    """The keys and values of a store in eight bits, in float32."""
    return tuple(
        bits.cpu().view(torch.float8_e4m3fn).to(DEVICE).float() * scales[..., None].float()
        for bits, scales in zip(store[:2], store[2:], strict=True)
    )


def in_eight_bits(given):
    """The same case with both stores in eight bits. Scales differ from token to token."""
    q, own, prompt, segments = given

    def spread(store, seed):
        sizes = [torch.exp2(randn(*part.shape[:2], 1, seed=seed)) for part in store]
        return stored(*(part.float() * size for part, size in zip(store, sizes, strict=True)))

    return q, spread(own, 21), spread(prompt, 22), segments


def due(given, window, scale=0.25, **options):
    q, own, prompt, segments = given
    options |= {"scale": scale, "window": window or 10**6}
    return reference.attention(q.float(), floats(own), floats(prompt), segments, **options)


def poisoned(given):
    """The same with NaN in the scales of keys that no query sees, and large numbers there."""
    q, own, prompt, segments = given
    last = (segments.positions.amax(1) - segments.base)[:, None]
    hidden = torch.arange(SPAN, device=DEVICE) > last
    hidden = hidden[segments.own.argsort()].flatten()
    outside = torch.ones(STORE, dtype=torch.bool, device=DEVICE)
    for group in segments.groups:
        outside[group.start : group.start + group.length] = False

    def marked(store, where):
        keys, values, key_scales, value_scales = store
        keys, values = (part.masked_fill(where[:, None], 0x7E) for part in (keys, values))
        return keys, values, key_scales.masked_fill(where, torch.nan), value_scales

    return q, marked(own, hidden), marked(prompt, outside), segments


def run(given, **options):
    from bass_kernels.ragged import attention

    return attention(*poisoned(given), scale=options.pop("scale", 0.25), **options)


@pytest.mark.parametrize(
    ("dtype", "form"),
    thinned_on_cpu(itertools.product(DTYPES, [(3, 1, 0), (1, 9, 0), (3, 9, 75), (3, 1, 20)]), 3),
)
def test_ragged_attention(conversion, dtype, form):
    splits, width, window = form
    given = in_eight_bits(case(width, dtype, spans=SPANS[:5], used=USED[:5]))
    found = run(given, window=window, splits=splits, members=1)
    assert found.dtype == dtype
    close(found, due(given, window), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (8, 1, 80), (6, 2, 96), (7, 1, 128), (2, 1, 256)]
)
def test_head_sizes(heads, kv_heads, size):
    given = case(5, heads=heads, kv_heads=kv_heads, size=size, spans=SPANS[:5], used=USED[:5])
    given = in_eight_bits(given)
    found = ops.attention(*poisoned(given), scale=size**-0.5)
    close(found, due(given, 0, size**-0.5), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "groups"),
    thinned_on_cpu(
        itertools.product(
            DTYPES, [(2, 1, 1, 1, 0), (4, 2, 3, 3, 75), (8, 1, 2, 3, 0), (4, 1, 2, 1, 20)]
        ),
        3,
    ),
)
def test_shared_prefix_groups(conversion, dtype, groups):
    members, splits, group_splits, width, window = groups
    given = in_eight_bits(case(width, dtype))
    found = run(given, window=window, splits=splits, group_splits=group_splits, members=members)
    close(found, due(given, window), dtype)


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_capped_scores_and_sinks(dtype, members):
    given = in_eight_bits(case(3, dtype))
    options = {"cap": 1.5, "sinks": randn(6, dtype=dtype, seed=12)}
    found = run(given, splits=2, group_splits=2, members=members, **options)
    close(found, due(given, 0, **options), dtype)


@pytest.mark.parametrize(
    ("schedule", "width", "window"), [("pad", 1, 0), ("pad", 3, 20), ("split", 3, 0)]
)
def test_the_papers_schedules(schedule, width, window):
    ops.attention_schedule(schedule)
    given = in_eight_bits(case(width, kv_heads=1))
    close(run(given, window=window), due(given, window), torch.float32)


def test_packed_rows():
    """Rows with 1 to 4 queries each, one after the other."""
    q, own, prompt, segments = in_eight_bits(case(4, spans=SPANS[:5], used=USED[:5]))
    counts = torch.tensor([1, 4, 2, 1, 3], device=DEVICE)
    given = q, own, prompt, segments
    packed = ops.Packed(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        torch.repeat_interleave(counts),
        torch.cat([torch.arange(count, device=DEVICE) for count in counts.tolist()]),
        4,
    )
    alone = replace(
        segments, positions=segments.positions[packed.row, packed.place][None], packed=packed
    )
    found = ops.attention(q[packed.row, packed.place][None], own, prompt, alone, scale=0.25)
    close(found[0], due(given, 0)[packed.row, packed.place], torch.float32)


def test_a_large_query_and_small_weights_are_accurate():
    """Queries beyond float16's range, and 3000 keys of nearly equal weight with small values."""
    dtype = DTYPES[-1]
    count = 3000
    size = 1e4 if dtype == torch.float16 else 3e7
    keys, values = randn(1, count, 16), 1e-3 * (1 + 0.1 * randn(1, count, 16, seed=1))
    q = (size * randn(1, 1, 2, 16, seed=2)).to(dtype)
    prompt, own = stored(keys, values), stored(keys[:, :16], values[:, :16])
    positions = torch.tensor([[count]], device=DEVICE)
    base, zero = positions[0], torch.zeros(1, dtype=torch.int64, device=DEVICE)
    segments = ops.Segments(
        positions, base, zero, zero, (ops.Group(0, count, slice(0, 1)),), 1, None
    )
    given = q, own, prompt, segments
    from bass_kernels.ragged import attention

    close(attention(*given, scale=0.1 / size), due(given, 0, 0.1 / size), dtype)


@pytest.mark.parametrize("window", [0, 30])
def test_a_long_prefill_of_one_prompt(window, monkeypatch):
    """37 tokens, the last of 61, in tiles of 16: with causal attention, or with a window with the
    ragged kernel."""
    from bass_kernels import ragged

    monkeypatch.setattr(ragged, "_MANY", 37)
    tokens, end, start = 37, 61, 20
    positions = torch.full((48,), end - 1, device=DEVICE)
    positions[:tokens] = torch.arange(end - tokens, end, device=DEVICE)
    tiles = torch.full((3,), end, device=DEVICE)
    group = ops.Group(start, end, slice(0, 3), tokens)
    begins, slots = torch.full_like(tiles, start), torch.zeros_like(tiles)
    segments = ops.Segments(positions.view(3, 16), tiles, begins, slots, (group,), 0)
    prompt = stored(*(randn(2, STORE, 16, seed=i) for i in range(2)))
    q = randn(3, 16, 6, 16, dtype=torch.float16, seed=9)
    wanted = due((q, prompt, prompt, segments), window)
    for scales in prompt[2:]:
        scales[:, :start] = scales[:, start + end :] = torch.nan
    found = ragged.attention(q, prompt, prompt, segments, scale=0.25, window=window)
    close(*(out.reshape(48, -1)[:tokens] for out in (found, wanted)), torch.float16)
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "rotated", "norms"), [(16, 16, False), (80, 40, False), (96, 96, True), (128, 0, True)]
)
def test_rope_and_cache_write(dtype, size, rotated, norms):
    """The kernel stores what the definition makes of the kernel's own keys and values in the
    model's dtype. Slots that are not written stay as they are."""
    heads, kv_heads, rows, width, span = 6, 2, 3, 4, 11
    qkv = randn(rows, width, (heads + 2 * kv_heads) * size, dtype=dtype)
    qkv[1, 2, -3], qkv[2, 1, heads * size + 1] = torch.nan, torch.inf
    positions = torch.tensor([[3, 4, 5, 6], [0, 1, 2, 3], [7, 8, 9, 10]], device=DEVICE)
    turns = positions[..., None] * (0.3 + torch.arange(rotated // 2, device=DEVICE))
    angles = (turns.cos(), turns.sin()) if rotated else None
    weights = (
        (randn(size, dtype=dtype, seed=5), randn(size, dtype=dtype, seed=6)) if norms else None
    )
    slots = positions + span * torch.tensor([[3], [0], [1]], device=DEVICE)
    wide = tuple(
        torch.full((kv_heads, 5 * span, size), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)
    )
    own = stored(*wide)
    given = {"heads": heads, "norms": weights, "eps": 1e-6}
    plain_q = ops.rope_write(qkv, angles, slots, wide, **given)
    q = ops.rope_write(qkv, angles, slots, own, **given)
    if not norms:
        assert torch.equal(q.nan_to_num(), plain_q.nan_to_num())
        for found, wanted in zip(own, stored(*wide), strict=True):
            assert torch.equal(found.nan_to_num(9.0), wanted.nan_to_num(9.0))
    else:  # the two kernels may add the squares of a norm in different orders
        close(q.nan_to_num(), plain_q.nan_to_num(), dtype)
        for found, wanted in zip(floats(own), floats(stored(*wide)), strict=True):
            found, wanted = found.nan_to_num(9.0), wanted.nan_to_num(9.0)
            assert ((found - wanted).abs() <= 0.13 * wanted.abs() + 1e-3).all()
            assert (found != wanted).float().mean() < 0.02
    assert own[2].isnan().sum() == 2


@pytest.mark.parametrize(
    ("wide", "window", "norms", "splits"),
    [
        pytest.param(*case, splits, marks=pytest.mark.slow if (at // 2 + other) % 2 else ())
        for at, case in enumerate([(1, 0, True), (3, 0, False), (2, 20, True), (16, 75, False)])
        for other, splits in enumerate((1, 3))
    ],
)
def test_fused_attention(conversion, splits, wide, window, norms, monkeypatch):
    """Attention with rope and cache write in one. New keys are rounded before they are read."""
    from bass_kernels import fused_attention

    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    given = in_eight_bits(case(wide, dtype))
    q, own, clean, segments = given
    _q, mine, prompt, _segments = poisoned(given)
    rows, heads = len(q), q.shape[2]
    qkv, angles, weights, slots = projected(given, norms=norms)
    due_own = tuple(part.clone() for part in own)
    options = {"heads": heads, "eps": 1e-6}
    with bounded(monkeypatch) if DEVICE.type == "cpu" else contextlib.nullcontext():
        found = fused_attention.attend(
            qkv,
            angles.flatten(1, 2),
            weights,
            segments,
            mine,
            prompt,
            **options,
            scale=0.25,
            window=window,
            splits=splits,
            keys=32,
        )
    q = reference.rope_write(
        qkv.view(rows, wide, -1), tuple(angles), slots, due_own, norms=weights, **options
    )
    close(found.view(rows, wide, -1), due((q, due_own, clean, segments), window), dtype, factor=2)
    # kernel and definition may round a value to two neighbours
    for held, wanted in zip(floats(mine), floats(due_own), strict=True):
        held, wanted = (part[:, slots] for part in (held, wanted))
        assert ((held - wanted).abs() <= 0.13 * wanted.abs() + 1e-3).all()
        assert (held != wanted).float().mean() < 0.02


@pytest.mark.parametrize("size", [0.0, 1e-7])
def test_queries_of_zero_and_tiny_ones_see_all_keys_alike(conversion, size):
    dtype = DTYPES[-1]
    q, *rest = in_eight_bits(case(3, dtype, spans=SPANS[:5], used=USED[:5]))
    q = torch.where(torch.arange(q.shape[2], device=DEVICE)[:, None] % 2 == 0, size, q).to(dtype)
    given = q, *rest
    close(run(given, members=1), due(given, 0), dtype)
