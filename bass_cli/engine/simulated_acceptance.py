"""Simulated acceptance for benchmarks with random weights. The output is then meaningless.

Whether the draft at a position is accepted is drawn once for a row's life. All draft lengths then
have the same luck, and runs with one seed can be compared row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Change
from bass_cli.engine.sampling_params import noise_key
from bass_cli.engine.sizes import LONGEST

# The probability that a draft of a row is accepted: one number, or one for each position in the
# draft, of which the last applies to all positions after it.
Rate = float | tuple[float, ...]


class SimulatedAcceptance:
    """Accept each draft with its row's probability if all drafts before it were accepted.

    Rows take the `rates` in turn, beginning with the first row of an empty batch. If `rates` is
    replaced, the new values apply to rows that begin later. `version` changes when the table moves
    to another address.
    """

    def __init__(self, rates: Sequence[Rate], batch: Batch):
        self.rates, self._batch, self._turn = tuple(rates), batch, 0
        # By row and position: a draft there is accepted if this is below its probability.
        self._luck = torch.ones(batch.capacity, 0, device=batch.device)
        # By row and position in the draft: the probability.
        self._chances = torch.zeros(batch.capacity, LONGEST, device=batch.device)
        self.version = 0
        self._widen()

    def follow(self, change: Change) -> None:
        """Draw the luck of rows that begin, from their noise keys."""
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
        """Return the number of accepted drafts, [B] int64. places: [B, k], the positions of the
        drafts."""
        rows, width = places.shape
        # Clamps only positions beyond a row's end.
        places = places.clamp(max=self._luck.shape[1] - 1)
        accepted = self._luck[:rows].gather(1, places) < self._chances[:rows, :width]
        return accepted.long().cumprod(-1).sum(-1)

    def _widen(self) -> None:
        more = self._batch.tokens.shape[1] - self._luck.shape[1]
        if more > 0:
            self._luck = torch.nn.functional.pad(self._luck, (0, more), value=1.0)
            self.version += 1


def _chances(rate: Rate) -> Tensor:
    """Return the probability by position in the draft, [LONGEST] float32."""
    by_place = rate if isinstance(rate, tuple) else (rate,)
    return torch.tensor([*by_place, *by_place[-1:] * (LONGEST - len(by_place))][:LONGEST])
