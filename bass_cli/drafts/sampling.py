"""How a draft model samples its tokens under each coupling. The target's side is
engine/verify.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Proposal
from bass_cli.engine.sampling_params import SamplingParams


def propose_chain(
    logits_of: Callable[[int, Tensor | None], Tensor],
    places: Tensor,
    params: SamplingParams,
    lengths: Tensor,
    *,
    coupling: str,
    goes_on: Callable[[Tensor], bool] | None = None,
) -> Proposal:
    """Draft one token after the other for `places` [k, B].

    Args:
        logits_of: logits_of(step, tokens) returns logits [B, V] after the tokens [B] of the step
            before; None in the first step.
        goes_on: ends drafting when it returns False (see Drafter.propose_while). Shared coupling
            only.
    """
    chosen: list[Tensor] = []
    distributions: list[ops.Distribution] = []
    for step, at in enumerate(places):
        logits = logits_of(step, chosen[-1] if chosen else None)
        if goes_on is None:
            token, probs = propose_one(logits, params, at, lengths, coupling=coupling)
            chosen.append(token)
            if probs is not None:
                distributions.append(probs)
        else:
            token, scores = propose_scored(logits, params, at)
            chosen.append(token)
            if not goes_on(scores.exp()):
                break
    return Proposal(torch.stack(chosen, 1), stacked(distributions) if distributions else None)


def propose_at_once(
    logits: Tensor, params: SamplingParams, batch: Batch, *, coupling: str
) -> Proposal:
    """Draft from logits [B, k, V] of the places after the rows' ends, each by itself. Under
    shared coupling the proposal has scores."""
    rows, length = logits.shape[:2]
    places = batch.places(0, length).flatten()
    flat = logits.flatten(0, 1)
    if coupling == "shared":
        found, scores = propose_scored(flat, params, places)
        return Proposal(found.view(rows, length), None, scores=scores.view(rows, length))
    starts = batch.lengths[:rows].repeat_interleave(length)
    tokens, probs = propose_maximal(flat, params.repeat(length), places, starts)
    values, edges = (None if part is None else part.unflatten(0, (-1, length)) for part in probs)
    assert values is not None
    return Proposal(tokens.view(rows, length), ops.Distribution(values, edges))


def propose_one(
    logits: Tensor, params: SamplingParams, places: Tensor, lengths: Tensor, *, coupling: str
) -> tuple[Tensor, ops.Distribution | None]:
    """Return tokens [B] and, under maximal coupling, the distributions that they were sampled
    from."""
    if coupling == "shared":
        return propose_shared(logits, params, places), None
    return propose_maximal(logits, params, places, lengths)


def propose_shared(logits: Tensor, params: SamplingParams, places: Tensor) -> Tensor:
    """Return the draft's tokens [B] from its logits [B, V], with the noise that the target will
    use at `places` [B]."""
    return ops.sample(logits, params.temperature, params.top_k, params.top_p, params.keys, places)


def propose_scored(logits: Tensor, params: SamplingParams, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens [B] of `propose_shared` and the draft's log-probability of each at
    temperature 1, [B] float32. Each row of `params` may serve several consecutive rows of the
    logits."""
    tokens, scores = ops.sample_scored(
        logits, params.temperature, params.top_k, params.top_p, params.keys, places
    )
    return tokens, scores


def propose_maximal(
    logits: Tensor, params: SamplingParams, places: Tensor, lengths: Tensor
) -> tuple[Tensor, ops.Distribution]:
    """Return tokens [B] and the distributions [B, V] that they were sampled from, with the
    draft's own noise. lengths [B] makes the noise of this round different from that of every
    other."""
    return ops.draft_sample(
        logits, params.temperature, params.top_k, params.top_p, params.keys, places, lengths
    )


def stacked(distributions: list[ops.Distribution]) -> ops.Distribution:
    """Stack the distributions [B, V] of consecutive places to one, [B, k, V]."""
    values, edges = zip(*distributions, strict=True)
    return ops.Distribution(
        torch.stack(values, 1), None if edges[0] is None else torch.stack(edges, 1)
    )
