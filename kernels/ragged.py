"""Triton: ragged attention over two segments, the shared prompt and a row's own span. Definition: reference.attention.

Queries of a row that share a key/value head are stacked into one matrix. The keys a row sees are cut into blocks, first
the prompt's, then its own, and the blocks into splits: one unit of work each, of the row's own length, so that a short
row costs little. The last split of a row to finish merges them all. Everything that varies by row is read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import counters, processors
from .reference import Segments

_BLOCK_M = 64


def attention(q: Tensor, own: tuple[Tensor, Tensor], prompt: tuple[Tensor, Tensor], segments: Segments, *,
              scale: float, window: int = 0, splits: int | None = None,
              tile: tuple[int, int, int] | None = None) -> Tensor:
    """As reference.attention; `splits` (chosen by the shape if None) is how many pieces a row's keys are cut into,
    `tile` its keys at a time, warps and stages."""
    rows, width, heads, size = q.shape
    keys, values = own
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_m = min(_BLOCK_M, max(16, triton.next_power_of_2(width * group)))
    tiles = triton.cdiv(width * group, block_m)
    units = rows * kv_heads * tiles
    if splits is None:
        splits = max(1, min(8 if units <= 16 else 4, 2 * processors(q.device) // units))
    block_n, warps, stages = tile or _tile(block_m, size)
    out = q.new_empty(rows, width, heads * size)
    block_d = max(16, triton.next_power_of_2(size))
    parts, peaks, masses, arrived = out, out, out, out
    if splits > 1:
        parts = q.new_empty(units * splits * block_m * block_d, dtype=torch.float32)
        peaks, masses = (q.new_empty(units * splits * block_m, dtype=torch.float32) for _ in range(2))
        arrived = counters(q.device, units)
    _attention[(units, splits)](
        q.contiguous(), keys, values, *prompt, segments.positions, segments.base, segments.start, out, parts, peaks, masses,
        arrived, scale * 1.4426950408889634, window, width, segments.positions.stride(0), segments.positions.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), prompt[0].stride(0), prompt[0].stride(1), tiles, H=heads,
        K=kv_heads, D=size, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        WIDE="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages)
    return out


def _tile(block_m: int, size: int) -> tuple[int, int, int]:
    """Keys at a time, warps and stages, from measurements on an H200."""
    return 64 if block_m == 16 else 32, 4, 3 if size <= 128 else 2


@triton.jit
def _blocks(q, key_ptr, value_ptr, key_step, first, last, position, offset, end, peak, mass, total, scale, window,
            inside, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Fold blocks first to last of one segment, whose place 0 is at position `offset` and that ends before position
    `end`, into the running softmax (peak, mass, total)."""
    d = tl.arange(0, BLOCK_D)
    for block in range(first, last):
        place = block * BLOCK_N + tl.arange(0, BLOCK_N)
        at = offset + place
        there = at < end
        grid = place[:, None] * key_step + d[None, :]
        mask = there[:, None] & (d < D)[None, :]
        keys = tl.load(key_ptr + grid, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=WIDE) * scale
        seen = there[None, :] & (at[None, :] <= position[:, None]) & inside[:, None]
        if window > 0:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -1e30)
        high = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - high[:, None]), 0.0)
        fade = tl.exp2(peak - high)
        values = tl.load(value_ptr + grid, mask=mask, other=0.0)
        total = total * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=WIDE)
        mass = mass * fade + tl.sum(weights, 1)
        peak = high
    return peak, mass, total


@triton.jit
def _attention(q_ptr, key_ptr, value_ptr, prompt_key_ptr, prompt_value_ptr, position_ptr, base_ptr, start_ptr, out_ptr,
               part_ptr, peak_ptr, mass_ptr, arrived_ptr, scale, window, width, position_row, position_place, key_row,
               key_head, key_step, prompt_head, prompt_step, tiles, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
               SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
               WIDE: tl.constexpr):
    unit, split = tl.program_id(0), tl.program_id(1)
    tile, kv, row = unit % tiles, (unit // tiles) % K, unit // (tiles * K)
    group: tl.constexpr = H // K
    line = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    step, head = line // group, kv * group + line % group
    inside = step < width
    d = tl.arange(0, BLOCK_D)
    position = tl.load(position_ptr + row * position_row + step * position_place, mask=inside, other=-1).to(tl.int32)
    base = tl.load(base_ptr + row).to(tl.int32)
    start = tl.load(start_ptr + row)
    places = (row.to(tl.int64) * width + step) * H + head
    grid = places[:, None] * D + d[None, :]
    real = inside[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + grid, mask=real, other=0.0)

    end = tl.max(position, 0) + 1  # the first position that no query here sees
    least = 0
    if window > 0:
        least = tl.maximum(tl.min(tl.where(inside, position, 2147483647), 0) - window + 1, 0)
    prompt_end = tl.minimum(base, end)
    first = tl.minimum(least, prompt_end) // BLOCK_N
    in_prompt = tl.cdiv(prompt_end, BLOCK_N)
    own_first = tl.maximum(least - base, 0) // BLOCK_N
    in_own = tl.maximum(tl.cdiv(end - base, BLOCK_N) - own_first, 0)
    prompts = in_prompt - first
    share = tl.cdiv(prompts + in_own, SPLITS)
    low, high = split * share, tl.minimum((split + 1) * share, prompts + in_own)

    peak = tl.full([BLOCK_M], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offset = kv * prompt_head + start * prompt_step
    peak, mass, total = _blocks(
        q, prompt_key_ptr + offset, prompt_value_ptr + offset, prompt_step, first + low, first + tl.minimum(high, prompts),
        position, 0, prompt_end, peak, mass, total, scale, window, inside, D, BLOCK_N, BLOCK_D, WIDE)
    offset = row.to(tl.int64) * key_row + kv * key_head
    peak, mass, total = _blocks(
        q, key_ptr + offset, value_ptr + offset, key_step, own_first + tl.maximum(low - prompts, 0),
        own_first + high - prompts, position, base, end, peak, mass, total, scale, window, inside, D, BLOCK_N,
        BLOCK_D, WIDE)

    if SPLITS == 1:
        tl.store(out_ptr + grid, (total / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real)
    else:
        at = (unit * SPLITS + split) * BLOCK_M + tl.arange(0, BLOCK_M)
        cell = at.to(tl.int64)[:, None] * BLOCK_D + d[None, :]
        tl.store(peak_ptr + at, peak)
        tl.store(mass_ptr + at, mass)
        tl.store(part_ptr + cell, total)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + unit, 1) == SPLITS - 1:
            at = unit * SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
            peak = tl.full([BLOCK_M], -1e30, tl.float32)
            mass = tl.zeros([BLOCK_M], tl.float32)
            total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for other in tl.static_range(SPLITS):  # first the peaks, so that the loads of the parts wait for nothing
                peak = tl.maximum(peak, tl.load(peak_ptr + at + other * BLOCK_M, cache_modifier=".cg"))
            for other in tl.static_range(SPLITS):
                gain = tl.exp2(tl.load(peak_ptr + at + other * BLOCK_M, cache_modifier=".cg") - peak)
                cell = (at + other * BLOCK_M).to(tl.int64)[:, None] * BLOCK_D + d[None, :]
                total += tl.load(part_ptr + cell, cache_modifier=".cg") * gain[:, None]
                mass += tl.load(mass_ptr + at + other * BLOCK_M, cache_modifier=".cg") * gain
            tl.store(out_ptr + grid, (total / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real)
            tl.store(arrived_ptr + unit, 0)
