"""Triton: the kernels of ragged attention. Shapes and launches: ragged.py.

A program folds blocks of keys into a running softmax. The last program of a row to finish merges
the splits by log-sum-exp. Rows with shared-prefix groups are merged by a separate launch. Attention
also prefetches the weights of the next product (launch.py).
"""

import triton
import triton.language as tl

from .eight_bit_kernels import in_float16, split_pairs
from .folding_kernels import fold_blocks
from .launch import after, prefetch_weight

# a row's counter: arrivals modulo _FIELD, then the number of splits in use
_FIELD: tl.constexpr = tl.constexpr(1 << 10)


@triton.jit(
    do_not_specialize=[
        "rows",
        "width",
        "position_row",
        "position_place",
        "span",
        "tiles",
        "few",
        "many",
        "splits",
        "group_few",
        "group_splits",
        "group_units",
        "prefetched",
    ]
)
def attend(
    q_ptr,
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
    begin_ptr,
    grouped_ptr,
    table_ptr,
    out_ptr,
    part_ptr,
    peak_ptr,
    mass_ptr,
    count_ptr,
    next_weight_ptr,
    prefetched,
    sink_ptr,
    scale,
    cap,
    window,
    rows,
    width,
    position_row,
    position_place,
    key_head,
    key_step,
    prompt_head,
    prompt_step,
    span,
    tiles,
    few,
    splits,
    group_few,
    group_splits,
    group_units,
    many,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PACKED: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    NATIVE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: first `group_splits` for each key/value head of each shared-prefix group (up to
    SIZE rows, whose prompt's keys are read once). Then `splits` for each unit, a tile of BLOCK_M
    lines of a row and key/value head. A line is one query of one head.

    A unit uses at least `few` of its splits, and one more for every `many` blocks of keys. The
    other programs return at once, and split 0 counts as their arrival. PAD (0: off): the power of
    two that holds all positions of the pass, to find the longest row. PACKED (no groups, no PAD):
    queries of all rows are contiguous. A row's queries go from its begin to the next row's, at most
    `width`.

    Each program does this in order:

    1. It finds its lines: their rows, positions and queries.
    2. From the positions it computes which blocks of the prompt's keys and of private keys the row
       sees, and which of them are its split's.
    3. It folds these blocks into the running softmax.
    4. If it has all keys of its lines, it stores the attention. Otherwise it stores its part. The
       last program of a unit to finish merges the parts; with groups merge_rows does.

    part_ptr, peak_ptr, mass_ptr: sums [rows, K, tiles, splits + group_splits, lines of a tile, D];
    peaks and masses, the same without D. count_ptr: [units], how many splits have finished, 0
    before and after; with groups [rows, K, 2], as in merge_rows.
    """
    after(EARLY)
    group: tl.constexpr = H // K
    columns: tl.constexpr = BLOCK_D if key_scale_ptr is None else BLOCK_D // 2
    lines = width * group
    units = rows * K * tiles
    line = tl.arange(0, BLOCK_M)
    program = tl.program_id(0)
    in_group = False
    if SIZE > 1:
        in_group = program < group_splits * group_units
        program = tl.where(in_group, program, program - group_splits * group_units)
        units = tl.where(in_group, group_units, units)
        min_splits = tl.where(in_group, group_few, few)
        max_splits = tl.where(in_group, group_splits, splits)
        unit, split = program % units, program // units
        tile, kv, entry = 0, unit % K, unit // K
        members = tl.where(in_group, SIZE, 0)  # members of the group in the table
        member = line // lines
        row = tl.load(table_ptr + entry * SIZE + member, mask=member < members, other=-1)
        row = tl.where(in_group, row, tl.where(line < lines, entry, -1))
        first_row = tl.max(tl.where(line == 0, row, -1), 0)
        local = line % lines
        grouped = tl.load(grouped_ptr + tl.maximum(first_row, 0))
    else:
        min_splits, max_splits = few, splits
        unit, split = program % units, program // units
        tile, kv, first_row = unit % tiles, (unit // tiles) % K, unit // (tiles * K)
        local = tile * BLOCK_M + line
        there = lines
        if PACKED:
            begin = tl.load(begin_ptr + first_row)
            there = (tl.load(begin_ptr + first_row + 1) - begin).to(tl.int32) * group
        row = tl.where(local < there, first_row, -1)
        grouped = 0
    if first_row >= 0:
        inside = row >= 0
        step, head = local // group, kv * group + local % group
        wide_row = row.to(tl.int64)
        query = wide_row * width + step
        position_at = position_ptr + wide_row * position_row + step * position_place
        if PACKED:
            query = begin + step
            position_at = position_ptr + query * position_place
        position = tl.load(position_at, mask=inside, other=-1).to(tl.int32)
        base = tl.load(base_ptr + first_row).to(tl.int32)
        start, own = tl.load(start_ptr + first_row), tl.load(own_ptr + first_row)
        d = tl.arange(0, BLOCK_D)
        places = query * H + head
        grid = places[:, None] * D + d[None, :]
        real = inside[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + grid, mask=real, other=0.0)
        q_odd, to_score = q, scale
        if key_scale_ptr is not None:
            q, to_score = in_float16(q)
            to_score *= scale
            at_prompt = kv.to(tl.int64) * prompt_scale_head + start
            prompt_key_scale_ptr += at_prompt
            prompt_value_scale_ptr += at_prompt
            at_own = kv.to(tl.int64) * scale_head + own
            key_scale_ptr += at_own
            value_scale_ptr += at_own
            q, q_odd = split_pairs(q)

        end = tl.max(position, 0) + 1  # the first position that no query of this tile sees
        first_seen = 0
        # Not an `if` on a number: ptxas 12.8 and 12.9 may put the minimum under another condition.
        if WINDOWED and PAD == 0:
            first_seen = tl.maximum(
                tl.min(tl.where(inside, position, 2147483647), 0) - window + 1, 0
            )
        reads_prompt = (grouped == 0) | in_group  # this program reads the prompt's keys
        prompt_end = tl.where(reads_prompt, tl.minimum(base, end), 0)
        first = tl.minimum(first_seen, prompt_end) // BLOCK_N
        prompt_blocks = tl.cdiv(prompt_end, BLOCK_N) - first
        own_first = tl.maximum(first_seen - base, 0) // BLOCK_N
        own_blocks = tl.maximum(tl.cdiv(end - base, BLOCK_N) - own_first, 0)
        if PAD > 0:
            every = tl.arange(0, PAD)
            offsets = (every // width).to(tl.int64) * position_row + (
                every % width
            ) * position_place
            ends = tl.load(position_ptr + offsets, mask=every < rows * width, other=0)
            longest = tl.max(ends, 0).to(tl.int32) + 1
            # one more, because both segments may end within a block
            own_blocks = tl.cdiv(longest, BLOCK_N) + 1 - prompt_blocks
        blocks = prompt_blocks + tl.where(in_group, 0, own_blocks)
        share = tl.maximum(
            tl.cdiv(blocks, tl.minimum(tl.maximum(blocks // many, min_splits), max_splits)), 1
        )
        used = tl.cdiv(blocks, share)
        if SINKS:  # split 0 of a row holds them, also if it sees no key
            used = tl.where(in_group, used, tl.maximum(used, 1))

        if split < tl.maximum(used, 1):
            low, high = split * share, tl.minimum((split + 1) * share, blocks)
            peak = tl.full([BLOCK_M], -1e30, tl.float32)
            mass = tl.zeros([BLOCK_M], tl.float32)
            total = tl.zeros([BLOCK_M, columns], tl.float32)
            total_odd = total
            if SINKS:
                first_own = split == 0
                if SIZE > 1:
                    first_own = first_own & (in_group == 0)
                sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32)
                peak = tl.where(first_own, sink * 1.4426950408889634, peak)
                mass = tl.where(first_own, 1.0, mass)
            at_prompt = kv.to(tl.int64) * prompt_head + start * prompt_step
            at_own = kv.to(tl.int64) * key_head + own * key_step
            peak, mass, total, total_odd = fold_blocks(
                q,
                q_odd,
                key_ptr + at_own,
                value_ptr + at_own,
                prompt_key_ptr + at_prompt,
                prompt_value_ptr + at_prompt,
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
                span - own.to(tl.int32),
                position,
                window,
                peak,
                mass,
                total,
                total_odd,
                to_score,
                cap,
                CAPPED,
                WINDOWED,
                PAD > 0,
                D,
                BLOCK_N,
                WIDE,
                NATIVE,
            )
            if key_scale_ptr is not None:
                total = tl.interleave(total, total_odd) * 0.00390625  # see fold_pairs

            if PREFETCH:
                prefetch_weight(next_weight_ptr, prefetched, tl.program_id(0), tl.num_programs(0))
            counter = (first_row * K + kv) * 2  # numbers of splits: the row's own, its group's
            if reads_prompt & (used <= 1) & (in_group == 0):
                done = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + grid, done, mask=real)
                if SIZE > 1:
                    tl.store(count_ptr + counter, 0)
                    tl.store(count_ptr + counter + 1, 0)
            elif SPLITS > 1:
                height = tl.minimum(lines, BLOCK_M)
                all_splits = splits + group_splits
                cell = (
                    ((row * K + kv) * tiles + tile) * all_splits * height + local - tile * BLOCK_M
                )
                at = cell + (split + tl.where(in_group, splits, 0)) * height
                if used > 0:
                    tl.store(peak_ptr + at, peak, mask=inside)
                    tl.store(mass_ptr + at, mass, mask=inside)
                    tl.store(part_ptr + at.to(tl.int64)[:, None] * D + d[None, :], total, mask=real)
                if SIZE > 1:
                    if split == 0:
                        if in_group:
                            counters = count_ptr + (row * K + kv) * 2 + 1
                            tl.store(counters, 0 * row + used, mask=inside & (local == 0))
                        else:
                            tl.store(count_ptr + counter, used)
                            if grouped == 0:
                                tl.store(count_ptr + counter + 1, 0)
                else:
                    tl.debug_barrier()
                    arrivals = 1
                    if split == 0:
                        arrivals = splits - tl.maximum(used, 1) + 1 + used * _FIELD
                    state = tl.atomic_add(count_ptr + unit, arrivals) + arrivals
                    if state % _FIELD == splits:
                        tl.store(count_ptr + unit, 0)
                        own_splits = tl.where(inside, state // _FIELD, 0)
                        merge_splits(
                            part_ptr,
                            peak_ptr,
                            mass_ptr,
                            out_ptr,
                            places,
                            inside,
                            cell,
                            height,
                            own_splits,
                            own_splits,
                            splits,
                            D,
                            SPLITS,
                            BLOCK_M,
                            BLOCK_D,
                        )


@triton.jit
def merge_splits(
    part_ptr,
    peak_ptr,
    mass_ptr,
    out_ptr,
    places,
    inside,
    cell,
    height,
    own,
    count,
    splits,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of the lines that are `inside` and write their attention to `places`.

    A line's first split is at `cell`, the others `height` apart. `own` of `count` splits are the
    row's own; its group's begin after `splits` places. The order of additions is fixed, so the
    result does not depend on which program merges.
    """
    split = tl.arange(0, SPLITS)
    place = tl.where(
        split[:, None] < own[None, :], split[:, None], split[:, None] - own[None, :] + splits
    )
    at = cell[None, :] + place * height
    there = split[:, None] < count[None, :]
    peaks = tl.load(peak_ptr + at, mask=there, other=-1e30, cache_modifier=".cg")
    masses = tl.load(mass_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
    high = tl.max(peaks, 0)
    mass = tl.sum(masses * tl.exp2(peaks - high[None, :]), 0)
    most = tl.max(count, 0)
    # Triton 3.5 has no min() of constants
    columns: tl.constexpr = BLOCK_D if BLOCK_D * BLOCK_M < 4096 else 4096 // BLOCK_M
    for column in range(0, D, columns):
        d = column + tl.arange(0, columns)
        total = tl.zeros([BLOCK_M, columns], tl.float32)
        for first in range(0, most, 4):
            # four at once, to overlap their loads
            for other in tl.static_range(4):
                i = first + other
                spot = cell + tl.where(i < own, i, i - own + splits) * height
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
            mask=inside[:, None] & (d < D)[None, :],
        )


@triton.jit(do_not_specialize=["width", "splits", "group_splits"])
def merge_rows(
    part_ptr,
    peak_ptr,
    mass_ptr,
    count_ptr,
    out_ptr,
    width,
    splits,
    group_splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
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
        merge_splits(
            part_ptr,
            peak_ptr,
            mass_ptr,
            out_ptr,
            (row.to(tl.int64) * width + local // group) * H + kv * group + local % group,
            inside,
            unit * (splits + group_splits) * lines + local,
            lines,
            tl.where(inside, own, 0),
            tl.where(inside, count, 0),
            splits,
            D,
            SPLITS,
            BLOCK_M,
            BLOCK_D,
        )
