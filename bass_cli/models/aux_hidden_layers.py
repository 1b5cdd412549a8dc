"""What layers of a decoder leave in the residual stream, for a drafter that reads it. A decoder
that nobody reads has none of this.

Not here: who reads (feature_head.py), where in a pass the stream is complete (decoder.py,
fused_decode.py).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bass_cli.models.kv_cache import Layers, Pass


class ReadsHidden(Protocol):
    """Takes in the outputs of the layers `taps` of a decoder, pass by pass. `cached`: the layers
    that it has in the decoder's store of keys and values, behind the decoder's own. `ahead`: how
    many tokens behind a position what it keeps there depends on, 0 or 1."""

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def ahead(self) -> int: ...

    @property
    def cached(self) -> tuple[Layers, ...]: ...

    def read(self, tokens: Tensor, hidden: Tensor, step: Pass) -> None:
        """hidden [B, W, taps * width]: of the tokens [B, W] of `step`, side by side."""


class AuxHiddenLayers:
    """The outputs of `layers` in one pass over tokens [B, W]: `hidden` [B, W, layers * width], in
    the dtype of the embedding `like`. They are copied, since later layers may be added in place."""

    def __init__(self, layers: tuple[int, ...], tokens: Tensor, like: Tensor):
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._width = like.shape[1]
        self.hidden = like.new_empty(*tokens.shape, len(layers) * self._width)

    def take(self, layer: int, residual: Tensor) -> None:
        """The residual stream [..., width] after a layer of the pass."""
        place = self._place.get(layer)
        if place is not None:
            part = self.hidden.unflatten(-1, (-1, self._width))[:, :, place]
            part.copy_(residual.view(part.shape))
