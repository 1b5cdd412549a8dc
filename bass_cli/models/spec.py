"""Spec: everything in which the known families of decoders differ, as data, and the names, shapes
and dtypes of the tensors that follow from it.

Not here: the decoder itself (decoder.py), how a checkpoint names its tensors (families.py).
"""

from __future__ import annotations

import sys
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


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A drafter over the outputs of a target's layers `taps`: `body` are its own layers. A block
    has `block` places, the anchor and masks of id `mask`; `first`: the one that drafts first, 0
    for the anchor. `rank`: of the bias by the token before, 0 for none. Without a block it drafts
    token by token; `norms_residual`: its residual stream begins at the normed feature. `embeds`,
    `heads`: whether it has an embedding and a head of its own, not the target's. `ids`: of the
    tokens that its head has, in its order; None for all."""

    kind: str
    body: Spec
    aux_layers: tuple[int, ...]
    block: int = 0
    first: int = 0
    mask: int | None = None
    rank: int = 0
    norms_residual: bool = False
    embeds: bool = False
    heads: bool = False
    ids: tuple[int, ...] | None = None

    @property
    def drafts(self) -> int:
        """The most tokens that it drafts in a round."""
        return self.block - self.first if self.block else sys.maxsize

    @property
    def inputs(self) -> int:
        """Columns of its projections to queries, keys and values: token by token it reads an
        embedding beside each feature."""
        return self.body.width * (1 if self.block else 2)


def head_parameters(head: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all its tensors: those of its layers, and of what makes one context
    feature of the taps."""
    width, vocab = head.body.width, head.body.vocab
    known = vocab if head.ids is None else len(head.ids)
    shapes = parameters(head.body) | {"head.weight": (known, width)}
    for name, own in (("embed.weight", head.embeds), ("head.weight", head.heads)):
        if not own:
            del shapes[name]
    for name, shape in shapes.items():
        if name.endswith(".qkv.weight"):
            shapes[name] = shape[0], head.inputs
    shapes["fc.weight"] = width, len(head.aux_layers) * width
    shapes["context_norm.weight"] = (width,)
    if head.rank:
        shapes["markov.before.weight"] = vocab, head.rank
        shapes["markov.after.weight"] = known, head.rank
    return shapes
