"""The two couplings between draft and target, in plain torch: the number of accepted drafts of each
row, and the token that follows them."""

import torch
from torch import Tensor

from .noise import BONUS, DRAFT, RESIDUAL, TEST, bits, uniform
from .sampling import Distribution, draw, log_probability, process


def accept_shared(drafts: Tensor, targets: Tensor, most: Tensor | None = None) -> Tensor:
    """Shared coupling (Gumbel coupling, arXiv 2408.07978): accept each row's drafts up to the first
    that differs from the target's own token.

    Args:
        drafts: [B, k] int64.
        targets: [B, k + 1] int64, the target's token at each position.
        most: maximum number of accepted drafts, [] or [B] int64.

    Returns: the number of accepted drafts, [B] int64. The target's token at that position follows
    them.
    """
    agree = (drafts == targets[:, :-1]).int()
    accepted = agree.cumprod(-1).sum(-1)
    return accepted if most is None else torch.minimum(accepted, most)


def accept_maximal(
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Maximal coupling by block verification (arXiv 2403.10444, algorithm 2). On average it accepts
    at least as many drafts as token by token verification (arXiv 2211.17192, algorithm 1), and
    equally many if the drafts are point masses.

    Args:
        drafts: [B, k] int64.
        draft_probs: the distributions that drafts were sampled from, [B, k, V]; None for point
            masses.
        target_probs: the target's distributions, [B, k + 1, V].
        keys: [B, 2] int64, noise keys.
        lengths: [B] int64, position of the first draft. It is also the noise's origin, so that each
            round has its own noise.
        most: maximum number of accepted drafts, [] int64.

    Returns: accepted [B], the last place whose uniform number lies below its chance
    (`block_chances`), and the next token [B], sampled from `recovered_probs`.
    """
    width = drafts.shape[1]
    weights, chances = block_chances(drafts, draft_probs, target_probs, most)
    places = torch.arange(width + 1, device=drafts.device)
    at = (lengths[:, None] + places[:-1]).reshape(-1)
    origins = lengths.repeat_interleave(width)
    random = bits(
        keys.repeat_interleave(width, 0), at, torch.zeros_like(at), stream=TEST, origin=origins
    )
    passes = uniform(random).view(drafts.shape) < chances[:, 1:]
    accepted = (passes * places[1:]).amax(-1) if width else torch.zeros_like(lengths)
    complete = accepted == width if most is None else accepted == most.clamp(max=width)
    probs = recovered_probs(drafts, draft_probs, target_probs, weights, accepted, complete)
    stream = torch.where(complete, BONUS, RESIDUAL)
    return accepted, draw(probs, keys, lengths + accepted, stream=stream, origin=lengths)


def block_chances(
    drafts: Tensor, draft_probs: Tensor | None, target_probs: Tensor, most: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the weights w (p_i in the paper) and chances h of block verification, [B, k + 1]
    float32 each, by number of accepted drafts. Arguments as in `accept_maximal`.

    w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1). With s the mass of max(w_i p - q, 0) at the
    next position, h_i = s / (s + 1 - w_i). At the last place h = w. The same holds where a
    distribution has NaN: the block ends there. Places beyond `most` have chance 0.
    """
    width = drafts.shape[1]
    weight = target_probs.new_ones(len(target_probs))
    weights, chances = [weight], [weight]
    for place in range(1, width + 1):
        token = drafts[:, place - 1 : place]
        weighted = weight * target_probs[:, place - 1].gather(1, token)[:, 0]
        own = torch.ones_like(weighted)
        if draft_probs is not None:
            own = draft_probs[:, place - 1].gather(1, token)[:, 0]
        # 0 where q(x) is 0, and where p or q is NaN
        share = torch.where(weighted < own, weighted / own, 0.0)
        weight = torch.where((weighted >= own) & (own > 0), 1.0, share)
        chance = weight
        if place < width:
            probs = None if draft_probs is None else draft_probs[:, place]
            mass = _rest(target_probs[:, place], weight, drafts[:, place], probs).sum(-1)
            ends = mass.isnan() if most is None else mass.isnan() | (most == place)
            inside = torch.where(weight < 1, mass / (mass + (1 - weight)), 1.0)
            chance = torch.where(ends, weight, inside)
        weights.append(weight)
        chances.append(chance if most is None else torch.where(most >= place, chance, 0.0))
    return torch.stack(weights, 1), torch.stack(chances, 1)


def recovered_probs(
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    weights: Tensor,
    accepted: Tensor,
    complete: Tensor,
) -> Tensor:
    """Compute the distribution [B, V], not normalised, of the token after the accepted [B] drafts:
    max(w p - q, 0). It is p where that has no mass, and where all drafts are accepted (complete
    [B], bool)."""
    index, last = torch.arange(len(drafts), device=drafts.device), drafts.shape[1] - 1
    target = target_probs[index, accepted]
    if last < 0:
        return target
    place = accepted.clamp(max=last)
    probs = None if draft_probs is None else draft_probs[index, place]
    rest = _rest(target, weights[index, accepted], drafts[index, place], probs)
    empty = ~(rest.sum(-1) > 0)
    return torch.where((complete | empty)[:, None], target, rest)


def _rest(target: Tensor, weight: Tensor, token: Tensor, draft_probs: Tensor | None) -> Tensor:
    """Compute max(w p - q, 0) [B, V] from target p [B, V], weight w [B] and draft_probs q [B, V].
    None for q: a point mass on token [B]."""
    weighted = weight[:, None] * target
    if draft_probs is None:
        return weighted.scatter_(1, token[:, None], 0.0)
    return weighted.sub_(draft_probs).clamp_(min=0)


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    origins: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Distribution]:
    """Sample the draft's tokens under maximal coupling.

    Args:
        logits: [N, V].
        origins: [N] int64, the rows' lengths at the start of the round.
        The others: as in `sample`.

    Returns: tokens [N] int64, sampled from the processed distributions with noise of the DRAFT
    stream, and those distributions.
    """
    probs = process(logits, temperature, top_k, top_p, min_p)
    return draw(probs, keys, positions, stream=DRAFT, origin=origins), Distribution(probs)


def rejection_sample(
    drafts: Tensor,
    draft_dist: Distribution | None,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Verify drafts under maximal coupling against the processed distributions of the target's
    logits.

    Args:
        drafts: [B, k] int64, sampled from draft_dist.
        draft_dist: distributions [B, k, U] with U <= V; None for point masses.
        logits: the target's, [B, k + 1, V].
        The others: as in `sample` and `accept_maximal`.

    Returns: accepted [B] and next [B] as in `accept_maximal`; block [B, k + 1] int64, the drafts
    with the next token at place `accepted`, valid up to that place; and the block's
    `log_probability` [B, k + 1] float32.
    """
    rows, places, vocab = logits.shape
    given = (temperature, top_k, top_p, *([] if min_p is None else [min_p]))
    parameters = [parameter.repeat_interleave(places) for parameter in given]
    target = process(logits.flatten(0, 1), *parameters).view(rows, places, vocab)
    probabilities = None if draft_dist is None else draft_dist.values
    if probabilities is not None and probabilities.shape[-1] < vocab:
        probabilities = torch.nn.functional.pad(probabilities, (0, vocab - probabilities.shape[-1]))
    accepted, following = accept_maximal(drafts, probabilities, target, keys, lengths, most)
    block = torch.cat((drafts, drafts.new_zeros(rows, 1)), dim=1).scatter(
        1, accepted[:, None], following[:, None]
    )
    return accepted, following, block, log_probability(logits, block)
