"""Triton: attention for a few new tokens a row, fused with what precedes it: norms of queries and
keys, rope, and the cache write.

The keys in the cache are cut into splits (split-K flash decoding). The last split also takes the
new keys from the product's output and writes them to the cache. The last program to finish merges
all splits. Definition: reference.rope_write, then reference.attention.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from .eight_bit_kernels import arguments, converts, encode, in_float16, load_scales
from .launch import SPARE, after, card, fitting, input_precision, overlap, processors, scratch
from .pointwise import finite
from .ragged_kernel import fold
from .residual import magnitude
from .segments import Segments, Store

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
    splits = splits or max(1, min(8, processors(qkv.device) // units))
    block_q, block_d = _block(wide * heads // kv_heads), _block(size)
    lines = units * splits * block_q
    keys, stages = tiling_for(qkv, block_q, block_d) if keys is None else (keys, 3)
    shape = {"H": heads, "K": kv_heads, "D": size, "HALF": angles.shape[2], "SPLITS": splits}
    shape |= {"BLOCK_Q": block_q, "BLOCK_D": block_d, "KEYS": keys}
    shape |= {"NORMS": norms is not None, "LARGEST": peaks is not None}
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
        WIDE=input_precision(qkv),
        NATIVE=converts(qkv.device),
        **shape,
        num_warps=4,
        num_stages=stages,
        **overlap(early, qkv.device),
    )
    return out


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
    lines, size = _block(lines), _block(size)

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


@triton.jit
def _load_rotated(
    qkv_ptr,
    token,
    head,
    inside,
    angle_ptr,
    tokens,
    norm_ptr,
    eps,
    LINES: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load heads [lines] of tokens [lines], apply norm (optional) and rope: [lines, BLOCK_D] in the
    model's dtype."""
    d = tl.arange(0, BLOCK_D)
    source = qkv_ptr + token[:, None] * LINES + head[:, None] * D
    rotated = d < 2 * HALF
    partner, place = tl.where(d < HALF, d + HALF, d - HALF), tl.where(d < HALF, d, d - HALF)
    raw = tl.load(source + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    other = tl.load(source + partner[None, :], mask=inside[:, None] & rotated[None, :], other=0.0)
    value, far = raw.to(tl.float32), other.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale * tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        far *= scale * tl.load(norm_ptr + partner, mask=rotated, other=0.0).to(tl.float32)[None, :]
        value, far = value.to(raw.dtype).to(tl.float32), far.to(raw.dtype).to(tl.float32)
    angle = angle_ptr + token[:, None] * HALF + place[None, :]
    mask = inside[:, None] & rotated[None, :]
    cos = tl.load(angle, mask=mask, other=1.0)
    sin = tl.load(angle + tokens * HALF, mask=mask, other=0.0)
    return (value * cos + tl.where(d < HALF, -far, far) * sin).to(raw.dtype)


@triton.jit(do_not_specialize=["wide", "rows"])
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
    EARLY: tl.constexpr,
):
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
    share = tl.cdiv(tl.cdiv(old - least, KEYS), SPLITS) * KEYS
    low = least + split * share
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
    after(EARLY)
    q = _load_rotated(
        qkv_ptr,
        token,
        head,
        inside,
        angle_ptr,
        rows * wide,
        q_norm_ptr,
        eps,
        lines,
        D,
        HALF,
        NORMS,
        BLOCK_D,
    )
    if key_scale_ptr is not None:
        q, q_scales = in_float16(q)
        scale = scale * q_scales
    peak, mass = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first in tl.range(low, tl.minimum(low + share, old), KEYS):
        at = first + tl.arange(0, KEYS)
        mask = (at < old)[:, None] & (d < D)[None, :]
        in_prompt = (at < base)[:, None]
        far, near = (at * prompt_step)[:, None], ((at - base) * key_step)[:, None]
        spot = tl.where(in_prompt, prompt_key_ptr + far, key_ptr + near) + d[None, :]
        keys = tl.load(spot, mask=mask, other=0.0)
        spot = tl.where(in_prompt, prompt_value_ptr + far, value_ptr + near) + d[None, :]
        values = tl.load(spot, mask=mask, other=0.0)
        key_scales, value_scales = None, None
        if key_scale_ptr is not None:
            stored, near = at < base, at - base
            spot = tl.where(stored, prompt_key_scale_ptr + at, key_scale_ptr + near)
            key_scales = load_scales(spot, 0, at < old)
            spot = tl.where(stored, prompt_value_scale_ptr + at, value_scale_ptr + near)
            value_scales = load_scales(spot, 0, at < old)
        seen = (at < old)[None, :] & inside[:, None]
        if window > 0:
            seen = seen & (at[None, :] > position[:, None] - window)
        peak, mass, total = fold(
            q, keys, values, key_scales, value_scales, seen, peak, mass, total, scale, WIDE, NATIVE
        )
    if split == SPLITS - 1:
        step = tl.arange(0, _NEW)
        here = position_ptr + row * wide + step
        new = tl.load(here, mask=step < wide, other=-1).to(tl.int32)
        following = tl.load(here + 1, mask=step + 1 < wide, other=-1).to(tl.int32)
        mask = (step < wide)[:, None] & (d < D)[None, :]
        place = (new - base)[:, None] * key_step + d[None, :]
        keys = _load_rotated(
            qkv_ptr,
            row * wide + step,
            step * 0 + H + kv,
            step < wide,
            angle_ptr,
            rows * wide,
            k_norm_ptr,
            eps,
            lines,
            D,
            HALF,
            NORMS,
            BLOCK_D,
        )
        source = qkv_ptr + (row * wide + step)[:, None] * lines + (H + K + kv) * D
        values = tl.load(source + d[None, :], mask=mask, other=0.0)
        keys = (keys + (keys * 0 + values * 0)).to(values.dtype)  # see reference.rope_write
        values = finite(values)
        key_scales, value_scales = None, None
        if key_scale_ptr is not None:
            keys, key_scales = encode(keys.to(tl.float32))
            values, value_scales = encode(values.to(tl.float32))
            at = (new - base)[:, None]
            tl.store(key_scale_ptr + at, key_scales.to(tl.float16), mask=(step < wide)[:, None])
            tl.store(value_scale_ptr + at, value_scales.to(tl.float16), mask=(step < wide)[:, None])
            key_scales, value_scales = tl.sum(key_scales, 1), tl.sum(value_scales, 1)
        tl.store(key_ptr + place, keys, mask=mask)
        tl.store(value_ptr + place, values, mask=mask)
        # A repeated token, which fills a place, counts once.
        seen = (
            (new != following)[None, :]
            & (new[None, :] <= position[:, None])
            & inside[:, None]
            & (step < wide)[None, :]
        )
        if window > 0:
            seen = seen & (new[None, :] > position[:, None] - window)
        peak, mass, total = fold(
            q, keys, values, key_scales, value_scales, seen, peak, mass, total, scale, WIDE, NATIVE
        )
    if key_scale_ptr is not None:
        total *= 0.00390625  # see fold
    target = out_ptr + token[:, None] * (H * D) + head[:, None] * D + d[None, :]
    real = inside[:, None] & (d < D)[None, :]
    mass_ptr = peak_ptr + rows * K * SPLITS * BLOCK_Q
    last = True
    if SPLITS > 1:
        at = (cell * SPLITS + split) * BLOCK_Q + line
        tl.store(peak_ptr + at, peak)
        tl.store(mass_ptr + at, mass)
        tl.store(part_ptr + at[:, None] * BLOCK_D + d[None, :], total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + cell, 1) == SPLITS - 1
        if last:
            cells = cell * SPLITS * BLOCK_Q + line
            peak, mass = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
            total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            # load the peaks cells, so that the loads of the parts do not wait
            for other in tl.static_range(SPLITS):
                peak = tl.maximum(
                    peak, tl.load(peak_ptr + cells + other * BLOCK_Q, cache_modifier=".cg")
                )
            for other in tl.static_range(SPLITS):
                at = cells + other * BLOCK_Q
                gain = tl.exp2(tl.load(peak_ptr + at, cache_modifier=".cg") - peak)
                total += (
                    tl.load(part_ptr + at[:, None] * BLOCK_D + d[None, :], cache_modifier=".cg")
                    * gain[:, None]
                )
                mass += tl.load(mass_ptr + at, cache_modifier=".cg") * gain
            tl.store(arrived_ptr + cell, 0)
    if last:
        found = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(target, found, mask=real)
        if LARGEST:
            most = tl.max(tl.where(real, magnitude(found), 0), 1)
            tl.atomic_max(bound_ptr + token, most, mask=inside, sem="relaxed")
