"""Random weights of a given shape, made on the device in their dtype: no file, no copy on the host.
And what makes a pair of them agree: the layers that its draft lacks can be scaled down.

The scales keep every layer's output near 1 and give logits the spread below, so that a nucleus
holds some hundreds of ids, as in text, and not nearly the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bass_cli.formats.partition import part_of
from bass_cli.models.ranks import Share
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
    """All of `shapes` (`parameters(spec)`): normal matrices, norms of 1, biases of 0. A tied head
    is the embedding itself. `whole`: the shapes of what these are a part of, whose sums with the
    other parts are to be as large as if there were none."""
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
    """follower.Source: a part of no other model than that of these parts together, of which
    nothing is read. `scaled`: scale_layers' `first` and `scale`."""
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
    """Scale what layers `first` and later add to the residual stream, in place; 0 makes them do
    nothing."""
    assert not spec.norm.sandwich  # a norm after the map would undo it
    for i in range(first, spec.layers):
        for name in ("o", "down"):
            for kind in (".weight", ".bias"):
                if f"layers.{i}.{name}{kind}" in weights:
                    weights[f"layers.{i}.{name}{kind}"].mul_(scale)
