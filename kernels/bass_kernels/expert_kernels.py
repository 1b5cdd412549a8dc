"""Triton: mixtures of experts. Definitions: experts.py.

A pass makes five launches: the router; the pairs of a token and one of its experts, sorted by
expert; the products of each expert's pairs with `up` and `down`; and each token's weighted sum.
Everything that depends on the tokens is read on the device, so a captured pass serves any choice of
experts. Programs of experts without a token return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .experts import Clamp, Maps
from .launch import SPARE, card, fitting
from .pointwise import KINDS, activate

_TOKENS = tl.constexpr(16)  # tokens of a program of the router
_FEW = 16  # rows of a tile, the fewest of a tensor core's product
_MANY = 64  # rows of a tile if experts have many tokens, as in a prefill
_MANY_FROM = 32  # pairs for each expert, on average, from which tiles have _MANY rows
_PAIRS = 1024  # pairs that a program of `_sort` reads at once
_COLUMNS, _DEPTH = 64, 64  # tile of weights


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, *, chosen: int, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Do experts.route."""
    (tokens, width), experts = x.shape, len(router)
    ids = torch.empty(tokens, chosen, dtype=torch.int64, device=x.device)
    shares = torch.empty(tokens, chosen, dtype=torch.float32, device=x.device)
    _route[(triton.cdiv(tokens, _TOKENS.value),)](
        x.contiguous(),
        router,
        router if bias is None else bias,
        ids,
        shares,
        tokens,
        width,
        experts,
        BIAS=bias is not None,
        CHOSEN=chosen,
        NORMALISED=normalised,
        BLOCK_E=max(16, triton.next_power_of_2(experts)),
        BLOCK_C=triton.next_power_of_2(chosen),
        BLOCK_K=_DEPTH,
        WIDE=_wide(x),
        num_warps=4,
        num_stages=_stages(x, max(16, triton.next_power_of_2(experts)) + _TOKENS.value),
    )
    return ids, shares


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x_ptr,
    router_ptr,
    bias_ptr,
    ids_ptr,
    share_ptr,
    tokens,
    width,
    experts,
    BIAS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    real, known = token < tokens, expert < experts
    lines = x_ptr + token.to(tl.int64)[:, None] * width
    logits = tl.zeros([_TOKENS, BLOCK_E], tl.float32)
    for start in range(0, width, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < width
        x = tl.load(lines + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        w = tl.load(
            router_ptr + expert[:, None] * width + at[None, :],
            mask=known[:, None] & inside[None, :],
            other=0.0,
        )
        logits = tl.dot(x, tl.trans(w), logits, input_precision=WIDE)
    if BIAS:
        logits += tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)[None, :]
    # the definition's logits have the dtype of x
    logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    logits = tl.where(known[None, :], logits, float("-inf"))
    peak = tl.max(logits, 1)
    mass = tl.sum(tl.exp(logits - peak[:, None]), 1)
    ids = tl.zeros([_TOKENS, BLOCK_C], tl.int32)
    shares = tl.zeros([_TOKENS, BLOCK_C], tl.float32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(logits, 1)
        found = tl.min(tl.where(logits == best[:, None], expert[None, :], experts - 1), 1)
        here = choice[None, :] == place
        ids = tl.where(here, found[:, None], ids)
        shares = tl.where(here, tl.exp(best - peak)[:, None], shares)
        logits = tl.where(expert[None, :] == found[:, None], float("-inf"), logits)
    if NORMALISED:
        mass = tl.sum(shares, 1)
    places = token.to(tl.int64)[:, None] * CHOSEN + choice[None, :]
    mask = real[:, None] & (choice < CHOSEN)[None, :]
    tl.store(ids_ptr + places, ids.to(tl.int64), mask=mask)
    tl.store(share_ptr + places, shares / mass[:, None], mask=mask)


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    maps: Maps,
    residual: Tensor | None = None,
    *,
    experts: int,
    activation: str,
    clamp: Clamp | None = None,
) -> Tensor:
    """Do experts.mix_experts."""
    (tokens, width), chosen = x.shape, ids.shape[1]
    pairs, inner = tokens * chosen, maps.down.shape[1]
    order = _sorted_pairs(ids, experts)
    rows = _FEW if pairs <= _MANY_FROM * experts else _MANY
    tile = {"ROWS": rows, "COLUMNS": _COLUMNS, "BLOCK_K": _DEPTH, "WIDE": _wide(x), "num_warps": 4}
    mixed, parts = x.new_empty(pairs, inner), x.new_empty(pairs, width)
    _up[(triton.cdiv(inner, _COLUMNS), experts)](
        x.contiguous(),
        maps.up,
        maps.up if maps.up_bias is None else maps.up_bias,
        *order,
        mixed,
        width,
        inner,
        CHOSEN=chosen,
        BIAS=maps.up_bias is not None,
        KIND=KINDS[activation],
        CLAMPED=clamp is not None,
        ALPHA=0.0 if clamp is None else clamp.alpha,
        LIMIT=0.0 if clamp is None else clamp.limit,
        num_stages=_stages(x, 2 * _COLUMNS + rows),
        **tile,
    )
    _down[(triton.cdiv(width, _COLUMNS), experts)](
        mixed,
        maps.down,
        maps.down if maps.down_bias is None else maps.down_bias,
        *order,
        parts,
        width,
        inner,
        BIAS=maps.down_bias is not None,
        num_stages=_stages(x, _COLUMNS + rows),
        **tile,
    )
    out = torch.empty_like(x)
    _sum[(tokens, triton.cdiv(width, 1024))](
        parts,
        weights,
        out if residual is None else residual.contiguous(),
        out,
        width,
        ADD=residual is not None,
        CHOSEN=chosen,
        BLOCK=1024,
        num_warps=4,
    )
    return out


def _sorted_pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of ids [T, chosen] sorted by expert, [T * chosen], and where those of each
    expert begin and end, [E] each; all int32."""
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    first, end = torch.empty(2, experts, dtype=torch.int32, device=ids.device)
    block = min(_PAIRS, max(16, triton.next_power_of_2(ids.numel())))
    _sort[(experts,)](ids.contiguous(), order, first, end, ids.numel(), BLOCK=block, num_warps=4)
    return order, first, end


def _wide(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _stages(x: Tensor, lines: int) -> int:
    """Return four pipeline stages of `lines` rows of _DEPTH elements, or as many as fit."""
    size = lines * _DEPTH * x.element_size()
    return fitting(range(4, 0, -1), lambda stages: size * stages + SPARE, card(x.device).shared)


@triton.jit(do_not_specialize=["pairs"])
def _sort(ids_ptr, order_ptr, first_ptr, end_ptr, pairs, BLOCK: tl.constexpr):
    """Write the pairs of one expert in order, after those of the experts before it."""
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
        end += tl.sum(own, 0)
    tl.store(first_ptr + expert, first)
    tl.store(end_ptr + expert, end)


@triton.jit
def _up(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    width,
    inner,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the gated inner values of one expert's pairs, in the order of the sorted pairs."""
    expert = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < inner
    line = expert.to(tl.int64) * 2 * inner + column
    gate_lines = weight_ptr + line[:, None] * width
    up_lines = weight_ptr + (line + inner)[:, None] * width
    last = tl.load(end_ptr + expert)
    for row in range(tl.load(first_ptr + expert), last, ROWS):
        place = row + tl.arange(0, ROWS)
        real = place < last
        token = tl.load(order_ptr + place, mask=real, other=0) // CHOSEN
        x_lines = x_ptr + token.to(tl.int64)[:, None] * width
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            inside = at < width
            mask = known[:, None] & inside[None, :]
            x = tl.load(x_lines + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            w = tl.load(gate_lines + at[None, :], mask=mask, other=0.0)
            gates = tl.dot(x, tl.trans(w), gates, input_precision=WIDE)
            w = tl.load(up_lines + at[None, :], mask=mask, other=0.0)
            ups = tl.dot(x, tl.trans(w), ups, input_precision=WIDE)
        if BIAS:
            gates += tl.load(bias_ptr + line, mask=known, other=0.0).to(tl.float32)[None, :]
            ups += tl.load(bias_ptr + line + inner, mask=known, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:
            gates = tl.minimum(gates, LIMIT)
            ups = tl.minimum(tl.maximum(ups, -LIMIT), LIMIT) + 1.0
            gates = gates * tl.sigmoid(ALPHA * gates)
        else:
            gates = activate(gates, KIND)
        tl.store(
            out_ptr + place.to(tl.int64)[:, None] * inner + column[None, :],
            (gates * ups).to(out_ptr.dtype.element_ty),
            mask=real[:, None] & known[None, :],
        )


@triton.jit
def _down(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    width,
    inner,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write one expert's outputs for its pairs, each at the index of its pair."""
    expert = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    line = expert.to(tl.int64) * width + column
    weight_lines = weight_ptr + line[:, None] * inner
    last = tl.load(end_ptr + expert)
    for row in range(tl.load(first_ptr + expert), last, ROWS):
        place = row + tl.arange(0, ROWS)
        real = place < last
        pair = tl.load(order_ptr + place, mask=real, other=0)
        x_lines = x_ptr + place.to(tl.int64)[:, None] * inner
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inner, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            inside = at < inner
            x = tl.load(x_lines + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            w = tl.load(
                weight_lines + at[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
            total = tl.dot(x, tl.trans(w), total, input_precision=WIDE)
        if BIAS:
            total += tl.load(bias_ptr + line, mask=known, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_ptr + pair.to(tl.int64)[:, None] * width + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & known[None, :],
        )


@triton.jit
def _sum(
    x_ptr,
    share_ptr,
    residual_ptr,
    out_ptr,
    width,
    ADD: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the weighted sum of one token's outputs, in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        part = tl.load(x_ptr + pair * width + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(share_ptr + pair) * part
    if ADD:
        total += tl.load(residual_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=inside)
