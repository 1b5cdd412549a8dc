"""A decoder's layers for a few tokens on a GPU, in five launches a layer, where the family
allows it (residual.py, products.py and mixing.py of bass_kernels). Not here: the same layers op by
op, for any family and number of tokens (decoder.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.aux_hidden_layers import AuxHiddenLayers
from bass_cli.models.kv_cache import Pass

if TYPE_CHECKING:
    from bass_cli.models.spec import Spec


def serves(spec: Spec, tokens: Tensor, like: Tensor, step: Pass) -> bool:
    """Whether `run` takes these tokens [B, W]: few of them, as many of each row, no prefill, none
    that sees those behind it, a family without exceptions, and queries and keys that fit the
    device."""
    if ops.kind_for(like) != "triton" or like.dtype == torch.float16:
        return False  # float16: the residual stream times a norm's weight may not fit
    from bass_kernels import cuts, dispatch, mixing

    plain = spec.norm.kind == "rms" and not spec.norm.sandwich and not spec.parallel and spec.gated
    rope = spec.rope is not None and spec.local_rope is None
    few = (
        step.prefill is None
        and not step.mutual
        and step.segments.packed is None
        and tokens.numel() <= cuts.MOST_TOKENS
        and dispatch.schedule() == "ragged"
    )
    lines = tokens.shape[1] * spec.heads // spec.kv_heads
    return (
        few
        and plain
        and rope
        and spec.biases <= {"qkv"}
        and mixing.fits(like, lines, spec.head_size)
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
    """The final norm's output [B, W, width] for tokens [B, W], whose keys and values are
    written. Positions must not lie before a row's own slot 0. frequencies [half]: of rope."""
    from bass_kernels import mixing, products, residual

    eps, early = spec.norm.eps, _large(spec, len(layers))
    norms = [weights[f"layers.{i}.norm1.weight"] for i in layers] + [weights["norm.weight"]]
    # before the chain of launches
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
        mixed = mixing.mix(
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
    """Whether launches should overlap: on an H200 that gains 2 % with models of 1.5B and 7B, and
    costs drafts as much."""
    queries = spec.heads * spec.head_size
    maps = spec.width * (2 * queries + 2 * spec.kv_heads * spec.head_size + 3 * spec.inner)
    return layers * maps >= 1_000_000_000
