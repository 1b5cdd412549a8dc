"""A decoding pass on a CPU in float32 in few calls (host_layers.py and host.py of bass_kernels).

Only some families allow it. Not here: the layers op by op (decoder.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.hidden import AuxHiddenLayers
from bass_cli.models.kv_cache import Pass
from bass_cli.models.spec import Spec
from bass_cli.models.weights import Weights
from bass_kernels import host, host_layers, reference


def supports_host(spec: Spec, like: Tensor, step: Pass, layouts: Set[str | None]) -> bool:
    """Return whether `run_host` supports a pass with matrices in `layouts`, None for a plain one.

    It must be a causal decoding pass with the same number of tokens for each row, of a family with
    RMS norms, one rotary embedding and a gated feed-forward. Keys and values must be float32.
    """
    norm, few = spec.norm, spec.unusual is None and spec.biases <= {"qkv"}
    return (
        few
        and norm.kind == "rms"
        and not (norm.sandwich or spec.parallel or any(spec.windows))
        and spec.gated
        and spec.rope is not None
        and "fp8" not in layouts
        and step.prefill is None
        and not step.mutual
        and ops.kind_for(like) == "reference"
        and step.own(0)[0].dtype == torch.float32
        and host.supports(like, step.own(0), step.segments)
    )


def run_host(
    spec: Spec,
    weights: Weights,
    layers: tuple[int, ...],
    angles: tuple[Tensor, Tensor],
    tokens: Tensor,
    step: Pass,
    aux_layers: AuxHiddenLayers | None = None,
) -> Tensor | None:
    """Run the layers over tokens [B, W], write their keys and values, and return the final norm's
    output [B, W, width].

    Args:
        angles: cos and sin of the rotary embedding, [B, W, size / 2] each.

    Returns: None if a number is not finite. Then the pass must be run op by op, which writes the
        same keys and values.
    """
    heads, kv_heads, size, eps = spec.heads, spec.kv_heads, spec.head_size, spec.norm.eps
    shape, plain = (*tokens.shape, heads, size), weights.plain
    segments, slots = step.segments, step.slots().flatten()
    room = host.room_of(segments, shape, kv_heads)
    rotation = host_layers.rotation(angles, heads=heads, kv_heads=kv_heads, size=size)
    pair = host_layers.begin(ops.embed(tokens, plain("embed.weight"), scale=spec.embed_scale))
    dtypes = (torch.float32, torch.bfloat16)
    spare = {dtype: torch.empty(pair.shape[0], spec.width, dtype=dtype) for dtype in dtypes}
    mixed = {dtype: torch.empty(room.found.shape, dtype=dtype) for dtype in dtypes}
    written = []
    for slot, i in enumerate(layers):
        norm1, qkv, bias, o, norm2, up, down = _names(i)
        weight = weights[qkv]
        x = host_layers.rms_norm(pair, plain(norm1), eps, host_layers.inputs_of(weight, spare))
        x = host_layers.product(x, weight).float()
        if bias in weights:
            x = x + plain(bias)
        x = x.view(-1, heads + 2 * kv_heads, size)
        if spec.norm.qk:
            x = host_layers.norm_heads(x, weights.qk_norms(f"layers.{i}."), kv_heads, eps)
        x = host_layers.rotate(x, rotation)
        written.append(x)
        q = host_layers.write(x, step.own_pair(slot), slots)
        views = room.views_of(step.first + slot, step.own(slot), step.prompt(slot))
        found = host.attend(q.view(shape), room, views, spec.query_scale)
        weight = weights[o]
        x = host_layers.inputs_of(weight, mixed).copy_(found).view(-1, heads * size)
        host_layers.add(pair, host_layers.product(x, weight))
        weight = weights[up]
        x = host_layers.rms_norm(pair, plain(norm2), eps, host_layers.inputs_of(weight, spare))
        x = reference.activation(host_layers.product(x, weight), spec.activation, gated=True)
        host_layers.add(pair, host_layers.product(x, weights[down]))
        if aux_layers is not None:
            aux_layers.take(i, pair[:, 0])
    normed = host_layers.rms_norm(pair, plain("norm.weight"), eps, spare[torch.float32])
    if not math.isfinite(float(normed.sum() + torch.cat(written).sum())):
        return None
    return normed.view(*tokens.shape, -1)


@functools.cache
def _names(layer: int) -> tuple[str, ...]:
    """Return the names of a layer's tensors, in the order in which they are read."""
    names = ("norm1.weight", "qkv.weight", "qkv.bias", "o.weight", "norm2.weight")
    return tuple(f"layers.{layer}.{name}" for name in (*names, "up.weight", "down.weight"))
