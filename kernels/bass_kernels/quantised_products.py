"""Triton: products with 8-bit weights (quantised.py). `project`, `add` and `gate_up` are those of
products.py for up to `MOST_TOKENS` tokens. `linear` and `norm_up` take any number of tokens.

fp8: tokens are rounded to e4m3 too (W8A8). A stream's are rounded where they are read, with the
largest magnitudes that their producers found, others by a launch of their own (`factor`). GPUs
without e4m3 convert both factors to float16. int8: weights become the tokens' dtype (W8A16).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import quantised_kernels as kernels
from .launch import SPARE, card, fitting, overlap, processors, scratch
from .pointwise import KINDS
from .quantised import Quantised
from .residual import Stream

MOST_TOKENS = 64  # of `project`, `add` and `gate_up`
_LEAST_TOKENS = 16  # the smallest tile of tokens


class Tiling(NamedTuple):
    """`lines` of each weight and `tokens` a program; the depth in `splits`, `deep` of it a step."""

    lines: int
    tokens: int
    splits: int
    deep: int
    warps: int
    stages: int = 4

    def smaller(self) -> Iterator[Tiling]:
        """Yield this tiling, then tilings that take less and less shared memory."""
        tiling = self
        while True:
            yield tiling
            if tiling.stages > 2:
                tiling = tiling._replace(stages=tiling.stages - 1)
            elif tiling.deep > 32:
                tiling = tiling._replace(deep=tiling.deep // 2)
            else:
                return


def tiling_for(
    count: int, weight: Quantised, x: Tensor, *, pair: bool = False, most: int = 128
) -> Tiling:
    """Return the tiling for `count` tokens x, or the nearest that fits the device.

    Args:
        pair: the weight is gate and up.
        most: maximum tokens a program.
    """
    tokens = min(most, room(count))
    lines, splits = 64, 1
    if not pair:
        tiles = triton.cdiv(len(weight), lines)
        splits = max(1, min(4, 4 * processors(x.device) // tiles, weight.shape[1] // 512))
    wanted = Tiling(lines, tokens, splits, 128, 4, 4)

    def needs(tiling: Tiling) -> int:
        line = (2 if pair else 1) * tiling.lines + tiling.tokens * x.element_size()
        # the factors of one step in the form that tensor cores read them
        step = tiling.deep * 2 * (tiling.lines + tiling.tokens)
        return max(
            line * tiling.deep * tiling.stages + step + SPARE,
            4 * tiling.lines * tiling.tokens + SPARE,
        )

    return fitting(wanted.smaller(), needs, card(x.device).shared)


def room(count: int) -> int:
    """Return the size of a tile that holds `count` tokens."""
    return max(_LEAST_TOKENS, triton.next_power_of_2(count))


def project(
    stream: Stream,
    weight: Quantised,
    bias: Tensor | None,
    *,
    eps: float,
    tiling: Tiling | None = None,
    early: bool = False,
) -> Tensor:
    """Do products.project."""
    x, lines, most = stream.x, len(weight), stream.squares.shape[1]
    tiling = (tiling or tiling_for(len(x), weight, x))._replace(tokens=most)
    out = x.new_empty(len(x), lines)
    tiles = triton.cdiv(lines, tiling.lines)
    kernels.linear_kernel[(1, tiles, tiling.splits)](
        x,
        _bits(weight, x),
        weight.scales,
        _peaks(weight, stream.largest, x),
        stream.squares,
        x if bias is None else bias,
        x,
        out,
        *_scratch(x, tiling, tiles),
        len(x),
        eps,
        TILES=len(stream.squares),
        BIAS=bias is not None,
        ADD=False,
        READY=False,
        **_shape(weight, x, tiling, lines, early=early),
    )
    return out


def add(
    x: Tensor,
    weight: Quantised,
    stream: Stream,
    norm: Tensor,
    *,
    peaks: Tensor | None = None,
    tiling: Tiling | None = None,
    early: bool = False,
) -> Stream:
    """Do products.add.

    Args:
        peaks: [most] int32, for fp8: the largest magnitude of each token of x, as bits of float32.
            Without it x is rounded by a launch of its own.
    """
    scales = None
    if weight.layout == "fp8" and peaks is None:
        x, scales = factor(x, weight)
    count, lines, most = len(x), len(weight), stream.squares.shape[1]
    tiling = (tiling or tiling_for(count, weight, x))._replace(tokens=most)
    tiles, like = triton.cdiv(lines, tiling.lines), stream.x
    out = Stream.empty(count, lines, tiles, like, most=most, largest=stream.largest is not None)
    kernels.add_kernel[(1, tiles, tiling.splits)](
        x,
        _bits(weight, x),
        weight.scales,
        _peaks(weight, peaks if scales is None else scales, x),
        norm,
        stream.residual,
        *out.stores,
        *_scratch(like, tiling, tiles),
        count,
        LARGEST=out.largest is not None,
        READY=scales is not None,
        **_shape(weight, x, tiling, lines, early=early),
    )
    return out


def gate_up(
    stream: Stream,
    weight: Quantised,
    *,
    eps: float,
    activation: str,
    peaks: Tensor | None = None,
    tiling: Tiling | None = None,
    early: bool = False,
) -> Tensor:
    """Do products.gate_up.

    Args:
        peaks: [most] int32, raised to the largest magnitude of each token of the result.
    """
    x, lines, most = stream.x, len(weight) // 2, stream.squares.shape[1]
    tiling = (tiling or tiling_for(len(x), weight, x, pair=True))._replace(tokens=most)
    out = x.new_empty(len(x), lines)
    kernels.gate_up_kernel[(1, triton.cdiv(lines, tiling.lines))](
        x,
        _bits(weight, x),
        weight.scales,
        _peaks(weight, stream.largest, x),
        stream.squares,
        out,
        x if peaks is None else peaks,
        len(x),
        eps,
        TILES=len(stream.squares),
        PEAKS=peaks is not None,
        READY=False,
        ACTIVATION=KINDS[activation],
        **_shape(weight, x, tiling, lines, early=early, pair=True),
    )
    return out


def _peaks(weight: Quantised, peaks: Tensor | None, x: Tensor) -> Tensor:
    """Return the largest magnitudes for fp8. int8 needs none."""
    assert (peaks is not None) or weight.layout == "int8"
    return x if peaks is None else peaks


def linear(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return x W^T + bias + residual, [..., N], for x [..., K]."""
    rounded, scales = factor(x, weight)
    return product(rounded, scales, weight, bias, residual, like=x, tiling=tiling)


def norm_linear(
    residual: Tensor,
    norm: tuple[Tensor, Tensor | None] | None,
    weight: Quantised,
    bias: Tensor | None,
    *,
    eps: float,
    kind: str,
) -> Tensor:
    """Return the norm of the residual stream [..., K] (if there is one) times W^T, and bias: [...,
    N]."""
    rounded, scales = factor(residual, weight, norm, eps=eps, kind=kind)
    return product(rounded, scales, weight, bias, None, like=residual)


def norm_up(
    residual: Tensor,
    norm: tuple[Tensor, Tensor | None] | None,
    weight: Quantised,
    *,
    eps: float,
    kind: str,
    activation: str,
) -> Tensor:
    """Return the gated product of the norm of the residual stream [..., K], if there is one: [...,
    inner]."""
    rounded, scales = factor(residual, weight, norm, eps=eps, kind=kind)
    return gated(rounded, scales, weight, like=residual, activation=activation)


def product(
    x: Tensor,
    scales: Tensor | None,
    weight: Quantised,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    like: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return the product of tokens [M, K] from `factor`: [..., N] in the shape and dtype of `like`
    [..., any]."""
    count, lines = len(x), len(weight)
    tiling = tiling or tiling_for(count, weight, x)
    out = like.new_empty(*like.shape[:-1], lines)
    tiles, parts = triton.cdiv(lines, tiling.lines), triton.cdiv(count, tiling.tokens)
    kernels.linear_kernel[(parts, tiles, tiling.splits)](
        x,
        _bits(weight, x),
        weight.scales,
        x if scales is None else scales,
        x,
        x if bias is None else bias,
        x if residual is None else residual.contiguous(),
        out,
        *_scratch(like, tiling, tiles * parts),
        count,
        0.0,
        TILES=0,
        BIAS=bias is not None,
        ADD=residual is not None,
        READY=True,
        **_shape(weight, x, tiling, lines, early=False),
    )
    return out


def gated(
    x: Tensor,
    scales: Tensor | None,
    weight: Quantised,
    *,
    like: Tensor,
    activation: str,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return activation(x G^T) * (x U^T) of tokens [M, K] from `factor`: [..., lines] in the shape
    and dtype of `like` [..., any]."""
    count, lines = len(x), len(weight) // 2
    tiling = tiling or tiling_for(count, weight, x, pair=True)
    out = like.new_empty(*like.shape[:-1], lines)
    tiles, parts = triton.cdiv(lines, tiling.lines), triton.cdiv(count, tiling.tokens)
    kernels.gate_up_kernel[(parts, tiles)](
        x,
        _bits(weight, x),
        weight.scales,
        x if scales is None else scales,
        x,
        out,
        x,
        count,
        0.0,
        TILES=0,
        PEAKS=False,
        READY=True,
        ACTIVATION=KINDS[activation],
        **_shape(weight, x, tiling, lines, early=False, pair=True),
    )
    return out


def factor(
    x: Tensor,
    weight: Quantised,
    norm: tuple[Tensor, Tensor | None] | None = None,
    *,
    eps: float = 0.0,
    kind: str = "rms",
) -> tuple[Tensor, Tensor | None]:
    """Return x [..., K], or its norm, as the product's factor [M, K], and the scales of its tokens
    [M] float32 for fp8."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    round_tokens, (count, size) = weight.layout == "fp8", flat.shape
    if norm is None and not round_tokens:
        return flat, None
    dtype = (torch.float8_e4m3fn if _native(x) else torch.float16) if round_tokens else x.dtype
    out = torch.empty(flat.shape, dtype=dtype, device=x.device)
    scales = torch.empty(count if round_tokens else 1, dtype=torch.float32, device=x.device)
    weights = (flat, None) if norm is None else norm
    block = triton.next_power_of_2(size)
    kernels.factor_kernel[(count,)](
        flat,
        weights[0],
        weights[0] if weights[1] is None else weights[1],
        out,
        scales,
        eps,
        size,
        NORM=norm is not None,
        LAYER=kind == "layer",
        BIAS=weights[1] is not None,
        ROUND=round_tokens,
        NATIVE=_native(x),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out, scales if round_tokens else None


def _native(x: Tensor) -> bool:
    """Return whether the device has e4m3. The interpreter's conversion to it does not round to the
    nearest."""
    return x.device.type != "cpu" and card(x.device).capability >= (8, 9)


def _bits(weight: Quantised, x: Tensor) -> Tensor:
    """Return the weight's values as the kernels take them."""
    if weight.layout == "int8" or _native(x):
        return weight.values
    return weight.values.view(torch.uint8)


def _scratch(like: Tensor, tiling: Tiling, tiles: int) -> tuple[Tensor, ...]:
    """Return buffers for the splits of all tiles: their sums and an arrival counter."""
    size = tiles * tiling.splits * tiling.lines * tiling.tokens
    return scratch(like, tiling.splits, tiles, size)


def _shape(
    weight: Quantised, x: Tensor, tiling: Tiling, lines: int, *, early: bool, pair: bool = False
) -> dict[str, Any]:
    how = (
        kernels.INT8 if weight.layout == "int8" else kernels.E4M3 if _native(x) else kernels.ROUNDED
    )
    shape = {
        "LINES": lines,
        "DEPTH": weight.shape[1],
        "L": tiling.lines,
        "T": tiling.tokens,
        "SPLITS": tiling.splits,
        "DEEP": tiling.deep,
        "STAGES": tiling.stages,
        "HOW": how.value,
        "WIDE": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiling.warps,
        **overlap(early, x.device),
    }
    if pair:
        del shape["SPLITS"]
    return shape
