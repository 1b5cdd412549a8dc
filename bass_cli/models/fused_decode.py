"""A pass of few tokens on a GPU in five launches a layer (residual.py, products.py and
fused_attention.py of bass_kernels), for families that allow it. Experts take more.

Not here: the layers op by op (decoder.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.hidden import AuxHiddenLayers
from bass_cli.models.kv_cache import Pass
from bass_cli.models.spec import Spec
from bass_cli.models.weights import Weights
from bass_kernels import Quantised, Weight, Writable

if TYPE_CHECKING:
    from bass_kernels.peers import Peers
    from bass_kernels.residual import Stream


def supports_fused(
    spec: Spec,
    tokens: Tensor,
    like: Tensor,
    step: Pass,
    layouts: Set[str | None] = frozenset({None}),
) -> bool:
    """Return whether `run_fused` supports this pass over tokens [B, W] with matrices in `layouts`,
    None for a plain one.

    It must be a causal decoding pass of few tokens with the same number for each row, of a family
    with RMS norms, one rotary embedding and a gated feed-forward, and its queries and keys must
    fit the device's shared memory.
    """
    if ops.kind_for(like) != "triton" or like.dtype == torch.float16:
        return False  # float16: the residual stream times a norm's weight may overflow
    from bass_kernels import dispatch, fused_attention, residual

    plain = spec.norm.kind == "rms" and not spec.norm.sandwich and not spec.parallel and spec.gated
    plain = plain and replace(spec, experts=None).unusual is None
    plain = plain and (spec.experts is None or not (spec.experts.shared or spec.experts.clamp))
    rope = spec.rope is not None and spec.local_rope is None
    few = (
        step.prefill is None
        and not step.mutual
        and step.segments.packed is None
        and tokens.numel() <= residual.MOST_TOKENS
        and len(layouts) == 1
        and dispatch.schedule() == "ragged"
    )
    lines = tokens.shape[1] * spec.heads // spec.kv_heads
    return (
        few
        and plain
        and rope
        and spec.biases <= {"qkv"}
        and fused_attention.fits(like, lines, spec.head_size)
    )


def supports_peers(weights: Sequence[Writable], like: Tensor, peers: Peers) -> bool:
    """Return whether `run_fused` can add the parts of all processes in the launches of these
    products, whose outputs are summed."""
    from bass_kernels import products

    return all(products.adds_at_once(weight, like, peers) for weight in weights)


def run_fused(
    spec: Spec,
    weights: Weights,
    layers: tuple[int, ...],
    frequencies: Tensor,
    tokens: Tensor,
    step: Pass,
    aux_layers: AuxHiddenLayers | None = None,
    parts: tuple[Peers, Tensor] | None = None,
) -> Tensor:
    """Run the layers over tokens [B, W], write their keys and values, and return the final norm's
    output [B, W, width]. Positions must not lie before a row's private slot 0.

    Args:
        frequencies: [size / 2], inverse, of the rotary embedding.
        parts: of a split model, the peers and the embedded tokens [B, W, width].
    """
    from bass_kernels import fused_attention, products, residual

    eps, early = spec.norm.eps, _large(spec, len(layers))
    attend = functools.partial(
        fused_attention.attend, heads=spec.heads, eps=eps, scale=spec.query_scale, early=early
    )
    plain = weights.plain
    norms = [plain(f"layers.{i}.norm1.weight") for i in layers] + [plain("norm.weight")]
    matrix = weights.writable
    peaks = _peaks(matrix(f"layers.{layers[0]}.o.weight"), len(layers))
    # any copy is made here, before the chain of launches
    segments = replace(step.segments, positions=step.positions.contiguous())
    peers, ids, embed, scale = None, tokens.flatten(), plain("embed.weight"), spec.embed_scale
    if parts is not None:
        peers, embed, scale = parts[0], parts[1].view(-1, spec.width), 1.0
        ids = torch.arange(len(embed), device=embed.device)
    add = functools.partial(products.add, peers=peers, early=early)
    given = ids, step.positions.flatten(), embed, norms[0], frequencies
    stream, angles = residual.begin(*given, scale=scale, peaks=peaks, early=early)
    for slot, i in enumerate(layers):
        at = f"layers.{i}."
        bias = weights.plain_or_none(at + "qkv.bias")
        qkv = products.project(stream, matrix(at + "qkv.weight"), bias, eps=eps, early=early)
        norm = weights.qk_norms(at) if spec.norm.qk else None
        found = (None,) * 4 if peaks is None else peaks[slot].unbind()
        own, prompt, window = step.own(slot), step.prompt(slot), spec.windows[i]
        mixed = attend(qkv, angles, norm, segments, own, prompt, window=window, peaks=found[0])
        weight, norm2 = matrix(at + "o.weight"), plain(at + "norm2.weight")
        stream = add(mixed, weight, stream, norm2, peaks=found[0], largest=found[1])
        norm1 = norms[slot + 1]
        if spec.experts is not None:
            stream = _add_experts(spec, weights, at, stream, norm1, early=early)
        else:
            inner = products.gate_up(
                stream, matrix(at + "up.weight"), eps=eps, activation=spec.activation,
                peaks=found[2], early=early,
            )  # fmt: skip
            weight = matrix(at + "down.weight")
            stream = add(inner, weight, stream, norm1, peaks=found[2], largest=found[3])
        if aux_layers is not None:
            aux_layers.take(i, stream.residual)
    return residual.finish(stream, norms[-1], eps=eps, early=early).view(*tokens.shape, spec.width)


def _add_experts(
    spec: Spec, weights: Weights, at: str, stream: Stream, norm1: Tensor, *, early: bool
) -> Stream:
    """Add the experts' feed-forward to the stream, and prepare it for the norm with weight
    `norm1`.

    Args:
        at: the begin of the layer's names.
    """
    from bass_kernels import expert_kernels, residual

    experts = spec.experts
    assert experts is not None
    x = residual.finish(stream, weights.plain(at + "norm2.weight"), eps=spec.norm.eps, early=early)
    router = weights.plain(at + "router.weight")
    chosen = experts.chosen, experts.normalised
    ids, shares = ops.route(x, router, None, chosen=chosen[0], normalised=chosen[1])
    up, down = (weights[f"{at}experts_{name}.weight"] for name in ("up", "down"))
    return expert_kernels.add_experts(
        x,
        ids,
        shares,
        ops.Maps(up, None, down, None),
        stream,
        norm1,
        expert_kernels.Mixture(experts.total, spec.activation, None),
        rounds=isinstance(up, Quantised) and up.layout == "fp8",
    )


def _peaks(weight: Weight, layers: int) -> Tensor | None:
    """Return room for largest magnitudes, [layers, 4, most] int32: those of the outputs of
    attention, of the first addition, of the gated product, and of the second addition. None if no
    product needs them."""
    from bass_kernels import residual

    if not isinstance(weight, Quantised) or weight.layout != "fp8":
        return None
    shape = layers, 4, residual.MOST_TOKENS
    return torch.empty(shape, dtype=torch.int32, device=weight.device)


def _large(spec: Spec, layers: int) -> bool:
    """Return whether launches should overlap. On an H200 that gains 2 % with models of 1.5B and
    7B, and costs as much with drafts."""
    queries = spec.heads * spec.head_size
    maps = spec.width * (2 * queries + 2 * spec.kv_heads * spec.head_size + 3 * spec.inner)
    return layers * maps >= 1_000_000_000
