"""A round's bookkeeping in plain torch: the definition, and the CPU path. Tokens and counts, which
drafts of all rows to verify, and the calibration of the draft's confidence.

texts [B, C] int64 holds each row's tokens, lengths [B] int64 their number. The acceptance rate of
drafts is tracked by bin of the draft's confidence; the chance of a row's first i drafts is the
product of their rates. The number of drafts to verify is chosen elsewhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .acceptance import accept_shared
from .segments import Packed, pack_queries

BINS = 16  # bins of sqrt(1 - confidence), because most confidences are near 1
MEMORY = 0.995  # weight of a round's drafts one round later (exponential forgetting)


def pending(texts: Tensor, lengths: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's pending (last) token followed by its drafts [B, k], and their positions:
    [B, k + 1] int64 each."""
    places = torch.arange(-1, drafts.shape[1], device=drafts.device)
    positions = lengths[:, None] + places
    return torch.cat((texts.gather(1, positions[:, :1]), drafts), 1), positions


def commit(texts: Tensor, lengths: Tensor, alive: Tensor, accepted: Tensor, block: Tensor) -> None:
    """Append block [B, W] (drafts, then the target's token) in place: accepted [B] + 1 tokens for
    each row where alive [B] is 1.

    The whole block is written. Tokens beyond a row's new length are overwritten by its next round.
    Only a row that ends now can reach the end of `texts`; its last place may then hold any token.
    """
    places = lengths[:, None] + torch.arange(block.shape[1], device=block.device)
    texts.scatter_(1, places.clamp(max=texts.shape[1] - 1), block)
    lengths.addcmul_(accepted + 1, alive)


def report(
    texts: Tensor, lengths: Tensor, alive: Tensor, accepted: Tensor, block: Tensor, scores: Tensor
) -> Tensor:
    """Do `commit`, and return what the host needs as one table [B, 2W + 1] int64: accepted, the
    block, and the bits of its log-probabilities (scores [B, W] float32)."""
    commit(texts, lengths, alive, accepted, block)
    return torch.cat((accepted[:, None], block, scores.view(torch.int32).long()), 1)


class ConfidenceStats(NamedTuple):
    """Acceptance statistics by bin of doubt, [BINS] float32 each.

    accepted: accepted drafts. trials: drafts that were tested, that is, all drafts before them were
    accepted. prior: pseudo-counts of both, [2, BINS], which never fade.
    """

    accepted: Tensor
    trials: Tensor
    prior: Tensor

    def fade(self) -> None:
        """Move both counts towards the prior by one round's forgetting."""
        for count, prior in zip((self.accepted, self.trials), self.prior, strict=True):
            count.lerp_(prior, 1 - MEMORY)


class ChosenDrafts(NamedTuple):
    """The pending tokens and chosen drafts of all rows, M in all, packed row by row. counts: [B],
    chosen drafts of each row. tokens: [M]. places: [M] int64, the positions behind the tokens."""

    counts: Tensor
    packed: Packed
    tokens: Tensor
    places: Tensor


def prefix_chances(scores: Tensor, stats: ConfidenceStats, alive: Tensor) -> Tensor:
    """Return the chance that each draft and all before it are accepted, [B, k] float32.

    Args:
        scores: [B, k], log-probabilities that the draft gave its tokens. Rates are interpolated
            between bins; NaN counts as confidence 0.
        alive: [B]; chances are 0 in rows where it is 0.
    """
    at = (_doubt(scores) * BINS - 0.5).clamp(0, BINS - 1)
    low = at.floor().clamp(max=BINS - 2)
    share, place, rates = at - low, low.long(), stats.accepted / stats.trials
    chances = rates[place] * (1 - share) + rates[place + 1] * share
    return chances.cumprod(1) * alive[:, None]


def choose_drafts(chances: Tensor, total: int, tokens: Tensor, lengths: Tensor) -> ChosenDrafts:
    """Choose the `total` likeliest drafts of all rows.

    Args:
        chances: [B, k], from `prefix_chances`.
        tokens: [B, k + 1], each row's pending token, then its drafts.
        lengths: [B].

    A prefix is never less likely than a longer one, so the chosen drafts of a row are its first
    ones. With ties only their number is used.
    """
    rows, width = chances.shape
    best = most_likely(chances, total)
    chosen = best.new_zeros(chances.numel()).index_fill_(0, best, 1)
    counts = chosen.view(chances.shape).sum(1)
    packed = pack_queries(counts + 1, total + rows, width + 1)
    places = lengths[packed.row] + packed.place
    return ChosenDrafts(counts, packed, tokens[packed.row, packed.place], places)


def most_likely(chances: Tensor, total: int) -> Tensor:
    """Return the flat indices of the `total` highest of chances [B, k], [total] int64, in any
    order."""
    return chances.flatten().topk(total, sorted=False).indices


def accept_chosen(
    drafts: Tensor,
    scores: Tensor,
    chosen: ChosenDrafts,
    targets: Tensor,
    target_scores: Tensor,
    stats: ConfidenceStats,
    alive: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept drafts and update the statistics `stats`.

    Args:
        drafts, scores: [B, k].
        targets: [M], the target's own tokens for the verified ones.
        target_scores: [M] float32, their log-probabilities.
        alive: [B]; rows where it is 0 do not change `stats`.

    Returns: accepted [B], and a table [B, 2k + 4] int64: accepted; the row's target tokens, valid
    up to the first that differs from its draft; the bits of their log-probabilities; the number of
    verified drafts. Drafts after the first rejected one, and drafts that were not verified, do not
    change `stats`.
    """
    index, counts = chosen.packed.by_row, chosen.counts
    targets, bits = targets[index], target_scores[index].view(torch.int32).long()
    accepted = accept_shared(drafts, targets, counts)
    bins = (_doubt(scores) * BINS).long().clamp(max=BINS - 1)
    places = torch.arange(drafts.shape[1], device=drafts.device)
    was_accepted = places < (accepted * alive)[:, None]
    tried = places < (torch.minimum(accepted + 1, counts) * alive)[:, None]
    which = bins[:, :, None] == torch.arange(BINS, device=drafts.device)
    stats.fade()
    for count, counted in ((stats.accepted, was_accepted), (stats.trials, tried)):
        count.add_((which & counted[:, :, None]).sum((0, 1)))
    return accepted, torch.cat((accepted[:, None], targets, bits, counts[:, None]), 1)


def _doubt(scores: Tensor) -> Tensor:
    """Return sqrt(1 - confidence) from log-confidence; 1 for NaN."""
    return (1 - scores.exp()).clamp(0, 1).sqrt().nan_to_num(1.0)
