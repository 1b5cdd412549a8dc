"""Triton: one program's part of the product of a few tokens with a weight matrix, for products.py
and skinny.py."""

import triton
import triton.language as tl


@triton.jit
def sums(
    x_ptr,
    weight_ptr,
    first,
    end,
    low,
    high,
    count,
    SECOND: tl.constexpr,
    DEPTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply tokens' x [., DEPTH] by rows first to end of a weight matrix [., DEPTH], over the
    depth low to high: [M, N] float32. If SECOND is not 0, also by the rows SECOND further on."""
    row, line, place = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DEEP)
    weight_ptr += first.to(tl.int64) * DEPTH  # offsets from here fit into 32 bits
    one, two = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in tl.range(low, high, DEEP, num_stages=STAGES):
        real, there = (row < count)[:, None], (line < end - first)[:, None]
        if DEPTH % DEEP != 0:
            real, there = (
                real & (start + place < high)[None, :],
                there & (start + place < high)[None, :],
            )
        x = tl.load(x_ptr + start + row[:, None] * DEPTH + place[None, :], mask=real, other=0.0)
        w = tl.load(
            weight_ptr + start + line[:, None] * DEPTH + place[None, :],
            mask=there,
            other=0.0,
            eviction_policy="evict_first",
        )
        one = tl.dot(x, tl.trans(w), one, input_precision=WIDE)
        if SECOND > 0:
            w = tl.load(
                weight_ptr + SECOND * DEPTH + start + line[:, None] * DEPTH + place[None, :],
                mask=there,
                other=0.0,
                eviction_policy="evict_first",
            )
            two = tl.dot(x, tl.trans(w), two, input_precision=WIDE)
    return one, two


@triton.jit
def part(
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Return this program's part of a product: tile, rows first to end, and depth low to high."""
    tile = tl.program_id(0)
    low, high = 0, DEPTH
    if SPLITS > 1:
        share: tl.constexpr = ((DEPTH + DEEP - 1) // DEEP + SPLITS - 1) // SPLITS * DEEP
        low = tl.program_id(1) * share
        high = tl.minimum(low + share, DEPTH)
    return tile, tile * EACH, tl.minimum(tile * EACH + EACH, LINES), low, high


@triton.jit
def complete(
    total, part_ptr, arrived_ptr, tile, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr
):
    """For the last split of a tile to arrive, return the sum of all splits, added in fixed order,
    and True. For the others return the input and False."""
    last = True
    if SPLITS > 1:
        cell = tile * SPLITS * M * N + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(part_ptr + cell + tl.program_id(1) * M * N, total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1) == SPLITS - 1
        if last:
            total = tl.zeros([M, N], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(part_ptr + cell + other * M * N, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    return total, last
