"""DFlash (arXiv 2602.06036) and DSpark: drafters that read their target's hidden states and draft a
block of tokens in one pass of a few layers.

The outputs of some layers of the target, concatenated, become one context feature a token (`fc`,
then a norm). Each draft layer projects it to keys and values. They are in the target's store,
after the target's layers, so the store alone handles prompts, moved rows and rejected drafts. A
block of an anchor and masks attends to all of them and to all of itself. Not here: the tokens of
a block and sampling (drafts/heads.py), configs (head_config.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.decoder import Decoder, angles_of, inverse_frequencies
from bass_cli.models.kv_cache import Layers, Pass
from bass_cli.models.spec import HeadSpec


class FeatureHead:
    """A DFlash or DSpark drafter for `target` (see ReadsHidden).

    Args:
        weights: tensors by the names of `head_parameters(spec)`. The target's embedding and head
            are used if it has none.
    """

    ahead = 0

    def __init__(self, spec: HeadSpec, weights: dict[str, Tensor], target: Decoder):
        self.spec, body, self._vocab = spec, spec.body, target.vocab
        self._behind = len(target.layers)  # its layers in the store come after the target's
        self._fc = ops.pack(weights.pop("fc.weight"))
        self._norm = weights.pop("context_norm.weight")
        self._before = weights.pop("markov.before.weight", None)
        after = weights.pop("markov.after.weight", None)
        if after is not None:
            after = ops.pack(after if spec.ids is not None else after[: target.vocab])
        self._after = after
        self._ids = None if spec.ids is None else torch.tensor(spec.ids, device=target.device)
        query = body.heads * body.head_size
        self._projections = []
        for at in (f"layers.{i}." for i in range(body.layers)):
            bias = weights.get(at + "qkv.bias")
            norms = (weights[at + "q_norm.weight"], weights[at + "k_norm.weight"])
            self._projections.append(
                (
                    ops.pack(weights[at + "qkv.weight"][query:]),
                    None if bias is None else bias[query:],
                    norms if body.norm.qk else None,
                )
            )
        self.body = Decoder(body, weights, vocab=target.vocab, shared=target)
        self._frequencies = inverse_frequencies(body.rope, self.body.device)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.spec.aux_layers

    @property
    def cached(self) -> tuple[Layers, ...]:
        body = self.spec.body
        return (Layers(body.layers, body.kv_heads, body.head_size),)

    def read(self, tokens: Tensor, hidden: Tensor, step: Pass) -> None:
        """Write the keys and values of the tokens [B, W] of `step`. See ReadsHidden."""
        eps = self.spec.body.norm.eps
        fused = ops.linear(hidden, self._fc, None)
        context = ops.norm(None, fused, self._norm, None, eps=eps, kind="rms")[0]
        angles, slots = angles_of(step.positions, self._frequencies), step.slots()
        for i, (weight, bias, norms) in enumerate(self._projections):
            ops.rope_write(
                ops.linear(context, weight, bias),
                angles,
                slots,
                step.own(self._behind + i),
                heads=0,
                norms=norms,
                eps=eps,
            )

    def draft(self, tokens: Tensor, step: Pass, length: int) -> Tensor:
        """Return logits [B, length, U] of the first drafts of blocks [B, block], over the
        drafter's own tokens, without the bias by the token before (`after`). The logits of one
        place are contiguous in memory."""
        hidden = self.body.hidden(tokens, step.block(self._behind))
        first = self.spec.first
        by_place = hidden[:, first : first + length].transpose(0, 1).contiguous()
        return self.body.logits(by_place).transpose(0, 1)

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Add to logits [B, U] of a place the bias by the tokens [B] before it. The logits may be
        changed in place."""
        assert self._before is not None
        assert self._after is not None
        return ops.linear_add(ops.embed(tokens, self._before), self._after, None, logits)

    def whole(self, logits: Tensor) -> Tensor:
        """Map logits [..., U] over the drafter's own tokens to [..., vocab] over the target's."""
        return over_target(logits, self._ids, self.spec.body.vocab, self._vocab)


def over_target(logits: Tensor, ids: Tensor | None, every: int, vocab: int) -> Tensor:
    """Map a drafter's logits to its target's vocabulary. Tokens that it lacks get -inf.

    Args:
        logits: [..., U].
        ids: the target's ids of the drafter's tokens, [U]. None: it has all, and nothing changes.
        every: rows of the target's head.
        vocab: ids that can be sampled, the first of them.

    Returns:
        [..., vocab].
    """
    if ids is None:
        return logits
    found = logits.new_full((*logits.shape[:-1], every), -torch.inf)
    return found.index_copy_(-1, ids, logits)[..., :vocab].contiguous()
