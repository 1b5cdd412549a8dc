"""The contract between a target's passes and a drafter that reads its hidden states (ReadsHidden),
and the outputs of layers that a pass gives to it.

Not here: such drafters (heads.py).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bass_cli.models.kv_cache import Layers, Pass


class ReadsHidden(Protocol):
    """A drafter that reads the outputs of the layers `aux_layers` of a decoder, pass by pass.

    cached: its own layers in the decoder's key/value store, after the decoder's.
    ahead: how many tokens after a position its keys and values there depend on, 0 or 1.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def ahead(self) -> int: ...

    @property
    def cached(self) -> tuple[Layers, ...]: ...

    def read(self, tokens: Tensor, hidden: Tensor, step: Pass) -> None:
        """Read the layers' outputs for the tokens [B, W] of `step`.

        Args:
            hidden: [B, W, len(aux_layers) * width], one layer after the other.
        """


class AuxHiddenLayers:
    """The outputs of `layers` in one pass over tokens [B, W]: `hidden` [B, W, layers * width], in
    the dtype of `like`, the embedding. They are copies, because later layers may be added to the
    residual stream in place."""

    def __init__(self, layers: tuple[int, ...], tokens: Tensor, like: Tensor):
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._width = like.shape[1]
        self.hidden = like.new_empty(*tokens.shape, len(layers) * self._width)

    def take(self, layer: int, residual: Tensor) -> None:
        """Copy the residual stream [..., width] after `layer`, if that is one of `layers`."""
        place = self._place.get(layer)
        if place is not None:
            part = self.hidden.unflatten(-1, (-1, self._width))[:, :, place]
            part.copy_(residual.view(part.shape))
