"""Triton: products for linear.py, each with what follows it in one launch.

`stream` adds a product of up to 16 rows to the residual stream; it is bound by the bandwidth of the
weights. `gate_up` takes 17 to 64 tokens. Its weights are the left factor, so that their rows fill
the 64-wide side of Hopper's tensor cores and tokens take the other side. Tensor descriptors load
both, with zeros out of bounds. For more tokens the library's product is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import SPARE, card, fitting, input_precision, loads_tiles, processors, scratch
from .pointwise import KINDS, activate
from .products import sum_splits
from .residual import MOST_TOKENS

_ROWS = MOST_TOKENS  # maximum rows of `stream`
_COLUMNS, _DEPTH = 16, 256  # tile of weights
_M, _N, _K = (tl.constexpr(size) for size in (_ROWS, _COLUMNS, _DEPTH))
_TILES = 264  # two programs on each processor of a large GPU
# With more columns programs run in several waves, and the tiles of a vocabulary are too shallow to
# prefetch: 8 rows of 256 by 151,936 columns take 60 us, the library 24 (one H200).
_COLUMNS_AT_ONCE = 8 * _TILES * _COLUMNS
_MOST_TOKENS = 64  # of `gate_up`
# Rows of a tile of each weight, depth a step, warps: the best of 49 cuts for the layers of a 7B on
# an H200 (67.2 us a layer; the library's product 74.9).
_LINES, _DEEP, _WARPS = 64, 64, 4
_L, _D = tl.constexpr(_LINES), tl.constexpr(_DEEP)


def streams(rows: int, weight: Tensor) -> bool:
    """Return whether `stream` is faster than the library for so many rows."""
    return rows <= _ROWS and weight.shape[0] <= _COLUMNS_AT_ONCE


def stream(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x W^T + bias, [..., N], for x [..., K] of at most _ROWS rows and weight
    [N, K]."""
    columns, depth = weight.shape
    rows = x.numel() // depth
    out = torch.empty_like(residual)
    tiles = triton.cdiv(columns, _COLUMNS)
    splits = max(1, min(8, _TILES // tiles, depth // 512))
    share = triton.cdiv(triton.cdiv(depth, _DEPTH), splits) * _DEPTH
    _stream[(tiles, splits)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        residual.contiguous(),
        out,
        *scratch(out, splits, tiles, tiles * splits * _ROWS * _COLUMNS),
        rows,
        columns,
        depth,
        share,
        BIAS=bias is not None,
        SPLITS=splits,
        EVEN=depth % _DEPTH == 0 and columns % _COLUMNS == 0,
        WIDE=input_precision(x),
        num_warps=2,
        num_stages=_stream_stages(weight),
    )
    return out


def _stream_stages(weight: Tensor) -> int:
    """Return five pipeline stages, or as many as fit."""
    tile = (_ROWS + _COLUMNS) * _DEPTH * weight.element_size()
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
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Programs: tiles of rows of the weight by splits of the depth, `share` each. The last split of
    a tile to finish adds bias and residual."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, _M)
    line = tile * _N + tl.arange(0, _N)
    real = row < rows
    total = tl.zeros([_M, _N], tl.float32)
    first, end = 0, depth
    if SPLITS > 1:
        first, end = split * share, tl.minimum(split * share + share, depth)
    for start in range(first, end, _K):
        at = start + tl.arange(0, _K)
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
    total, last = sum_splits(total, part_ptr, arrived_ptr, tile, _N, SPLITS)
    if last:
        if BIAS:
            total += tl.load(bias_ptr + line, mask=line < columns, other=0.0).to(tl.float32)[
                None, :
            ]
        total += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


def gates(tokens: int, weight: Tensor) -> bool:
    """Return whether `gate_up` supports this number of tokens and weight [2 lines, depth]. It was
    measured on Hopper in 16 bits only, and its descriptors need rows aligned to 16 bytes."""
    return (
        _ROWS < tokens <= _MOST_TOKENS
        and weight.element_size() == 2
        and loads_tiles(weight.device)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
    )


def gate_up(x: Tensor, weight: Tensor, *, activation: str) -> Tensor:
    """Return activation(x G^T) * (x U^T), [..., lines], for x [..., depth] of at most 64
    tokens and weight [2 lines, depth], G above U, both 16 bits."""
    lines, depth = len(weight) // 2, weight.shape[1]
    flat = x.reshape(-1, depth)
    tokens = max(16, triton.next_power_of_2(len(flat)))
    out = x.new_empty(*x.shape[:-1], lines)
    programs = triton.cdiv(lines, _LINES)
    _gate_up[(programs,)](
        TensorDescriptor.from_tensor(flat, [tokens, _DEEP]),
        TensorDescriptor.from_tensor(weight, [_LINES, _DEEP]),
        out,
        len(flat),
        KIND=KINDS[activation],
        LINES=lines,
        DEPTH=depth,
        TOKENS=tokens,
        STAGES=_gate_stages(programs, x.device),
        num_warps=_WARPS,
    )
    return out


def _gate_stages(programs: int, device: torch.device) -> int:
    """Return the most pipeline stages with which all programs of a processor are resident at once.
    A 7B has 296 programs, three a processor of an H200 (132 processors). An 8B has 192, two a
    processor; with norm and down product they take 88.9 us with 3 stages and 87.1 with 4."""
    return 4 if programs <= 2 * processors(device) else 3


@triton.jit(do_not_specialize=["count"])
def _gate_up(
    x,
    weight,
    out_ptr,
    count,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs: tiles of rows of G, with the same rows of U, for all tokens."""
    first = tl.program_id(0) * _L
    gates = tl.zeros([_L, TOKENS], tl.float32)
    ups = tl.zeros([_L, TOKENS], tl.float32)
    for start in tl.range(0, DEPTH, _D, num_stages=STAGES):
        w = weight.load([first, start])
        tokens = tl.trans(x.load([0, start]))
        gates = tl.dot(w, tokens, gates)
        # the last tile's gate rows may reach into the up rows; those are masked out at the store
        w = weight.load([first + LINES, start])
        ups = tl.dot(w, tokens, ups)
    line, token = first + tl.arange(0, _L), tl.arange(0, TOKENS)
    tl.store(
        out_ptr + token[None, :] * LINES + line[:, None],
        (activate(gates, KIND) * ups).to(out_ptr.dtype.element_ty),
        mask=(token < count)[None, :] & (line < LINES)[:, None],
    )
