"""Ends the drafting of a round where the draft is unsure of itself: for shared coupling, and rounds
that are not captured.

Under shared coupling nothing that drafting does reaches the output, so it may look at the very
tokens it gates. Under maximal coupling it may not. Captured rounds have a fixed number of steps
(docs/DESIGN.md says why they stay whole).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter, Lengths, Proposal, StopsDrafts, StopsShort

_BINS = 12  # of confidence, each as wide as the others
_STRENGTH = 6.0  # trials that a bin's own middle counts as, before any
_MEMORY = 0.995  # what a round weighs one round later


class Stopping:
    """Whether one more draft is worth its time: the rows' chances of getting there, from the
    draft's confidence in each of their tokens so far and what drafts of such confidence were
    worth until now."""

    def __init__(self) -> None:
        middles = (torch.arange(_BINS) + 0.5) / _BINS
        self._kept, self._trials = _STRENGTH * middles, torch.full((_BINS,), _STRENGTH)
        self._bins: list[Tensor] = []  # by step, of each row

    def propose(self, drafter: Drafter, batch: Batch, length: int, lengths: Lengths) -> Proposal:
        """A proposal of up to `length` tokens, ended early where drafter and controller can do
        that."""
        if not (length and isinstance(drafter, StopsShort) and isinstance(lengths, StopsDrafts)):
            return drafter.propose(batch, length)
        least = lengths.least
        self._bins, alive = [], torch.ones(len(batch))

        def goes_on(confidence: Tensor) -> bool:
            nonlocal alive
            self._bins.append((confidence.cpu() * _BINS).long().clamp(0, _BINS - 1))
            alive = alive * (self._kept / self._trials)[self._bins[-1]]
            return float(alive.mean()) >= least(len(self._bins))

        return drafter.propose_while(batch, length, goes_on)

    def observe(self, accepted: Sequence[int]) -> None:
        """What the rows kept of the last proposal."""
        if not self._bins:
            return
        kept, bins = torch.tensor(accepted)[:, None], torch.stack(self._bins, 1)
        steps = torch.arange(bins.shape[1])
        self._kept *= _MEMORY
        self._trials *= _MEMORY
        self._kept += torch.bincount(bins[steps < kept], minlength=_BINS)
        self._trials += torch.bincount(bins[steps <= kept], minlength=_BINS)
        self._bins = []
