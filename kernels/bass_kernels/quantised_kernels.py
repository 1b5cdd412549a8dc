"""Triton: the kernels of quantised_products.py, which says what they compute.

Weights are the left factor, so that their rows fill the 64-wide side of Hopper's tensor cores: in
no other shape do they multiply e4m3. Tiles and accumulators are [L lines, T tokens]. The order of
a sum depends on the tiling alone, so a token has the same result whatever tokens are beside it.
"""

import torch
import triton
import triton.language as tl

from .launch import after
from .peers import add_tile
from .pointwise import activate, normalise
from .residual import load_tiles, magnitude, store_stream

# How a kernel multiplies
E4M3 = tl.constexpr(0)  # tensor cores take e4m3
ROUNDED = tl.constexpr(1)  # e4m3 numbers as float16
INT8 = tl.constexpr(2)  # whole numbers in the dtype of the tokens
PLAIN = tl.constexpr(3)  # weights in the dtype of the tokens, without scales
# Tensor cores sum e4m3 products with some 13 bits, so sums of this many are added in float32
# (arXiv 2412.19437, section 3.3.2).
_PROMOTED = tl.constexpr(128)
_HIGHEST = tl.constexpr(448.0)  # of e4m3
PREFETCHED = 512  # bytes of each row of a tile: two to four steps
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # the least scale, see quantised.py


@triton.jit
def factor_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scale_ptr,
    eps,
    size,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    ROUND: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tokens. Each norms its token if NORM, and rounds it to e4m3 if ROUND."""
    after(EARLY)
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    start, inside = row.to(tl.int64) * size, at < size
    value = tl.load(x_ptr + start + at, mask=inside, other=0.0)
    if NORM:
        value = normalise(
            value.to(tl.float32), at, size, weight_ptr, bias_ptr, eps, LAYER, BIAS
        ).to(x_ptr.dtype.element_ty)
    if ROUND:
        scale = token_scale(tl.max(magnitude(value), 0))
        value = value.to(tl.float32) * tl.div_rn(1.0, scale)
        value = value.to(tl.float8e4nv) if NATIVE else round_e4m3(value).to(tl.float16)
        tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + start + at, value, mask=inside)


@triton.jit
def gated_factor_kernel(
    both_ptr,
    out_ptr,
    scale_ptr,
    size,
    ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round activation(gate) * up of a token, [2 size], in two passes over it."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    both_ptr += row * 2 * size
    peaks = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        value = _gated(both_ptr, first + lane, size, ACTIVATION)
        peaks = tl.maximum(peaks, magnitude(value))
    scale = token_scale(tl.max(peaks, 0))
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    for first in range(0, size, BLOCK):
        value = _gated(both_ptr, first + lane, size, ACTIVATION).to(tl.float32) * inverse
        value = value.to(tl.float8e4nv) if NATIVE else round_e4m3(value).to(tl.float16)
        tl.store(out_ptr + row * size + first + lane, value, mask=first + lane < size)


@triton.jit
def _gated(both_ptr, at, size, ACTIVATION: tl.constexpr):
    gate = tl.load(both_ptr + at, mask=at < size, other=0.0)
    up = tl.load(both_ptr + size + at, mask=at < size, other=0.0).to(tl.float32)
    return (activate(gate.to(tl.float32), ACTIVATION) * up).to(gate.dtype)


@triton.jit
def add_product_kernel(
    sum_ptr,
    scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    residual_ptr,
    lines,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add a part of a token's product, whose sums have no scales yet, to the residual stream."""
    after(EARLY)
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = row.to(tl.int64) * lines + at, at < lines
    total = tl.load(sum_ptr + place, mask=inside, other=0.0)
    total *= tl.load(scale_ptr + row)
    total *= tl.load(weight_scale_ptr + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + place, total.to(residual_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    weight_scale_ptr,
    largest_ptr,
    square_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    count,
    eps,
    TILES: tl.constexpr,
    LARGEST: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    READY: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    HOW: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of T tokens, by tiles of EACH rows of the weight, by splits of the depth. The
    last split of a tile to finish applies scales, the norm of a stream if TILES > 0, bias and
    residual."""
    first, end, low, high = _part(LINES, DEPTH, EACH, SPLITS, DEEP)
    token, line = tl.program_id(0) * T + tl.arange(0, T), first + tl.arange(0, L)
    weight_scale = tl.load(
        weight_scale_ptr + line, mask=line < end, other=0.0, cache_modifier=".cg"
    )
    if PREFETCH:
        prefetch_rows(weight_ptr, first, end, low, L, DEPTH)
    after(EARLY)
    if TILES > 0:
        squares = load_tiles(square_ptr, TILES, T)
    scale = _token_scales(largest_ptr, token, count, LARGEST, T, READY, HOW)
    total, _ = _multiply(
        x_ptr, weight_ptr, scale, first, end, low, high, count, 0, DEPTH, L, T, DEEP, STAGES, HOW,
        READY, WIDE, ONCE,
    )  # fmt: skip
    total, last = _sum_splits(total, part_ptr, arrived_ptr, L, T, SPLITS)
    if last:
        total = total * scale[None, :] * weight_scale[:, None]
        if TILES > 0:
            total *= tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)[None, :]
        if BIAS:
            bias = tl.load(bias_ptr + line, mask=line < end, other=0.0)
            total += bias.to(tl.float32)[:, None]
        place = token.to(tl.int64)[None, :] * LINES + line[:, None]
        inside = (token < count)[None, :] & (line < end)[:, None]
        if ADD:
            total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def add_kernel(
    x_ptr,
    weight_ptr,
    weight_scale_ptr,
    largest_ptr,
    norm_ptr,
    stream_ptr,
    sum_ptr,
    next_ptr,
    square_ptr,
    bound_ptr,
    part_ptr,
    arrived_ptr,
    address_ptr,
    state_ptr,
    capacity,
    limit,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PEAKS: tl.constexpr,
    READY: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    HOW: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: 1, by tiles of EACH rows of the weight, by splits of the depth; all have all
    tokens. The last split of a tile to finish applies scales, adds the parts of all processes if
    RANKS > 1, and adds the sum to the stream."""
    first, end, low, high = _part(LINES, DEPTH, EACH, SPLITS, DEEP)
    token, line = tl.arange(0, T), first + tl.arange(0, L)
    weight_scale = tl.load(
        weight_scale_ptr + line, mask=line < end, other=0.0, cache_modifier=".cg"
    )
    if PREFETCH:
        prefetch_rows(weight_ptr, first, end, low, L, DEPTH)
    after(EARLY)
    scale = _token_scales(largest_ptr, token, count, 1, T, READY, HOW)
    total, _ = _multiply(
        x_ptr, weight_ptr, scale, first, end, low, high, count, 0, DEPTH, L, T, DEEP, STAGES, HOW,
        READY, WIDE, ONCE,
    )  # fmt: skip
    total, last = _sum_splits(total, part_ptr, arrived_ptr, L, T, SPLITS)
    if last:
        added = tl.trans(total * scale[None, :] * weight_scale[:, None])
        place = token[:, None] * LINES + line[None, :]
        inside = (token < count)[:, None] & (line < end)[None, :]
        if RANKS > 1:
            added = add_tile(
                added, place, inside, address_ptr, state_ptr, capacity, limit, tl.num_programs(1),
                RANK, RANKS,
            )  # fmt: skip
        added += tl.load(stream_ptr + place, mask=inside, other=0.0)
        largest = store_stream(
            added,
            tl.load(norm_ptr + line, mask=line < end, other=0.0).to(tl.float32),
            sum_ptr,
            next_ptr,
            square_ptr,
            tl.program_id(1),
            first,
            end,
            count,
            LINES,
            L,
            T,
        )
        if PEAKS:
            tl.atomic_max(bound_ptr + token, largest, mask=token < count, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    weight_scale_ptr,
    largest_ptr,
    square_ptr,
    out_ptr,
    bound_ptr,
    count,
    eps,
    TILES: tl.constexpr,
    LARGEST: tl.constexpr,
    PEAKS: tl.constexpr,
    READY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    HOW: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of T tokens by tiles of EACH rows of G, with the same rows of U. Each has the
    whole depth. PEAKS: raise the largest magnitude of each token."""
    first, end, low, high = _part(LINES, DEPTH, EACH, 1, DEEP)
    token, line = tl.program_id(0) * T + tl.arange(0, T), first + tl.arange(0, L)
    weight_scale_ptr += line
    gate_scale = tl.load(weight_scale_ptr, mask=line < end, other=0.0, cache_modifier=".cg")
    up_scale = tl.load(weight_scale_ptr + LINES, mask=line < end, other=0.0, cache_modifier=".cg")
    if PREFETCH:
        prefetch_rows(weight_ptr, first, end, low, L, DEPTH)
        prefetch_rows(weight_ptr + LINES * DEPTH, first, end, low, L, DEPTH)
    after(EARLY)
    if TILES > 0:
        squares = load_tiles(square_ptr, TILES, T)
    scale = _token_scales(largest_ptr, token, count, LARGEST, T, READY, HOW)
    gates, ups = _multiply(
        x_ptr, weight_ptr, scale, first, end, low, high, count, LINES, DEPTH, L, T, DEEP, STAGES,
        HOW, READY, WIDE, ONCE,
    )  # fmt: skip
    if TILES > 0:
        scale *= tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)
    gates = gates * scale[None, :] * gate_scale[:, None]
    ups = ups * scale[None, :] * up_scale[:, None]
    value = (activate(gates, ACTIVATION) * ups).to(out_ptr.dtype.element_ty)
    inside = (token < count)[None, :] & (line < end)[:, None]
    place = token.to(tl.int64)[None, :] * LINES + line[:, None]
    tl.store(out_ptr + place, value, mask=inside)
    if PEAKS:
        peak = tl.max(tl.where(inside, magnitude(value), 0), 0)
        tl.atomic_max(bound_ptr + token, peak, mask=token < count, sem="relaxed")


@triton.jit
def _multiply(
    x_ptr,
    weight_ptr,
    scale,
    first,
    end,
    low,
    high,
    count,
    SECOND: tl.constexpr,
    DEPTH: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    HOW: tl.constexpr,
    READY: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Multiply rows first to end of a weight matrix [., DEPTH] by T tokens [., DEPTH] over the
    depth low to high: [L, T] float32 without scales. If SECOND is not 0, also the rows SECOND
    further on. READY: the tokens are rounded already. ONCE: no other program reads these rows."""
    policy: tl.constexpr = "evict_first" if ONCE else ""
    line, token, place = tl.arange(0, L), tl.arange(0, T), tl.arange(0, DEEP)
    weight_ptr += first.to(tl.int64) * DEPTH  # offsets from here fit into 32 bits
    x_ptr += tl.program_id(0).to(tl.int64) * T * DEPTH
    inverse = tl.div_rn(1.0, scale)[:, None]
    one, two = tl.zeros([L, T], tl.float32), tl.zeros([L, T], tl.float32)
    for start in tl.range(low, high, DEEP, num_stages=STAGES):
        real = (token < count - tl.program_id(0) * T)[:, None]
        there = (line < end - first)[:, None]
        if DEPTH % DEEP != 0:
            deep = (start + place < high)[None, :]
            real, there = real & deep, there & deep
        x = tl.load(x_ptr + start + token[:, None] * DEPTH + place[None, :], mask=real, other=0.0)
        if HOW != INT8 and not READY:
            x = x.to(tl.float32) * inverse
            x = x.to(tl.float8e4nv) if HOW == E4M3 else round_e4m3(x).to(tl.float16)
        x = tl.trans(x)
        spot = weight_ptr + start + line[:, None] * DEPTH + place[None, :]
        weight = tl.load(spot, mask=there, other=0.0, eviction_policy=policy)
        one = dot(weight, x, one, HOW, WIDE)
        if SECOND > 0:
            spot += SECOND * DEPTH
            weight = tl.load(spot, mask=there, other=0.0, eviction_policy=policy)
            two = dot(weight, x, two, HOW, WIDE)
    return one, two


@triton.jit
def dot(weight, x, total, HOW: tl.constexpr, WIDE: tl.constexpr):
    """Add the product of a weight [L, K] and tokens [K, T] to a total [L, T], without scales."""
    if HOW == E4M3:
        most: tl.constexpr = _PROMOTED if weight.shape[1] > _PROMOTED else weight.shape[1]
        total = tl.dot(weight, x, total, max_num_imprecise_acc=most)
    elif HOW == ROUNDED:
        total = tl.dot(widen_e4m3(weight), x, total)
    elif HOW == INT8:
        total = tl.dot(widen_int8(weight).to(x.dtype), x, total, input_precision=WIDE)
    else:
        total = tl.dot(weight, x, total, input_precision=WIDE)
    return total


@triton.jit
def _part(
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Return this program's rows first to end of the weight, and its depth low to high."""
    low, high = 0, DEPTH
    if SPLITS > 1:
        share: tl.constexpr = ((DEPTH + DEEP - 1) // DEEP + SPLITS - 1) // SPLITS * DEEP
        low = tl.program_id(2) * share
        high = tl.minimum(low + share, DEPTH)
    first = tl.program_id(1) * EACH
    return first, tl.minimum(first + EACH, LINES), low, high


@triton.jit
def _sum_splits(
    total, part_ptr, arrived_ptr, L: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr
):
    """For the last split of a tile to arrive, return the sum of all splits, added in fixed order,
    and True. For the others return the input and False."""
    last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        part_ptr += tile.to(tl.int64) * SPLITS * L * T
        cell = tl.arange(0, L)[:, None] * T + tl.arange(0, T)[None, :]
        tl.store(part_ptr + cell + tl.program_id(2) * L * T, total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1) == SPLITS - 1
        if last:
            total = tl.zeros([L, T], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(part_ptr + cell + other * L * T, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    return total, last


@triton.jit
def _token_scales(
    largest_ptr,
    token,
    count,
    LARGEST: tl.constexpr,
    T: tl.constexpr,
    READY: tl.constexpr,
    HOW: tl.constexpr,
):
    """Return the scales of tokens, [T]: loaded if READY, or those of the largest magnitudes
    [LARGEST, T]; 1 for int8."""
    if HOW == INT8:
        scale = tl.full([T], 1.0, tl.float32)
    elif READY:
        scale = tl.load(largest_ptr + token, mask=token < count, other=1.0)
    else:
        scale = token_scale(tl.max(load_tiles(largest_ptr, LARGEST, T), 0))
    return scale


@triton.jit
def token_scale(largest):
    """Return the scale of a token from its largest magnitude, as in quantised.quantise."""
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), _HIGHEST)
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def round_e4m3(value):
    """Round float32 of at most 448 to the nearest e4m3 number, ties to even."""
    power = value.to(tl.int32, bitcast=True) & 0x7F800000  # the bits of 2^floor(log2 |value|)
    power = tl.maximum(power, (127 - 6) << 23)  # below 2^-6 numbers are as far apart as from there
    # 1.5 * 2^20 times the power of two: float32 from there are as far apart as e4m3 numbers of the
    # value's size
    base = (power + (20 << 23) + (1 << 22)).to(tl.float32, bitcast=True)
    return (value + base) - base


@triton.jit
def widen_e4m3(bits):
    """Return e4m3 numbers, given as bytes, in float16."""
    bits = bits.to(tl.int16)
    # sign, exponent and mantissa at their places in float16, whose exponents are 8 higher
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def widen_int8(numbers):
    """Return int8 in float32. GPUs convert integers at an eighth of the rate of their additions, so
    the number plus 128 becomes the last byte of a float32 of 2^23."""
    bits = numbers.to(tl.int32) + (0x4B000000 + 128)
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + 128.0)


@triton.jit
def prefetch_rows(weight_ptr, first, end, low, L: tl.constexpr, DEPTH: tl.constexpr):
    """Prefetch the first PREFETCHED bytes of rows first to end, from depth `low` on, to L2, without
    waiting."""
    line = first + tl.arange(0, L)
    tl.inline_asm_elementwise(
        """{
        .reg .pred here;
        setp.ne.s32 here, $2, 0;
        @here cp.async.bulk.prefetch.L2.global [$1], 512;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [(weight_ptr + low).to(tl.int64) + line.to(tl.int64) * DEPTH, (line < end).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
