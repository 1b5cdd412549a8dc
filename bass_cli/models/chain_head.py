"""EAGLE-3 (arXiv 2503.01840): a drafter that reads its target's hidden states and drafts token by
token. Its one layer takes a token's embedding beside the feature of the token before it.

The pair of feature f_i (from the target's layers) and token i + 1 is at position i. Its key and
value need no attention, so every pass of the target writes them for all tokens with a feature.
They replace those of drafted tokens, for which the layer's own output stood in for the feature.
The features are in the store too, as if they were keys and values, because a row's next draft
begins from its last feature. Not here: sampling (drafts/heads.py), configs (head_config.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.decoder import Decoder, angles_of, inverse_frequencies
from bass_cli.models.feature_head import FeatureHead, over_target
from bass_cli.models.kv_cache import Layers, Pass
from bass_cli.models.spec import HeadSpec


class ChainHead:
    """An EAGLE-3 drafter for `target` (see ReadsHidden).

    Args:
        weights: tensors by the names of `head_parameters(spec)`. The target's embedding and head
            are used if it has none.
    """

    ahead = 1  # a pair at position i has token i + 1

    def __init__(self, spec: HeadSpec, weights: dict[str, Tensor], target: Decoder):
        self.spec, body, self._vocab = spec, spec.body, target.vocab
        self._behind = len(target.layers)  # its layers in the store come after the target's
        self._fc = ops.pack(weights.pop("fc.weight"))
        self._feature_norm = weights.pop("context_norm.weight")
        self._ids = None if spec.ids is None else torch.tensor(spec.ids, device=target.device)
        at, query = "layers.0.", body.heads * body.head_size
        weight, self._bias = weights[at + "qkv.weight"], weights.get(at + "qkv.bias")
        self._keys = ops.pack(weight[query:]), None if self._bias is None else self._bias[query:]
        self._norms = None
        if body.norm.qk:
            self._norms = weights[at + "q_norm.weight"], weights[at + "k_norm.weight"]
        self.body = Decoder(body, weights, vocab=target.vocab, shared=target)
        self._qkv, self._embed = weights[at + "qkv.weight"], weights["embed.weight"]
        self._token_norm = weights[at + "norm1.weight"]
        self._frequencies = inverse_frequencies(body.rope, self.body.device)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.spec.aux_layers

    @property
    def cached(self) -> tuple[Layers, ...]:
        body = self.spec.body
        return Layers(1, body.kv_heads, body.head_size), Layers(1, 1, body.width // 2)

    def read(self, tokens: Tensor, hidden: Tensor, step: Pass) -> None:
        """Write the features of the tokens [B, W] of `step` and the keys and values of their pairs
        (see ReadsHidden). In a prefill the token after each feature is known. Rows pair their
        first token with the feature before it, which is in the store."""
        features = ops.linear(hidden, self._fc, None)
        if step.following is not None:
            pairs, tokens, positions = features, step.following, step.positions
            slots = step.slots()
        else:
            positions = step.positions - 1
            pairs = torch.cat((self.found(step, positions[:, :1]), features[:, :-1]), 1)
            slots = self._slots(step, positions)
        parts, own = features.chunk(2, -1), step.own(self._behind + 1)
        for store, part in zip(own, parts, strict=True):
            store[0, step.slots()] = part
        ops.rope_write(
            ops.linear(self._joined(tokens, self._normed(pairs)), *self._keys),
            angles_of(positions, self._frequencies),
            slots,
            step.own(self._behind),
            heads=0,
            norms=self._norms,
            eps=self.spec.body.norm.eps,
        )

    def found(self, step: Pass, positions: Tensor) -> Tensor:
        """Return the stored features [B, 1, width] at positions [B, 1] of the rows of `step`, from
        the prompt or the row's private store. Zeros before position 0."""
        segments = step.segments
        own = (positions + (segments.own - segments.base)[:, None]).clamp(min=0)
        prompt = (positions + segments.start[:, None]).clamp(min=0)
        inside = (positions >= segments.base[:, None])[..., None]
        layer = self._behind + 1
        found = torch.cat(
            [
                torch.where(inside, mine[0, own], shared[0, prompt])
                for mine, shared in zip(step.own(layer), step.prompt(layer), strict=True)
            ],
            -1,
        )
        return found.masked_fill((positions < 0)[..., None], 0.0)

    def draft(self, tokens: Tensor, features: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """Draft one token for each row.

        Args:
            tokens: [B, 1], at the positions of `step`.
            features: [B, 1, width] of the tokens before them. May be overwritten.

        Returns:
            Logits [B, U] of the next token, over the drafter's own vocabulary, and the layer's
            output [B, 1, width], which stands in for the next feature.
        """
        body, layer = self.spec.body, step._replace(first=self._behind)
        normed = self._normed(features)
        q = ops.rope_write(
            ops.linear(self._joined(tokens, normed), self._qkv, self._bias),
            angles_of(step.positions, self._frequencies),
            self._slots(step, step.positions),
            layer.own(0),
            heads=body.heads,
            norms=self._norms,
            eps=body.norm.eps,
        )
        residual = normed if self.spec.norms_residual else features
        output = self.body.behind(0, 0, q, residual, layer)
        return self.body.logits(self.body.normed(output))[:, 0], output

    def whole(self, logits: Tensor) -> Tensor:
        """Map logits [..., U] over the drafter's own tokens to [..., vocab] over the target's."""
        return over_target(logits, self._ids, self.spec.body.vocab, self._vocab)

    def _slots(self, step: Pass, positions: Tensor) -> Tensor:
        """Return the slots of pairs at positions [B, W]. Pairs inside a row's prompt are stored
        already, and go to slot 0, the scrap slot of rows that are not live."""
        slots = positions + (step.segments.own - step.segments.base)[:, None]
        return slots.masked_fill(positions < step.segments.base[:, None], 0)

    def _normed(self, features: Tensor) -> Tensor:
        eps = self.spec.body.norm.eps
        return ops.norm(None, features, self._feature_norm, None, eps=eps, kind="rms")[0]

    def _joined(self, tokens: Tensor, normed: Tensor) -> Tensor:
        """Return the input of the layer's projections, [B, W, 2 width]."""
        embedded = ops.embed(tokens, self._embed)
        eps = self.spec.body.norm.eps
        first = ops.norm(None, embedded, self._token_norm, None, eps=eps, kind="rms")[0]
        return torch.cat((first, normed), -1)


Head = FeatureHead | ChainHead


def make_head(spec: HeadSpec, weights: dict[str, Tensor], target: Decoder) -> Head:
    """Return the drafter that a spec describes. It takes ownership of `weights`."""
    return (FeatureHead if spec.block else ChainHead)(spec, weights, target)
