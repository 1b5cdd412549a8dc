"""Triton: the product of a few rows with a weight matrix, added to the residual stream; bound by
the bandwidth of the weights. Definition: fused.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SPARE, card, counters, fitting
from .tiles import complete

MOST_ROWS = 16
_COLUMNS, _DEPTH = 16, 256  # tile of weights
_TILES = 264  # two programs on each processor of a large GPU
# With more columns programs run in several waves, and the tiles of a vocabulary are too shallow to
# prefetch: 8 rows of 256 by 151,936 columns take 60 us, the library 24 (one H200).
_COLUMNS_AT_ONCE = 8 * _TILES * _COLUMNS


def serves(rows: int, weight: Tensor) -> bool:
    """Return whether `stream` is faster than the library for so many rows."""
    return rows <= MOST_ROWS and weight.shape[0] <= _COLUMNS_AT_ONCE


def stream(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x W^T + bias, [..., N], for x [..., K] of at most MOST_ROWS rows and weight
    [N, K]."""
    columns, depth = weight.shape
    rows = x.numel() // depth
    out = torch.empty_like(residual)
    tiles = triton.cdiv(columns, _COLUMNS)
    splits = max(1, min(8, _TILES // tiles, depth // 512))
    parts = arrived = out
    if splits > 1:
        parts = x.new_empty(tiles * splits * MOST_ROWS * _COLUMNS, dtype=torch.float32)
        arrived = counters(x.device, tiles)
    share = triton.cdiv(triton.cdiv(depth, _DEPTH), splits) * _DEPTH
    _stream[(tiles, splits)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        residual.contiguous(),
        out,
        parts,
        arrived,
        rows,
        columns,
        depth,
        share,
        BIAS=bias is not None,
        SPLITS=splits,
        BLOCK_M=MOST_ROWS,
        BLOCK_N=_COLUMNS,
        BLOCK_K=_DEPTH,
        EVEN=depth % _DEPTH == 0 and columns % _COLUMNS == 0,
        WIDE="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=2,
        num_stages=_stages(weight),
    )
    return out


def _stages(weight: Tensor) -> int:
    """Return five pipeline stages, or as many as fit."""
    tile = (MOST_ROWS + _COLUMNS) * _DEPTH * weight.element_size()
    return fitting(
        range(5, 1, -1), lambda stages: tile * (stages - 1) + SPARE, card(weight.device).shared
    )


@triton.jit(do_not_specialize=["rows"])
def _stream(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    rows,
    columns,
    depth,
    share,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    line = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    real = row < rows
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, end = 0, depth
    if SPLITS > 1:
        first, end = split * share, tl.minimum(split * share + share, depth)
    for start in range(first, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        weights = weight_ptr + line.to(tl.int64)[:, None] * depth + at[None, :]
        if EVEN:
            x = tl.load(x_ptr + row[:, None] * depth + at[None, :], mask=real[:, None], other=0.0)
            w = tl.load(weights, eviction_policy="evict_first")
        else:
            inside = at < depth
            x = tl.load(
                x_ptr + row[:, None] * depth + at[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(weights, mask=(line < columns)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision=WIDE)
    place = row[:, None] * columns + line[None, :]
    mask = real[:, None] & (line < columns)[None, :]
    total, last = complete(total, part_ptr, arrived_ptr, tile, BLOCK_M, BLOCK_N, SPLITS)
    if last:
        if BIAS:
            total += tl.load(bias_ptr + line, mask=line < columns, other=0.0).to(tl.float32)[
                None, :
            ]
        total += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)
