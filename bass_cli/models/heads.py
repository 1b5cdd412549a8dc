"""Drafters that read their target's hidden states: DFlash (arXiv 2602.06036) and DSpark, which
draft a block of tokens in one pass; EAGLE-3 (arXiv 2503.01840) and the multi-token-prediction layer
of a checkpoint (arXiv 2412.19437, 2.2), which draft token by token.

What they keep of a token is in the target's store, after the target's layers, so the store alone
handles prompts, moved rows and rejected drafts. Not here: sampling (drafts/heads.py), configs
(formats/draft_heads.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.decoder import Decoder, angles_of, inverse_frequencies
from bass_cli.models.kv_cache import Layers, Pass
from bass_cli.models.spec import PLAIN, HeadSpec, Layouts
from bass_cli.models.weights import Named
from bass_kernels import Quantised, Writable


class _HiddenStateDrafter:
    """The common part of such drafters for `target` (see ReadsHidden).

    The outputs of some layers of the target become one context feature a token, which has its own
    norm. The drafter's layers project it to keys and values.

    Args:
        weights: tensors by the names of `head_parameters(spec)`. The target's embedding and head
            are used if it has none. `body.weights` holds them afterwards.
    """

    def __init__(self, spec: HeadSpec, weights: Named, target: Decoder):
        self.spec, body, self._vocab = spec, spec.body, target.vocab
        # its layers in the store come after the target's
        self._first_layer = sum(layers.number for layers in target.cached)
        self._ids = None if spec.ids is None else torch.tensor(spec.ids, device=target.device)
        self.body = Decoder(body, weights, vocab=target.vocab, shared=target)
        own, query = self.body.weights, body.heads * body.head_size * (1 + body.output_gate)
        self._fc, self._context_norm = own.pack("fc.weight"), own.plain("context_norm.weight")
        self._keys_values, self._norms = [], []
        for at in (f"layers.{i}." for i in range(body.layers)):
            bias = own.plain_or_none(at + "qkv.bias")
            norms = own.qk_norms(at) if body.norm.qk else None
            self._keys_values.append(
                (own.rows_from(at + "qkv.weight", query), None if bias is None else bias[query:])
            )
            self._norms.append(norms)
        self._frequencies = inverse_frequencies(body.rope, self.body.device)
        self._scale = 1.0 if body.rope is None else body.rope.scale

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.spec.aux_layers

    def whole(self, logits: Tensor) -> Tensor:
        """Map logits [..., U] over the drafter's own tokens to [..., vocab] over the target's.
        Tokens that it lacks get -inf."""
        if self._ids is None:
            return logits
        found = logits.new_full((*logits.shape[:-1], self.spec.body.vocab), -torch.inf)
        return found.index_copy_(-1, self._ids, logits)[..., : self._vocab].contiguous()

    def _normed(self, features: Tensor) -> Tensor:
        return _norm(features, self._context_norm, self.spec)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        return angles_of(positions, self._frequencies, self._scale)

    def _write(
        self,
        i: int,
        inputs: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        step: Pass,
    ) -> None:
        """Write layer i's keys and values of these inputs, without its queries."""
        ops.rope_write(
            ops.linear(inputs, *self._keys_values[i]),
            angles,
            slots,
            step.own(self._first_layer + i),
            heads=0,
            norms=self._norms[i],
            eps=self.spec.body.norm.eps,
        )


def _norm(x: Tensor, weight: Tensor, spec: HeadSpec) -> Tensor:
    return ops.norm(None, x, weight, None, eps=spec.body.norm.eps, kind="rms")[0]


class FeatureHead(_HiddenStateDrafter):
    """A DFlash or DSpark drafter: each layer projects the normed feature of every token of the
    context. A block of an anchor and masks attends to all of them and to all of itself."""

    ahead = 0

    def __init__(self, spec: HeadSpec, weights: Named, target: Decoder):
        super().__init__(spec, weights, target)
        own, self._after = self.body.weights, None
        self._before = own.plain_or_none("markov.before.weight")
        if self._before is not None:
            read = None if spec.ids is not None else target.columns
            self._after = own.pack("markov.after.weight", read)

    @property
    def cached(self) -> tuple[Layers, ...]:
        body = self.spec.body
        return (Layers(body.layers, body.kv_heads, body.head_size),)

    def read(self, tokens: Tensor, hidden: Tensor, step: Pass) -> None:
        """Write the keys and values of the tokens [B, W] of `step`. See ReadsHidden."""
        context = self._normed(ops.linear(hidden, self._fc, None))
        angles, slots = self._angles(step.positions), step.slots()
        for i in range(self.spec.body.layers):
            self._write(i, context, angles, slots, step)

    def draft(self, tokens: Tensor, step: Pass, length: int) -> Tensor:
        """Return logits [B, length, U] of the first drafts of blocks [B, block], over the
        drafter's own tokens, without the bias by the token before (`after`). The logits of one
        position are contiguous in memory."""
        hidden = self.body.final_hidden(tokens, step.block(self._first_layer))
        assert hidden is not None
        first = self.spec.first
        by_position = hidden[:, first : first + length].transpose(0, 1).contiguous()
        return self.body.logits(by_position).transpose(0, 1)

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Add to logits [B, U] at a position the bias by the tokens [B] before it. The logits may
        be changed in place."""
        assert self._before is not None
        assert self._after is not None
        return ops.linear_add(ops.embed(tokens, self._before), self._after, None, logits)


class ChainHead(_HiddenStateDrafter):
    """A drafter of one layer that drafts token by token. It takes a token's embedding beside the
    feature of the token before it.

    The pair of feature f_i (from the target's layers) and token i + 1 is at position i. Its key and
    value need no attention, so every pass of the target writes them for all tokens with a feature.
    They replace those of drafted tokens, for which the layer's own output stood in for the feature.
    The features are in the store too, as if they were keys and values, because a row's next draft
    begins from its last feature.
    """

    ahead = 1  # a pair at position i has token i + 1

    def __init__(self, spec: HeadSpec, weights: Named, target: Decoder):
        super().__init__(spec, weights, target)
        own = self.body.weights
        self._embed, self._input_norm = (
            own.plain("embed.weight"),
            own.plain("layers.0.norm1.weight"),
        )

    @property
    def cached(self) -> tuple[Layers, ...]:
        body = self.spec.body
        return Layers(1, body.kv_heads, body.head_size), Layers(1, 1, body.width // 2, hidden=True)

    def read(self, tokens: Tensor, hidden: Tensor, step: Pass) -> None:
        """Write the features of the tokens [B, W] of `step` and the keys and values of their pairs
        (see ReadsHidden). In a prefill the token after each feature is known. Rows pair their
        first token with the feature before it, which is in the store."""
        features = self._features(hidden)
        if step.following is not None:
            pairs, tokens, positions = features, step.following, step.positions
            slots = step.slots()
        else:
            positions = step.positions - 1
            pairs = torch.cat((self.found(step, positions[:, :1]), features[:, :-1]), 1)
            slots = self._slots(step, positions)
        ops.write_hidden(features, step.slots(), step.own(self._first_layer + 1))
        self._write(0, self._inputs(tokens, pairs), self._angles(positions), slots, step)

    def found(self, step: Pass, positions: Tensor) -> Tensor:
        """Return the stored features [B, 1, width] at positions [B, 1] of the rows of `step`, from
        the prompt or the row's private store. Zeros before position 0."""
        layer = self._first_layer + 1
        found: Tensor = ops.read_hidden(
            positions, step.segments, step.own(layer), step.prompt(layer)
        )
        return found

    def draft(self, tokens: Tensor, features: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """Draft one token for each row.

        Args:
            tokens: [B, 1], at the positions of `step`.
            features: [B, 1, width] of the tokens before them. May be overwritten.

        Returns:
            Logits [B, U] of the next token, over the drafter's own vocabulary, and [B, 1, width],
            which stands in for the next feature.
        """
        raise NotImplementedError

    def _features(self, hidden: Tensor) -> Tensor:
        """Return the features [B, W, width] of the outputs of the target's layers."""
        raise NotImplementedError

    def _inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the input of the layer's projections for pairs [B, W]."""
        raise NotImplementedError

    def _slots(self, step: Pass, positions: Tensor) -> Tensor:
        """Return the slots of pairs at positions [B, W]. Pairs inside a row's prompt are stored
        already, and go to slot 0, the scrap slot of rows that are not live."""
        slots = positions + (step.segments.own - step.segments.base)[:, None]
        return slots.masked_fill(positions < step.segments.base[:, None], 0)


class EagleHead(ChainHead):
    """An EAGLE-3 drafter. `fc` combines several layers of the target to a feature. The layer's
    projections take the embedding beside it."""

    def __init__(self, spec: HeadSpec, weights: Named, target: Decoder):
        super().__init__(spec, weights, target)
        own, at = self.body.weights, "layers.0."
        self._qkv, self._bias = own[at + "qkv.weight"], own.plain_or_none(at + "qkv.bias")

    def draft(self, tokens: Tensor, features: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """See ChainHead. The layer's output stands in for the next feature."""
        body, layer = self.spec.body, step._replace(first=self._first_layer)
        normed = self._normed(features)
        q = ops.rope_write(
            ops.linear(self._joined(tokens, normed), self._qkv, self._bias),
            self._angles(step.positions),
            self._slots(step, step.positions),
            layer.own(0),
            heads=body.heads,
            norms=self._norms[0],
            eps=body.norm.eps,
        )
        residual = normed if self.spec.norms_residual else features
        output = self.body.rest_of_layer(0, 0, q, residual, layer)
        return self.body.logits(self.body.final_norm(output))[:, 0], output

    def _features(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self._fc, None)

    def _inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        return self._joined(tokens, self._normed(features))

    def _joined(self, tokens: Tensor, normed: Tensor) -> Tensor:
        """Return the input of the layer's projections, [B, W, 2 width]."""
        embedded = _norm(ops.embed(tokens, self._embed), self._input_norm, self.spec)
        return torch.cat((embedded, normed), -1)


class PredictionHead(ChainHead):
    """The multi-token-prediction layer of a checkpoint (MTP; DeepSeek-V3, arXiv 2412.19437, section
    2.2, in the form of Qwen3-Next).

    A feature is the output of the target's final norm. The residual stream begins at
    fc [norm(embedding), norm(feature)]. The output of the layer's own final norm gives the logits,
    and stands in for the next feature.
    """

    def __init__(self, spec: HeadSpec, weights: Named, target: Decoder):
        super().__init__(spec, weights, target)
        self._target, self._token_norm = target, self.body.weights.plain("token_norm.weight")

    def draft(self, tokens: Tensor, features: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """See ChainHead."""
        slots, angles = self._slots(step, step.positions), self._angles(step.positions)
        layer = step._replace(first=self._first_layer)
        residual = self._joined(tokens, features)
        output = self.body.block(0, 0, residual, layer, slots, (angles, None))
        normed = self.body.final_norm(output)
        return self.body.logits(normed)[:, 0], normed

    def _features(self, hidden: Tensor) -> Tensor:
        return self._target.final_norm(hidden)

    def _inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        return _norm(self._joined(tokens, features), self._input_norm, self.spec)

    def _joined(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the residual stream before the layer, [B, W, width]."""
        embedded = _norm(ops.embed(tokens, self._embed), self._token_norm, self.spec)
        return ops.linear(torch.cat((embedded, self._normed(features)), -1), self._fc, None)


Head = FeatureHead | ChainHead


def make_head(spec: HeadSpec, weights: Named, target: Decoder, layouts: Layouts = PLAIN) -> Head:
    """Return the drafter that a spec describes. It takes the tensors out of `weights`.

    Args:
        layouts: if they have one for heads, a drafter without a head of its own gets a copy of the
            target's in this layout, unless that is stored so. Default: it shares the target's.
    """
    held = target.weights["head.weight"]
    stored = None if isinstance(held, Tensor) else held.layout
    if layouts.head not in (None, stored) and "head.weight" not in weights:
        whole = whole_head(target)
        copied = Quantised.empty(tuple(whole.shape), layouts.head, target.device)
        copied.write_from(whole)
        weights = {**weights, "head.weight": copied}
    kind = FeatureHead if spec.block else PredictionHead if spec.joins else EagleHead
    return kind(spec, weights, target)


def whole_head(target: Decoder) -> Writable:
    """Return the head of a target that is not split, 8-bit or plain, of which drafters have
    quantised copies."""
    held = target.weights["head.weight"]
    return held if isinstance(held, Quantised) else target.weights.whole("head.weight")
