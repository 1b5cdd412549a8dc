"""Make random weights of a given shape on the device, without a copy on the host.

The scales keep every layer's output near 1. Logits get the standard deviation below, so that a
nucleus (top-p) holds some hundreds of ids, as in text, and not nearly the whole vocabulary.
`scale_layers` makes a draft of the first layers agree with the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bass_cli.models.ranks import Share, part_of
from bass_cli.models.spec import Spec, parameters, stored_dtype

LOGIT_SPREAD = 4.0  # standard deviation of the logits


def random_weights(
    spec: Spec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    whole: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """Make normal matrices, norms of 1 and biases of 0. A tied head is the embedding itself.

    Args:
        shapes: shape by name; default: `parameters(spec)`.
        whole: with tensor parallelism, the shapes of the whole model. Matrices are scaled by its
            input sizes, so that the sum over all parts has the usual size.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in (shapes or parameters(spec)).items():
        if name == "head.weight" and spec.tied:
            weights[name] = weights["embed.weight"]
        else:
            weights[name] = torch.empty(shape, dtype=stored_dtype(name, dtype), device=device)
            _fill(weights[name], name, spec, generator, inputs=(whole or {}).get(name, shape)[-1])
    return weights


def random_part(
    spec: Spec,
    seed: int,
    scaled: tuple[int, float] | None,
    share: Share,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_read: Callable[[int], None] = lambda size: None,
) -> tuple[Spec, dict[str, Tensor]]:
    """Make one part of a random model for tensor parallelism, as a `Source` of follower.py.

    Each part has its own seed, so the parts form one random model. `scaled`: arguments `first` and
    `scale` of `scale_layers`, or None.
    """
    part = part_of(spec, share.ranks)
    weights = random_weights(
        part, dtype=dtype, device=device, seed=seed + share.rank, whole=parameters(spec)
    )
    if scaled is not None:
        scale_layers(weights, part, first=scaled[0], scale=scaled[1])
    return part, weights


def _fill(
    weight: Tensor, name: str, spec: Spec, generator: torch.Generator, *, inputs: int
) -> None:
    head = name == "head.weight" or (name == "embed.weight" and spec.tied)
    if name.endswith(".bias"):
        weight.zero_()
    elif weight.dim() == 1:
        weight.fill_(1.0)
    elif name in ("embed.weight", "positions.weight") and not head:
        weight.normal_(0.0, 0.02, generator=generator)
    else:
        weight.normal_(0.0, (LOGIT_SPREAD if head else 1.0) / inputs**0.5, generator=generator)


def scale_layers(weights: dict[str, Tensor], spec: Spec, *, first: int, scale: float) -> None:
    """Scale, in place, what layers `first` and later add to the residual stream.

    With a scale of 0 these layers have no effect.
    """
    assert not spec.norm.sandwich  # a norm after the projection would undo the scaling
    for i in range(first, spec.layers):
        for name in ("o", "down"):
            for kind in (".weight", ".bias"):
                if f"layers.{i}.{name}{kind}" in weights:
                    weights[f"layers.{i}.{name}{kind}"].mul_(scale)
