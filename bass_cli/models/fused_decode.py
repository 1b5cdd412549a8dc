"""A decoding pass in few launches or calls, for families that allow it: on a GPU of few tokens, in
five launches a layer (residual.py, products.py and fused_attention.py of bass_kernels; experts take
more), and on a CPU in few calls (host_layers.py and host.py).

Not here: the layers op by op (decoder.py).
"""

from __future__ import annotations

import functools
import math
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
from bass_kernels import Quantised, Weight, Writable, host, host_layers, reference

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
