"""Triton: online softmax for attention. Keys and values are folded into a running softmax, and the
last program merges the results of several (log-sum-exp merge). Used by mixing.py and
ragged_kernel.py."""

import triton
import triton.language as tl


@triton.jit
def fold(q, keys, values, seen, peak, mass, total, scale, WIDE: tl.constexpr):
    """Fold more keys and values into the running softmax (peak, mass, total) (online softmax, arXiv
    1805.02867). `seen` [queries, keys]: mask, None if every query sees all keys. scale: of scores,
    for base 2."""
    scores = tl.dot(q, tl.trans(keys), input_precision=WIDE) * scale
    if seen is not None:
        scores = tl.where(seen, scores, -1e30)
    high = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - high[:, None])
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
    fade = tl.exp2(peak - high)
    total = total * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=WIDE)
    return high, mass * fade + tl.sum(weights, 1), total


@triton.jit
def merge_splits(
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
    """Store attention to `target` once the last of SPLITS programs of a cell has arrived. Masses
    are stored `masses` after the peaks."""
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
            # load the peaks first, so that the loads of the parts do not wait
            for other in tl.static_range(SPLITS):
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


@triton.jit
def merge_pieces(
    part_ptr,
    peak_ptr,
    mass_ptr,
    out_ptr,
    places,
    due,
    cell,
    height,
    mine,
    count,
    splits,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of the lines that are `due` and write their attention to `places`.

    A line's first split is at `cell`, the others `height` apart. `mine` of `count` splits are the
    row's own; its group's begin after `splits` places. The order of additions is fixed, so the
    result does not depend on which program merges.
    """
    piece = tl.arange(0, PIECES)
    place = tl.where(
        piece[:, None] < mine[None, :], piece[:, None], piece[:, None] - mine[None, :] + splits
    )
    at = cell[None, :] + place * height
    there = piece[:, None] < count[None, :]
    peaks = tl.load(peak_ptr + at, mask=there, other=-1e30, cache_modifier=".cg")
    masses = tl.load(mass_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
    high = tl.max(peaks, 0)
    mass = tl.sum(masses * tl.exp2(peaks - high[None, :]), 0)
    pieces = tl.max(count, 0)
    columns: tl.constexpr = min(BLOCK_D, 4096 // BLOCK_M)
    for column in range(0, D, columns):
        d = column + tl.arange(0, columns)
        total = tl.zeros([BLOCK_M, columns], tl.float32)
        for first in range(0, pieces, 4):
            # four at once, to overlap their loads
            for other in tl.static_range(4):
                i = first + other
                spot = cell + tl.where(i < mine, i, i - mine + splits) * height
                peak = tl.load(peak_ptr + spot, mask=i < count, other=-1e30, cache_modifier=".cg")
                gain = tl.exp2(peak - high)
                part = tl.load(
                    part_ptr + spot.to(tl.int64)[:, None] * D + d[None, :],
                    mask=(i < count)[:, None] & (d < D)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                total += part * gain[:, None]
        tl.store(
            out_ptr + places[:, None] * D + d[None, :],
            (total / mass[:, None]).to(out_ptr.dtype.element_ty),
            mask=due[:, None] & (d < D)[None, :],
        )


@triton.jit(do_not_specialize=["width", "splits", "team_splits"])
def merge_rows(
    part_ptr,
    peak_ptr,
    mass_ptr,
    count_ptr,
    out_ptr,
    width,
    splits,
    team_splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits that ragged_kernel.attend stored with groups. Programs: rows times key/value
    heads, by tiles of BLOCK_M lines. count_ptr [rows, kv heads, 2] int32: splits of the row and of
    its group; with 0 there is nothing to do."""
    unit = tl.program_id(0)
    row, kv = unit // K, unit % K
    group: tl.constexpr = H // K
    lines = width * group
    own = tl.load(count_ptr + unit * 2)
    count = own + tl.load(count_ptr + unit * 2 + 1)
    if count > 0:
        local = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = local < lines
        merge_pieces(
            part_ptr,
            peak_ptr,
            mass_ptr,
            out_ptr,
            (row.to(tl.int64) * width + local // group) * H + kv * group + local % group,
            inside,
            unit * (splits + team_splits) * lines + local,
            lines,
            tl.where(inside, own, 0),
            tl.where(inside, count, 0),
            splits,
            D,
            PIECES,
            BLOCK_M,
            BLOCK_D,
        )
