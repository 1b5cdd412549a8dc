"""Spec: everything in which the known families of decoders differ, as data, and the names, shapes
and dtypes of the tensors that follow from it.

Not here: the decoder itself (decoder.py), how a checkpoint names its tensors (families.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_NORMS = {"norm", "norm1", "norm2", "post1", "post2", "q_norm", "k_norm", "context_norm"}


class Rope(NamedTuple):
    """Rotary position embedding of the first `size` dimensions of a head (arXiv 2104.09864).

    `factors` ([size / 2], or None) divide the inverse frequencies: every published scaling that
    does not depend on the length (linear, Llama 3) comes down to them.
    """

    theta: float
    size: int
    factors: tuple[float, ...] | None = None


class Norm(NamedTuple):
    """Normalisation: kind "rms" or "layer" (with bias); `qk` also norms each head's q and k;
    `sandwich` also norms what attention and feed-forward return, before it joins the residual
    stream (Gemma 3)."""

    kind: str
    eps: float
    qk: bool = False
    sandwich: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a decoder-only transformer, and everything in which the known families differ.

    `windows` has one entry a layer: the number of most recent positions (itself included) a
    query sees, 0 for all. `rope` None means learned absolute positions. `local_rope`, if any,
    serves the layers with a window. `biases` names the linear maps that have one: of "qkv", "o",
    "up", "down", "head".
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    context: int
    norm: Norm
    activation: str  # silu | gelu | gelu_tanh | relu
    gated: bool
    rope: Rope | None
    windows: tuple[int, ...]
    query_scale: float
    local_rope: Rope | None = None
    parallel: bool = (
        False  # attention and feed-forward read the same norm and are added together (GPT-J)
    )
    embed_scale: float = 1.0
    biases: frozenset[str] = frozenset()
    tied: bool = False  # the head is the embedding


def parameters(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor the decoder needs; `head.weight` is listed also when it is
    tied.

    qkv stacks q, k, v by rows; a gated `up` stacks gate, then up.
    """
    query, key = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    up = (2 if spec.gated else 1) * spec.inner
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (spec.vocab, spec.width),
        "head.weight": (spec.vocab, spec.width),
    }
    if spec.rope is None:
        shapes["positions.weight"] = (spec.context, spec.width)
    if "head" in spec.biases:
        shapes["head.bias"] = (spec.vocab,)
    norms = {"norm": spec.width}
    for i in range(spec.layers):
        maps = {
            "qkv": (query + 2 * key, spec.width),
            "o": (spec.width, query),
            "up": (up, spec.width),
            "down": (spec.width, spec.inner),
        }
        for name, shape in maps.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            if name in spec.biases:
                shapes[f"layers.{i}.{name}.bias"] = shape[:1]
        norms[f"layers.{i}.norm1"] = spec.width
        if not spec.parallel:
            norms[f"layers.{i}.norm2"] = spec.width
        if spec.norm.sandwich:
            norms |= {f"layers.{i}.post1": spec.width, f"layers.{i}.post2": spec.width}
        if spec.norm.qk:
            shapes |= {
                f"layers.{i}.q_norm.weight": (spec.head_size,),
                f"layers.{i}.k_norm.weight": (spec.head_size,),
            }
    for name, size in norms.items():
        shapes[f"{name}.weight"] = (size,)
        if spec.norm.kind == "layer":
            shapes[f"{name}.bias"] = (size,)
    return shapes


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor of `parameters` has in a decoder of `dtype`: norms stay float32,
    in which they are computed. (In bfloat16 1 + w, which Gemma's norms multiply by, would keep 8
    bits of the sum.)"""
    import torch

    return torch.float32 if name.split(".")[-2] in _NORMS else dtype
