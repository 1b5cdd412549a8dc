"""Causal attention of many tokens of one prompt over its keys, for passes over a long prompt: a
Triton kernel on Hopper, torch's own flash attention elsewhere.

Tensor descriptors load blocks of keys, with zeros beyond the prompt. On an H200, 8,192 tokens at
the end of 8,192 / 32,768: 465 / 589 TFLOP/s; torch 248 / 328. Rows with private keys, and tiles of
several prompts: ragged.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import card

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

_LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """Queries of one head a program, keys a step, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# By head size, up to 64 and up to 128: the best of nine tiles on an H200. 8,192 queries on 8,192
# keys: 484 TFLOP/s for heads of 64 (torch's flash attention 269), 465 for heads of 128 (248).
_TILES = {64: Tile(64, 128, 4, 3), 128: Tile(128, 128, 8, 3)}
_LARGEST = 256  # largest head size of torch's flash attention


@functools.cache
def suits(dtype: torch.dtype, size: int, device: torch.device) -> bool:
    """Return whether `attention` supports heads of this size: 16-bit dtypes only, on a device that
    has the kernel or torch's flash attention."""
    if dtype.itemsize != 2 or size % 8:
        return False
    return _has_kernel(size, device) or (device.type == "cuda" and _has_flash(size, device))


def _has_kernel(size: int, device: torch.device) -> bool:
    here = card(device).capability[0] == 9 and TensorDescriptor is not None
    return here and size <= max(_TILES)


def _has_flash(size: int, device: torch.device) -> bool:
    capable = torch.cuda.get_device_capability(device)[0] >= 8
    return torch.backends.cuda.is_flash_attention_available() and capable and size <= _LARGEST


def attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, scale: float, tile: Tile | None = None
) -> None:
    """Write causal attention to `out`.

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
    tile = tile or _TILES[64 if size <= 64 else 128]
    wide, tiles = max(16, triton.next_power_of_2(size)), triton.cdiv(count, tile.queries)
    stored = (
        TensorDescriptor(it, list(it.shape), list(it.stride()), [1, tile.keys, wide])
        for it in (keys, values)
    )
    _attend[(tiles * heads,)](
        q,
        *stored,
        out,
        scale * _LOG2_E,
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
def _fold(q, keys, values, seen, peak, mass, total, scale):
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
def _attend(
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
        peak, mass, total = _fold(q, k, v, None, peak, mass, total, scale)
    for block in range(whole, tl.cdiv(tl.minimum(first + BLOCK_M, length), BLOCK_N)):
        k = keys.load([kv, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D])
        v = values.load([kv, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D])
        seen = (block * BLOCK_N + n)[None, :] <= (query + before)[:, None]
        peak, mass, total = _fold(q, k, v, seen, peak, mass, total, scale)
    tl.store(out_ptr + at, (total / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real)
