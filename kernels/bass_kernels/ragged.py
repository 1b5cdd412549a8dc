"""Triton: attention over a shared prompt and private keys (reference.attention), as split-K flash
decoding: shapes, launches and schedules; the kernel is in ragged_kernel.py.

A row's queries of one key/value head form one matrix. Its keys are cut into splits, one program
each, so that a short row costs little. Rows with the same prompt form shared-prefix groups, which
read its keys once. Everything that varies by row is read on the device, so a captured launch serves
any lengths. A pass over a long part of one prompt uses causal attention, at the end of this file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import dispatch
from .eight_bit_kernels import arguments, converts, in_pairs
from .folding_kernels import head_block
from .launch import (
    SPARE,
    can_prefetch,
    card,
    fitting,
    input_precision,
    loads_tiles,
    overlap,
    prefetch_blocks,
    processors,
    scratch,
)
from .ragged_kernel import attend, merge_rows
from .segments import Group, Segments, Store, by_row, one_after_other, plain

_KEYS = 256  # keys from which one more split is worth its merge
# Queries of one prompt from which causal attention is used: blocks of 128 queries of some 28 heads
# then keep all processors of an H200 busy.
_MANY = 640
_BASE_2 = 1.4426950408889634  # log2(e): the kernel's exponentials have base 2


class Cut(NamedTuple):
    """Number of splits of the keys of a row (or of a group's prompt): at least `few`, and `most` if
    it is long."""

    few: int
    most: int


class Scores(NamedTuple):
    """How scores become weights; see reference.attention."""

    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None

    def arguments(self, nothing: Tensor) -> tuple[Tensor, float, float, int]:
        """Return the kernel's sinks (else `nothing`), scale, cap and window."""
        scale = self.scale / self.cap if self.cap else self.scale * _BASE_2
        sinks = nothing if self.sinks is None else self.sinks
        return sinks, scale, self.cap * _BASE_2, self.window


class Tiling(NamedTuple):
    """`members`: rows of a shared-prefix group, 1 for no groups. `lines`: queries of one head a
    program. `keys`: keys a step. `warps` and `stages` of the launch. `registers`: of a thread at
    most; 0 for no limit."""

    members: int
    lines: int
    keys: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The launch options of this tiling."""
        found = {
            "SIZE": self.members,
            "BLOCK_M": self.lines,
            "BLOCK_N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        return found | ({"maxnreg": self.registers} if self.registers else {})


def attention(
    q: Tensor,
    own: Store,
    prompt: Store,
    segments: Segments,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    next_weight: Tensor | None = None,
    splits: int | Cut | None = None,
    tile: tuple[int, int, int] | None = None,
    members: int | None = None,
    group_splits: int | Cut | None = None,
) -> Tensor:
    """Do reference.attention with the schedule that `attention_schedule` set.

    Args:
        splits, group_splits: splits of the keys of a row and of a shared-prefix group.
        tile: keys a step, warps and stages.
        members: rows of a group, a power of two in `segments.device_groups`; 1 for no groups.
        Each of these is chosen by shape if None.
    """
    packed = segments.packed
    given: dict[str, Any] = {"scale": scale, "window": window, "cap": cap, "sinks": sinks}
    if packed is not None and _schedule(segments) != "ragged":
        # the paper's schedules need equally many queries in each row
        q, segments = by_row(q, segments)
        padded = attention(q, own, prompt, segments, **given)
        return one_after_other(padded, packed)
    if _schedule(segments) == "split" and len(q) > 1:
        given |= {"splits": splits, "tile": tile}
        found = [
            attention(q[at], own, prompt, _rows(segments, at), **given)
            for at in (slice(row, row + 1) for row in range(len(q)))
        ]
        return torch.cat(found)
    (rows, width), (heads, size) = _grid(q, segments), q.shape[2:]
    if not (window or cap or sinks is not None) and (group := _one_prompt(q, segments)) is not None:
        return _within(q, prompt, group, scale)
    kv_heads = own[0].shape[0]
    lines = width * (heads // kv_heads)
    if _schedule(segments) != "ragged" or segments.device_groups is None or packed is not None:
        members = 1
    elif members is None:
        members = _members(lines, rows)
    crowded = rows * kv_heads > processors(q.device)
    tiling = _fitted(lines, members, size, q, own[0].element_size(), crowded)
    if tile is not None:
        tiling = Tiling(tiling.members, tiling.lines, *tile)
    cut, group_cut = _cuts(tiling, rows, kv_heads, lines, q.device)
    cut, group_cut = _or_default(splits, cut), _or_default(group_splits, group_cut)
    scores = Scores(**given)
    own, prompt = in_pairs(own), in_pairs(prompt)
    return _launch(q, own, prompt, segments, tiling, cut, group_cut, scores, next_weight)


def _grid(q: Tensor, segments: Segments) -> tuple[int, int]:
    """Return the number of rows and the maximum number of queries of a row."""
    packed = segments.packed
    return (len(q), q.shape[1]) if packed is None else (len(segments.base), packed.widest)


def _schedule(segments: Segments) -> str:
    """Return the schedule. A prefill, whose rows are tiles of prompts without private keys, always
    runs "ragged"."""
    return dispatch.schedule() if segments.extent else "ragged"


def _one_prompt(q: Tensor, segments: Segments) -> Group | None:
    """Return the prompt if this pass is a prefill of at least _MANY tokens of one prompt, else
    None."""
    groups = segments.groups or ()
    if segments.extent or len(groups) != 1 or not suits_causal(q.dtype, q.shape[3], q.device):
        return None
    return groups[0] if groups[0].queries >= _MANY else None


def _within(q: Tensor, prompt: Store, group: Group, scale: float) -> Tensor:
    """Compute attention [B, W, H D] of q [B, W, H, D], consecutive tiles whose first
    `group.queries` tokens are the last tokens of that prompt. Padding gives zeros."""
    rows, width, heads, size = q.shape
    span = slice(group.start, group.start + group.length)
    keys, values = plain(*(part[:, span] for part in prompt), dtype=q.dtype)
    tokens, out = q.reshape(-1, heads, size), q.new_empty(rows * width, heads, size)
    out[group.queries :].zero_()
    many = slice(0, group.queries)
    causal_attention(tokens[many].contiguous(), keys, values, out[many], scale=scale)
    return out.view(rows, width, heads * size)


def _launch(
    q: Tensor,
    own: Store,
    prompt: Store,
    segments: Segments,
    tiling: Tiling,
    cut: Cut,
    group_cut: Cut,
    scores: Scores,
    next_weight: Tensor | None,
) -> Tensor:
    (rows, width), (heads, size) = _grid(q, segments), q.shape[2:]
    kv_heads, positions, packed = own[0].shape[0], segments.positions, segments.packed
    lines, all_splits = width * (heads // kv_heads), cut.most + group_cut.most
    units = rows * kv_heads * (tiles := triton.cdiv(lines, tiling.lines))
    *tables, group_units = _table(segments, tiling.members, kv_heads)
    out = q.new_empty(*q.shape[:2], heads * size)
    blocks = prefetch_blocks(next_weight, q.shape[0] * q.shape[1])
    shape = _constants(heads, kv_heads, size, all_splits)
    cells = units * all_splits * min(lines, tiling.lines)
    found = _buffers(out, all_splits, units, cells, size, groups=group_cut.most > 0)
    attend[(group_units * group_cut.most + units * cut.most,)](
        q.contiguous(),
        *arguments(own, prompt),
        positions,
        segments.base,
        segments.start,
        segments.own,
        segments.base if packed is None else packed.begin,
        *tables,
        out,
        *found,
        *((next_weight, blocks) if blocks else (out, 0)),
        *scores.arguments(out),
        rows,
        width,
        *positions.stride(),
        *own[0].stride()[:2],
        *prompt[0].stride()[:2],
        own[0].shape[1],
        tiles,
        *cut,
        *group_cut,
        group_units,
        max(1, _KEYS // tiling.keys),
        PACKED=packed is not None,
        PAD=triton.next_power_of_2(rows * width) if _schedule(segments) == "pad" else 0,
        WIDE=input_precision(q),
        CAPPED=bool(scores.cap),
        SINKS=scores.sinks is not None,
        NATIVE=converts(q.device),
        WINDOWED=bool(scores.window),
        PREFETCH=can_prefetch(q.device),
        **shape,
        **overlap(True, q.device),
        **tiling.options,
    )
    if group_cut.most:
        _merge(found, out, cut, group_cut, width, shape)
    return out


def _table(segments: Segments, members: int, kv_heads: int) -> tuple[Tensor, Tensor, int]:
    """Return which rows are in groups, the groups of `members` rows, and the number of groups times
    key/value heads. Without groups the tensors are placeholders."""
    if members == 1:
        return segments.base, segments.base, 0
    assert segments.device_groups is not None
    tiles = segments.device_groups.tiles[members]
    return segments.device_groups.member, tiles, len(tiles) * kv_heads


def _buffers(
    out: Tensor, all_splits: int, units: int, cells: int, size: int, *, groups: bool
) -> tuple[Tensor, ...]:
    """Return buffers for splits: sums, peaks, masses, and an arrival counter of each unit; with
    groups, the numbers of splits of each row and of its group instead of the counter."""
    *found, counts = scratch(out, all_splits, units, cells * size, cells, cells)
    return *found, out.new_empty(2 * units, dtype=torch.int32) if groups else counts


def _merge(
    found: tuple[Tensor, ...],
    out: Tensor,
    cut: Cut,
    group_cut: Cut,
    width: int,
    shape: dict[str, int],
) -> None:
    """Merge the splits of rows and groups into out [B, width, heads * size]."""
    lines, kv_heads = 16, shape["K"]
    merge_rows[(len(out) * kv_heads, triton.cdiv(width * (shape["H"] // kv_heads), lines))](
        *found, out, width, cut.most, group_cut.most, BLOCK_M=lines, **shape
    )


def _constants(heads: int, kv_heads: int, size: int, all_splits: int) -> dict[str, int]:
    """Return the compile-time constants for these heads and this number of splits."""
    names = {"H": heads, "K": kv_heads, "D": size}
    return {**names, "BLOCK_D": head_block(size), "SPLITS": _power(all_splits)}


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`: 1, or at least 16."""
    return 1 if count == 1 else max(16, triton.next_power_of_2(count))


def _rows(segments: Segments, rows: slice) -> Segments:
    """Return the segments of these rows of a pass, without groups."""
    return replace(
        segments,
        positions=segments.positions[rows],
        base=segments.base[rows],
        start=segments.start[rows],
        own=segments.own[rows],
        groups=(),
        device_groups=None,
    )


def _members(lines: int, rows: int) -> int:
    """Return the rows of a shared-prefix group. On an H200 groups gain at width 1 (16 rows on 3800
    tokens: 1.2 times as fast, 32 rows on 8192: 2.9). They lose with 8 rows and at width 8, where
    the L2 cache already shares the prompt's keys."""
    return 64 // max(8, triton.next_power_of_2(lines)) if lines <= 16 and rows >= 16 else 1


def _cut(units: int, lines: int, device: torch.device) -> Cut:
    """Return the splits for the keys of rows without groups.

    With one split a row there would be `units` programs. Aim at two programs a processor, with at
    most eight splits a row, or four with more than 16 units. Short rows whose tiles have more than
    16 lines aim at one program a processor.
    More for long rows alone would make short ones slower: docs/decisions/11-eight-bit-keys.md.
    """
    limit, each = 8 if units <= 16 else 4, processors(device) / units
    one, two = (max(1, min(limit, int(count * each))) for count in (1, 2))
    return Cut(two if lines <= 16 else one, two)


def _cuts(
    tiling: Tiling, rows: int, kv_heads: int, lines: int, device: torch.device
) -> tuple[Cut, Cut]:
    """Return the splits for the keys of rows and of shared-prefix groups."""
    if tiling.members > 1:
        return Cut(1, 2), _group_cut(triton.cdiv(rows, tiling.members) * kv_heads, device)
    units = rows * kv_heads * triton.cdiv(lines, tiling.lines)
    return _cut(units, tiling.lines, device), Cut(0, 0)


def _group_cut(units: int, device: torch.device) -> Cut:
    """Return the splits for the keys of groups; `units`: groups of all rows times key/value heads.
    Aim at three programs for two processors. A processor holds two, and the programs for private
    keys follow."""
    few = max(4, min(12, 3 * processors(device) // (2 * units)))
    return Cut(few, few)


def _or_default(splits: int | Cut | None, default: Cut) -> Cut:
    """Return `splits`, or the default if it is None or there are no such splits."""
    if not default.most:
        return default
    if isinstance(splits, int):
        return Cut(splits, splits)
    return default if splits is None else splits


def _fitted(
    lines: int, members: int, size: int, like: Tensor, stored: int, crowded: bool
) -> Tiling:
    """Return the tiling for `lines` queries of a row and groups of `members` rows: the one that was
    fastest on an H100, or the nearest that fits. `stored`: bytes of a stored number. `crowded`:
    there are more programs than processors. Raises Triton's OutOfResources if nothing fits."""
    here, width = card(like.device), max(16, triton.next_power_of_2(size))
    # pipeline stages without a buffer
    spare = 0 if here.reads_shared and like.element_size() == 2 else 1

    def needs(option: Tiling) -> int:
        block = 2 * option.keys * width
        queries = like.element_size() * option.lines * (width + option.keys)
        # products of 64 lines and more, or in float32, read dequantised numbers from shared memory
        copied = option.lines >= 64 or like.element_size() == 4
        plain = 2 * block if stored == 1 and copied else 0
        return stored * (option.stages - spare) * block + plain + queries + SPARE

    return fitting(_tilings(lines, members, size, stored, crowded), needs, here.shared)


def _tilings(lines: int, members: int, size: int, stored: int, crowded: bool) -> Iterator[Tiling]:
    """Yield the fastest tiling first, then those that use less shared memory, and at last those
    without groups.

    Rows of up to 16 lines gain from more programs at once: with 2 stages, or in eight bits with at
    most 128 registers, a processor holds one more. In eight bits 256 rows on 330 keys (28 heads, 4
    of keys) take 40 us instead of 46. So do 32 lines with small steps of two warps: 64 rows of 8
    tokens take 39 us instead of 41. Where processors are free, a program's own time counts: with
    these steps 8 rows of 8 tokens took 22 us instead of 17.
    """
    for rows in dict.fromkeys((members, 1)):
        most = max(16, triton.next_power_of_2(lines * rows))
        for block in (most,) if rows > 1 else (m for m in (64, 32, 16) if m <= most):
            best, warps, stages, registers = 32, 4 if block < 128 else 8, 3, 0
            if block == 32 and crowded:
                warps = 2
            elif block == 32 and size <= 128:
                best = 64
            elif block == 16 and stored > 1:
                best, warps, stages = 64, 4, 2
            elif block == 16:
                best, warps, stages, registers = 64, 4, 3, 128
            for keys in (n for n in (64, 32, 16) if n <= best):
                for fewer in range(stages if size <= 128 else 2, 1, -1):
                    yield Tiling(rows, block, keys, warps, fewer, registers)


class CausalTile(NamedTuple):
    """Queries of one head a program, keys a step, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# By head size, up to 64 and up to 128: the best of nine tiles on an H200. 8,192 queries on 8,192
# keys: 484 TFLOP/s for heads of 64 (torch's flash attention 269), 465 for heads of 128 (248).
_CAUSAL_TILES = {64: CausalTile(64, 128, 4, 3), 128: CausalTile(128, 128, 8, 3)}
_LARGEST = 256  # largest head size of torch's flash attention


@functools.cache
def suits_causal(dtype: torch.dtype, size: int, device: torch.device) -> bool:
    """Return whether `causal_attention` supports heads of this size: 16-bit dtypes only, on a
    device that has the kernel or torch's flash attention."""
    if dtype.itemsize != 2 or size % 8:
        return False
    return _has_kernel(size, device) or (device.type == "cuda" and _has_flash(size, device))


def _has_kernel(size: int, device: torch.device) -> bool:
    return loads_tiles(device) and size <= max(_CAUSAL_TILES)


def _has_flash(size: int, device: torch.device) -> bool:
    capable = torch.cuda.get_device_capability(device)[0] >= 8
    return torch.backends.cuda.is_flash_attention_available() and capable and size <= _LARGEST


def causal_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    scale: float,
    tile: CausalTile | None = None,
) -> None:
    """Write causal attention to `out`: with a Triton kernel on Hopper, torch's own flash attention
    elsewhere.

    Tensor descriptors load blocks of keys, with zeros beyond the prompt. On an H200, 8,192 tokens
    at the end of 8,192 / 32,768: 465 / 589 TFLOP/s; torch 248 / 328.

    Args:
        q, out: [M, H, D], contiguous, 16 bits.
        keys, values: [K, N, D] with N >= M, aligned to 16 bytes. Query i is at key N - M + i and
            sees that key and all before it.
        tile: default by head size.
    """
    if not _has_kernel(q.shape[2], q.device):
        out.copy_(_flash(q, keys, values, scale))
        return
    (count, heads, size), (kv_heads, length, _) = q.shape, keys.shape
    tile = tile or _CAUSAL_TILES[64 if size <= 64 else 128]
    wide, tiles = max(16, triton.next_power_of_2(size)), triton.cdiv(count, tile.queries)
    stored = (
        TensorDescriptor(it, list(it.shape), list(it.stride()), [1, tile.keys, wide])
        for it in (keys, values)
    )
    _attend_causal[(tiles * heads,)](
        q,
        *stored,
        out,
        scale * _BASE_2,
        count,
        length,
        tiles,
        H=heads,
        K=kv_heads,
        D=size,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        BLOCK_D=wide,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _flash(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute the same with torch. The public function imports torch's compiler first, which takes
    4 s, so the operator is called directly."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    found: Tensor = flash(
        q.transpose(0, 1)[None], keys[None], values[None], 0.0, True, scale=scale
    )[0]
    return found[0].transpose(0, 1)


@triton.jit
def _fold_causal(q, keys, values, seen, peak, mass, total, scale):
    """Do ragged_kernel.fold where each query sees a key of the first block. Then a masked score
    alone gives weight 0. The scale is applied within the exponent, in one operation."""
    scores = tl.dot(q, tl.trans(keys))
    if seen is not None:
        scores = tl.where(seen, scores, -1e30)
    high = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - high[:, None])
    fade = tl.exp2(peak - high)
    total = tl.dot(weights.to(values.dtype), values, total * fade[:, None])
    return high, mass * fade + tl.sum(weights, 1), total


@triton.jit(do_not_specialize=["count", "length", "tiles"])
def _attend_causal(
    q_ptr,
    keys,
    values,
    out_ptr,
    scale,
    count,
    length,
    tiles,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute BLOCK_M queries of one head. Tiles with the most keys begin first, and heads that
    share keys run side by side."""
    program = tl.program_id(0)
    head, tile = program % H, tiles - 1 - program // H
    kv, before = head // (H // K), length - count
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    at = (query.to(tl.int64) * H + head)[:, None] * D + d[None, :]
    real = (query < count)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + at, mask=real, other=0.0)
    peak = tl.full([BLOCK_M], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = tile * BLOCK_M + before  # position of the first query
    whole = (first + 1) // BLOCK_N  # number of blocks whose keys all queries see
    for block in range(0, whole):
        k = keys.load([kv, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D])
        v = values.load([kv, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D])
        peak, mass, total = _fold_causal(q, k, v, None, peak, mass, total, scale)
    for block in range(whole, tl.cdiv(tl.minimum(first + BLOCK_M, length), BLOCK_N)):
        k = keys.load([kv, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D])
        v = values.load([kv, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D])
        seen = (block * BLOCK_N + n)[None, :] <= (query + before)[:, None]
        peak, mass, total = _fold_causal(q, k, v, seen, peak, mass, total, scale)
    tl.store(out_ptr + at, (total / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real)
