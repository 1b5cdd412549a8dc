"""Cuts each row's drafts where the draft's own confidence says so: of all that one pass has drafted
for a batch, the likeliest are verified, as many as a captured pass has places for.

For shared coupling, where nothing that this looks at reaches the output, and drafts of one pass:
those made one after the other have cost their time before they are cut. Not here: the pass over
what is left (verify.py), the choice and what is learnt of it (kernels).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.contracts import Proposal

# Tokens of a pass up to which another one hardly takes time, so that verifying all is as good: on
# an H200 a 7B's pass of 8 / 64 / 128 / 256 tokens takes 4.2 / 5.0 / 6.0 / 8.9 ms; a CPU's takes
# longer from a few on.
CHEAP = {"cpu": 16, "cuda": 64}
_STRENGTH = 6.0  # drafts that what a bin is taken for counts as, before any


class Cut(NamedTuple):
    """Where rows may be cut: `more` tokens are drafted of each row than are verified on average,
    `most` at the most, and nothing is cut of a pass that takes all with up to `above` tokens."""

    most: int
    above: int
    more: int

    def drafted(self, width: int) -> int:
        """How many tokens are drafted of each row where `width` are verified of one on average;
        these alone where no more may be."""
        return max(min(width + self.more, self.most), width)


class Cutting:
    """For one loop, on its device: what is known of its draft's confidence, at addresses that
    stay, for captured rounds learn too."""

    def __init__(self, cut: Cut, device: torch.device):
        self._cut = cut
        # at first: half of a draft's doubt comes true, for noise is shared
        middles = (torch.arange(ops.BINS, device=device) + 0.5) / ops.BINS
        kept = _STRENGTH * (1 - middles * middles / 2)
        first = torch.stack((kept, torch.full_like(kept, _STRENGTH)))
        kept, trials = first.clone()
        self.known = ops.Known(kept, trials, first)

    def pays(self, rows: int, width: int) -> bool:
        """Whether rounds of so many rows are cut that verify `width` drafts of each on average."""
        tokens = rows * (width + 1)
        return width > 0 and tokens > self._cut.above and self.drafted(width) > width

    def drafted(self, width: int) -> int:
        """How many tokens are drafted of each row then."""
        return self._cut.drafted(width)

    def choose(
        self, proposal: Proposal, total: int, pending: Tensor, lengths: Tensor, alive: Tensor
    ) -> ops.Chosen:
        """The `total` likeliest of a proposal with scores, behind the rows' last tokens pending
        [B, 1], at their lengths [B]; rows that do not live (alive [B] is 0) have what is left."""
        assert proposal.scores is not None
        chances = ops.standing(proposal.scores, self.known, alive)
        tokens = torch.cat((pending, proposal.tokens), 1)
        chosen: ops.Chosen = ops.likeliest(chances, total, tokens, lengths)
        return chosen

    def settle(
        self, proposal: Proposal, chosen: ops.Chosen, found: tuple[Tensor, Tensor], alive: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many drafts each row keeps, [B], and what the host is told (selection.settle), where
        the target has `found` these tokens and their log-probabilities, [M] each."""
        drafts, scores = proposal.tokens, proposal.scores
        kept, table = ops.settle(drafts, scores, chosen, *found, self.known, alive)
        return kept, table
