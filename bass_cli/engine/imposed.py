"""Acceptance that is set, for benchmarks of random weights: the output then means nothing.

Whether the draft of a position stands is drawn once for a row's life, so every draft length
meets the same luck and runs of one seed can be compared row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Change
from bass_cli.engine.laws import noise_key


class Imposed:
    """Every draft stands with its row's chance. Rows take the `rates` in turn, beginning with
    the first row of an empty batch; other `rates` hold for rows that come from then on.
    `version` changes whenever the table moves to another address."""

    def __init__(self, rates: Sequence[float], batch: Batch):
        self.rates, self._batch, self._turn = tuple(rates), batch, 0
        # by row and position
        self._stands = torch.zeros(batch.capacity, 0, dtype=torch.bool, device=batch.device)
        self.version = 0
        self._widen()

    def follow(self, change: Change) -> None:
        """Rows that begin have the luck of their noise keys."""
        self._widen()
        for source, target, _ in change.moved:
            self._stands[target] = self._stands[source]
        begun = [(place, key) for places, key in change.begun for place in places]
        if len(begun) == len(self._batch):
            self._turn = 0
        for place, key in begun:
            host = self._batch.hosts[place]
            first, second = noise_key(host.seed, key, host.sample)
            luck = torch.rand(
                self._stands.shape[1],
                generator=torch.Generator().manual_seed(first << 31 | second >> 1),
            )
            self._stands[place] = luck < self.rates[self._turn % len(self.rates)]
            self._turn += 1

    def accepted(self, places: Tensor) -> Tensor:
        """How many drafts stand, [B] int64. places [B, k]: their positions."""
        # only what is beyond a row's end goes there
        places = places.clamp(max=self._stands.shape[1] - 1)
        return self._stands[: len(places)].gather(1, places).long().cumprod(-1).sum(-1)

    def _widen(self) -> None:
        width = self._batch.tokens.shape[1]
        if width > self._stands.shape[1]:
            self._stands = torch.nn.functional.pad(self._stands, (0, width - self._stands.shape[1]))
            self.version += 1
