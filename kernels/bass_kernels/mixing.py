"""Triton: attention for a few new tokens a row, with what precedes it: norms of queries and keys,
rope, the cache write.

The keys a row had before are cut into splits. The last split also takes the new ones, from where
the product left them, and writes them into the cache. The last to finish merges all. Definition:
reference.rope_write, then reference.attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from .launch import SPARE, after, card, counters, fitting, overlap, processors
from .pointwise import finite
from .reference import Segments

_NEW = 16  # the most new tokens of a row


def mix(
    qkv: Tensor,
    angles: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    segments: Segments,
    own: tuple[Tensor, Tensor],
    prompt: tuple[Tensor, Tensor],
    *,
    heads: int,
    eps: float,
    scale: float,
    window: int = 0,
    splits: int | None = None,
    keys: int | None = None,
    warps: int = 4,
    early: bool = False,
) -> Tensor:
    """Attention's output [B W, H D] for qkv [B W, (H + 2K) D] as a product leaves it and angles [2,
    B W, half] of rope.

    segments.positions [B, W], contiguous, must rise by one from place to place, or repeat where
    the same token is fed again, and must not lie before the row's own slot 0. splits (of a row's
    keys), keys (at a time), warps: for tuning.
    """
    rows, wide = segments.positions.shape
    kv_heads, size = own[0].shape[1], own[0].shape[3]
    units = rows * kv_heads
    if splits is None:
        splits = max(1, min(8, processors(qkv.device) // units))
    block_q, block_d = _block(wide * heads // kv_heads), _block(size)
    keys, stages = loads(qkv, block_q, block_d) if keys is None else (keys, 3)
    assert wide <= _NEW
    out = qkv.new_empty(rows * wide, heads * size)
    parts, peaks, arrived = out, out, out
    if splits > 1:
        parts = torch.empty(
            units * splits * block_q * block_d, dtype=torch.float32, device=qkv.device
        )
        peaks = torch.empty(2 * units * splits * block_q, dtype=torch.float32, device=qkv.device)
        arrived = counters(qkv.device, units)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    positions = segments.positions
    assert positions.is_contiguous()  # a copy here would be written by the launch right ahead
    _mix[(units, splits)](
        qkv,
        angles,
        q_norm,
        k_norm,
        *own,
        *prompt,
        positions,
        segments.base,
        segments.start,
        out,
        parts,
        peaks,
        arrived,
        wide,
        rows,
        window,
        eps,
        scale * 1.4426950408889634,
        own[0].stride(0),
        own[0].stride(1),
        own[0].stride(2),
        prompt[0].stride(0),
        prompt[0].stride(1),
        H=heads,
        K=kv_heads,
        D=size,
        HALF=angles.shape[2],
        NORMS=norms is not None,
        NEW=_NEW,
        BLOCK_Q=block_q,
        BLOCK_D=block_d,
        KEYS=keys,
        SPLITS=splits,
        WIDE="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **overlap(early, qkv.device),
    )
    return out


def fits(like: Tensor, lines: int, size: int) -> bool:
    """Whether a device can do this at all (see `loads`)."""
    try:
        return bool(loads(like, lines, size))
    except OutOfResources:
        return False


def _block(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def loads(like: Tensor, lines: int, size: int) -> tuple[int, int]:
    """How many keys at a time, in how many stages, for so many lines of queries of heads of this
    size: 64 in 3, or what fits; Triton's OutOfResources if nothing does."""
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
def _turned(
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
    """[lines, BLOCK_D]: the heads [lines] of tokens [lines] after norm (optional) and rope, in
    the model's dtype."""
    d = tl.arange(0, BLOCK_D)
    source = qkv_ptr + token[:, None] * LINES + head[:, None] * D
    turned = d < 2 * HALF
    partner, place = tl.where(d < HALF, d + HALF, d - HALF), tl.where(d < HALF, d, d - HALF)
    raw = tl.load(source + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    other = tl.load(source + partner[None, :], mask=inside[:, None] & turned[None, :], other=0.0)
    value, far = raw.to(tl.float32), other.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale * tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        far *= scale * tl.load(norm_ptr + partner, mask=turned, other=0.0).to(tl.float32)[None, :]
        value, far = value.to(raw.dtype).to(tl.float32), far.to(raw.dtype).to(tl.float32)
    angle = angle_ptr + token[:, None] * HALF + place[None, :]
    mask = inside[:, None] & turned[None, :]
    cos = tl.load(angle, mask=mask, other=1.0)
    sin = tl.load(angle + tokens * HALF, mask=mask, other=0.0)
    return (value * cos + tl.where(d < HALF, -far, far) * sin).to(raw.dtype)


@triton.jit
def _fold(q, keys, values, seen, peak, mass, total, scale, WIDE: tl.constexpr):
    """Fold some keys and values into the running softmax (peak, mass, total); `seen` [queries,
    keys]."""
    scores = tl.where(seen, tl.dot(q, tl.trans(keys), input_precision=WIDE) * scale, -1e30)
    high = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp2(scores - high[:, None]), 0.0)
    fade = tl.exp2(peak - high)
    total = total * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=WIDE)
    return high, mass * fade + tl.sum(weights, 1), total


@triton.jit(do_not_specialize=["wide", "rows"])
def _mix(
    qkv_ptr,
    angle_ptr,
    q_norm_ptr,
    k_norm_ptr,
    key_ptr,
    value_ptr,
    prompt_key_ptr,
    prompt_value_ptr,
    position_ptr,
    base_ptr,
    start_ptr,
    out_ptr,
    part_ptr,
    peak_ptr,
    arrived_ptr,
    wide,
    rows,
    window,
    eps,
    scale,
    key_row,
    key_head,
    key_step,
    prompt_head,
    prompt_step,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    cell, split = tl.program_id(0), tl.program_id(1)
    kv, row = cell % K, cell // K
    group: tl.constexpr = H // K
    lines: tl.constexpr = (H + 2 * K) * D
    line, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    inside = line // group < wide
    token, head = row * wide + line // group, kv * group + line % group
    # Written before the chain of launches that this is in, so that they may be read before the
    # one ahead is done.
    base = tl.load(base_ptr + row, cache_modifier=".cg").to(tl.int32)
    start = tl.load(start_ptr + row, cache_modifier=".cg")
    # keys before it are in the cache
    old = tl.load(position_ptr + row * wide, cache_modifier=".cg").to(tl.int32)
    position = tl.load(position_ptr + token, mask=inside, other=-1, cache_modifier=".cg").to(
        tl.int32
    )
    least = 0
    if window > 0:
        least = tl.maximum(old - window + 1, 0)
    share = tl.cdiv(tl.cdiv(old - least, KEYS), SPLITS) * KEYS
    low = least + split * share
    key_ptr += row.to(tl.int64) * key_row + kv * key_head
    value_ptr += row.to(tl.int64) * key_row + kv * key_head
    prompt_key_ptr += kv * prompt_head + start * prompt_step
    prompt_value_ptr += kv * prompt_head + start * prompt_step
    after(EARLY)
    q = _turned(
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
    peak, mass = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first in tl.range(low, tl.minimum(low + share, old), KEYS):
        at = first + tl.arange(0, KEYS)
        mask = (at < old)[:, None] & (d < D)[None, :]
        in_prompt, far, near = (
            (at < base)[:, None],
            (at * prompt_step)[:, None],
            ((at - base) * key_step)[:, None],
        )
        keys = tl.load(
            tl.where(in_prompt, prompt_key_ptr + far, key_ptr + near) + d[None, :],
            mask=mask,
            other=0.0,
        )
        values = tl.load(
            tl.where(in_prompt, prompt_value_ptr + far, value_ptr + near) + d[None, :],
            mask=mask,
            other=0.0,
        )
        seen = (at < old)[None, :] & inside[:, None]
        if window > 0:
            seen = seen & (at[None, :] > position[:, None] - window)
        peak, mass, total = _fold(q, keys, values, seen, peak, mass, total, scale, WIDE)
    if split == SPLITS - 1:
        step = tl.arange(0, NEW)
        new = tl.load(position_ptr + row * wide + step, mask=step < wide, other=-1).to(tl.int32)
        following = tl.load(
            position_ptr + row * wide + step + 1, mask=step + 1 < wide, other=-1
        ).to(tl.int32)
        mask = (step < wide)[:, None] & (d < D)[None, :]
        place = (new - base)[:, None] * key_step + d[None, :]
        keys = _turned(
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
        keys = (keys + (keys * 0 + values * 0)).to(values.dtype)  # reference.rope_write says why
        values = finite(values)
        tl.store(key_ptr + place, keys, mask=mask)
        tl.store(value_ptr + place, values, mask=mask)
        # A token that is fed twice, for want of others, counts once.
        seen = (
            (new != following)[None, :]
            & (new[None, :] <= position[:, None])
            & inside[:, None]
            & (step < wide)[None, :]
        )
        if window > 0:
            seen = seen & (new[None, :] > position[:, None] - window)
        peak, mass, total = _fold(q, keys, values, seen, peak, mass, total, scale, WIDE)
    _merge(
        peak,
        mass,
        total,
        out_ptr + token[:, None] * (H * D) + head[:, None] * D + d[None, :],
        inside[:, None] & (d < D)[None, :],
        part_ptr,
        peak_ptr,
        rows * K * SPLITS * BLOCK_Q,
        arrived_ptr,
        cell,
        split,
        SPLITS,
        BLOCK_Q,
        BLOCK_D,
    )


@triton.jit
def _merge(
    peak,
    mass,
    total,
    target,
    mask,
    part_ptr,
    peak_ptr,
    masses,
    arrived_ptr,
    cell,
    split,
    SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store what attention gives, once the last split of a row and head has come. Masses lie
    `masses` after the peaks."""
    line, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    last = True
    if SPLITS > 1:
        at = (cell * SPLITS + split) * BLOCK_Q + line
        tl.store(peak_ptr + at, peak)
        tl.store(peak_ptr + masses + at, mass)
        tl.store(part_ptr + at[:, None] * BLOCK_D + d[None, :], total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + cell, 1) == SPLITS - 1
        if last:
            first = cell * SPLITS * BLOCK_Q + line
            peak, mass = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
            total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            for other in tl.static_range(
                SPLITS
            ):  # first the peaks, so that the loads of the parts wait for nothing
                peak = tl.maximum(
                    peak, tl.load(peak_ptr + first + other * BLOCK_Q, cache_modifier=".cg")
                )
            for other in tl.static_range(SPLITS):
                at = first + other * BLOCK_Q
                gain = tl.exp2(tl.load(peak_ptr + at, cache_modifier=".cg") - peak)
                total += (
                    tl.load(part_ptr + at[:, None] * BLOCK_D + d[None, :], cache_modifier=".cg")
                    * gain[:, None]
                )
                mass += tl.load(peak_ptr + masses + at, cache_modifier=".cg") * gain
            tl.store(arrived_ptr + cell, 0)
    if last:
        tl.store(target, (total / mass[:, None]).to(target.dtype.element_ty), mask=mask)
