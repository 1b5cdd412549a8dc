"""The two couplings between draft and target, in plain torch: how many drafts a row keeps, and
the token after them."""

import torch
from torch import Tensor

from .noise import BONUS, DRAFT, RESIDUAL, TEST, bits, uniform
from .sampling import Distribution, draw, log_probability, process


def accept_shared(drafts: Tensor, targets: Tensor, most: Tensor | None = None) -> Tensor:
    """Shared coupling (arXiv 2408.07978): a draft stands while it equals the target's own token at
    its place.

    drafts [B, k], targets [B, k + 1] int64. Returns how many stand, [B] int64; the target's token
    at that place follows them. most ([] or [B] int64): as if no more drafts had been proposed.
    """
    agree = (drafts == targets[:, :-1]).int()
    accepted = agree.cumprod(-1).sum(-1)
    return accepted if most is None else torch.minimum(accepted, most)


def accept_maximal(
    drafts: Tensor,
    draft_laws: Tensor | None,
    laws: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Maximal coupling, verified by the block (arXiv 2403.10444, algorithm 2), which keeps at least
    as many drafts as one by one (arXiv 2211.17192, algorithm 1), and as many where each was
    proposed with certainty.

    drafts [B, k] int64, drawn from draft_laws [B, k, V] (None: each proposed with certainty);
    laws [B, k + 1, V]: the target's; keys [B, 2]; lengths [B] int64: the position of the first
    draft, which also makes this round's noise its own. Returns accepted [B] and next [B]: the
    last place whose number u lies below its chance (`block_chances`), and a token from
    `recovered_law` there. most ([] int64): as if no more drafts had been proposed.
    """
    width = drafts.shape[1]
    weights, chances = block_chances(drafts, draft_laws, laws, most)
    places = torch.arange(width + 1, device=drafts.device)
    at = (lengths[:, None] + places[:-1]).reshape(-1)
    origins = lengths.repeat_interleave(width)
    random = bits(
        keys.repeat_interleave(width, 0), at, torch.zeros_like(at), stream=TEST, origin=origins
    )
    stands = uniform(random).view(drafts.shape) < chances[:, 1:]
    accepted = (stands * places[1:]).amax(-1) if width else torch.zeros_like(lengths)
    complete = accepted == width if most is None else accepted == most.clamp(max=width)
    law = recovered_law(drafts, draft_laws, laws, weights, accepted, complete)
    stream = torch.where(complete, BONUS, RESIDUAL)
    return accepted, draw(law, keys, lengths + accepted, stream=stream, origin=lengths)


def block_chances(
    drafts: Tensor, draft_laws: Tensor | None, laws: Tensor, most: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of block verification, [B, k + 1] float32 each, by how many drafts are kept: the weights w
    (the paper's p_i) and the chances h; the rest as in `accept_maximal`.

    w_0 = 1, w_i = min(w_{i-1} p(x_i) / q(x_i), 1); with s the mass of max(w_i p - q, 0) at the
    place after them, h_i = s / (s + 1 - w_i). At the last place h = w, and so it is where a law
    has NaN: the block ends there. Nothing beyond has a chance.
    """
    width = drafts.shape[1]
    weight = laws.new_ones(len(laws))
    weights, chances = [weight], [weight]
    for place in range(1, width + 1):
        token = drafts[:, place - 1 : place]
        due = weight * laws[:, place - 1].gather(1, token)[:, 0]
        own = torch.ones_like(due)
        if draft_laws is not None:
            own = draft_laws[:, place - 1].gather(1, token)[:, 0]
        # 0 where the draft's law could not give it, and where one of the two has NaN
        share = torch.where(due < own, due / own, 0.0)
        weight = torch.where((due >= own) & (own > 0), 1.0, share)
        chance = weight
        if place < width:
            law = None if draft_laws is None else draft_laws[:, place]
            mass = _rest(laws[:, place], weight, drafts[:, place], law).sum(-1)
            ends = mass.isnan() if most is None else mass.isnan() | (most == place)
            inside = torch.where(weight < 1, mass / (mass + (1 - weight)), 1.0)
            chance = torch.where(ends, weight, inside)
        weights.append(weight)
        chances.append(chance if most is None else torch.where(most >= place, chance, 0.0))
    return torch.stack(weights, 1), torch.stack(chances, 1)


def recovered_law(
    drafts: Tensor,
    draft_laws: Tensor | None,
    laws: Tensor,
    weights: Tensor,
    accepted: Tensor,
    complete: Tensor,
) -> Tensor:
    """The law [B, V], not normalised, of the token after the accepted [B] drafts: max(w p - q, 0),
    or p where that has no mass, or where all drafts are kept (complete [B])."""
    index, last = torch.arange(len(drafts), device=drafts.device), drafts.shape[1] - 1
    target = laws[index, accepted]
    if last < 0:
        return target
    place = accepted.clamp(max=last)
    law = None if draft_laws is None else draft_laws[index, place]
    rest = _rest(target, weights[index, accepted], drafts[index, place], law)
    empty = ~(rest.sum(-1) > 0)
    return torch.where((complete | empty)[:, None], target, rest)


def _rest(target: Tensor, weight: Tensor, token: Tensor, draft_law: Tensor | None) -> Tensor:
    """max(w p - q, 0) [B, V] of p, w and q, [B, V], [B] and [B, V] (None: all of token [B])."""
    due = weight[:, None] * target
    if draft_law is None:
        return due.scatter_(1, token[:, None], 0.0)
    return due.sub_(draft_law).clamp_(min=0)


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    origins: Tensor,
) -> tuple[Tensor, Distribution]:
    """The draft's side of maximal coupling: tokens [N] int64 drawn from the processed laws of
    logits [N, V] by noise of the DRAFT stream, and those laws. origins [N] int64: the lengths at
    the start of the round; the rest as in `sample`."""
    law = process(logits, temperature, top_k, top_p)
    return draw(law, keys, positions, stream=DRAFT, origin=origins), Distribution(law)


def rejection_sample(
    drafts: Tensor,
    draft_law: Distribution | None,
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
