"""Triton: the residual stream of a few tokens between the products of transformer blocks, from the
embedding to the final norm. Definition: reference.py.

Norms need no launch. The producer of the stream (`begin`, products.add) stores it times the next
norm's weight, with sums of squares by tile (`store_stream`); the consumer scales its sums by the
root of the mean square. Products with fp8 weights round their input with one scale a token, so the
largest magnitude of each token is carried beside the squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import after, begin_chain, overlap

MOST_TOKENS = 16
_BEGIN = tl.constexpr(256)  # columns a program of `begin`
_FINISH = tl.constexpr(512)  # columns a program of `finish`


class Stream(NamedTuple):
    """The residual stream of N tokens before a norm. `residual`: [N, width] float32. `x`: [N,
    width], the residual times the norm's weight. `squares`: [tiles, most] float32, sums of squares
    of the residual's tiles, for at least N tokens. `largest`: [any, most] int32, largest magnitudes
    of parts of `x` as the bits of float32; None if no product needs them."""

    residual: Tensor
    x: Tensor
    squares: Tensor
    largest: Tensor | None = None

    @classmethod
    def empty(
        cls,
        count: int,
        width: int,
        tiles: int,
        like: Tensor,
        *,
        most: int = MOST_TOKENS,
        largest: Tensor | None = None,
    ) -> Stream:
        residual = torch.empty(count, width, dtype=torch.float32, device=like.device)
        squares = torch.empty(tiles, most, dtype=torch.float32, device=like.device)
        return cls(residual, like.new_empty(count, width), squares, largest)


def begin(
    tokens: Tensor,
    positions: Tensor,
    embed: Tensor,
    norm: Tensor,
    inverse: Tensor,
    *,
    scale: float = 1.0,
    peaks: Tensor | None = None,
    most: int = MOST_TOKENS,
    early: bool = False,
) -> tuple[Stream, Tensor]:
    """Embed tokens [N], and compute cosines and sines [2, N, half] of positions [N] times
    frequencies [half].

    Args:
        peaks: int32, set to zeros for later launches of the chain, which find the largest magnitude
            of each token there. With it the stream has `largest`.
        most: tokens that the stream's tiles have room for, a power of two.
    """
    count, width = tokens.numel(), embed.shape[1]
    tiles = triton.cdiv(width, _BEGIN.value)
    largest = None if peaks is None else peaks.new_empty(tiles, most)
    stream = Stream.empty(count, width, tiles, embed, most=most, largest=largest)
    angles = torch.empty(2, count, len(inverse), dtype=torch.float32, device=embed.device)
    _begin[(tiles,)](
        tokens.contiguous(),
        positions.contiguous(),
        embed,
        inverse,
        angles,
        norm,
        *stream[:3],
        tokens if largest is None else largest,
        tokens if peaks is None else peaks,
        count,
        torch.tensor(scale, dtype=embed.dtype).item(),
        M=most,
        PEAKS=0 if peaks is None else peaks.numel(),
        VOCAB=max(len(embed), most),  # one form for all numbers of tokens that are embedded already
        WIDTH=width,
        HALF=len(inverse),
        num_warps=4,
        **overlap(early, embed.device),
    )
    return stream, angles


def finish(stream: Stream, norm: Tensor, *, eps: float, early: bool = False) -> Tensor:
    """Return norm(stream), [N, width]."""
    count, width = stream.x.shape
    out = torch.empty_like(stream.x)
    _finish[(count, triton.cdiv(width, _FINISH.value))](
        stream.residual,
        norm,
        stream.squares,
        out,
        eps,
        WIDTH=width,
        TILES=len(stream.squares),
        M=stream.squares.shape[1],
        num_warps=4,
        **overlap(early, norm.device),
    )
    return out


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
    largest_ptr,
    bound_ptr,
    count,
    scale,
    M: tl.constexpr,
    PEAKS: tl.constexpr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of _BEGIN columns, for all tokens. They share the angles and the zeros of
    `peaks` among them."""
    begin_chain(EARLY)
    tile = tl.program_id(0)
    row, line = tl.arange(0, M), tile * _BEGIN + tl.arange(0, _BEGIN)
    token = tl.minimum(tl.load(tokens_ptr + row, mask=row < count, other=0), VOCAB - 1)
    value = tl.load(
        embed_ptr + token[:, None] * WIDTH + line[None, :],
        mask=(row < count)[:, None] & (line < WIDTH)[None, :],
        other=0.0,
    )
    value = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
    weight = tl.load(norm_ptr + line, mask=line < WIDTH, other=0.0).to(tl.float32)
    largest = store_stream(
        value,
        weight,
        sum_ptr,
        x_ptr,
        square_ptr,
        tile,
        tile * _BEGIN,
        WIDTH,
        count,
        WIDTH,
        _BEGIN,
        M,
    )
    if PEAKS > 0:
        tl.store(largest_ptr + tile * M + row, largest)
    for first in range(tile * _BEGIN, PEAKS, tl.num_programs(0) * _BEGIN):
        place = first + tl.arange(0, _BEGIN)
        tl.store(bound_ptr + place, place * 0, mask=place < PEAKS)
    at = tl.arange(0, triton.next_power_of_2(HALF))
    for one in range(tile, count, tl.num_programs(0)):
        angle = tl.load(position_ptr + one).to(tl.float32) * tl.load(
            inverse_ptr + at, mask=at < HALF, other=0.0
        )
        tl.store(angle_ptr + one * HALF + at, tl.cos(angle), mask=at < HALF)
        tl.store(angle_ptr + (count + one) * HALF + at, tl.sin(angle), mask=at < HALF)


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
    EARLY: tl.constexpr,
):
    """Programs: tokens by tiles of _FINISH columns."""
    after(EARLY)
    row, at = tl.program_id(0), tl.program_id(1) * _FINISH + tl.arange(0, _FINISH)
    tile = tl.arange(0, triton.next_power_of_2(TILES))
    squares = tl.sum(tl.load(square_ptr + tile * M + row, mask=tile < TILES, other=0.0), 0)
    value = tl.load(stream_ptr + row * WIDTH + at, mask=at < WIDTH, other=0.0)
    value *= tl.rsqrt(squares / WIDTH + eps) * tl.load(
        norm_ptr + at, mask=at < WIDTH, other=0.0
    ).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, value.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def store_stream(
    value,
    weight,
    residual_ptr,
    x_ptr,
    square_ptr,
    tile,
    first,
    end,
    count,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Store a tile [M, N] of the residual stream, the same times the next norm's weight, and its
    sum of squares. Return the largest magnitudes of the second, [M]."""
    row, line = tl.arange(0, M), first + tl.arange(0, N)
    inside = (row < count)[:, None] & (line < end)[None, :]
    value = tl.where(inside, value, 0.0)
    place = row[:, None] * WIDTH + line[None, :]
    tl.store(residual_ptr + place, value, mask=inside)
    scaled = (value * weight[None, :]).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + place, scaled, mask=inside)
    tl.store(square_ptr + tile * M + row, tl.sum(value * value, 1))
    return tl.max(magnitude(scaled), 1)


@triton.jit
def magnitude(value):
    """Return the absolute values of floats as the bits of float32. They compare like the floats,
    and NaN is the largest."""
    return tl.abs(value.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def load_tiles(tile_ptr, TILES: tl.constexpr, M: tl.constexpr):
    """Load what `store_stream` found in each tile, [tiles, M]. The caller reduces it later, when
    the loads have arrived."""
    tile = tl.arange(0, triton.next_power_of_2(TILES))
    return tl.load(
        tile_ptr + tile[:, None] * M + tl.arange(0, M)[None, :],
        mask=(tile < TILES)[:, None],
        other=0,
    )
