"""A decoder's layers in five kernel launches each, for few tokens on a GPU and families that allow
it (residual.py, products.py and fused_attention.py of bass_kernels). A second form of the loop over
layers of decoder.py, which runs the same layers op by op, for any family and number of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.kv_cache import Pass

if TYPE_CHECKING:
    from bass_cli.models.decoder import AuxHiddenLayers
    from bass_cli.models.spec import Spec


def serves(spec: Spec, tokens: Tensor, like: Tensor, step: Pass) -> bool:
    """Return whether `run` supports this pass over tokens [B, W].

    It must be a causal decoding pass of few tokens with the same number for each row, of a family
    with RMS norms, one rotary embedding and a gated feed-forward, and its queries and keys must
    fit the device's shared memory.
    """
    if ops.kind_for(like) != "triton" or like.dtype == torch.float16:
        return False  # float16: the residual stream times a norm's weight may overflow
    from bass_kernels import dispatch, fused_attention, residual

    plain = spec.norm.kind == "rms" and not spec.norm.sandwich and not spec.parallel and spec.gated
    rope = spec.rope is not None and spec.local_rope is None
    few = (
        step.prefill is None
        and not step.mutual
        and step.segments.packed is None
        and tokens.numel() <= residual.MOST_TOKENS
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


def run(
    spec: Spec,
    weights: dict[str, Tensor],
    layers: tuple[int, ...],
    frequencies: Tensor,
    tokens: Tensor,
    step: Pass,
    aux_layers: AuxHiddenLayers | None = None,
) -> Tensor:
    """Run the layers over tokens [B, W], write their keys and values, and return the final norm's
    output [B, W, width]. `frequencies` [size / 2]: inverse, of the rotary embedding. Positions must
    not lie before a row's private slot 0."""
    from bass_kernels import fused_attention, products, residual

    eps, early = spec.norm.eps, _large(spec, len(layers))
    norms = [weights[f"layers.{i}.norm1.weight"] for i in layers] + [weights["norm.weight"]]
    # any copy is made here, before the chain of launches
    segments = replace(step.segments, positions=step.positions.contiguous())
    stream, angles = residual.begin(
        tokens.flatten(),
        step.positions.flatten(),
        weights["embed.weight"],
        norms[0],
        frequencies,
        scale=spec.embed_scale,
        early=early,
    )
    for slot, i in enumerate(layers):
        at = f"layers.{i}."
        qk = (
            (weights[at + "q_norm.weight"], weights[at + "k_norm.weight"]) if spec.norm.qk else None
        )
        qkv = products.project(
            stream, weights[at + "qkv.weight"], weights.get(at + "qkv.bias"), eps=eps, early=early
        )
        mixed = fused_attention.attend(
            qkv,
            angles,
            qk,
            segments,
            step.own(slot),
            step.prompt(slot),
            heads=spec.heads,
            eps=eps,
            scale=spec.query_scale,
            window=spec.windows[i],
            early=early,
        )
        stream = products.add(
            mixed, weights[at + "o.weight"], stream, weights[at + "norm2.weight"], early=early
        )
        inner = products.gate_up(
            stream, weights[at + "up.weight"], eps=eps, activation=spec.activation, early=early
        )
        stream = products.add(
            inner, weights[at + "down.weight"], stream, norms[slot + 1], early=early
        )
        if aux_layers is not None:
            aux_layers.take(i, stream.residual)
    return residual.finish(stream, norms[-1], eps=eps, early=early).view(*tokens.shape, spec.width)


def _large(spec: Spec, layers: int) -> bool:
    """Return whether launches should overlap. On an H200 that gains 2 % with models of 1.5B and
    7B, and costs as much with drafts."""
    queries = spec.heads * spec.head_size
    maps = spec.width * (2 * queries + 2 * spec.kv_heads * spec.head_size + 3 * spec.inner)
    return layers * maps >= 1_000_000_000
