"""Triton: the products of a transformer block for a few tokens. Each is one launch, with the norm
before it and the bias, activation or residual addition after it. Definition: reference.py.

Elsewhere: how the residual stream carries norms from one product to the next (residual.py), a
program's part of a product (tiles.py), how products are split over programs (cuts.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cuts import MOST_TOKENS, Cut, cut_for
from .launch import after, counters, overlap
from .pointwise import KINDS, activate
from .residual import Stream, give, squares
from .tiles import complete, part, sums


def project(
    stream: Stream,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    cut: Cut | None = None,
    early: bool = False,
) -> Tensor:
    """Return norm(stream) W^T + bias, [N, lines], for weight [lines, width]."""
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
        *_pieces(cut, lines, out),
        count,
        eps,
        TILES=len(stream.squares),
        BIAS=bias is not None,
        **_shape(cut, lines, depth, out, early),
    )
    return out


def add(
    x: Tensor,
    weight: Tensor,
    stream: Stream,
    norm: Tensor,
    *,
    cut: Cut | None = None,
    early: bool = False,
) -> Stream:
    """Add x W^T to the stream and prepare it for the norm with weight `norm`. x: [N, depth],
    weight: [width, depth]."""
    count, depth = x.shape
    lines = len(weight)
    cut = cut or cut_for(lines, depth, weight, split=True)
    out = Stream.empty(count, lines, cut, weight)
    _add[cut.grid(lines)](
        x,
        weight,
        norm,
        stream.residual,
        *out,
        *_pieces(cut, lines, x),
        count,
        **_shape(cut, lines, depth, x, early),
    )
    return out


def gate_up(
    stream: Stream,
    weight: Tensor,
    *,
    eps: float,
    activation: str,
    cut: Cut | None = None,
    early: bool = False,
) -> Tensor:
    """Return activation(norm(stream) G^T) * (norm(stream) U^T), [N, lines], for weight [2 lines,
    width], G above U."""
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


def _pieces(cut: Cut, lines: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return buffers for the splits of a tile: their sums and an arrival counter."""
    if cut.splits == 1:
        return out, out
    tiles = cut.tiles(lines)
    parts = torch.empty(
        tiles * cut.splits * MOST_TOKENS * cut.block, dtype=torch.float32, device=out.device
    )
    return parts, counters(out.device, tiles)


def _shape(cut: Cut, lines: int, depth: int, like: Tensor, early: bool) -> dict[str, object]:
    return {
        "LINES": lines,
        "DEPTH": depth,
        "EACH": cut.columns,
        "N": cut.block,
        "SPLITS": cut.splits,
        "DEEP": cut.deep,
        "STAGES": cut.stages,
        "M": MOST_TOKENS,
        "WIDE": "ieee" if like.dtype == torch.float32 else "tf32",
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
    M: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, first, end, low, high = part(LINES, DEPTH, EACH, SPLITS, DEEP)
    row, line = tl.arange(0, M), first + tl.arange(0, N)
    after(EARLY)
    shares = squares(square_ptr, TILES, M)
    total, _ = sums(
        x_ptr, weight_ptr, first, end, low, high, count, 0, DEPTH, M, N, DEEP, STAGES, WIDE
    )
    total, last = complete(total, part_ptr, arrived_ptr, tile, M, N, SPLITS)
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
    count,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    M: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, first, end, low, high = part(LINES, DEPTH, EACH, SPLITS, DEEP)
    row, line = tl.arange(0, M), first + tl.arange(0, N)
    after(EARLY)
    residual = tl.load(
        stream_ptr + row[:, None] * LINES + line[None, :],
        mask=(row < count)[:, None] & (line < end)[None, :],
        other=0.0,
    )
    weight = tl.load(norm_ptr + line, mask=line < end, other=0.0).to(tl.float32)
    total, _ = sums(
        x_ptr, weight_ptr, first, end, low, high, count, 0, DEPTH, M, N, DEEP, STAGES, WIDE
    )
    total, last = complete(total, part_ptr, arrived_ptr, tile, M, N, SPLITS)
    if last:
        give(
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
            M,
            N,
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
    M: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    _tile, first, end, low, high = part(LINES, DEPTH, EACH, 1, DEEP)
    row, line = tl.arange(0, M), first + tl.arange(0, N)
    after(EARLY)
    shares = squares(square_ptr, TILES, M)
    gates, ups = sums(
        x_ptr, weight_ptr, first, end, low, high, count, LINES, DEPTH, M, N, DEEP, STAGES, WIDE
    )
    scale = tl.rsqrt(tl.sum(shares, 0) / DEPTH + eps)[:, None]
    value = activate(gates * scale, KIND) * (ups * scale)
    tl.store(
        out_ptr + row[:, None] * LINES + line[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=(row < count)[:, None] & (line < end)[None, :],
    )
