"""Which of all rows' drafts are verified, by the draft's confidence in them, and what is learnt of
that, in plain torch: the definition, and the CPU path.

The chance that a draft stands whose turn comes is followed by the confidence that the draft had in
it; that of a row's first i drafts is their product. Not here: how many drafts there are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .acceptance import accept_shared
from .segments import Packed, pack_queries

BINS = 16  # of the square root of 1 - confidence: most confidences are near 1
MEMORY = 0.995  # what a round's drafts weigh one round later


class Known(NamedTuple):
    """By bin of doubt, [BINS] float32 each: drafts that stood, of those whose turn came; and what
    both are taken for before any, `first` [2, BINS], which never weighs less."""

    kept: Tensor
    trials: Tensor
    first: Tensor

    def fade(self) -> None:
        """One more round has gone by: what was learnt weighs less."""
        for count, first in zip((self.kept, self.trials), self.first, strict=True):
            count.lerp_(first, 1 - MEMORY)


class Chosen(NamedTuple):
    """Rows' tokens and drafts that are verified, M in all, one row after the other: counts [B] of
    its drafts, tokens [M], places [M] of the tokens behind them, int64."""

    counts: Tensor
    packed: Packed
    tokens: Tensor
    places: Tensor


def standing(scores: Tensor, known: Known, alive: Tensor) -> Tensor:
    """The chance of each draft that it stands and all before it, [B, k] float32, by the
    log-probabilities [B, k] that the draft gave them: between bins in proportion, NaN as no
    confidence; 0 in rows where alive [B] is 0."""
    at = (_doubt(scores) * BINS - 0.5).clamp(0, BINS - 1)
    low = at.floor().clamp(max=BINS - 2)
    share, place, rates = at - low, low.long(), known.kept / known.trials
    chances = rates[place] * (1 - share) + rates[place + 1] * share
    return chances.cumprod(1) * alive[:, None]


def likeliest(chances: Tensor, total: int, tokens: Tensor, lengths: Tensor) -> Chosen:
    """The `total` likeliest drafts of all rows, by the chances [B, k] that `standing` gives; tokens
    [B, k + 1]: each row's last, then its drafts; lengths [B]. A prefix is never likelier than a
    shorter one, so those chosen of a row are its first ones, ties apart: of these as many."""
    rows, width = chances.shape
    best = most_likely(chances, total)
    chosen = best.new_zeros(chances.numel()).index_fill_(0, best, 1)
    counts = chosen.view(chances.shape).sum(1)
    packed = pack_queries(counts + 1, total + rows, width + 1)
    places = lengths[packed.row] + packed.place
    return Chosen(counts, packed, tokens[packed.row, packed.place], places)


def most_likely(chances: Tensor, total: int) -> Tensor:
    """Where in chances [B, k], read row by row, the `total` highest are: [total] int64, in any
    order."""
    return chances.flatten().topk(total, sorted=False).indices


def settle(
    drafts: Tensor,
    scores: Tensor,
    chosen: Chosen,
    targets: Tensor,
    told: Tensor,
    known: Known,
    alive: Tensor,
) -> tuple[Tensor, Tensor]:
    """What becomes of drafts [B, k] with these scores [B, k], where the target's own tokens of
    those that are verified are targets [M], of log-probability told [M] float32: accepted [B], and
    [B, 2k + 4] int64: accepted; the target's tokens of the row, valid up to the first that no
    draft equals; the bits of their log-probabilities; how many drafts were verified.

    `known` learns of it, but for rows where alive [B] is 0. Drafts behind the first that fell,
    or that were not verified, tell nothing.
    """
    index, counts = chosen.packed.by_row, chosen.counts
    targets, bits = targets[index], told[index].view(torch.int32).long()
    accepted = accept_shared(drafts, targets, counts)
    bins = (_doubt(scores) * BINS).long().clamp(max=BINS - 1)
    places = torch.arange(drafts.shape[1], device=drafts.device)
    stood = places < (accepted * alive)[:, None]
    tried = places < (torch.minimum(accepted + 1, counts) * alive)[:, None]
    which = bins[:, :, None] == torch.arange(BINS, device=drafts.device)
    known.fade()
    for count, counted in ((known.kept, stood), (known.trials, tried)):
        count.add_((which & counted[:, :, None]).sum((0, 1)))
    return accepted, torch.cat((accepted[:, None], targets, bits, counts[:, None]), 1)


def _doubt(scores: Tensor) -> Tensor:
    """The square root of 1 - confidence, by its logarithm; 1 for NaN."""
    return (1 - scores.exp()).clamp(0, 1).sqrt().nan_to_num(1.0)
