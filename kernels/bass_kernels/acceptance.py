"""The two couplings between draft and target, in plain torch: how many drafts a row keeps, and
the token after them."""

import torch
from torch import Tensor

from .noise import BONUS, DRAFT, RESIDUAL, TEST, bits, uniform
from .sampling import Law, draw, log_probability, process


def accept_shared(
    drafts: Tensor, targets: Tensor, most: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Shared coupling (arXiv 2408.07978): a draft stands while it equals the target's own token at
    its place.

    drafts [B, k], targets [B, k + 1] int64. Returns accepted [B] and next [B]: the target's
    token at the first difference, or after all k. most ([] int64): as if no more drafts had been
    proposed.
    """
    agree = (drafts == targets[:, :-1]).int()
    accepted = agree.cumprod(-1).sum(-1)
    accepted = accepted if most is None else torch.minimum(accepted, most)
    return accepted, targets.gather(1, accepted[:, None])[:, 0]


def accept_maximal(
    drafts: Tensor,
    draft_laws: Tensor | None,
    laws: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Maximal coupling, modified rejection sampling (arXiv 2211.17192, algorithm 1; arXiv
    2302.01318).

    drafts [B, k] int64, drawn from draft_laws [B, k, V] (None: each proposed with certainty);
    laws [B, k + 1, V]: the target's; keys [B, 2]; lengths [B] int64: the position of the first
    draft, which also makes this round's noise its own. Returns accepted [B] and next [B]: accept
    x while u q(x) < p(x); at the first failure draw from max(p - q, 0) (from p should that have
    no mass); after k acceptances draw from p. most ([] int64): as if no more drafts had been
    proposed.
    """
    rows, width = drafts.shape
    vocab = laws.shape[-1]
    index = torch.arange(rows, device=drafts.device)
    if width:
        places = lengths[:, None] + torch.arange(width, device=drafts.device)
        flat = [
            t.reshape(-1)
            for t in (places, torch.zeros_like(drafts), lengths[:, None].expand(-1, width))
        ]
        u = uniform(
            bits(keys.repeat_interleave(width, 0), flat[0], flat[1], stream=TEST, origin=flat[2])
        ).view(rows, width)
        p = laws[:, :-1].gather(-1, drafts[..., None])[..., 0]
        q = 1.0 if draft_laws is None else draft_laws.gather(-1, drafts[..., None])[..., 0]
        accepted = (u * q < p).int().cumprod(-1).sum(-1)
    else:
        accepted = torch.zeros_like(lengths)
    complete = accepted == width
    if most is not None:
        accepted, complete = torch.minimum(accepted, most), complete | (accepted >= most)
    target = laws[index, accepted]
    residual = target
    if width:
        place = accepted.clamp(max=width - 1)
        if draft_laws is None:
            proposed = torch.zeros_like(target).scatter_(
                1, drafts[index, place][:, None], torch.inf
            )
        else:
            proposed = draft_laws[index, place]
        residual = torch.where(complete[:, None], target, (target - proposed).clamp(min=0))
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    stream = torch.where(complete, BONUS, RESIDUAL)
    assert target.shape == (rows, vocab)
    return accepted, draw(residual, keys, lengths + accepted, stream=stream, origin=lengths)


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    origins: Tensor,
) -> tuple[Tensor, Law]:
    """The draft's side of maximal coupling: tokens [N] int64 drawn from the processed laws of
    logits [N, V] by noise of the DRAFT stream, and those laws. origins [N] int64: the lengths at
    the start of the round; the rest as in `sample`."""
    law = process(logits, temperature, top_k, top_p)
    return draw(law, keys, positions, stream=DRAFT, origin=origins), Law(law)


def rejection_sample(
    drafts: Tensor,
    draft_law: Law | None,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The target's side of maximal coupling: drafts [B, k] int64 drawn from draft_law [B, k, U]
    (None: point masses), U at most V, against the processed laws of logits [B, k + 1, V];
    temperature, top_k, top_p, keys, lengths and most as in `sample` and `accept_maximal`.

    Returns accepted [B] and next [B] as `accept_maximal`; block [B, k + 1] int64: the drafts
    with next at place `accepted`, valid up to it; and the block's `log_probability` [B, k + 1]
    float32.
    """
    rows, places, vocab = logits.shape
    laws = [parameter.repeat_interleave(places) for parameter in (temperature, top_k, top_p)]
    target = process(logits.flatten(0, 1), *laws).view(rows, places, vocab)
    probabilities = None if draft_law is None else draft_law.values
    if probabilities is not None and probabilities.shape[-1] < vocab:
        probabilities = torch.nn.functional.pad(probabilities, (0, vocab - probabilities.shape[-1]))
    accepted, following = accept_maximal(drafts, probabilities, target, keys, lengths, most)
    block = torch.cat((drafts, drafts.new_zeros(rows, 1)), dim=1).scatter(
        1, accepted[:, None], following[:, None]
    )
    return accepted, following, block, log_probability(logits, block)
