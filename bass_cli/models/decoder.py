"""The one decoder for all families: a Spec (spec.py) says how the blocks differ, the weights say
the rest.

Not here: how a checkpoint names its tensors (families.py), how they get here (weights.py), where
keys and values live (kv_cache.py). Rotary embedding is always the half-split kind; interleaved
checkpoints are reordered at load.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

import bass_kernels as ops
from bass_cli.models import fused_decode
from bass_cli.models.aux_hidden_layers import AuxHiddenLayers, ReadsHidden
from bass_cli.models.kv_cache import Layers, Pass
from bass_cli.models.ranks import Ranks
from bass_cli.models.spec import Rope, Spec

_MATRICES = (".qkv.weight", ".o.weight", ".up.weight", ".down.weight")


class Decoder:
    """A decoder-only transformer over fused weights; holds no state of any sequence.

    `weights` maps the names of `parameters(spec)` to tensors of their `stored_dtype` on one
    device; the decoder takes the dict over, and replaces matrices in it by packed ones where
    that is faster. Embedding and head may be missing: they are those of `shared` then. `vocab`
    cuts the head to the first ids (those the tokenizer knows: a checkpoint's padding rows must
    never be sampled). `layers` are the layers that are run; `reader`: see `read_by`. With
    `ranks` spec and weights are one process's part (partition.part_of), `vocab` is the whole
    model's, and every pass is one that all of them take.
    """

    def __init__(
        self,
        spec: Spec,
        weights: dict[str, Tensor],
        *,
        vocab: int | None = None,
        shared: Decoder | None = None,
        ranks: Ranks | None = None,
    ):
        self.spec, self.ranks = spec, ranks
        self.layers = tuple(range(spec.layers))
        every = spec.vocab * (1 if ranks is None else ranks.share.ranks)
        self.vocab = min(vocab or every, every)
        self.reader: ReadsHidden | None = None
        self._weights = weights
        if "embed.weight" not in weights:
            assert shared is not None
            weights["embed.weight"] = shared._weights["embed.weight"]
        embed = weights["embed.weight"]
        self.device, self.dtype = embed.device, embed.dtype
        self._head: tuple[Tensor, Tensor | None]
        if "head.weight" in weights:
            bias = weights.pop("head.bias", None)
            most = self.vocab if ranks is None else spec.vocab  # all parts are of one size
            self._head = (
                ops.pack(weights.pop("head.weight")[:most]),
                None if bias is None else bias[:most],
            )
        else:
            assert shared is not None
            self._head = shared._head
        for name in weights:
            if name.endswith(_MATRICES):
                weights[name] = ops.pack(weights[name])
        self._frequencies = tuple(
            inverse_frequencies(rope, self.device) for rope in (spec.rope, spec.local_rope)
        )

    @property
    def context(self) -> int:
        """The most positions a sequence may have."""
        return self.spec.context

    @property
    def cached(self) -> tuple[Layers, ...]:
        """What a store of keys and values has for it, its reader's layers last."""
        own = Layers(len(self.layers), self.spec.kv_heads, self.spec.head_size)
        return (own,) if self.reader is None else (own, *self.reader.cached)

    def keep_layers(self, layers: Sequence[int]) -> Decoder:
        """The same weights with only these layers run: the others are skipped
        (self-speculation)."""
        other = copy.copy(self)
        other.layers = tuple(layers)
        return other

    def read_by(self, reader: ReadsHidden) -> Decoder:
        """The same weights, whose passes `reader` is given some layers' outputs of."""
        other = copy.copy(self)
        other.reader = reader
        return other

    def forward(self, tokens: Tensor, step: Pass, *, last: int | None = None) -> Tensor | None:
        """Run tokens [B, W] int64 at `step.positions` [B, W]; writes their keys and values into the
        cache of `step`.

        Returns logits [B, min(last, W), vocab] in the weights' dtype for the last `last`
        positions of each row (all by default), or None for last = 0 (prefill: only the cache is
        wanted).
        """
        aux_layers, reader = None, self.reader
        if reader is not None:
            aux_layers = AuxHiddenLayers(reader.aux_layers, tokens, self._weights["embed.weight"])
        normed = self._normed(tokens, step, last, aux_layers)
        if reader is not None and aux_layers is not None:
            reader.read(tokens, aux_layers.hidden, step)
        return None if normed is None else self.logits(normed)

    def hidden(self, tokens: Tensor, step: Pass) -> Tensor:
        """As `forward`, but what the head takes: the final norm's output [B, W, width]."""
        normed = self._normed(tokens, step, None, None)
        assert normed is not None
        return normed

    def normed(self, residual: Tensor) -> Tensor:
        """The final norm's output, of the residual stream [..., width]."""
        return self._norm("norm", residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab] of the final norm's output [..., width]."""
        found = ops.linear(hidden, *self._head)
        return found if self.ranks is None else self.ranks.join_logits(found, self.vocab)

    def _normed(
        self, tokens: Tensor, step: Pass, last: int | None, aux_layers: AuxHiddenLayers | None
    ) -> Tensor | None:
        """The final norm's output [B, min(last, W), width], or None for last = 0."""
        embed = self._weights["embed.weight"]
        alone = self.ranks is None  # five launches a layer leave no place for sums
        if (
            alone
            and self._frequencies[0] is not None
            and fused_decode.serves(self.spec, tokens, embed, step)
        ):
            normed = fused_decode.run(
                self.spec,
                self._weights,
                self.layers,
                self._frequencies[0],
                tokens,
                step,
                aux_layers,
            )
            return None if last == 0 else normed[:, -(last or tokens.shape[1]) :].contiguous()
        embedded = ops.embed if self.ranks is None else self.ranks.embed
        residual = embedded(tokens, embed, scale=self.spec.embed_scale)
        if self.spec.rope is None:
            places = step.positions.clamp(0, self.spec.context - 1)
            residual = residual + functional.embedding(places, self._weights["positions.weight"])
        angles = tuple(angles_of(step.positions, f) for f in self._frequencies)
        slots = step.slots()
        for slot, i in enumerate(self.layers):
            residual = self._block(i, slot, residual, step, slots, angles)
            if aux_layers is not None:
                aux_layers.take(i, residual)
        if last == 0:
            return None
        if last is not None:
            residual = residual[:, -last:]
        return self.normed(residual)

    def _block(
        self, i: int, slot: int, residual: Tensor, step: Pass, slots: Tensor, angles: tuple
    ) -> Tensor:
        """The residual stream [B, W, width] after layer i with cache layer `slot`; keys go to
        `slots` [B, W]."""
        spec, at = self.spec, f"layers.{i}."
        q = ops.project(
            residual,
            self._affine(at + "norm1"),
            self._affine(at + "qkv"),
            angles[1 if spec.windows[i] and spec.local_rope else 0],
            slots,
            step.own(slot),
            heads=spec.heads,
            eps=spec.norm.eps,
            kind=spec.norm.kind,
            norms=(self._weights[at + "q_norm.weight"], self._weights[at + "k_norm.weight"])
            if spec.norm.qk
            else None,
        )
        return self.behind(i, slot, q, residual, step)

    def behind(self, i: int, slot: int, q: Tensor, residual: Tensor, step: Pass) -> Tensor:
        """The rest of layer i, whose queries q [B, W, H, D] and keys are there; it may be written
        in place of the residual stream."""
        spec, at, segments = self.spec, f"layers.{i}.", step.segments
        mixed = ops.attention(
            q.view(*segments.positions.shape, *q.shape[2:]),  # a prefill's one row: its tiles
            step.own(slot),
            step.prompt(slot),
            segments,
            scale=spec.query_scale,
            window=spec.windows[i],
            then=self._weights[at + "o.weight"],
        ).view(*q.shape[:2], -1)
        if spec.norm.sandwich:
            residual = residual + self._norm(at + "post1", self._mapped(at + "o", mixed))
            mapped = self._mapped(at + "down", self._up(at, residual))
            return residual + self._norm(at + "post2", mapped)
        inner = self._up(at, residual) if spec.parallel else None
        residual = self._added(at + "o", mixed, residual)
        inner = self._up(at, residual) if inner is None else inner
        return self._added(at + "down", inner, residual)

    def _added(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """The residual stream and a linear map out of heads or feed-forward; may be written in
        place of it."""
        if self.ranks is None:
            return ops.linear_add(x, *self._affine(name), residual)
        return residual + self._mapped(name, x)

    def _mapped(self, name: str, x: Tensor) -> Tensor:
        """Such a map alone, of which each process may have some columns; the bias comes once."""
        weight, bias = self._affine(name)
        if self.ranks is None:
            return ops.linear(x, weight, bias)
        found = self.ranks.sum(ops.linear(x, weight, None))
        return found if bias is None else found.add_(bias)

    def _up(self, at: str, residual: Tensor) -> Tensor:
        """The feed-forward's inner values [B, W, inner] from the residual stream."""
        spec = self.spec
        norm = self._affine(at + ("norm1" if spec.parallel else "norm2"))
        return ops.norm_up(
            residual,
            norm,
            self._affine(at + "up"),
            eps=spec.norm.eps,
            kind=spec.norm.kind,
            activation=spec.activation,
            gated=spec.gated,
        )

    def _affine(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self._weights[name + ".weight"], self._weights.get(name + ".bias")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return ops.norm(
            None, x, *self._affine(name), eps=self.spec.norm.eps, kind=self.spec.norm.kind
        )[0]


def inverse_frequencies(rope: Rope | None, device: torch.device) -> Tensor | None:
    """[size / 2] float32, scaled."""
    if rope is None:
        return None
    exponents = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    inverse = 1.0 / (rope.theta**exponents)
    if rope.factors is not None:
        inverse = inverse / torch.tensor(rope.factors)
    return inverse.to(device)


def angles_of(positions: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """cos and sin, each [B, W, size / 2] float32."""
    return None if inverse is None else ops.angles(positions, inverse)
