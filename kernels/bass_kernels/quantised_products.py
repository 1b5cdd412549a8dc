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

from . import pointwise, wide_products
from . import quantised_kernels as kernels
from .launch import SPARE, card, fitting, overlap, processors, scratch
from .peers import Peers
from .pointwise import KINDS
from .quantised import Quantised
from .residual import Stream

MOST_TOKENS = 16  # of `project`, `add` and `gate_up`
_DEEP = 8192  # depth from which a product is split in four or five; that of down products
_LINES = 64  # the rows of a tile of the weight, all of them or the first ones


class Tiling(NamedTuple):
    """`lines` of each weight and `tokens` a program; the depth in `splits`, `deep` of it a step."""

    lines: int
    tokens: int
    splits: int
    deep: int
    warps: int
    stages: int = 4

    @property
    def block(self) -> int:
        """Rows of a tile of the weight, of which `lines` are used."""
        return max(_LINES, triton.next_power_of_2(self.lines))

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


def tiling_for(count: int, weight: Quantised, x: Tensor, *, pair: bool = False) -> Tiling:
    """Return the tiling for `count` tokens x, or the nearest that fits the device. `pair`: the
    weight is gate and up."""

    return fitting(
        _measured(count, weight, x, pair=pair).smaller(),
        lambda tiling: _shared(tiling, x, pair=pair),
        card(x.device).shared,
    )


def _shared(tiling: Tiling, x: Tensor, *, pair: bool = False) -> int:
    """Return the bytes of shared memory of a program."""
    lines, tokens = tiling.block, tiling.tokens
    step = (2 if pair else 1) * lines + tokens * x.element_size()
    # beside the stages, the factors of one step as tensor cores read them
    loop = (step * tiling.stages + 2 * (lines + tokens)) * tiling.deep
    return max(loop, 4 * lines * tokens) + SPARE


def tiles_at_once(weight: Quantised, x: Tensor) -> tuple[int, int]:
    """Return the tiles of `add`, and the bytes of shared memory of a program of four warps."""
    tiling = tiling_for(MOST_TOKENS, weight, x)
    return triton.cdiv(len(weight), tiling.lines), _shared(tiling, x)


def _measured(count: int, weight: Quantised, x: Tensor, *, pair: bool) -> Tiling:
    """Return the fastest tiling on an H100, by decoding passes over the layers of a 7B. Programs
    have equally many rows of the weight, and all are resident at once: of gate and up three a
    processor, of others up to four, whose depth is split."""
    lines, depth = len(weight) // (2 if pair else 1), weight.shape[1]
    if count > MOST_TOKENS:
        return _measured_beyond(min(128, room(count)), lines, depth, x, pair=pair)
    programs = processors(x.device) * (3 if pair else 1)
    each = triton.cdiv(lines, programs * triton.cdiv(lines, programs * _LINES))
    if pair:
        return Tiling(each, room(count), 1, 128, 4, 3)
    if weight.layout == "fp8" and depth >= 2048:
        # One H100, a layer of a 7B with 8 tokens: 108.6 us with the tilings below, 106.6 with five
        # splits of down products in three programs a processor, 106.2 with wider tiles of output
        # products too. Matrices with fewer or more rows were not measured.
        rows, splits = (2 * each, 4) if depth < _DEEP else (triton.cdiv(5 * lines, 3 * programs), 5)
        if _LINES // 2 < rows <= _LINES:
            return Tiling(rows, room(count), splits, 128, 4, 5)
    # two splits and seven stages: 94 us a layer, with four and four 96
    if weight.layout == "fp8" and depth < _DEEP:
        return Tiling(each, room(count), max(1, min(2, depth // 512)), 128, 4, 7)
    return Tiling(each, room(count), max(1, min(4, depth // 512)), 128, 4)


def _measured_beyond(tokens: int, lines: int, depth: int, x: Tensor, *, pair: bool) -> Tiling:
    """Return the tiling for tiles of more than MOST_TOKENS tokens. With 64 tokens in e4m3, whole
    tiles of 64 rows and two splits for all took 110 us a layer, the tilings here 97."""
    programs = processors(x.device)
    if x.element_size() == 1 and tokens <= 64:
        if pair:
            waves = triton.cdiv(lines, programs * _LINES)
            return Tiling(
                triton.cdiv(lines, programs * waves), tokens, 1, 128, 4, max(3, 6 - waves)
            )
        each = triton.cdiv(4 * lines, 2 * programs)
        if depth >= _DEEP and each <= _LINES:
            return Tiling(each, tokens, 4, 128, 4, 6)
    tiles = triton.cdiv(lines, _LINES)
    splits = 1 if pair else max(1, min(2, 4 * programs // tiles, depth // 512))
    return Tiling(_LINES, tokens, splits, 128, 4, 6 if tokens <= 64 else 4)


def room(count: int) -> int:
    """Return the size of a tile that holds `count` tokens."""
    return max(16, triton.next_power_of_2(count))


def project(
    stream: Stream,
    weight: Quantised,
    bias: Tensor | None,
    *,
    eps: float,
    tiling: Tiling | None = None,
    early: bool = False,
) -> Tensor:
    """Do products.project. Without stream.largest, tokens are rounded by a launch of their own."""
    count, lines, most = len(stream.x), len(weight), stream.squares.shape[1]
    x, scales, ready = _tokens(stream.x, weight, stream.largest, early)
    tiling = (tiling or tiling_for(count, weight, x))._replace(tokens=most)
    out = stream.x.new_empty(count, lines)
    tiles = triton.cdiv(lines, tiling.lines)
    kernels.linear_kernel[(1, tiles, tiling.splits)](
        x,
        _bits(weight, x),
        weight.scales,
        scales,
        stream.squares,
        out if bias is None else bias,
        out,
        out,
        *_scratch(out, tiling, tiles),
        count,
        eps,
        TILES=len(stream.squares),
        LARGEST=1 if stream.largest is None else len(stream.largest),
        BIAS=bias is not None,
        ADD=False,
        READY=ready,
        **_shape(weight, x, tiling, lines, once=True, early=early),
    )
    return out


def add(
    x: Tensor,
    weight: Quantised,
    stream: Stream,
    norm: Tensor,
    *,
    peaks: Tensor | None = None,
    largest: Tensor | None = None,
    peers: Peers | None = None,
    tiling: Tiling | None = None,
    early: bool = False,
) -> Stream:
    """Do products.add.

    Args:
        peaks: [most] int32, for fp8: the largest magnitude of each token of x, as bits of float32.
            Without it, tokens are rounded by a launch of their own.
        largest: [most] int32, raised to the largest magnitudes of the result's x.
    """
    count, lines, most = len(x), len(weight), stream.squares.shape[1]
    x, scales, ready = _tokens(x, weight, peaks, early)
    tiling = (tiling or tiling_for(count, weight, x))._replace(tokens=most)
    tiles, like = triton.cdiv(lines, tiling.lines), stream.x
    found = None if largest is None else largest[None]
    out = Stream.empty(count, lines, tiles, like, most=most, largest=found)
    kernels.add_kernel[(1, tiles, tiling.splits)](
        x,
        _bits(weight, x),
        weight.scales,
        scales,
        norm,
        stream.residual,
        *out[:3],
        x if largest is None else largest,
        *_scratch(like, tiling, tiles),
        *((like, like, 0, 0) if peers is None else peers.arguments()),
        count,
        RANK=0 if peers is None else peers.rank,
        RANKS=1 if peers is None else peers.ranks,
        PEAKS=largest is not None,
        READY=ready,
        **_shape(weight, x, tiling, lines, once=True, early=early),
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
    """Do products.gate_up. Without stream.largest, tokens are rounded by a launch of their own.

    Args:
        peaks: [most] int32, raised to the largest magnitude of each token of the result.
    """
    count, lines, most = len(stream.x), len(weight) // 2, stream.squares.shape[1]
    x, scales, ready = _tokens(stream.x, weight, stream.largest, early)
    tiling = (tiling or tiling_for(count, weight, x, pair=True))._replace(tokens=most)
    out = stream.x.new_empty(count, lines)
    kernels.gate_up_kernel[(1, triton.cdiv(lines, tiling.lines))](
        x,
        _bits(weight, x),
        weight.scales,
        scales,
        stream.squares,
        out,
        x if peaks is None else peaks,
        count,
        eps,
        TILES=len(stream.squares),
        LARGEST=1 if stream.largest is None else len(stream.largest),
        PEAKS=peaks is not None,
        READY=ready,
        ACTIVATION=KINDS[activation],
        **_shape(weight, x, tiling, lines, once=True, early=early, pair=True),
    )
    return out


def _tokens(
    x: Tensor, weight: Quantised, peaks: Tensor | None, early: bool
) -> tuple[Tensor, Tensor, bool]:
    """Return tokens as a kernel reads them, their scales or largest magnitudes, and whether they
    are ready, without rounding."""
    if weight.layout == "int8":
        return x, x, True
    if peaks is not None:
        return x, peaks, False
    rounded, scales = factor(x, weight, early=early)
    assert scales is not None
    return rounded, scales, True


def linear(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return x W^T + bias + residual, [..., N], for x [..., K]."""
    rounded, scales = factor(x, weight, early=True, block=_block(x, weight))
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
    block = _block(residual, weight)
    rounded, scales = factor(residual, weight, norm, eps=eps, kind=kind, early=True, block=block)
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
    block = _block(residual, weight)
    rounded, scales = factor(residual, weight, norm, eps=eps, kind=kind, early=True, block=block)
    return gated(rounded, scales, weight, like=residual, activation=activation)


def feed_forward(
    residual: Tensor,
    norm: tuple[Tensor, Tensor | None] | None,
    up: Quantised,
    down: Quantised,
    bias: Tensor | None,
    *,
    eps: float,
    kind: str,
    activation: str,
) -> Tensor:
    """Return the residual stream [..., K] plus its norm, gated product, down product and bias. If
    the library multiplies, the gated activation is rounded in the launch that computes it."""
    block = _block(residual, up)
    x, scales = factor(residual, up, norm, eps=eps, kind=kind, early=True, block=block)
    library = wide_products.supports(residual, up) and not wide_products.gates()
    if library and down.layout == "fp8":
        both = wide_products.linear(x, _there(scales), up, None, count=_count(residual))
        x, scales = gated_factor(both, activation, block=block)
        return product(x, scales, down, bias, residual, like=residual)
    inner = gated(x, scales, up, like=residual, activation=activation)
    return linear(inner, down, bias, residual)


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
    """Return the product of tokens from `factor`: [..., N] in the shape and dtype of `like` [...,
    any].

    Args:
        x, scales: [at least M, K] and [at least M], for the M tokens of `like`.
    """
    count, lines = _count(like), len(weight)
    if tiling is None and wide_products.supports(like, weight):
        scales = _there(scales)
        if residual is not None:
            return wide_products.linear_add(x, scales, weight, bias, residual)
        found = wide_products.linear(x, scales, weight, bias, count=count)
        return found.view(*like.shape[:-1], lines)
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
        LARGEST=1,
        BIAS=bias is not None,
        ADD=residual is not None,
        READY=True,
        **_shape(weight, x, tiling, lines, once=False, early=True),
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
    """Return activation(x G^T) * (x U^T) of tokens from `factor`: [..., lines] in the shape and
    dtype of `like` [..., any]. `x`, `scales`: see `product`."""
    count, lines = _count(like), len(weight) // 2
    if tiling is None and wide_products.supports(like, weight):
        scales = _there(scales)
        if wide_products.gates():
            found = wide_products.gate_up(x, scales, weight, count=count, activation=activation)
        else:
            both = wide_products.linear(x, scales, weight, None, count=count)
            found = pointwise.activation(both, activation, gated=True)
        return found.view(*like.shape[:-1], lines)
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
        LARGEST=1,
        PEAKS=False,
        READY=True,
        ACTIVATION=KINDS[activation],
        **_shape(weight, x, tiling, lines, once=False, early=True, pair=True),
    )
    return out


def _block(x: Tensor, weight: Quantised) -> int:
    """Return the number of tokens whose multiples the product of x takes fastest."""
    return wide_products.BLOCK if wide_products.supports(x, weight) else 1


def _there(scales: Tensor | None) -> Tensor:
    assert scales is not None  # of fp8
    return scales


def _count(x: Tensor) -> int:
    """Return the number of tokens of x [..., any]."""
    return x.shape[:-1].numel()


def factor(
    x: Tensor,
    weight: Quantised,
    norm: tuple[Tensor, Tensor | None] | None = None,
    *,
    eps: float = 0.0,
    kind: str = "rms",
    early: bool = False,
    block: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Return x [..., K], or its norm, as the product's factor [M, K], and the scales of its tokens
    [M] float32 for fp8. With `block`, M is rounded up to a multiple of it, for fp8; what is beyond
    x's tokens is not set."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    round_tokens, (count, size) = weight.layout == "fp8", flat.shape
    if norm is None and not round_tokens:
        return flat, None
    dtype = (torch.float8_e4m3fn if _native(x) else torch.float16) if round_tokens else x.dtype
    padded = triton.cdiv(count, block) * block if round_tokens else count
    out = torch.empty(padded, size, dtype=dtype, device=x.device)
    scales = torch.empty(padded if round_tokens else 1, dtype=torch.float32, device=x.device)
    weights = (flat, None) if norm is None else norm
    at_once = triton.next_power_of_2(size)
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
        BLOCK=at_once,
        num_warps=min(16, max(1, at_once // 512)),
        **overlap(early, x.device),
    )
    return out, scales if round_tokens else None


def gated_factor(both: Tensor, activation: str, *, block: int = 1) -> tuple[Tensor, Tensor]:
    """Return activation(gate) * up of tokens [M, 2 K], gates first, as `factor` does for fp8."""
    count, size = len(both), both.shape[1] // 2
    dtype = torch.float8_e4m3fn if _native(both) else torch.float16
    padded = triton.cdiv(count, block) * block
    out = torch.empty(padded, size, dtype=dtype, device=both.device)
    scales = torch.empty(padded, dtype=torch.float32, device=both.device)
    # few steps, because each waits for its loads, and two programs a processor
    at_once = min(8192, triton.next_power_of_2(size))
    kernels.gated_factor_kernel[(count,)](
        both,
        out,
        scales,
        size,
        ACTIVATION=KINDS[activation],
        NATIVE=_native(both),
        BLOCK=at_once,
        num_warps=max(1, at_once // 512),
    )
    return out, scales


def _native(x: Tensor) -> bool:
    """Return whether the device has e4m3. The interpreter's conversion to it does not round to the
    nearest."""
    return x.device.type != "cpu" and card(x.device).capability >= (8, 9)


def as_factor(weight: Quantised, x: Tensor) -> tuple[Tensor, int]:
    """Return the weight's values as the kernels take them, and how they are multiplied with
    tokens x."""
    if weight.layout == "int8":
        return weight.values, kernels.INT8.value
    if _native(x):
        return weight.values, kernels.E4M3.value
    return weight.values.view(torch.uint8), kernels.ROUNDED.value


def _bits(weight: Quantised, x: Tensor) -> Tensor:
    return as_factor(weight, x)[0]


def _scratch(like: Tensor, tiling: Tiling, tiles: int) -> tuple[Tensor, ...]:
    """Return buffers for the splits of all tiles: their sums and an arrival counter."""
    size = tiles * tiling.splits * tiling.block * tiling.tokens
    return scratch(like, tiling.splits, tiles, size)


def _shape(
    weight: Quantised,
    x: Tensor,
    tiling: Tiling,
    lines: int,
    *,
    once: bool,
    early: bool = False,
    pair: bool = False,
) -> dict[str, Any]:
    """Return the launch options of a product. `once`: weights are read by one program and leave
    the caches first."""
    depth, options = weight.shape[1], overlap(early, x.device)
    share = triton.cdiv(triton.cdiv(depth, tiling.deep), tiling.splits) * tiling.deep
    last = depth - share * (tiling.splits - 1)
    shape = {
        "LINES": lines,
        "DEPTH": depth,
        "EACH": tiling.lines,
        "L": tiling.block,
        "T": tiling.tokens,
        "SPLITS": tiling.splits,
        "DEEP": tiling.deep,
        "STAGES": tiling.stages,
        "HOW": as_factor(weight, x)[1],
        "WIDE": "ieee" if x.dtype == torch.float32 else "tf32",
        "ONCE": once,
        # before the kernel ahead is done; launches overlap on devices with bulk prefetches only
        "PREFETCH": options["EARLY"] and last >= kernels.PREFETCHED and depth % 16 == 0,
        "num_warps": tiling.warps,
        **options,
    }
    if pair:
        del shape["SPLITS"]
    return shape
