"""Triton: logits, the product of the final norm's output and a head with int8 weights.

Tokens are rounded to 16 bits: whole numbers 256 high + low, both int8, with one scale a token. That
loses less than bfloat16, because the largest number of a token is some 30 times the usual one.
Tensor cores then multiply int8 by int8 twice, at twice the rate of bfloat16, and no weight is
converted. Sums are exact, so a token's logits have the same bits at every width of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import quantised_kernels as kernels
from .launch import SPARE, after, card, fitting, overlap
from .quantised import Quantised
from .residual import magnitude

_STEPS = 127 * 256  # the largest of a token's whole numbers
_HIGHEST = tl.constexpr(float(_STEPS))
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # the least scale, see quantised.py
# Sums of this and a float32 below 2^22 are whole numbers, rounded to the nearest, ties to even.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


class Tiling(NamedTuple):
    """`lines` of the weight and `tokens` a program; `deep` of the depth a step."""

    lines: int
    tokens: int
    deep: int
    warps: int
    stages: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a program."""
        loop = (self.lines + 2 * self.tokens) * self.deep * self.stages
        return max(loop, 4 * self.lines * self.tokens) + SPARE

    def smaller(self) -> Iterator[Tiling]:
        """Yield this tiling, then tilings that take less and less shared memory."""
        tiling = self
        while True:
            yield tiling
            if tiling.stages > 2:
                tiling = tiling._replace(stages=tiling.stages - 1)
            elif tiling.deep > 32:
                tiling = tiling._replace(deep=tiling.deep // 2)
            elif tiling.tokens > 16:
                tiling = tiling._replace(tokens=tiling.tokens // 2)
            else:
                return


def tiling_for(count: int, device: torch.device) -> Tiling:
    """Return the tiling for so many tokens that fits the device. All have the same results."""
    tokens = max(16, triton.next_power_of_2(min(count, 128)))
    wanted = Tiling(128, tokens, 128, 8, 4) if tokens > 32 else Tiling(64, tokens, 128, 4, 4)
    return fitting(wanted.smaller(), lambda tiling: tiling.shared, card(device).shared)


def logits(
    x: Tensor, weight: Quantised, bias: Tensor | None, *, tiling: Tiling | None = None
) -> Tensor:
    """Return x W^T + bias, [..., N] in the dtype of x [..., K], for an int8 weight [N, K]."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    (count, size), lines = flat.shape, len(weight)
    tiling = tiling or tiling_for(count, x.device)
    numbers = torch.empty(count, 2, size, dtype=torch.int8, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    at_once = triton.next_power_of_2(size)
    split_kernel[(count,)](
        flat,
        numbers,
        scales,
        size,
        BLOCK=at_once,
        num_warps=min(16, max(1, at_once // 512)),
        **overlap(True, x.device),
    )
    out = x.new_empty(*x.shape[:-1], lines)
    options = overlap(True, x.device)
    grid = triton.cdiv(count, tiling.tokens), triton.cdiv(lines, tiling.lines)
    head_kernel[grid](
        numbers,
        weight.values,
        weight.scales,
        scales,
        out if bias is None else bias,
        out,
        count,
        BIAS=bias is not None,
        LINES=lines,
        DEPTH=size,
        L=tiling.lines,
        T=tiling.tokens,
        DEEP=tiling.deep,
        STAGES=tiling.stages,
        PREFETCH=options["EARLY"] and size >= kernels.PREFETCHED and size % 16 == 0,
        num_warps=tiling.warps,
        **options,
    )
    return out


@triton.jit
def split_kernel(x_ptr, out_ptr, scale_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Write a token [size] as whole numbers 256 high + low: [2, size] int8, the high parts first.
    Its scale is its largest magnitude over 127 * 256."""
    after(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(magnitude(value), 0).to(tl.float32, bitcast=True), _HIGHEST)
    scale = tl.where(scale < _TINY, 1.0, scale)
    number = value * tl.div_rn(1.0, scale)
    number = ((number + _ROUNDING) - _ROUNDING).to(tl.int32)
    high = (number + 128) >> 8
    out_ptr += row * 2 * size + at
    tl.store(out_ptr, high.to(tl.int8), mask=inside)
    tl.store(out_ptr + size, (number - (high << 8)).to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["count"])
def head_kernel(
    x_ptr,
    weight_ptr,
    weight_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    count,
    BIAS: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs: tiles of T tokens by tiles of L rows of the weight. Each multiplies the rows by the
    high and by the low parts of the tokens, and adds both with their scales."""
    first = tl.program_id(1) * L
    token, line = tl.program_id(0) * T + tl.arange(0, T), first + tl.arange(0, L)
    weight_scale = tl.load(
        weight_scale_ptr + line, mask=line < LINES, other=0.0, cache_modifier=".cg"
    )
    if PREFETCH:
        kernels.prefetch_rows(weight_ptr, first, LINES, 0, L, DEPTH)
    after(EARLY)
    scale = tl.load(scale_ptr + token, mask=token < count, other=0.0)
    place = tl.arange(0, DEEP)
    spot = x_ptr + token.to(tl.int64)[:, None] * 2 * DEPTH + place[None, :]
    weight_ptr += line.to(tl.int64)[:, None] * DEPTH + place[None, :]
    high, low = tl.zeros([L, T], tl.int32), tl.zeros([L, T], tl.int32)
    for start in tl.range(0, DEPTH, DEEP, num_stages=STAGES):
        real, there = (token < count)[:, None], (line < LINES)[:, None]
        if DEPTH % DEEP != 0:
            deep = (start + place < DEPTH)[None, :]
            real, there = real & deep, there & deep
        weight = tl.load(weight_ptr + start, mask=there, other=0)
        x = tl.trans(tl.load(spot + start, mask=real, other=0))
        high = tl.dot(weight, x, high, out_dtype=tl.int32)
        x = tl.trans(tl.load(spot + DEPTH + start, mask=real, other=0))
        low = tl.dot(weight, x, low, out_dtype=tl.int32)
    total = (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * scale[None, :]
    total *= weight_scale[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + line, mask=line < LINES, other=0.0)
        total += bias.to(tl.float32)[:, None]
    inside = (token < count)[None, :] & (line < LINES)[:, None]
    out_ptr += token.to(tl.int64)[None, :] * LINES + line[:, None]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=inside)
