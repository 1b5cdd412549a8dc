"""The model that learns: a small one of the target's family, or the target's own first layers,
with a mask token.

Not here: how it learns (trainer.py), what is written of it (folder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bass_cli.distill.loss import Head
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.formats.weights import load
from bass_cli.models.spec import Spec, parameters


@dataclass(frozen=True, slots=True)
class Source:
    """What a student is made of: `layers` of a checkpoint, its first ones. `mask`: the id of its
    mask token; `trained`: whether it has drafted by it before. `vocab`: ids below are tokens of
    the target's too; `size`: of its tokenizer."""

    checkpoint: Checkpoint
    layers: int
    mask: int
    trained: bool
    vocab: int
    size: int

    @property
    def spec(self) -> Spec:
        """The student's: with a row more where the mask token has no other place."""
        spec = self.checkpoint.spec
        return replace(
            spec,
            layers=self.layers,
            windows=spec.windows[: self.layers],
            vocab=max(spec.vocab, self.mask + 1),
        )


def source_of(
    checkpoint: Checkpoint, *, layers: int | None, mask: int | None, vocab: int, size: int
) -> Source:
    """`mask`: its own, if it has one. Otherwise the first id that is no token: one of those that
    fill the vocabulary up, or a new one. `size`: of its tokenizer, `vocab`: ids of the target's
    too."""
    spec = checkpoint.spec
    if layers is not None and not 1 <= layers <= spec.layers:
        raise UserError(
            f"--layers (or BASS_LAYERS): {checkpoint.path} has {spec.layers} layers, and {layers} "
            "of them make no draft"
        )
    chosen = max(size, vocab) if mask is None else mask
    return Source(checkpoint, layers or spec.layers, chosen, mask is not None, vocab, size)


def student_weights(
    source: Source, device: torch.device, on_read: Callable[[int], None] = lambda size: None
) -> dict[str, Tensor]:
    """The student's weights in float32; a tied head is the embedding itself. A mask that it has
    not been trained with begins as the mean of all tokens, as a word that it knows nothing of."""
    stored = load(source.checkpoint, dtype=torch.float32, device=device, on_read=on_read)
    spec = source.spec
    weights = {name: stored[name] for name in parameters(spec)}
    if not source.trained:
        for name in ("embed.weight", "head.weight"):
            if not (spec.tied and name == "head.weight"):
                weights[name] = _with_mask(weights[name], source)
        if "head.bias" in weights:
            weights["head.bias"] = _with_mask(weights["head.bias"], source)
        if spec.tied:
            weights["head.weight"] = weights["embed.weight"]
    return weights


def _with_mask(rows: Tensor, source: Source) -> Tensor:
    mean = rows[: min(source.size, len(rows))].mean(0, keepdim=True)
    if source.mask >= len(rows):
        return torch.cat((rows, mean.expand(source.mask + 1 - len(rows), *rows.shape[1:])))
    rows[source.mask] = mean[0]
    return rows


def trainable(spec: Spec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that there are, each once, with gradients from now on."""
    return {
        name: weight.requires_grad_()
        for name, weight in weights.items()
        if not (spec.tied and name == "head.weight")
    }


def head_of(weights: Mapping[str, Tensor], vocab: int) -> Head:
    """Of the first `vocab` ids."""
    bias = weights.get("head.bias")
    return Head(weights["head.weight"][:vocab], None if bias is None else bias[:vocab])
