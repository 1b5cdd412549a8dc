"""Triton: the online softmax of attention kernels (arXiv 1805.02867). Blocks of keys, of a prompt
and private ones, are folded into running sums. See ragged_kernel.py and fused_attention.py."""

import triton
import triton.language as tl

from .eight_bit_kernels import decode_pairs


def head_block(size: int) -> int:
    """Return the columns of a tile that holds a head: a power of two, at least 32. Keys in eight
    bits are multiplied in two halves, and a GPU's product takes at least 16 columns."""
    return max(32, triton.next_power_of_2(size))


@triton.jit
def _locate(
    block,
    prompt_blocks,
    first,
    own_first,
    prompt_end,
    end,
    base,
    ring,
    PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where the keys of a block are: whether in the prompt, their places there [BLOCK_N],
    their positions, and the position before which they end. See fold_blocks."""
    in_prompt = block < prompt_blocks
    begin = tl.where(in_prompt, first + block, own_first + block - prompt_blocks) * BLOCK_N
    place = begin + tl.arange(0, BLOCK_N)
    offset, limit = tl.where(in_prompt, 0, base), tl.where(in_prompt, prompt_end, end)
    at = place + offset
    if PAD:
        place = place % tl.where(in_prompt, base, ring)
    else:
        place = tl.minimum(place, limit - offset - 1)
    return in_prompt, place, at, limit


@triton.jit
def fold_blocks(
    q,
    q_odd,
    key_ptr,
    value_ptr,
    prompt_key_ptr,
    prompt_value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    prompt_key_scale_ptr,
    prompt_value_scale_ptr,
    key_step,
    prompt_step,
    low,
    high,
    prompt_blocks,
    first,
    own_first,
    prompt_end,
    end,
    base,
    ring,
    position,
    window,
    peak,
    mass,
    total,
    total_odd,
    scale,
    cap,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Fold blocks low to high of a row's keys into the running softmax (peak, mass, total).

    The first `prompt_blocks` are those of the prompt from block `first` on. Its keys end before
    position `prompt_end`. The others are of the private keys from block `own_first` on. These
    begin at position `base` and end before `end`. All pointers are to the row's first key.

    Loads need no mask: places beyond the end read the last key. PAD: places beyond the end are
    modulo the places that there are, `base` and `ring`, so every program reads as many keys.

    In eight bits, keys and values are pairs; see fold_pairs. The scales of a block are loaded one
    block ahead, because loads of two bytes cannot be asynchronous copies, which Triton needs to
    pipeline them.
    """
    columns: tl.constexpr = D if key_scale_ptr is None else D // 2
    column = tl.arange(0, total.shape[1])
    # The sum over keys is left to the end, because it takes two barriers.
    masses = tl.where(tl.arange(0, BLOCK_N)[None, :] == 0, mass[:, None], 0.0)
    if key_scale_ptr is not None:
        in_prompt, place, at, limit = _locate(
            low, prompt_blocks, first, own_first, prompt_end, end, base, ring, PAD, BLOCK_N
        )
        there = at < limit
        scales_at = tl.where(in_prompt, prompt_key_scale_ptr, key_scale_ptr) + place
        key_scales = tl.load(scales_at, mask=there, other=0.0)
        scales_at = tl.where(in_prompt, prompt_value_scale_ptr, value_scale_ptr) + place
        value_scales = tl.load(scales_at, mask=there, other=0.0)
    for block in range(low, high):
        in_prompt, place, at, limit = _locate(
            block, prompt_blocks, first, own_first, prompt_end, end, base, ring, PAD, BLOCK_N
        )
        grid = place[:, None] * tl.where(in_prompt, prompt_step, key_step) + column[None, :]
        keys_at = tl.where(in_prompt, prompt_key_ptr, key_ptr) + grid
        values_at = tl.where(in_prompt, prompt_value_ptr, value_ptr) + grid
        if total.shape[1] == columns:
            keys, values = tl.load(keys_at), tl.load(values_at)
        else:
            keys = tl.load(keys_at, mask=(column < columns)[None, :], other=0)
            values = tl.load(values_at, mask=(column < columns)[None, :], other=0)
        if PAD:
            values = tl.where((at < limit)[:, None], values, 0).to(values.dtype)
        seen = at[None, :] < tl.minimum(position + 1, limit)[:, None]
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        if key_scale_ptr is None:
            peak, masses, total = fold(
                q, keys, values, seen, peak, masses, total, scale, WIDE, cap, CAPPED
            )
        else:
            following = tl.minimum(block + 1, high - 1)
            in_prompt, place, at, limit = _locate(
                following,
                prompt_blocks,
                first,
                own_first,
                prompt_end,
                end,
                base,
                ring,
                PAD,
                BLOCK_N,
            )
            there = at < limit
            scales_at = tl.where(in_prompt, prompt_key_scale_ptr, key_scale_ptr) + place
            next_key_scales = tl.load(scales_at, mask=there, other=0.0)
            scales_at = tl.where(in_prompt, prompt_value_scale_ptr, value_scale_ptr) + place
            next_value_scales = tl.load(scales_at, mask=there, other=0.0)
            peak, masses, total, total_odd = fold_pairs(
                q,
                q_odd,
                keys,
                values,
                key_scales,
                value_scales,
                seen,
                peak,
                masses,
                total,
                total_odd,
                scale,
                WIDE,
                NATIVE,
                cap,
                CAPPED,
            )
            key_scales, value_scales = next_key_scales, next_value_scales
    return peak, tl.sum(masses, 1), total, total_odd


@triton.jit
def fold(
    q,
    keys,
    values,
    seen,
    peak,
    mass,
    total,
    scale,
    WIDE: tl.constexpr,
    cap=0.0,
    CAPPED: tl.constexpr = False,
):
    """Fold more keys and values into the running softmax (peak, mass, total) (online softmax, arXiv
    1805.02867).

    scale: of scores, for base 2; a number above 0, or [queries]. CAPPED: scores are cap *
    tanh(scale * score), also for base 2. seen: mask [queries, keys]. mass: [queries], or [queries,
    keys] if its sum is left to the caller.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision=WIDE)
    weights, fade, peak, mass = _weigh(scores, seen, peak, mass, scale, cap, CAPPED)
    total = tl.dot(weights.to(values.dtype), values, total * fade[:, None], input_precision=WIDE)
    return peak, mass, total


@triton.jit
def fold_pairs(
    q,
    q_odd,
    keys,
    values,
    key_scales,
    value_scales,
    seen,
    peak,
    mass,
    total,
    total_odd,
    scale,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    cap=0.0,
    CAPPED: tl.constexpr = False,
):
    """Do `fold` for keys and values in eight bits, [keys, D / 2] pairs of neighbours, with scales
    [keys] that multiply scores and weights.

    Queries and totals come in two parts, the even and the odd places of a head. So the processor
    loads pairs as it loads numbers of 16 bits, which one instruction transposes, and needs three
    instructions for four numbers. Totals are 256 times too large, so that small weights are still
    accurate in float16.
    """
    even, odd = decode_pairs(keys, q, NATIVE)
    scores = tl.dot(q, tl.trans(even), input_precision=WIDE)
    scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision=WIDE)
    scores *= key_scales.to(tl.float32)[None, :]
    weights, fade, peak, mass = _weigh(scores, seen, peak, mass, scale, cap, CAPPED)
    weights = (weights * (value_scales.to(tl.float32) * 256)[None, :]).to(q.dtype)
    even, odd = decode_pairs(values, q, NATIVE)
    total = tl.dot(weights, even, total * fade[:, None], input_precision=WIDE)
    total_odd = tl.dot(weights, odd, total_odd * fade[:, None], input_precision=WIDE)
    return peak, mass, total, total_odd


@triton.jit
def _weigh(scores, seen, peak, mass, scale, cap, CAPPED: tl.constexpr):
    """Return the weights of scores [queries, keys], the factor [queries] of earlier sums, and the
    new peak and mass; see fold."""
    rows: tl.constexpr = scores.shape[0]
    factor = tl.zeros([rows], tl.float32) + scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        scores = cap - 2.0 * cap / (tl.exp(2.0 * scores * factor[:, None]) + 1.0)
        factor = tl.full([rows], 1.0, tl.float32)
    scores = tl.where(seen, scores, float("-inf"))
    high = tl.maximum(peak, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor[:, None] - high[:, None])
    fade = tl.exp2(peak - high)
    if len(mass.shape) == 2:
        mass = mass * fade[:, None] + weights
    else:
        mass = mass * fade + tl.sum(weights, 1)
    return weights, fade, high, mass
