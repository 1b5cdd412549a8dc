"""Triton: mixtures of experts. Definitions: experts.py.

A pass makes six launches: the two of the router (router_kernels.py); the pairs of a token and one
of its experts, sorted by expert; the products of each expert's pairs with `up` and `down`; and each
token's weighted sum. All that depends on the tokens is read on the device, so a captured pass
serves any choice. Launches after the first begin early (launch.overlap). Weights are the left
factor, as in quantised_kernels.py; for fp8 a launch more rounds tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import quantised_products
from .experts import Clamp, Maps, Shared
from .grouped import Grouped
from .launch import after, card, input_precision, overlap, pipeline_that_fits
from .pointwise import KINDS, activate
from .quantised import Quantised
from .quantised_kernels import E4M3, PLAIN, ROUNDED, dot, round_e4m3, token_scale
from .residual import Stream, magnitude

_PAIRS = 1024  # pairs that a program of `_sort` reads at once
_SUMMED = 1024  # columns of a program that sums the outputs of experts


class Mixture(NamedTuple):
    """The number of experts, and their gated unit: see experts.mix_experts."""

    experts: int
    activation: str
    clamp: Clamp | None


class _Factor(NamedTuple):
    """A weight as the kernels read it: its values, its scales, and how it is multiplied."""

    values: Tensor
    scales: Tensor
    how: int

    @classmethod
    def of(cls, weight: Tensor | Quantised, x: Tensor) -> _Factor:
        if isinstance(weight, Tensor):
            return cls(weight, weight, PLAIN.value)
        values, how = quantised_products.as_factor(weight, x)
        return cls(values, weight.scales, how)

    @property
    def rounds(self) -> bool:
        """Whether the other factor is rounded to e4m3."""
        return self.how in (E4M3.value, ROUNDED.value)

    def launch(self, x: Tensor, tokens: int, tile: _Tile, *, pair: bool) -> dict[str, Any]:
        """Return the launch options of a product with tiles of so many tokens. `pair`: of gate and
        up."""
        lines = tile.lines * (2 if pair else 1) * self.values.element_size()
        # beside the stages, the factors of a step as tensor cores read them
        least = 0 if self.how == PLAIN.value else 2 * (tile.lines + tokens)
        size = lines + tokens * x.element_size()
        deep, stages = pipeline_that_fits(size, least, x, deep=tile.deep, most=tile.stages)
        return {
            "HOW": self.how,
            "ROUND": self.rounds,
            "TOKENS": tokens,
            "LINES": tile.lines,
            "BLOCK_K": deep,
            "WIDE": input_precision(x),
            "num_warps": tile.warps,
            **overlap(True, x.device),
            "num_stages": stages,
        }


class _Tile(NamedTuple):
    """The tile of a weight: its rows, the inputs of a step, the most pipeline stages, and warps."""

    lines: int
    deep: int
    stages: int
    warps: int


class _Tiling(NamedTuple):
    """How the products of experts are tiled.

    most: pairs of an expert, on average, up to which it is used.
    tokens: of a tile; 16 are the fewest of a tensor core's product.
    up, down: tiles of the weights.
    """

    most: float
    tokens: int
    up: _Tile
    down: _Tile


# By the kind of weights. An expert with more pairs than a tile has tokens is read once more, and
# not from L2: the programs that run at once read more than it holds. Experts of a pass differ, so
# 16 tokens are left early: if their logits differ by a standard deviation, the first expert has
# ten times the average. Measured on an H100: docs/decisions/04-layers.md.
_TILINGS = {
    "16 bits": (
        _Tiling(4, 16, _Tile(64, 128, 3, 4), _Tile(64, 128, 3, 4)),
        _Tiling(32, 64, _Tile(64, 64, 4, 4), _Tile(64, 64, 4, 4)),
        _Tiling(math.inf, 128, _Tile(64, 64, 3, 4), _Tile(64, 64, 3, 4)),
    ),
    "32 bits": (
        _Tiling(4, 16, _Tile(64, 64, 4, 4), _Tile(64, 64, 4, 4)),
        _Tiling(math.inf, 64, _Tile(64, 64, 4, 4), _Tile(64, 64, 4, 4)),
    ),
    "e4m3": (
        _Tiling(6, 16, _Tile(64, 128, 4, 4), _Tile(64, 128, 4, 4)),
        _Tiling(28, 32, _Tile(64, 128, 4, 4), _Tile(128, 128, 4, 8)),
        _Tiling(48, 64, _Tile(64, 128, 4, 4), _Tile(128, 128, 4, 8)),
        _Tiling(math.inf, 128, _Tile(64, 128, 3, 4), _Tile(64, 128, 3, 4)),
    ),
    "converted": (  # int8, and e4m3 as float16
        _Tiling(4, 16, _Tile(64, 128, 4, 4), _Tile(64, 128, 4, 4)),
        _Tiling(24, 32, _Tile(64, 128, 4, 4), _Tile(64, 128, 4, 4)),
        _Tiling(56, 64, _Tile(64, 128, 3, 4), _Tile(64, 128, 3, 4)),
        _Tiling(math.inf, 128, _Tile(128, 128, 3, 8), _Tile(64, 128, 3, 4)),
    ),
}


# Bytes of shared memory from which tiles have more than 64 tokens: those of int8 take 131 KB in one
# stage. Consumer GPUs have 99 KB.
_WIDE_FROM = 160 * 1024


def _tiling(factor: _Factor, x: Tensor, mean: float) -> _Tiling:
    """Return how the products of these weights with tokens x are tiled, for a mean number of pairs
    of an expert."""
    kind = "converted"
    if factor.how == PLAIN.value:
        kind = "16 bits" if x.element_size() == 2 else "32 bits"
    elif factor.how == E4M3.value:
        kind = "e4m3"
    wide = card(x.device).shared >= _WIDE_FROM
    tilings = [tiling for tiling in _TILINGS[kind] if wide or tiling.tokens <= 64]
    return next((tiling for tiling in tilings if mean <= tiling.most), tilings[-1])


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    maps: Maps,
    residual: Tensor | None = None,
    shared: Shared | None = None,
    *,
    experts: int,
    activation: str,
    clamp: Clamp | None = None,
) -> Tensor:
    """Do experts.mix_experts."""
    mixture = Mixture(experts, activation, clamp)
    parts = _outputs(x, ids, maps, mixture)
    return _weighted_sum(x, parts, weights, residual, shared)


def add_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    maps: Maps,
    stream: Stream,
    norm: Tensor,
    mixture: Mixture,
    *,
    rounds: bool,
) -> Stream:
    """Add the weighted sum of the experts' feed-forwards of tokens x [N, width] to the stream, and
    prepare it for the norm with weight `norm`.

    Args:
        ids, weights: of `route`.
        rounds: whether the next product rounds its input to e4m3.
    """
    (tokens, width), most = x.shape, stream.squares.shape[1]
    parts = _outputs(x, ids, maps, mixture)
    tiles = triton.cdiv(width, _SUMMED)
    largest = torch.empty(tiles, most, dtype=torch.int32, device=x.device) if rounds else None
    out = Stream.empty(tokens, width, tiles, x, most=most, largest=largest)
    _add_sum[(tokens, tiles)](
        parts,
        weights,
        stream.residual,
        norm,
        *out[:3],
        ids if largest is None else largest,
        width,
        M=most,
        PEAKS=rounds,
        CHOSEN=ids.shape[1],
        BLOCK=_SUMMED,
        num_warps=4,
        **overlap(True, x.device),
    )
    return out


def _outputs(x: Tensor, ids: Tensor, maps: Maps, mixture: Mixture) -> Tensor:
    """Return the outputs of the experts of tokens x [T, width], [T * chosen, width]."""
    (tokens, width), chosen = x.shape, ids.shape[1]
    (experts, activation, clamp), inner = mixture, maps.down.shape[1]
    pairs = tokens * chosen
    peaks = torch.empty(pairs, dtype=torch.int32, device=x.device)
    order = _sorted_pairs(ids, experts, peaks)
    mixed, parts = x.new_empty(pairs, inner), x.new_empty(pairs, width)
    assert not isinstance(maps.up, Grouped)  # on a CPU only
    assert not isinstance(maps.down, Grouped)
    up, down = _Factor.of(maps.up, x), _Factor.of(maps.down, x)
    rounded, scales = x.contiguous(), None
    if isinstance(maps.up, Quantised):
        rounded, scales = quantised_products.factor(rounded, maps.up, early=True)
    tiling = _tiling(up, x, pairs / experts)
    _up[(triton.cdiv(inner, tiling.up.lines), experts)](
        rounded,
        x if scales is None else scales,
        up.values,
        up.scales,
        x if maps.up_bias is None else maps.up_bias,
        *order,
        mixed,
        peaks,
        width,
        inner,
        CHOSEN=chosen,
        BIAS=maps.up_bias is not None,
        KIND=KINDS[activation],
        CLAMPED=clamp is not None,
        ALPHA=0.0 if clamp is None else clamp.alpha,
        LIMIT=0.0 if clamp is None else clamp.limit,
        PEAKS=down.rounds,
        **up.launch(rounded, tiling.tokens, tiling.up, pair=True),
    )
    tiling = _tiling(down, x, pairs / experts)
    _down[(triton.cdiv(width, tiling.down.lines), experts)](
        mixed,
        peaks,
        down.values,
        down.scales,
        x if maps.down_bias is None else maps.down_bias,
        *order,
        parts,
        width,
        inner,
        BIAS=maps.down_bias is not None,
        **down.launch(x, tiling.tokens, tiling.down, pair=False),
    )
    return parts


def _weighted_sum(
    x: Tensor, parts: Tensor, weights: Tensor, residual: Tensor | None, shared: Shared | None
) -> Tensor:
    """Return the sums of parts [T * chosen, width] by tokens, with weights [T, chosen], of the
    residual stream [T, width], and of the expert of all tokens x [T, width]."""
    (tokens, width), chosen = x.shape, weights.shape[1]
    out = torch.empty_like(x)
    _sum[(tokens, triton.cdiv(width, _SUMMED))](
        parts,
        weights,
        out if residual is None else residual.contiguous(),
        x.contiguous(),
        x if shared is None else shared.gate,
        x if shared is None else shared.output.contiguous(),
        out,
        width,
        ADD=residual is not None,
        SHARED=shared is not None,
        CHOSEN=chosen,
        BLOCK=_SUMMED,
        num_warps=4,
        **overlap(True, x.device),
    )
    return out


def _sorted_pairs(ids: Tensor, experts: int, peaks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of ids [T, chosen] sorted by expert, [T * chosen], and where those of each
    expert begin and end, [E] each; all int32. Set peaks [T * chosen] to 0."""
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    first, end = torch.empty(2, experts, dtype=torch.int32, device=ids.device)
    block = min(_PAIRS, max(16, triton.next_power_of_2(ids.numel())))
    _sort[(experts,)](
        ids.contiguous(),
        order,
        peaks,
        first,
        end,
        ids.numel(),
        BLOCK=block,
        num_warps=4,
        **overlap(True, ids.device),
    )
    return order, first, end


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    ids_ptr,
    order_ptr,
    peak_ptr,
    first_ptr,
    end_ptr,
    pairs,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write the pairs of one expert in order, after those of the experts before it."""
    after(EARLY)
    expert = tl.program_id(0)
    first = tl.program_id(0) * 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found = tl.load(ids_ptr + pair, mask=pair < pairs, other=1 << 30)
        first += tl.sum((found < expert).to(tl.int32), 0)
    end = first
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found = tl.load(ids_ptr + pair, mask=pair < pairs, other=1 << 30)
        own = (found == expert).to(tl.int32)
        place = end + tl.cumsum(own, 0) - own
        tl.store(order_ptr + place, pair, mask=own != 0)
        tl.store(peak_ptr + place, 0, mask=own != 0)
        end += tl.sum(own, 0)
    tl.store(first_ptr + expert, first)
    tl.store(end_ptr + expert, end)


@triton.jit
def _up(
    x_ptr,
    scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    order_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    peak_ptr,
    width,
    inner,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PEAKS: tl.constexpr,
    HOW: tl.constexpr,
    ROUND: tl.constexpr,
    TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write the gated inner values of one expert's pairs, in the order of the sorted pairs. PEAKS:
    raise the largest magnitude of each pair."""
    after(EARLY)
    expert = tl.program_id(1)
    column = tl.program_id(0) * LINES + tl.arange(0, LINES)
    known = column < inner
    line = expert.to(tl.int64) * 2 * inner + column
    gate_lines = weight_ptr + line[:, None] * width
    up_lines = weight_ptr + (line + inner)[:, None] * width
    last = tl.load(end_ptr + expert)
    for row in range(tl.load(first_ptr + expert), last, TOKENS):
        place = row + tl.arange(0, TOKENS)
        real = place < last
        token = tl.load(order_ptr + place, mask=real, other=0) // CHOSEN
        x_lines = x_ptr + token.to(tl.int64)[:, None] * width
        gates = tl.zeros([LINES, TOKENS], tl.float32)
        ups = tl.zeros([LINES, TOKENS], tl.float32)
        for start in range(0, width, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            inside = at < width
            mask = known[:, None] & inside[None, :]
            x = tl.load(x_lines + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            x = tl.trans(x)
            w = tl.load(gate_lines + at[None, :], mask=mask, other=0.0)
            gates = dot(w, x, gates, HOW, WIDE)
            w = tl.load(up_lines + at[None, :], mask=mask, other=0.0)
            ups = dot(w, x, ups, HOW, WIDE)
        if ROUND:
            scale = tl.load(scale_ptr + token, mask=real, other=1.0)[None, :]
            gates, ups = gates * scale, ups * scale
        if HOW != PLAIN:
            gates *= tl.load(weight_scale_ptr + line, mask=known, other=0.0)[:, None]
            ups *= tl.load(weight_scale_ptr + line + inner, mask=known, other=0.0)[:, None]
        if BIAS:
            gates += tl.load(bias_ptr + line, mask=known, other=0.0).to(tl.float32)[:, None]
            ups += tl.load(bias_ptr + line + inner, mask=known, other=0.0).to(tl.float32)[:, None]
        if CLAMPED:
            gates = tl.minimum(gates, LIMIT)
            ups = tl.minimum(tl.maximum(ups, -LIMIT), LIMIT) + 1.0
            gates = gates * tl.sigmoid(ALPHA * gates)
        else:
            gates = activate(gates, KIND)
        value = (gates * ups).to(out_ptr.dtype.element_ty)
        here = real[None, :] & known[:, None]
        tl.store(out_ptr + place.to(tl.int64)[None, :] * inner + column[:, None], value, mask=here)
        if PEAKS:
            peak = tl.max(tl.where(here, magnitude(value), 0), 0)
            tl.atomic_max(peak_ptr + place, peak, mask=real, sem="relaxed")


@triton.jit
def _down(
    x_ptr,
    peak_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    order_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    width,
    inner,
    BIAS: tl.constexpr,
    HOW: tl.constexpr,
    ROUND: tl.constexpr,
    TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one expert's outputs for its pairs, each at the index of its pair."""
    after(EARLY)
    expert = tl.program_id(1)
    column = tl.program_id(0) * LINES + tl.arange(0, LINES)
    known = column < width
    line = expert.to(tl.int64) * width + column
    weight_lines = weight_ptr + line[:, None] * inner
    last = tl.load(end_ptr + expert)
    for row in range(tl.load(first_ptr + expert), last, TOKENS):
        place = row + tl.arange(0, TOKENS)
        real = place < last
        pair = tl.load(order_ptr + place, mask=real, other=0)
        x_lines = x_ptr + place.to(tl.int64)[:, None] * inner
        scale = tl.full([TOKENS], 1.0, tl.float32)
        if ROUND:
            scale = token_scale(tl.load(peak_ptr + place, mask=real, other=0))
        inverse = tl.div_rn(1.0, scale)[:, None]
        total = tl.zeros([LINES, TOKENS], tl.float32)
        for start in range(0, inner, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            inside = at < inner
            x = tl.load(x_lines + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            if HOW == E4M3:
                x = (x.to(tl.float32) * inverse).to(tl.float8e4nv)
            elif HOW == ROUNDED:
                x = round_e4m3(x.to(tl.float32) * inverse).to(tl.float16)
            w = tl.load(
                weight_lines + at[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
            total = dot(w, tl.trans(x), total, HOW, WIDE)
        if HOW != PLAIN:
            total *= scale[None, :]
            total *= tl.load(weight_scale_ptr + line, mask=known, other=0.0)[:, None]
        if BIAS:
            total += tl.load(bias_ptr + line, mask=known, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out_ptr + pair.to(tl.int64)[None, :] * width + column[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=real[None, :] & known[:, None],
        )


@triton.jit
def _sum(
    x_ptr,
    share_ptr,
    residual_ptr,
    token_ptr,
    gate_ptr,
    shared_ptr,
    out_ptr,
    width,
    ADD: tl.constexpr,
    SHARED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write the weighted sum of one token's outputs, in the order of its experts."""
    after(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = _weighted(x_ptr, share_ptr, token, at, width, CHOSEN, BLOCK)
    if SHARED:
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(token_ptr + token * width + place, mask=place < width, other=0.0)
            weight = tl.load(gate_ptr + place, mask=place < width, other=0.0)
            products += value.to(tl.float32) * weight.to(tl.float32)
        # the definition's gate has the dtype of x
        gate = tl.sum(products, 0).to(token_ptr.dtype.element_ty).to(tl.float32)
        part = tl.load(shared_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sigmoid(gate) * part
    if ADD:
        total += tl.load(residual_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weighted(x_ptr, share_ptr, token, at, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weighted sum of one token's outputs at columns `at`, [BLOCK] float32."""
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        part = tl.load(x_ptr + pair * width + at, mask=at < width, other=0.0).to(tl.float32)
        total += tl.load(share_ptr + pair) * part
    return total


@triton.jit
def _add_sum(
    x_ptr,
    share_ptr,
    stream_ptr,
    norm_ptr,
    sum_ptr,
    next_ptr,
    square_ptr,
    bound_ptr,
    width,
    M: tl.constexpr,
    PEAKS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add the weighted sum of one token's outputs to the stream."""
    after(EARLY)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = _weighted(x_ptr, share_ptr, token, at, width, CHOSEN, BLOCK)
    total += tl.load(stream_ptr + token * width + at, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scaled = (total * norm).to(next_ptr.dtype.element_ty)
    tl.store(sum_ptr + token * width + at, total, mask=inside)
    tl.store(next_ptr + token * width + at, scaled, mask=inside)
    tl.store(square_ptr + tile * M + token, tl.sum(total * total, 0))
    if PEAKS:
        tl.store(bound_ptr + tile * M + token, tl.max(magnitude(scaled), 0))
    if token == 0:  # later launches read the places after the last token too
        place = tl.arange(0, M)
        unused = place >= tl.num_programs(0)
        tl.store(square_ptr + tile * M + place, place * 0.0, mask=unused)
        if PEAKS:
            tl.store(bound_ptr + tile * M + place, place * 0, mask=unused)
