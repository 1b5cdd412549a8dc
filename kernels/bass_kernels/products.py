"""Triton: the products of a transformer block for a few tokens. Each is one launch, with the norm
before it and the bias, activation or residual addition after it. Definition: reference.py.

How the residual stream carries norms from one product to the next: residual.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import quantised_products
from .launch import SPARE, after, card, fitting, input_precision, overlap, processors, scratch
from .peers import Peers, add_tile
from .pointwise import KINDS, activate
from .quantised import Quantised, Writable
from .residual import MOST_TOKENS, Stream, load_tiles, store_stream

_M = tl.constexpr(MOST_TOKENS)


class Cut(NamedTuple):
    """A tiling: `columns` a tile within a block of `block`; the depth in `splits` (split-K), `deep`
    of it a step, with `warps` and `stages`."""

    columns: int
    block: int
    splits: int
    deep: int
    warps: int
    stages: int = 4

    def tiles(self, lines: int) -> int:
        return triton.cdiv(lines, self.columns)

    def grid(self, lines: int) -> tuple[int, int]:
        return self.tiles(lines), self.splits

    def smaller(self) -> Iterator[Cut]:
        """Yield this cut, then cuts that take less and less shared memory."""
        cut = self
        while True:
            yield cut
            if cut.deep > 128 or (cut.stages == 2 and cut.deep > 16):
                cut = cut._replace(deep=cut.deep // 2)
            elif cut.stages > 2:
                cut = cut._replace(stages=cut.stages - 1)
            else:
                return


def cut_for(
    lines: int, depth: int, weight: Tensor, *, pair: bool = False, split: bool = False
) -> Cut:
    """Return the cut for a weight's dtype and device: the one that was fastest on an H200, or the
    nearest that fits."""
    lots = MOST_TOKENS + (2 if pair else 1) * 32  # rows of both matrices that a program holds
    lot = lots * weight.element_size()
    return fitting(
        _measured(lines, depth, weight, pair=pair, split=split).smaller(),
        lambda cut: lot * cut.deep * (cut.stages - 1) + SPARE,
        card(weight.device).shared,
    )


def _measured(lines: int, depth: int, weight: Tensor, *, pair: bool, split: bool) -> Cut:
    """Return the fastest cut on an H200: at most 32 columns a program, spread evenly. With `split`
    the depth is split too, because every program reads the whole input of its part of the depth.
    Then the sums are completed by the last program of a tile."""
    if split:
        return Cut(32, 32, max(1, min(4, depth // 128)), 128, 4, 5)
    programs = processors(weight.device) * (2 if pair else 1)
    each = triton.cdiv(lines, programs * triton.cdiv(lines, programs * 32))
    block = max(16, triton.next_power_of_2(each))
    if pair:
        return Cut(each, block, 1, 128, 4, 5)
    return Cut(each, block, 1, 512, block // 8, 3)


def project(
    stream: Stream,
    weight: Writable,
    bias: Tensor | None,
    *,
    eps: float,
    cut: Cut | None = None,
    early: bool = False,
) -> Tensor:
    """Return norm(stream) W^T + bias, [N, lines], for weight [lines, width]."""
    if isinstance(weight, Quantised):
        return quantised_products.project(stream, weight, bias, eps=eps, early=early)
    count, depth = stream.x.shape
    lines = len(weight)
    cut = cut or cut_for(lines, depth, weight)
    out = stream.x.new_empty(count, lines)
    _project[cut.grid(lines)](
        stream.x,
        weight,
        weight if bias is None else bias,
        stream.squares,
        out,
        *_scratch(cut, lines, out),
        count,
        eps,
        TILES=len(stream.squares),
        BIAS=bias is not None,
        **_shape(cut, lines, depth, out, early),
    )
    return out


def add(
    x: Tensor,
    weight: Writable,
    stream: Stream,
    norm: Tensor,
    *,
    peaks: Tensor | None = None,
    largest: Tensor | None = None,
    peers: Peers | None = None,
    cut: Cut | None = None,
    early: bool = False,
) -> Stream:
    """Add x W^T to the stream and prepare it for the norm with weight `norm`. x: [N, depth],
    weight: [width, depth]. `peaks` and `largest`: see quantised_products.add.

    Args:
        peers: add the products of all processes of a split model. The programs that complete tiles
            wait for each other across GPUs, so `adds_at_once` must hold.
    """
    if isinstance(weight, Quantised):
        return quantised_products.add(
            x, weight, stream, norm, peaks=peaks, largest=largest, peers=peers, early=early
        )
    count, depth = x.shape
    lines = len(weight)
    cut = cut or cut_for(lines, depth, weight, split=True)
    out = Stream.empty(count, lines, cut.tiles(lines), weight)
    _add[cut.grid(lines)](
        x,
        weight,
        norm,
        stream.residual,
        *out[:3],
        *_scratch(cut, lines, x),
        *((x, x, 0, 0) if peers is None else peers.arguments()),
        count,
        RANK=0 if peers is None else peers.rank,
        RANKS=1 if peers is None else peers.ranks,
        **_shape(cut, lines, depth, x, early),
    )
    return out


def adds_at_once(weight: Writable, x: Tensor, peers: Peers) -> bool:
    """Return whether `add` may wait for peers: the parts of a product fit into an exchange, and all
    programs that complete tiles are resident at once, beside one that does not.

    Args:
        x: any tensor in the tokens' dtype.
    """
    lines, depth = weight.shape
    if isinstance(weight, Quantised):
        tiles, each = quantised_products.tiles_at_once(weight, x)
    else:
        cut = cut_for(lines, depth, weight, split=True)
        tiles = cut.tiles(lines)
        each = (MOST_TOKENS + 32) * weight.element_size() * cut.deep * (cut.stages - 1) + SPARE
    # a program of four warps has at most half of a processor's registers
    resident = processors(x.device) * max(1, min(2, card(x.device).shared // each))
    return tiles < resident and MOST_TOKENS * lines <= peers.capacity


def gate_up(
    stream: Stream,
    weight: Writable,
    *,
    eps: float,
    activation: str,
    peaks: Tensor | None = None,
    cut: Cut | None = None,
    early: bool = False,
) -> Tensor:
    """Return activation(norm(stream) G^T) * (norm(stream) U^T), [N, lines], for weight [2 lines,
    width], G above U. `peaks`: see quantised_products.gate_up."""
    if isinstance(weight, Quantised):
        return quantised_products.gate_up(
            stream, weight, eps=eps, activation=activation, peaks=peaks, early=early
        )
    count, depth = stream.x.shape
    lines = len(weight) // 2
    cut = cut or cut_for(lines, depth, weight, pair=True)
    out = stream.x.new_empty(count, lines)
    shape = _shape(cut, lines, depth, out, early)
    del shape["SPLITS"]
    _gate_up[cut.grid(lines)](
        stream.x,
        weight,
        stream.squares,
        out,
        count,
        eps,
        TILES=len(stream.squares),
        KIND=KINDS[activation],
        **shape,
    )
    return out


def _scratch(cut: Cut, lines: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return buffers for the splits of a tile: their sums and an arrival counter."""
    tiles = cut.tiles(lines)
    return scratch(like, cut.splits, tiles, tiles * cut.splits * MOST_TOKENS * cut.block)


def _shape(cut: Cut, lines: int, depth: int, like: Tensor, early: bool) -> dict[str, object]:
    return {
        "LINES": lines,
        "DEPTH": depth,
        "EACH": cut.columns,
        "N": cut.block,
        "SPLITS": cut.splits,
        "DEEP": cut.deep,
        "STAGES": cut.stages,
        "WIDE": input_precision(like),
        "num_warps": cut.warps,
        **overlap(early, like.device),
    }


@triton.jit(do_not_specialize=["count"])
def _project(
    x_ptr,
    weight_ptr,
    bias_ptr,
    square_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    count,
    eps,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of rows of the weight by splits of the depth. The last split of a tile to
    finish scales the sums by the root of the mean square and adds the bias."""
    tile, first, end, low, high = program_part(LINES, DEPTH, EACH, SPLITS, DEEP)
    row, line = tl.arange(0, _M), first + tl.arange(0, N)
    after(EARLY)
    shares = load_tiles(square_ptr, TILES, _M)
    total, _ = partial_product(
        x_ptr, weight_ptr, first, end, low, high, count, 0, DEPTH, N, DEEP, STAGES, WIDE
    )
    total, last = sum_splits(total, part_ptr, arrived_ptr, tile, N, SPLITS)
    if last:
        total = total * tl.rsqrt(tl.sum(shares, 0) / DEPTH + eps)[:, None]
        if BIAS:
            total += tl.load(bias_ptr + line, mask=line < end, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None] * LINES + line[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(row < count)[:, None] & (line < end)[None, :],
        )


@triton.jit(do_not_specialize=["count"])
def _add(
    x_ptr,
    weight_ptr,
    norm_ptr,
    stream_ptr,
    sum_ptr,
    next_ptr,
    square_ptr,
    part_ptr,
    arrived_ptr,
    address_ptr,
    state_ptr,
    capacity,
    limit,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of rows of the weight by splits of the depth. The last split of a tile to
    finish adds the parts of all processes, if RANKS > 1, and the sum to the stream."""
    tile, first, end, low, high = program_part(LINES, DEPTH, EACH, SPLITS, DEEP)
    row, line = tl.arange(0, _M), first + tl.arange(0, N)
    after(EARLY)
    residual = tl.load(
        stream_ptr + row[:, None] * LINES + line[None, :],
        mask=(row < count)[:, None] & (line < end)[None, :],
        other=0.0,
    )
    weight = tl.load(norm_ptr + line, mask=line < end, other=0.0).to(tl.float32)
    total, _ = partial_product(
        x_ptr, weight_ptr, first, end, low, high, count, 0, DEPTH, N, DEEP, STAGES, WIDE
    )
    total, last = sum_splits(total, part_ptr, arrived_ptr, tile, N, SPLITS)
    if last:
        if RANKS > 1:
            total = add_tile(
                total,
                row[:, None] * LINES + line[None, :],
                (row < count)[:, None] & (line < end)[None, :],
                address_ptr,
                state_ptr,
                capacity,
                limit,
                tl.num_programs(0),
                RANK,
                RANKS,
            )
        store_stream(
            total + residual,
            weight,
            sum_ptr,
            next_ptr,
            square_ptr,
            tile,
            first,
            end,
            count,
            LINES,
            N,
            _M,
        )


@triton.jit(do_not_specialize=["count"])
def _gate_up(
    x_ptr,
    weight_ptr,
    square_ptr,
    out_ptr,
    count,
    eps,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of rows of G, with the same rows of U. Each has the whole depth."""
    _tile, first, end, low, high = program_part(LINES, DEPTH, EACH, 1, DEEP)
    row, line = tl.arange(0, _M), first + tl.arange(0, N)
    after(EARLY)
    shares = load_tiles(square_ptr, TILES, _M)
    gates, ups = partial_product(
        x_ptr, weight_ptr, first, end, low, high, count, LINES, DEPTH, N, DEEP, STAGES, WIDE
    )
    scale = tl.rsqrt(tl.sum(shares, 0) / DEPTH + eps)[:, None]
    value = activate(gates * scale, KIND) * (ups * scale)
    tl.store(
        out_ptr + row[:, None] * LINES + line[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=(row < count)[:, None] & (line < end)[None, :],
    )


@triton.jit
def partial_product(
    x_ptr,
    weight_ptr,
    first,
    end,
    low,
    high,
    count,
    SECOND: tl.constexpr,
    DEPTH: tl.constexpr,
    N: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply tokens' x [., DEPTH] by rows first to end of a weight matrix [., DEPTH], over the
    depth low to high: [M, N] float32. If SECOND is not 0, also by the rows SECOND further on."""
    row, line, place = tl.arange(0, _M), tl.arange(0, N), tl.arange(0, DEEP)
    weight_ptr += first.to(tl.int64) * DEPTH  # offsets from here fit into 32 bits
    one, two = tl.zeros([_M, N], tl.float32), tl.zeros([_M, N], tl.float32)
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
def program_part(
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
def sum_splits(total, part_ptr, arrived_ptr, tile, N: tl.constexpr, SPLITS: tl.constexpr):
    """For the last split of a tile to arrive, return the sum of all splits, added in fixed order,
    and True. For the others return the input and False."""
    last = True
    if SPLITS > 1:
        cell = tile * SPLITS * _M * N + tl.arange(0, _M)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(part_ptr + cell + tl.program_id(1) * _M * N, total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1) == SPLITS - 1
        if last:
            total = tl.zeros([_M, N], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(part_ptr + cell + other * _M * N, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    return total, last
