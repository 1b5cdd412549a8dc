"""Triton: the products of a transformer block for a few tokens, each one launch with all that
stands around it.

Norms need no launch: who produces the residual stream (`begin`, `add`) stores it times the next
norm's weight, with its sums of squares by tile; who consumes that (`project`, `gate_up`) scales
its own sums by the root. Definition: reference.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cuts import MOST_TOKENS, Cut, cut_for
from .launch import after, begin_chain, counters, overlap
from .pointwise import KINDS, activate
from .tiles import complete, give, part, squares, sums


class Stream(NamedTuple):
    """The residual stream of N tokens before a norm: `residual` [N, width] float32; `x` [N,
    width]: that times the norm's weight; `squares` [tiles, MOST_TOKENS] float32: sums of the
    squares of the residual's tiles."""

    residual: Tensor
    x: Tensor
    squares: Tensor


def begin(
    tokens: Tensor,
    positions: Tensor,
    embed: Tensor,
    norm: Tensor,
    inverse: Tensor,
    *,
    scale: float = 1.0,
    early: bool = False,
) -> tuple[Stream, Tensor]:
    """The embedding of tokens [N], and the cosines and sines [2, N, half] of positions [N] times
    frequencies [half]."""
    count, width = tokens.numel(), embed.shape[1]
    cut = Cut(256, 256, 1, 0, 4)
    stream = _stream(count, width, cut, embed)
    angles = torch.empty(2, count, len(inverse), dtype=torch.float32, device=embed.device)
    _begin[(triton.cdiv(width, cut.columns),)](
        tokens.contiguous(),
        positions.contiguous(),
        embed,
        inverse,
        angles,
        norm,
        *stream,
        count,
        torch.tensor(scale, dtype=embed.dtype).item(),
        VOCAB=len(embed),
        WIDTH=width,
        HALF=len(inverse),
        EACH=cut.columns,
        M=MOST_TOKENS,
        N=cut.block,
        num_warps=4,
        **overlap(early, embed.device),
    )
    return stream, angles


def project(
    stream: Stream,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    cut: Cut | None = None,
    early: bool = False,
) -> Tensor:
    """norm(stream) W^T + bias: [N, lines] for weight [lines, width]."""
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
    """The stream plus x W^T, before the norm with weight `norm`: x [N, depth], weight [width,
    depth]."""
    count, depth = x.shape
    lines = len(weight)
    cut = cut or cut_for(lines, depth, weight, split=True)
    out = _stream(count, lines, cut, weight)
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
    """activation(norm(stream) G^T) * (norm(stream) U^T): [N, lines] for weight [2 lines, width],
    G over U."""
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


def finish(stream: Stream, norm: Tensor, *, eps: float, early: bool = False) -> Tensor:
    """norm(stream): [N, width]."""
    count, width = stream.x.shape
    out = torch.empty_like(stream.x)
    _finish[(count, triton.cdiv(width, 512))](
        stream.residual,
        norm,
        stream.squares,
        out,
        eps,
        WIDTH=width,
        TILES=len(stream.squares),
        M=MOST_TOKENS,
        BLOCK=512,
        num_warps=4,
        **overlap(early, norm.device),
    )
    return out


def _stream(count: int, width: int, cut: Cut, like: Tensor) -> Stream:
    residual = torch.empty(count, width, dtype=torch.float32, device=like.device)
    squares = torch.empty(cut.tiles(width), MOST_TOKENS, dtype=torch.float32, device=like.device)
    return Stream(residual, like.new_empty(count, width), squares)


def _pieces(cut: Cut, lines: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Where the splits of a tile leave their sums, and how many have come."""
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
def _begin(
    tokens_ptr,
    position_ptr,
    embed_ptr,
    inverse_ptr,
    angle_ptr,
    norm_ptr,
    sum_ptr,
    x_ptr,
    square_ptr,
    count,
    scale,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    EACH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_chain(EARLY)
    tile = tl.program_id(0)
    row, line = tl.arange(0, M), tile * EACH + tl.arange(0, N)
    token = tl.minimum(tl.load(tokens_ptr + row, mask=row < count, other=0), VOCAB - 1)
    value = tl.load(
        embed_ptr + token[:, None] * WIDTH + line[None, :],
        mask=(row < count)[:, None] & (line < WIDTH)[None, :],
        other=0.0,
    )
    value = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
    weight = tl.load(norm_ptr + line, mask=line < WIDTH, other=0.0).to(tl.float32)
    give(value, weight, sum_ptr, x_ptr, square_ptr, tile, tile * EACH, WIDTH, count, WIDTH, M, N)
    at = tl.arange(0, triton.next_power_of_2(HALF))
    for one in range(tile, count, tl.num_programs(0)):
        angle = tl.load(position_ptr + one).to(tl.float32) * tl.load(
            inverse_ptr + at, mask=at < HALF, other=0.0
        )
        tl.store(angle_ptr + one * HALF + at, tl.cos(angle), mask=at < HALF)
        tl.store(angle_ptr + (count + one) * HALF + at, tl.sin(angle), mask=at < HALF)


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


@triton.jit
def _finish(
    stream_ptr,
    norm_ptr,
    square_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.arange(0, triton.next_power_of_2(TILES))
    squares = tl.sum(tl.load(square_ptr + tile * M + row, mask=tile < TILES, other=0.0), 0)
    value = tl.load(stream_ptr + row * WIDTH + at, mask=at < WIDTH, other=0.0)
    value *= tl.rsqrt(squares / WIDTH + eps) * tl.load(
        norm_ptr + at, mask=at < WIDTH, other=0.0
    ).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, value.to(out_ptr.dtype.element_ty), mask=at < WIDTH)
