"""The student: a small model of the target's family or the target's first layers, with a mask.

trainer.py trains it; folder.py writes it.
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
        return replace(
            spec,
            layers=self.layers,
            windows=spec.windows[: self.layers],
            vocab=max(spec.vocab, self.mask + 1),
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
            f"--layers (or BASS_LAYERS): give a number from 1 to {spec.layers}, the layers of "
            f"{checkpoint.path} (got {layers})"
        )
    chosen = max(size, vocab) if mask is None else mask
    return Source(checkpoint, layers or spec.layers, chosen, mask is not None, vocab, size)


def student_weights(
    source: Source, device: torch.device, on_read: Callable[[int], None] = lambda size: None
) -> dict[str, Tensor]:
    """Load the student's weights in float32; a tied head is the embedding itself.

    A new mask token starts as the mean of all token embeddings.
    """
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
    """Return the weights, a tied head once, and make them require gradients."""
    return {
        name: weight.requires_grad_()
        for name, weight in weights.items()
        if not (spec.tied and name == "head.weight")
    }


def head_of(weights: Mapping[str, Tensor], vocab: int) -> Head:
    """Return the output head for the first `vocab` ids."""
    bias = weights.get("head.bias")
    return Head(weights["head.weight"][:vocab], None if bias is None else bias[:vocab])
