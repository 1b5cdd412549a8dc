"""Cut each row's drafts where the draft's own confidence is low: of all tokens that one pass drafts
for the batch, verify the likeliest, as many as a captured pass has places for.

It needs shared coupling, where nothing that it uses affects the output, and a drafter that makes
all drafts in one pass: drafts made one after the other have cost their time already. Not here: the
pass over the chosen drafts (verify.py), the choice and the learning (kernels).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.contracts import Proposal

# Up to this many tokens in a pass one more costs almost nothing, so all drafts are verified. On an
# H200 a pass of a 7B over 8 / 64 / 128 / 256 tokens takes 4.2 / 5.0 / 6.0 / 8.9 ms. On a CPU every
# token costs time after the first few.
CHEAP = {"cpu": 16, "cuda": 64}
_STRENGTH = 6.0  # prior strength: pseudo-observations per confidence bin


class Cutting:
    """The choice for one loop, on its device. What is learnt about the draft's confidence stays
    at fixed addresses, because captured rounds learn too."""

    def __init__(self, cut: Cut, device: torch.device):
        self._cut = cut
        # Prior: P(reject) = (1 - confidence) / 2, because draft and target share their noise.
        middles = (torch.arange(ops.BINS, device=device) + 0.5) / ops.BINS
        kept = _STRENGTH * (1 - middles * middles / 2)
        first = torch.stack((kept, torch.full_like(kept, _STRENGTH)))
        kept, trials = first.clone()
        self.known = ops.Known(kept, trials, first)

    def pays(self, rows: int, width: int) -> bool:
        """Return whether rounds of `rows` rows that verify `width` drafts of each on average are
        cut."""
        tokens = rows * (width + 1)
        return width > 0 and tokens > self._cut.above and self.drafted(width) > width

    def drafted(self, width: int) -> int:
        """See Cut.drafted."""
        return self._cut.drafted(width)

    def choose(
        self, proposal: Proposal, total: int, pending: Tensor, lengths: Tensor, alive: Tensor
    ) -> ops.Chosen:
        """Choose the `total` likeliest drafts of a proposal with scores.

        Args:
            pending: [B, 1], the rows' last tokens.
            lengths: [B], the rows' lengths.
            alive: [B], 0 for rows that are not live; they get what is left over.
        """
        assert proposal.scores is not None
        chances = ops.standing(proposal.scores, self.known, alive)
        tokens = torch.cat((pending, proposal.tokens), 1)
        chosen: ops.Chosen = ops.likeliest(chances, total, tokens, lengths)
        return chosen

    def settle(
        self, proposal: Proposal, chosen: ops.Chosen, found: tuple[Tensor, Tensor], alive: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the accepted drafts of each row, [B], and the table for the host (ops.settle).

        Args:
            found: the target's tokens at the chosen places and their log-probabilities, [M] each.
        """
        drafts, scores = proposal.tokens, proposal.scores
        kept, table = ops.settle(drafts, scores, chosen, *found, self.known, alive)
        return kept, table


class Cut(NamedTuple):
    """When and how much to cut.

    most: the largest number of tokens drafted for a row.
    above: a pass is cut only if verifying all drafts would take more tokens than this.
    more: how many more tokens are drafted for each row than are verified on average.
    """

    most: int
    above: int
    more: int

    def drafted(self, width: int) -> int:
        """Return how many tokens are drafted for each row if `width` of each are verified on
        average; at least `width`."""
        return max(min(width + self.more, self.most), width)
