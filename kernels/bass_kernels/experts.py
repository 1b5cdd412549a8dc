"""The feed-forward of a mixture of experts in plain torch: the router, and the products of each
token's experts. Their definition, the CPU path, and the reference of the kernel tests.

A token's result has the same bits whatever tokens are beside it: products are done in tiles of a
fixed number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import grouped, quantised, reference
from .grouped import Grouped
from .quantised import Quantised, Weight

# Rows of a product. With a fixed number BLAS adds in one order for every row. More rows cost more
# where an expert has one token, fewer where it has many.
_ROWS = 4


class Clamp(NamedTuple):
    """The gated unit of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with the gate at most
    `limit` and up from -limit to limit."""

    alpha: float
    limit: float


class Maps(NamedTuple):
    """The weights of E experts: up [E * 2 inner, width] has the gate's rows, then up's, expert by
    expert, with a bias [E * 2 inner]; down [E * width, inner] with a bias [E * width]. Both may be
    quantised, or on a CPU stacked groups."""

    up: Weight
    up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


class Shared(NamedTuple):
    """The expert of all tokens: its output [T, width], and the weight [1, width] of the gate whose
    sigmoid multiplies it."""

    output: Tensor
    gate: Tensor


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, *, chosen: int, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Choose experts for tokens x [T, width].

    Args:
        router: [E, width], with a bias [E].
        chosen: experts of each token.
        normalised: divide the weights of the chosen experts by their sum. That is also the softmax
            of the chosen logits only, as in gpt-oss.

    Returns:
        Experts [T, chosen] int64, the likeliest first and of equal ones the lowest, and their
        weights [T, chosen] float32.
    """
    logits = _in_tiles(x, router, bias)
    found = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = found.values[:, :chosen], found.indices[:, :chosen]
    return ids, weights / weights.sum(-1, keepdim=True) if normalised else weights


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
    """Return the weighted sum of the experts' feed-forwards of tokens x [T, width], in x's dtype.

    Args:
        residual: [T, width], added to the sum. Default: nothing is added.
        shared: the expert of all tokens, added to the sum. Default: there is none.
        ids, weights: of `route`.
        experts: number of experts, E.
        activation: of the gate, unless there is a clamp.
    """
    (tokens, width), chosen = x.shape, ids.shape[1]
    parts, flat = x.new_empty(tokens * chosen, width), ids.flatten()
    for expert in flat.unique().tolist():
        pairs, part = (flat == expert).nonzero()[:, 0], (expert, experts)
        inner = _product(x[pairs // chosen], maps.up, maps.up_bias, *part)
        parts[pairs] = _product(gate(inner, activation, clamp), maps.down, maps.down_bias, *part)
    parts = parts.view(tokens, chosen, width).float() * weights[..., None]
    total = parts.sum(1)
    if shared is not None:
        gates = reference.sigmoid(_in_tiles(x, shared.gate, None).float())
        total = total + gates * shared.output.float()
    return (total if residual is None else residual + total).to(x.dtype)


def gate(x: Tensor, activation: str, clamp: Clamp | None) -> Tensor:
    """Apply the gated unit to x [..., 2 inner], the gate before up: [..., inner]."""
    if clamp is None:
        return reference.activation(x, activation, gated=True)
    gates, ups = x.chunk(2, dim=-1)
    gates = gates.clamp(max=clamp.limit)
    gates = gates * reference.sigmoid(gates * clamp.alpha)
    return (ups.clamp(-clamp.limit, clamp.limit) + 1) * gates


def _product(x: Tensor, weight: Weight, bias: Tensor | None, expert: int, experts: int) -> Tensor:
    """Return the linear map of x [T, K] by one expert's rows of a weight [E * N, K]."""
    every = len(weight) // experts
    first, last = expert * every, (expert + 1) * every
    own = None if bias is None else bias[first:last]
    if isinstance(weight, Grouped):
        return grouped.linear(x, weight.rows(first, last), own)
    if isinstance(weight, Quantised):
        return quantised.linear(x, weight.rows(first, last), own)
    return _in_tiles(x, weight[first:last], own)


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear map of x [T, K], computed in tiles of _ROWS rows."""
    padded = functional.pad(x, (0, 0, 0, -len(x) % _ROWS))
    tiles = (functional.linear(tile, weight, bias) for tile in padded.split(_ROWS))
    return torch.cat(list(tiles))[: len(x)]
