"""A round's bookkeeping of tokens and counts, in plain torch: the definition, and the CPU path.
texts [B, C] int64 holds each row's tokens, lengths [B] int64 their number."""

import torch
from torch import Tensor


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
