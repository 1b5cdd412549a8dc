"""Triton: attention for a few new tokens a row, fused with what precedes it: norms of queries and
keys, rope, and the cache write.

The keys in the cache are cut into splits (split-K flash decoding). The last split also takes the
new keys from the product's output and writes them to the cache. The last program to finish merges
all splits. Definition: reference.rope_write, then reference.attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from .eight_bit_kernels import (
    arguments,
    converts,
    encode,
    in_float16,
    in_pairs,
    join_pairs,
    split_pairs,
)
from .folding_kernels import fold, fold_blocks, fold_pairs, head_block
from .launch import SPARE, after, card, fitting, input_precision, overlap, processors, scratch
from .pointwise import finite, rotated_heads
from .residual import magnitude
from .segments import Segments, Store, is_eight_bit

_EACH = 256  # keys from which a long row has one more split
_NEW = tl.constexpr(16)  # maximum number of new tokens a row


def attend(
    qkv: Tensor,
    angles: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    segments: Segments,
    own: Store,
    prompt: Store,
    *,
    heads: int,
    eps: float,
    scale: float,
    window: int = 0,
    splits: int | None = None,
    keys: int | None = None,
    peaks: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Compute attention [B W, H D] from qkv [B W, (H + 2K) D] and rope's angles [2, B W, half].

    segments.positions [B, W] must be contiguous and not before the row's private slot 0. Along a
    row they rise by one, or repeat if a token is fed again. `splits` of a row's keys and `keys` a
    step: for tests. `peaks`: int32, raised to each token's largest magnitude as bits of float32."""
    rows, wide = segments.positions.shape
    kv_heads, _, size = own[0].shape
    units = rows * kv_heads
    few, splits = (splits, splits) if splits else _splits(units, own, qkv.device)
    block_q, block_d = _block(wide * heads // kv_heads), head_block(size)
    lines = units * splits * block_q
    keys, stages = tiling_for(qkv, block_q, block_d) if keys is None else (keys, 3)
    shape = {"H": heads, "K": kv_heads, "D": size, "HALF": angles.shape[2], "SPLITS": splits}
    shape |= {"BLOCK_Q": block_q, "BLOCK_D": block_d, "KEYS": keys}
    shape |= {"NORMS": norms is not None, "LARGEST": peaks is not None}
    own, prompt = in_pairs(own), in_pairs(prompt)
    out = qkv.new_empty(rows * wide, heads * size)
    assert wide <= _NEW.value
    assert segments.positions.is_contiguous()  # a copy's launch would not be waited for
    _attend[(units, splits)](
        qkv,
        angles,
        *(norms or (qkv, qkv)),
        *arguments(own, prompt),
        segments.positions,
        segments.base,
        segments.start,
        segments.own,
        *(out, out if peaks is None else peaks),
        *scratch(out, splits, units, lines * block_d, 2 * lines),  # sums, peaks and masses
        *(wide, rows, window, eps, scale * 1.4426950408889634),
        *own[0].stride()[:2],
        *prompt[0].stride()[:2],
        *(few, max(1, _EACH // keys)),
        WIDE=input_precision(qkv),
        NATIVE=converts(qkv.device),
        WINDOWED=window > 0,
        **shape,
        num_warps=4,
        num_stages=stages,
        **overlap(early, qkv.device),
    )
    return out


def _splits(units: int, own: Store, device: torch.device) -> tuple[int, int]:
    """Return the splits of a short row and of a long one. Short rows aim at one program a
    processor. In eight bits long ones aim at two, because a program waits less for memory."""
    each = processors(device) // units
    few = max(1, min(8, each))
    return few, max(1, min(8, 2 * each)) if is_eight_bit(own) else few


def fits(like: Tensor, lines: int, size: int) -> bool:
    """Return whether the device can run this kernel (see `tiling_for`)."""
    try:
        return bool(tiling_for(like, lines, size))
    except OutOfResources:
        return False


def _block(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def tiling_for(like: Tensor, lines: int, size: int) -> tuple[int, int]:
    """Return (keys a step, pipeline stages) for `lines` queries of heads of this size: 64 in 3
    stages, or the largest that fits. Raises Triton's OutOfResources if nothing fits."""
    lines, size = _block(lines), head_block(size)

    def needs(option: tuple[int, int]) -> int:
        keys, stages = option
        return (
            like.element_size() * (2 * (stages - 1) * keys * size + lines * (size + keys)) + SPARE
        )

    return fitting(
        ((keys, stages) for keys in (64, 32, 16) for stages in (3, 2)),
        needs,
        card(like.device).shared,
    )


@triton.jit(do_not_specialize=["wide", "rows", "few", "many"])
def _attend(
    qkv_ptr,
    angle_ptr,
    q_norm_ptr,
    k_norm_ptr,
    key_ptr,
    value_ptr,
    prompt_key_ptr,
    prompt_value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    prompt_key_scale_ptr,
    prompt_value_scale_ptr,
    scale_head,
    prompt_scale_head,
    position_ptr,
    base_ptr,
    start_ptr,
    own_ptr,
    out_ptr,
    bound_ptr,
    part_ptr,
    peak_ptr,
    arrived_ptr,
    wide,
    rows,
    window,
    eps,
    scale,
    key_head,
    key_step,
    prompt_head,
    prompt_step,
    few,
    many,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    WINDOWED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: rows times key/value heads, by splits of the row's keys. A program has BLOCK_Q
    lines; line i is the query of token i // group and head i % group. Each does this in order:

    1. From the row's position it computes which blocks of cached keys its split has. A row uses at
       least `few` splits, and one more for every `many` blocks. The other programs end here.
    2. It loads queries from the product's output, with their norm and rope.
    3. It folds its blocks of cached keys into the running softmax.
    4. The last split also takes the new keys: it norms and rotates them, writes them to the cache,
       and folds them.
    5. With one split it stores the attention. Otherwise it stores its part, and the last program to
       finish merges all parts.

    bound_ptr: `peaks` of attend. part_ptr, peak_ptr: sums [B K, SPLITS, BLOCK_Q, BLOCK_D]; peaks
    and then masses, [B K, SPLITS, BLOCK_Q] each. arrived_ptr: [B K], 0 before and after.
    """
    cell, split = tl.program_id(0), tl.program_id(1)
    kv, row = cell % K, cell // K
    group: tl.constexpr = H // K
    lines: tl.constexpr = (H + 2 * K) * D
    line, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    inside = line // group < wide
    token, head = row * wide + line // group, kv * group + line % group
    # These were written before this chain of launches began, so they may be read before the kernel
    # ahead is done (launch.overlap).
    base = tl.load(base_ptr + row, cache_modifier=".cg").to(tl.int32)
    start = tl.load(start_ptr + row, cache_modifier=".cg")
    own = tl.load(own_ptr + row, cache_modifier=".cg")
    old = tl.load(position_ptr + row * wide, cache_modifier=".cg")
    old = old.to(tl.int32)  # keys at earlier positions are in the cache
    position = tl.load(position_ptr + token, mask=inside, other=-1, cache_modifier=".cg")
    position = position.to(tl.int32)
    least = 0
    if window > 0:
        least = tl.maximum(old - window + 1, 0)
    first, own_first = tl.minimum(least, base) // KEYS, tl.maximum(least - base, 0) // KEYS
    prompt_blocks = tl.cdiv(base, KEYS) - first
    blocks = prompt_blocks + tl.cdiv(old - base, KEYS) - own_first
    # the last split also takes the new keys, which count as a block
    share = tl.cdiv(blocks + 1, tl.minimum(tl.maximum(blocks // many, few), SPLITS))
    used = tl.cdiv(blocks + 1, share)
    kv_head = kv.to(tl.int64)
    key_ptr += kv_head * key_head + own * key_step
    value_ptr += kv_head * key_head + own * key_step
    prompt_key_ptr += kv_head * prompt_head + start * prompt_step
    prompt_value_ptr += kv_head * prompt_head + start * prompt_step
    if key_scale_ptr is not None:
        key_scale_ptr += kv_head * scale_head + own
        value_scale_ptr += kv_head * scale_head + own
        prompt_key_scale_ptr += kv_head * prompt_scale_head + start
        prompt_value_scale_ptr += kv_head * prompt_scale_head + start
    if split >= used:
        return
    after(EARLY)
    query = tl.where(inside, token, row * wide)[:, None]
    q = rotated_heads(
        qkv_ptr + query * lines + head[:, None] * D,
        inside[:, None],
        angle_ptr + query * HALF,
        angle_ptr + (rows * wide + query) * HALF,
        q_norm_ptr,
        eps,
        D,
        HALF,
        NORMS,
        BLOCK_D,
    ).to(qkv_ptr.dtype.element_ty)
    q_odd = q
    columns: tl.constexpr = BLOCK_D if key_scale_ptr is None else BLOCK_D // 2
    if key_scale_ptr is not None:
        q, q_scales = in_float16(q)
        q, q_odd = split_pairs(q)
        scale = scale * q_scales
    peak, mass = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q, columns], tl.float32)
    peak, mass, total, total_odd = fold_blocks(
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
        split * share,
        tl.minimum((split + 1) * share, blocks),
        prompt_blocks,
        first,
        own_first,
        base,
        old,
        base,
        base,
        position,
        window,
        peak,
        mass,
        total,
        total,
        scale,
        0.0,
        False,
        WINDOWED,
        False,
        D,
        KEYS,
        WIDE,
        NATIVE,
    )
    if split == used - 1:
        step = tl.arange(0, _NEW)
        here = position_ptr + row * wide + step
        new = tl.load(here, mask=step < wide, other=-1).to(tl.int32)
        following = tl.load(here + 1, mask=step + 1 < wide, other=-1).to(tl.int32)
        mask = (step < wide)[:, None] & (d < D)[None, :]
        fresh = row * wide + tl.minimum(step, wide - 1)[:, None]
        source = qkv_ptr + fresh * lines + (H + kv) * D
        keys = rotated_heads(
            source,
            (step < wide)[:, None],
            angle_ptr + fresh * HALF,
            angle_ptr + (rows * wide + fresh) * HALF,
            k_norm_ptr,
            eps,
            D,
            HALF,
            NORMS,
            BLOCK_D,
        ).to(qkv_ptr.dtype.element_ty)
        values = tl.load(source + K * D + d[None, :], mask=mask, other=0.0)
        keys = (keys + (keys * 0 + values * 0)).to(values.dtype)  # see reference.rope_write
        values = finite(values)
        if key_scale_ptr is not None:
            keys, key_scales = encode(keys.to(tl.float32))
            values, value_scales = encode(values.to(tl.float32))
            at = (new - base)[:, None]
            tl.store(key_scale_ptr + at, key_scales.to(tl.float16), mask=(step < wide)[:, None])
            tl.store(value_scale_ptr + at, value_scales.to(tl.float16), mask=(step < wide)[:, None])
            keys, values = join_pairs(keys), join_pairs(values)
        column = tl.arange(0, columns)
        place = (new - base)[:, None] * key_step + column[None, :]
        mask = (step < wide)[:, None] & (column < D * columns // BLOCK_D)[None, :]
        tl.store(key_ptr + place, keys, mask=mask)
        tl.store(value_ptr + place, values, mask=mask)
        # A repeated token, which fills a place, counts once.
        seen = (
            (new != following)[None, :]
            & (new[None, :] <= position[:, None])
            & inside[:, None]
            & (step < wide)[None, :]
        )
        if WINDOWED:
            seen = seen & (new[None, :] > position[:, None] - window)
        if key_scale_ptr is None:
            peak, mass, total = fold(q, keys, values, seen, peak, mass, total, scale, WIDE)
        else:
            peak, mass, total, total_odd = fold_pairs(
                q,
                q_odd,
                keys,
                values,
                tl.sum(key_scales, 1),
                tl.sum(value_scales, 1),
                seen,
                peak,
                mass,
                total,
                total_odd,
                scale,
                WIDE,
                NATIVE,
            )
    if key_scale_ptr is not None:
        total = tl.interleave(total, total_odd) * 0.00390625  # see fold_pairs
    target = out_ptr + token[:, None] * (H * D) + head[:, None] * D + d[None, :]
    real = inside[:, None] & (d < D)[None, :]
    mass_ptr = peak_ptr + rows * K * SPLITS * BLOCK_Q
    last = True
    if SPLITS > 1:
        at = (cell * SPLITS + split) * BLOCK_Q + line
        if used > 1:
            tl.store(peak_ptr + at, peak)
            tl.store(mass_ptr + at, mass)
            tl.store(part_ptr + at[:, None] * BLOCK_D + d[None, :], total)
            tl.debug_barrier()
            last = tl.atomic_add(arrived_ptr + cell, 1) == used - 1
        if last & (used > 1):
            cells = cell * SPLITS * BLOCK_Q + line
            peak, mass = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
            total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            # load the peaks first, so that the loads of the parts do not wait
            for other in tl.static_range(SPLITS):
                there = line * 0 + other < used
                found = tl.load(
                    peak_ptr + cells + other * BLOCK_Q,
                    mask=there,
                    other=-1e30,
                    cache_modifier=".cg",
                )
                peak = tl.maximum(peak, found)
            for other in tl.static_range(SPLITS):
                at, there = cells + other * BLOCK_Q, line * 0 + other < used
                gain = tl.load(peak_ptr + at, mask=there, other=-1e30, cache_modifier=".cg")
                gain = tl.exp2(gain - peak)
                part = part_ptr + at[:, None] * BLOCK_D + d[None, :]
                part = tl.load(part, mask=there[:, None], other=0.0, cache_modifier=".cg")
                total += part * gain[:, None]
                mass += tl.load(mass_ptr + at, mask=there, other=0.0, cache_modifier=".cg") * gain
            tl.store(arrived_ptr + cell, 0)
    if last:
        found = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(target, found, mask=real)
        if LARGEST:
            most = tl.max(tl.where(real, magnitude(found), 0), 1)
            tl.atomic_max(bound_ptr + token, most, mask=inside, sem="relaxed")
