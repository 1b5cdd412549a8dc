"""Cuts each row's drafts where the draft's own confidence says so: of all that one pass has drafted
for a batch, the likeliest are verified, as many as a captured pass has places for.

For shared coupling, where nothing that this looks at reaches the output, and drafts of one pass:
those made one after the other have cost their time before they are cut. Not here: the pass over
what is left (verify.py), attention over it (kernels).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Tokens of a pass up to which another one hardly takes time, so that verifying all is as good: on
# an H200 a 7B's pass of 8 / 64 / 128 / 256 tokens takes 4.2 / 5.0 / 6.0 / 8.9 ms; a CPU's takes
# longer from a few on.
CHEAP = {"cpu": 16, "cuda": 64}
_BINS = 16  # of the square root of 1 - confidence: most confidences are near 1
_STRENGTH = 6.0  # drafts that what a bin is taken for counts as, before any
_MEMORY = 0.995  # what a round weighs one round later


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
    """For one loop, on its device. The chance that a draft stands whose turn comes is followed by
    the confidence that the draft had in it; that of a row's first i drafts is the product."""

    def __init__(self, cut: Cut, device: torch.device):
        self._cut = cut
        # at first: half of a draft's doubt comes true, for noise is shared
        middles = (torch.arange(_BINS, device=device) + 0.5) / _BINS
        # at addresses that stay, for graphs learn too
        self._kept = _STRENGTH * (1 - middles * middles / 2)
        self._trials = torch.full_like(middles, _STRENGTH)

    def pays(self, rows: int, width: int) -> bool:
        """Whether rounds of so many rows are cut that verify `width` drafts of each on average."""
        tokens = rows * (width + 1)
        return width > 0 and tokens > self._cut.above and self.drafted(width) > width

    def drafted(self, width: int) -> int:
        """How many tokens are drafted of each row then."""
        return self._cut.drafted(width)

    def chances(self, scores: Tensor) -> Tensor:
        """The chance of each draft, all before it standing, [B, k] float32, by the
        log-probabilities [B, k] that the draft gave them; of NaN that of no confidence."""
        at = (_doubt(scores) * _BINS - 0.5).clamp(0, _BINS - 1)
        low = at.floor().clamp(max=_BINS - 2)
        share, place, rates = at - low, low.long(), self._kept / self._trials
        return rates[place] * (1 - share) + rates[place + 1] * share

    def learn(self, scores: Tensor, counts: Tensor, accepted: Tensor, alive: Tensor) -> None:
        """Of drafts with these scores [B, k], counts [B] of a row were verified and accepted [B]
        kept; alive [B]: 0 where that is of no row. Those behind the first that fell, or behind a
        cut, tell nothing."""
        bins = (_doubt(scores) * _BINS).long().clamp(max=_BINS - 1)
        places = torch.arange(scores.shape[1], device=scores.device)
        stood = (places < accepted[:, None]) & (alive > 0)[:, None]
        turn = torch.minimum(accepted + 1, counts) * (alive > 0)
        which = bins[:, :, None] == torch.arange(_BINS, device=scores.device)
        for known, told in ((self._kept, stood), (self._trials, places < turn[:, None])):
            known.mul_(_MEMORY).add_((which & told[:, :, None]).sum((0, 1)))


def likeliest(chances: Tensor, total: int) -> Tensor:
    """How many drafts of each row, [B] int64, are among the `total` likeliest of all rows; chances
    [B, k]: of each draft if those before it stand. A prefix is never likelier than a shorter one,
    so those chosen of a row are its first ones, ties apart, which makes no difference."""
    whole = chances.cumprod(1).flatten()
    best = whole.topk(total, sorted=False).indices
    return best.new_zeros(whole.shape).index_fill_(0, best, 1).view(chances.shape).sum(1)


def _doubt(scores: Tensor) -> Tensor:
    """The square root of 1 - confidence, by its logarithm; 1 for NaN."""
    return (1 - scores.exp()).clamp(0, 1).sqrt().nan_to_num(1.0)
