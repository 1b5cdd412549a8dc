"""Triton: the kernels of ragged attention. A program folds blocks of keys into a running softmax.
The last program of a row to finish merges the splits by log-sum-exp. Rows with shared-prefix groups
are merged by a separate launch (softmax.py). Shapes and launches: ragged.py."""

import triton
import triton.language as tl

from .fetching import fetch
from .launch import after
from .softmax import fold, merge_pieces

# a row's counter: arrivals modulo _FIELD, then the number of splits in use
_FIELD: tl.constexpr = tl.constexpr(1 << 10)


@triton.jit
def _blocks(
    q,
    key_ptr,
    value_ptr,
    key_step,
    first,
    whole,
    last,
    position,
    offset,
    end,
    limit,
    peak,
    mass,
    total,
    scale,
    window,
    inside,
    WHOLE: tl.constexpr,
    PAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Fold blocks first to last of one segment into the running softmax (peak, mass, total).

    The segment's place 0 is at position `offset`, and it ends before position `end`. WHOLE: all
    queries see all keys of the blocks before `whole`, which need no mask. PAD: blocks beyond the
    end are read too, from places modulo `limit`, and get weight 0.
    """
    d = tl.arange(0, BLOCK_D)
    if WHOLE:
        for block in range(first, tl.minimum(whole, last)):
            place = block * BLOCK_N + tl.arange(0, BLOCK_N)
            grid = place[:, None] * key_step + d[None, :]
            if D == BLOCK_D:
                keys, values = tl.load(key_ptr + grid), tl.load(value_ptr + grid)
            else:
                keys = tl.load(key_ptr + grid, mask=(d < D)[None, :], other=0.0)
                values = tl.load(value_ptr + grid, mask=(d < D)[None, :], other=0.0)
            peak, mass, total = fold(q, keys, values, None, peak, mass, total, scale, WIDE)
        first = tl.maximum(first, whole)
    for block in range(first, last):
        place = block * BLOCK_N + tl.arange(0, BLOCK_N)
        at = offset + place
        there = at < end
        if PAD:
            grid = (place % limit)[:, None] * key_step + d[None, :]
            mask = (d < D)[None, :]
        else:
            grid = place[:, None] * key_step + d[None, :]
            mask = there[:, None] & (d < D)[None, :]
        keys = tl.load(key_ptr + grid, mask=mask, other=0.0)
        seen = there[None, :] & (at[None, :] <= position[:, None]) & inside[:, None]
        if window > 0:
            seen = seen & (at[None, :] > position[:, None] - window)
        values = tl.load(value_ptr + grid, mask=mask, other=0.0)
        if PAD:
            values = tl.where(there[:, None], values, 0.0).to(values.dtype)
        peak, mass, total = fold(q, keys, values, seen, peak, mass, total, scale, WIDE)
    return peak, mass, total


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
        "team_few",
        "team_splits",
        "team_units",
        "fetched",
    ]
)
def attend(
    q_ptr,
    key_ptr,
    value_ptr,
    prompt_key_ptr,
    prompt_value_ptr,
    position_ptr,
    base_ptr,
    start_ptr,
    own_ptr,
    begin_ptr,
    teamed_ptr,
    table_ptr,
    out_ptr,
    part_ptr,
    peak_ptr,
    mass_ptr,
    count_ptr,
    then_ptr,
    fetched,
    scale,
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
    team_few,
    team_splits,
    team_units,
    many,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    PACKED: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: first `team_splits` for each key/value head of each shared-prefix group (up to SIZE
    rows, whose prompt's keys are read once). Then `splits` for each unit, a tile of BLOCK_M lines
    of a row and key/value head. A line is one query of one head.

    A unit uses at least `few` of its splits, and one more for every `many` blocks of keys. The
    other programs return at once, and split 0 counts as their arrival. PAD (0: off): the power of
    two that holds all positions of the pass, to find the longest row. PACKED (no groups, no PAD):
    queries of all rows are contiguous. A row's queries go from its begin to the next row's, at most
    `width`.
    """
    after(EARLY)
    group: tl.constexpr = H // K
    lines = width * group
    units = rows * K * tiles
    line = tl.arange(0, BLOCK_M)
    program = tl.program_id(0)
    in_team = False
    if SIZE > 1:
        in_team = program < team_splits * team_units
        program = tl.where(in_team, program, program - team_splits * team_units)
        units = tl.where(in_team, team_units, units)
        least_splits = tl.where(in_team, team_few, few)
        most_splits = tl.where(in_team, team_splits, splits)
        unit, split = program % units, program // units
        tile, kv, entry = 0, unit % K, unit // K
        listed = tl.where(in_team, SIZE, 0)  # members of the group in the table
        member = line // lines
        row = tl.load(table_ptr + entry * SIZE + member, mask=member < listed, other=-1)
        row = tl.where(in_team, row, tl.where(line < lines, entry, -1))
        first_row = tl.max(tl.where(line == 0, row, -1), 0)
        local = line % lines
        teamed = tl.load(teamed_ptr + tl.maximum(first_row, 0))
    else:
        least_splits, most_splits = few, splits
        unit, split = program % units, program // units
        tile, kv, first_row = unit % tiles, (unit // tiles) % K, unit // (tiles * K)
        local = tile * BLOCK_M + line
        there = lines
        if PACKED:
            begin = tl.load(begin_ptr + first_row)
            there = (tl.load(begin_ptr + first_row + 1) - begin).to(tl.int32) * group
        row = tl.where(local < there, first_row, -1)
        teamed = 0
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

        end = tl.max(position, 0) + 1  # the first position that no query of this tile sees
        common = 0  # every query of this tile sees all keys at earlier positions
        if (SIZE > 1) & (window == 0):
            common = tl.min(tl.where(inside, position, 2147483646), 0) + 1
        least = 0
        if (window > 0) & (PAD == 0):
            least = tl.maximum(tl.min(tl.where(inside, position, 2147483647), 0) - window + 1, 0)
        apart = (teamed == 0) | in_team  # this program reads the prompt's keys
        prompt_end = tl.where(apart, tl.minimum(base, end), 0)
        first = tl.minimum(least, prompt_end) // BLOCK_N
        prompts = tl.cdiv(prompt_end, BLOCK_N) - first
        own_first = tl.maximum(least - base, 0) // BLOCK_N
        in_own = tl.maximum(tl.cdiv(end - base, BLOCK_N) - own_first, 0)
        if PAD > 0:
            every = tl.arange(0, PAD)
            offsets = (every // width).to(tl.int64) * position_row + (
                every % width
            ) * position_place
            ends = tl.load(position_ptr + offsets, mask=every < rows * width, other=0)
            longest = tl.max(ends, 0).to(tl.int32) + 1
            # one more, because both segments may end within a block
            in_own = tl.cdiv(longest, BLOCK_N) + 1 - prompts
        blocks = prompts + tl.where(in_team, 0, in_own)
        share = tl.maximum(
            tl.cdiv(blocks, tl.minimum(tl.maximum(blocks // many, least_splits), most_splits)), 1
        )
        used = tl.cdiv(blocks, share)

        if split < tl.maximum(used, 1):
            low, high = split * share, tl.minimum((split + 1) * share, blocks)
            peak = tl.full([BLOCK_M], -1e30, tl.float32)
            mass = tl.zeros([BLOCK_M], tl.float32)
            total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            offset = kv.to(tl.int64) * prompt_head + start * prompt_step
            peak, mass, total = _blocks(
                q,
                prompt_key_ptr + offset,
                prompt_value_ptr + offset,
                prompt_step,
                first + low,
                tl.minimum(common, prompt_end) // BLOCK_N,
                first + tl.minimum(high, prompts),
                position,
                0,
                prompt_end,
                base,
                peak,
                mass,
                total,
                scale,
                window,
                inside,
                SIZE > 1,
                PAD > 0,
                D,
                BLOCK_N,
                BLOCK_D,
                WIDE,
            )
            offset = kv.to(tl.int64) * key_head + own * key_step
            peak, mass, total = _blocks(
                q,
                key_ptr + offset,
                value_ptr + offset,
                key_step,
                own_first + tl.maximum(low - prompts, 0),
                tl.maximum(common - base, 0) // BLOCK_N,
                own_first + high - prompts,
                position,
                base,
                end,
                span - own.to(tl.int32),
                peak,
                mass,
                total,
                scale,
                window,
                inside,
                SIZE > 1,
                PAD > 0,
                D,
                BLOCK_N,
                BLOCK_D,
                WIDE,
            )

            if AHEAD:
                fetch(then_ptr, fetched, tl.program_id(0), tl.num_programs(0))
            counter = (first_row * K + kv) * 2  # numbers of splits: the row's own, its group's
            if apart & (used <= 1) & (in_team == 0):
                done = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + grid, done, mask=real)
                if SIZE > 1:
                    tl.store(count_ptr + counter, 0)
                    tl.store(count_ptr + counter + 1, 0)
            elif PIECES > 1:
                height = tl.minimum(lines, BLOCK_M)
                pieces = splits + team_splits
                cell = ((row * K + kv) * tiles + tile) * pieces * height + local - tile * BLOCK_M
                at = cell + (split + tl.where(in_team, splits, 0)) * height
                if used > 0:
                    tl.store(peak_ptr + at, peak, mask=inside)
                    tl.store(mass_ptr + at, mass, mask=inside)
                    tl.store(part_ptr + at.to(tl.int64)[:, None] * D + d[None, :], total, mask=real)
                if SIZE > 1:
                    if split == 0:
                        if in_team:
                            counters = count_ptr + (row * K + kv) * 2 + 1
                            tl.store(counters, 0 * row + used, mask=inside & (local == 0))
                        else:
                            tl.store(count_ptr + counter, used)
                            if teamed == 0:
                                tl.store(count_ptr + counter + 1, 0)
                else:
                    tl.debug_barrier()
                    arrivals = 1
                    if split == 0:
                        arrivals = splits - tl.maximum(used, 1) + 1 + used * _FIELD
                    state = tl.atomic_add(count_ptr + unit, arrivals) + arrivals
                    if state % _FIELD == splits:
                        tl.store(count_ptr + unit, 0)
                        mine = tl.where(inside, state // _FIELD, 0)
                        merge_pieces(
                            part_ptr,
                            peak_ptr,
                            mass_ptr,
                            out_ptr,
                            places,
                            inside,
                            cell,
                            height,
                            mine,
                            mine,
                            splits,
                            D,
                            PIECES,
                            BLOCK_M,
                            BLOCK_D,
                        )
