"""Acceptance that is set, for benchmarks of random weights: the output then means nothing.

Whether the draft of a position stands is drawn once for a row's life, so every draft length
meets the same luck and runs of one seed can be compared row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Change
from bass_cli.engine.sampling_params import noise_key
from bass_cli.engine.sizes import LONGEST

# the chance of each draft of a row, or by its place in the draft, the last one for all behind it
Rate = float | tuple[float, ...]


class SimulatedAcceptance:
    """A draft stands with its row's chance, those before it having stood. Rows take the `rates`
    in turn, beginning with the first row of an empty batch; other `rates` hold for rows that
    come from then on. `version` changes whenever the table moves to another address."""

    def __init__(self, rates: Sequence[Rate], batch: Batch):
        self.rates, self._batch, self._turn = tuple(rates), batch, 0
        # by row and position: a draft stands there if this is below its chance
        self._luck = torch.ones(batch.capacity, 0, device=batch.device)
        # by row and place in the draft
        self._chances = torch.zeros(batch.capacity, LONGEST, device=batch.device)
        self.version = 0
        self._widen()

    def follow(self, change: Change) -> None:
        """Rows that begin have the luck of their noise keys."""
        self._widen()
        for source, target in change.moved:
            self._luck[target] = self._luck[source]
            self._chances[target] = self._chances[source]
        begun = [(place, key) for places, key in change.begun for place in places]
        if len(begun) == len(self._batch):
            self._turn = 0
        for place, key in begun:
            host = self._batch.hosts[place]
            first, second = noise_key(host.seed, key, host.sample)
            self._luck[place] = torch.rand(
                self._luck.shape[1],
                generator=torch.Generator().manual_seed(first << 31 | second >> 1),
            )
            self._chances[place] = _chances(self.rates[self._turn % len(self.rates)])
            self._turn += 1

    def accepted(self, places: Tensor) -> Tensor:
        """How many drafts stand, [B] int64. places [B, k]: their positions."""
        rows, width = places.shape
        # only what is beyond a row's end goes there
        places = places.clamp(max=self._luck.shape[1] - 1)
        stands = self._luck[:rows].gather(1, places) < self._chances[:rows, :width]
        return stands.long().cumprod(-1).sum(-1)

    def _widen(self) -> None:
        more = self._batch.tokens.shape[1] - self._luck.shape[1]
        if more > 0:
            self._luck = torch.nn.functional.pad(self._luck, (0, more), value=1.0)
            self.version += 1


def _chances(rate: Rate) -> Tensor:
    """By place in the draft, [LONGEST] float32."""
    by_place = rate if isinstance(rate, tuple) else (rate,)
    return torch.tensor([*by_place, *by_place[-1:] * (LONGEST - len(by_place))][:LONGEST])
