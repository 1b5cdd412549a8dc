"""The two couplings between draft and target, in plain torch: how many drafts a row keeps, and the token after them."""

import torch
from torch import Tensor

from .noise import BONUS, RESIDUAL, TEST, bits, uniform
from .sampling import draw


def accept_shared(drafts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Shared coupling (arXiv 2408.07978): a draft stands while it equals the target's own token at its place.

    drafts [B, k], targets [B, k + 1] int64. Returns accepted [B] and next [B]: the target's token at the first
    difference, or after all k.
    """
    agree = (drafts == targets[:, :-1]).int()
    accepted = agree.cumprod(-1).sum(-1)
    return accepted, targets.gather(1, accepted[:, None])[:, 0]


def accept_maximal(drafts: Tensor, draft_laws: Tensor | None, laws: Tensor, keys: Tensor,
                   lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Maximal coupling, modified rejection sampling (arXiv 2211.17192, algorithm 1; arXiv 2302.01318).

    drafts [B, k] int64, drawn from draft_laws [B, k, V] (None: each proposed with certainty); laws [B, k + 1, V]: the
    target's; keys [B, 2]; lengths [B] int64: the position of the first draft, which also makes this round's noise its
    own. Returns accepted [B] and next [B]: accept x while u q(x) < p(x); at the first failure draw from max(p - q, 0)
    (from p should that have no mass); after k acceptances draw from p.
    """
    rows, width = drafts.shape
    vocab = laws.shape[-1]
    index = torch.arange(rows, device=drafts.device)
    if width:
        places = lengths[:, None] + torch.arange(width, device=drafts.device)
        flat = [t.reshape(-1) for t in (places, torch.zeros_like(drafts), lengths[:, None].expand(-1, width))]
        u = uniform(bits(keys.repeat_interleave(width, 0), flat[0], flat[1], stream=TEST, origin=flat[2])).view(rows, width)
        p = laws[:, :-1].gather(-1, drafts[..., None])[..., 0]
        q = 1.0 if draft_laws is None else draft_laws.gather(-1, drafts[..., None])[..., 0]
        accepted = (u * q < p).int().cumprod(-1).sum(-1)
    else:
        accepted = torch.zeros_like(lengths)
    target = laws[index, accepted]
    complete = accepted == width
    residual = target
    if width:
        place = accepted.clamp(max=width - 1)
        if draft_laws is None:
            proposed = torch.zeros_like(target).scatter_(1, drafts[index, place][:, None], torch.inf)
        else:
            proposed = draft_laws[index, place]
        residual = torch.where(complete[:, None], target, (target - proposed).clamp(min=0))
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    stream = torch.where(complete, BONUS, RESIDUAL)
    assert target.shape == (rows, vocab)
    return accepted, draw(residual, keys, lengths + accepted, stream=stream, origin=lengths)
