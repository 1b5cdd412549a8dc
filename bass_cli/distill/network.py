"""The student, and a differentiable version of models/decoder.py over training windows.

The student is a small model of the target's family, or the target's first layers, with a mask
token. Target and student run the same code in plain torch, without a KV cache, on the weights of
formats/weights.py. windows.py makes the attention masks; agreement.py applies the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import bass_kernels as ops
from bass_cli.distill.recurrence import Paths, delta_layer
from bass_cli.distill.windows import Windows
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.formats.weights import load_plain
from bass_cli.models.decoder import inverse_frequencies
from bass_cli.models.spec import Experts, Rope, Spec, parameters, stored_dtype
from bass_kernels import reference

Weights = Mapping[str, Tensor]

_ALIGNED = 64  # ids; a product with rows of no multiple of 16 bytes takes several times as long
_MASKED = -1e30  # finite, so that a tile of keys that are all masked gives no NaN


class Model(NamedTuple):
    """A decoder, which runs in `dtype`.

    vocab: only ids below are compared. mask: the mask token, to run text and masks; None to run the
    text alone.
    """

    spec: Spec
    weights: Weights
    vocab: int
    dtype: torch.dtype
    mask: int | None = None

    def cast(self) -> Model:
        """Return the model with its layers cast to `dtype`, keeping the gradient path.

        Embedding and head are not cast: few rows of the embedding are read, and Head casts itself.
        """
        layers = {
            name: weight
            if name.startswith(("embed.", "head."))
            else weight.to(stored_dtype(name, self.dtype))
            for name, weight in self.weights.items()
        }
        return self._replace(weights=layers)

    @property
    def head(self) -> Head:
        """The output head for the compared ids."""
        bias = self.weights.get("head.bias")
        weight = self.weights["head.weight"][: self.vocab]
        return Head(weight, None if bias is None else bias[: self.vocab])


class Head(NamedTuple):
    """Output head: weight [V, width], bias [V] or None, for the V ids that are compared."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of hidden [N, width], in the dtype of `hidden`."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)

    def padded(self, dtype: torch.dtype) -> Head:
        """Return the head in `dtype`, with rows of zeros added to a multiple of _ALIGNED."""

        def wider(x: Tensor) -> Tensor:
            size = -(-len(x) // _ALIGNED) * _ALIGNED
            if size == len(x):
                return x.to(dtype)
            padded = torch.zeros(size, *x.shape[1:], dtype=dtype, device=x.device)
            padded[: len(x)] = x
            return padded

        return Head(wider(self.weight), None if self.bias is None else wider(self.bias))


@dataclass(frozen=True, slots=True)
class Source:
    """What a student starts from: the first `layers` layers of a checkpoint.

    mask: id of the mask token. trained: whether the checkpoint was trained with this mask. vocab:
    ids below this are tokens of the target too. size: size of the checkpoint's tokenizer.
    """

    checkpoint: Checkpoint
    layers: int
    mask: int
    trained: bool
    vocab: int
    size: int

    @property
    def spec(self) -> Spec:
        """The student's Spec; its vocabulary has one row more if the mask token needs it."""
        spec = self.checkpoint.spec
        recurrent = spec.recurrent
        if recurrent is not None:
            kept = tuple(layer for layer in recurrent.layers if layer < self.layers)
            recurrent = recurrent._replace(layers=kept)
        return replace(
            spec,
            layers=self.layers,
            windows=spec.windows[: self.layers],
            vocab=max(spec.vocab, self.mask + 1),
            recurrent=recurrent,
        )


def source_of(
    checkpoint: Checkpoint, *, layers: int | None, mask: int | None, vocab: int, size: int
) -> Source:
    """Make a Source.

    Args:
        layers: None for all layers.
        mask: the checkpoint's mask token. If None, the first id without a token is used: a padding
            row of the vocabulary, or a new one.
        vocab: number of ids that are tokens of the target too.
        size: size of the checkpoint's tokenizer.
    """
    spec = checkpoint.spec
    if layers is not None and not 1 <= layers <= spec.layers:
        raise UserError(
            f"`layers`: give a number from 1 to {spec.layers}, the layers of "
            f"{checkpoint.path} (got {layers})"
        )
    least = first_whole(spec)
    if layers is not None and layers < least:
        raise UserError(
            f"`layers`: the first {layers} layers of {checkpoint.path} are all of one kind, and a "
            f"draft needs attention and recurrent layers; give at least {least}"
        )
    chosen = max(size, vocab) if mask is None else mask
    return Source(checkpoint, layers or spec.layers, chosen, mask is not None, vocab, size)


def first_whole(spec: Spec) -> int:
    """Return the fewest first layers that have every kind of layer of a model."""
    kinds = {spec.attention_layers[:1]}
    if spec.recurrent is not None:
        kinds.add(spec.recurrent.layers[:1])
    return 1 + max(layer for first in kinds for layer in first)


def student_weights(source: Source, device: torch.device) -> dict[str, Tensor]:
    """Load the student's weights in float32; a tied head is the embedding itself.

    A new mask token starts as the mean of all token embeddings.
    """
    stored, spec = load_plain(source.checkpoint, dtype=torch.float32, device=device), source.spec
    weights = {name: stored[name] for name in parameters(spec)}
    if not source.trained:
        head = () if spec.tied else ("head.weight",)
        for name in weights.keys() & {"embed.weight", "head.bias", *head}:
            weights[name] = _with_mask(weights[name], source)
    if spec.tied:
        weights["head.weight"] = weights["embed.weight"]
    return weights


def _with_mask(rows: Tensor, source: Source) -> Tensor:
    mean = rows[: min(source.size, len(rows))].mean(0, keepdim=True)
    if source.mask >= len(rows):
        return torch.cat((rows, mean.expand(source.mask + 1 - len(rows), *rows.shape[1:])))
    rows[source.mask] = mean[0]
    return rows


def run(model: Model, windows: Windows) -> Tensor:
    """Run the decoder; return the final norm's output [B, T, width] in the model's dtype."""
    return _Pass(model, windows).output()


class _Pass:
    """One pass of a decoder over windows."""

    def __init__(self, model: Model, windows: Windows):
        self._spec, self._weights, self._dtype = model.spec, model.weights, model.dtype
        self._windows = windows
        self._tokens, positions = windows.tokens, windows.positions
        if model.mask is not None:
            self._tokens, positions = windows.inputs(model.mask)
        self._positions, spec = positions, model.spec
        self._angles = {rope: self._angles_of(rope) for rope in (spec.rope, spec.local_rope)}
        masks = model.mask is not None and windows.layout.groups > 0
        self._biases = {window: self._biases_of(window, masks) for window in set(spec.windows)}
        self._paths = Paths.of(windows, masks=masks) if spec.recurrent is not None else None

    def output(self) -> Tensor:
        spec, embedding = self._spec, self._weights["embed.weight"]
        residual = functional.embedding(self._tokens, embedding).to(self._dtype)
        if spec.embed_scale != 1.0:
            residual = residual * torch.tensor(spec.embed_scale, dtype=self._dtype)
        if spec.rope is None:
            places = self._positions.clamp(max=spec.context - 1)
            learned = functional.embedding(places, self._weights["positions.weight"])
            residual = residual + learned
        for number in range(spec.layers):
            residual = self._layer(number, residual)
        return self._norm("norm", residual)

    def _layer(self, number: int, residual: Tensor) -> Tensor:
        """Run a layer; return the residual stream [B, T, width]."""
        spec, at = self._spec, f"layers.{number}."
        normed = self._norm(at + "norm1", residual)
        if number in spec.attention_layers:
            mixed = self._attention(number, normed)
        else:
            mixed = self._recurrent(at, normed)
        if spec.parallel:
            return residual + mixed + self._feed(at, normed)
        if spec.norm.sandwich:
            mixed = self._norm(at + "post1", mixed)
        residual = residual + mixed
        fed = self._feed(at, self._norm(at + "norm2", residual))
        if spec.norm.sandwich:
            fed = self._norm(at + "post2", fed)
        return residual + fed

    def _attention(self, number: int, normed: Tensor) -> Tensor:
        """Return what the attention of a layer adds to the residual stream, [B, T, width]."""
        spec, at, window = self._spec, f"layers.{number}.", self._spec.windows[number]
        qkv, gate = self._linear(at + "qkv", normed), None
        if spec.output_gate:
            size = spec.heads * spec.head_size
            gate, qkv = qkv.split((size, qkv.shape[-1] - size), -1)
        qkv = qkv.unflatten(-1, (-1, spec.head_size))
        q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=2)
        if spec.norm.qk:
            q, k = self._norm(at + "q_norm", q), self._norm(at + "k_norm", k)
        angles = self._angles[spec.local_rope if window and spec.local_rope else spec.rope]
        if angles is not None:
            q, k = _Rotated.apply(q, *angles), _Rotated.apply(k, *angles)
        mixed = self._mix(q, k, v, *self._biases[window])
        return self._linear(at + "o", mixed if gate is None else mixed * gate.sigmoid())

    def _recurrent(self, at: str, normed: Tensor) -> Tensor:
        """Return what a recurrent layer adds to the residual stream, [B, T, width]."""
        recurrent, weights = self._spec.recurrent, self._weights
        assert recurrent is not None
        assert self._paths is not None
        qkv, z = self._linear(at + "delta_in", normed).split(
            (recurrent.channels, recurrent.values), -1
        )
        found = delta_layer(
            qkv,
            self._linear(at + "delta_gates", normed),
            z,
            ops.DeltaWeights(
                weights[at + "conv.weight"].flatten(1),
                *(weights[f"{at}{name}.weight"] for name in ("decay", "step_bias", "delta_norm")),
            ),
            recurrent,
            self._paths,
            eps=self._spec.norm.eps,
        )
        return self._linear(at + "delta_out", found)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, of_text: Tensor, of_masks: Tensor | None
    ) -> Tensor:
        """Attention [B, T, H D] of the text to itself, and of each group to the text and itself.

        of_text, of_masks: the attention biases.
        """
        length, scale = self._windows.tokens.shape[1], self._spec.query_scale
        text = _attend(q[:, :length], k[:, :length], v[:, :length], of_text, scale)
        if of_masks is None:
            return text
        groups, masks = self._windows.layout.groups, self._windows.layout.masks

        def of_groups(x: Tensor) -> Tensor:  # [B C, masks, ...]
            return x[:, length:].unflatten(1, (groups, masks)).flatten(0, 1)

        def with_text(x: Tensor) -> Tensor:  # [B C, L + masks, ...]
            shared = x[:, None, :length].expand(-1, groups, -1, -1, -1).flatten(0, 1)
            return torch.cat((shared, of_groups(x)), 1)

        mixed = _attend(of_groups(q), with_text(k), with_text(v), of_masks, scale)
        return torch.cat((text, mixed.unflatten(0, (-1, groups)).flatten(1, 2)), 1)

    def _feed(self, at: str, normed: Tensor) -> Tensor:
        spec = self._spec
        if spec.experts is not None:
            return self._experts(at, spec.experts, normed)
        inner = self._linear(at + "up", normed)
        if spec.gated and spec.activation == "silu":
            inner = _Gated.apply(inner)
        else:
            inner = reference.activation(inner, spec.activation, gated=spec.gated)
        return self._linear(at + "down", inner)

    def _experts(self, at: str, experts: Experts, normed: Tensor) -> Tensor:
        """Return the output of the experts, which have no gradient: only targets have them."""
        x, spec = normed.flatten(0, 1), self._spec
        ids, shares = ops.route(
            x, *self._map(at + "router"), chosen=experts.chosen, normalised=experts.normalised
        )
        shared = None
        if experts.shared:
            inner = reference.activation(self._linear(at + "shared_up", x), "silu", gated=True)
            own = self._linear(at + "shared_down", inner)
            shared = ops.Shared(own, self._weights[at + "shared_gate.weight"])
        found = ops.mix_experts(
            x,
            ids,
            shares,
            ops.Maps(*self._map(at + "experts_up"), *self._map(at + "experts_down")),
            None,
            shared,
            experts=experts.total,
            activation=spec.activation,
            clamp=None if experts.clamp is None else ops.Clamp(*experts.clamp),
        )
        return found.view(normed.shape)

    def _map(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self._weights[name + ".weight"], self._weights.get(name + ".bias")

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, *self._map(name))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, size = self._weights[name + ".weight"].to(x.dtype), x.shape[-1:]
        head, eps = name.endswith(("q_norm", "k_norm")), self._spec.norm.eps
        if self._spec.norm.kind == "layer" and not head:
            bias = self._weights[name + ".bias"].to(x.dtype)
            return functional.layer_norm(x, size, weight, bias, eps)
        return functional.rms_norm(x, size, weight, eps)

    def _angles_of(self, rope: Rope | None) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin, each [B, T, 1, size / 2] float32; None without rotary positions."""
        inverse = inverse_frequencies(rope, self._positions.device)
        if inverse is None:
            return None
        angles = self._positions[..., None, None] * inverse
        return angles.cos(), angles.sin()

    def _biases_of(self, window: int, masks: bool) -> tuple[Tensor, Tensor | None]:
        """Make the attention biases of the text and of the masks, [N, 1, G T, S] each.

        G is the number of query heads that share a key head.
        """
        share = self._spec.heads // self._spec.kv_heads

        def of(allowed: Tensor) -> Tensor:
            bias = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
            return bias.masked_fill_(~allowed, _MASKED).repeat(1, share, 1)[:, None]

        text, both = self._windows.seen(window)
        return of(text), of(both) if masks and both is not None else None


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of q [N, T, H, D] to k and v [N, S, K, D]; returns [N, T, H D].

    Query heads that share a key head are folded into the query axis, so that keys are not copied.
    """
    rows, width, heads, size = q.shape
    kv_heads = k.shape[2]
    folded = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)
    out = functional.scaled_dot_product_attention(
        folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=scale
    )
    out = out.unflatten(2, (heads // kv_heads, width)).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, width, heads * size)


class _Rotated(torch.autograd.Function):
    """Rotary embedding of x by (cos, sin), with one kernel for each direction on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return ops.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return ops.rotate(outer[0], *ctx.saved_tensors, back=True), None, None


class _Gated(torch.autograd.Function):
    """silu(gate) * up of x [..., 2 I], with gate first; one kernel for each direction on a GPU.

    Only x is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return ops.activation(x, "silu", gated=True)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        return ops.gate_gradient(*ctx.saved_tensors, outer[0])
