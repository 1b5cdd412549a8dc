"""How a draft model chooses its tokens under each coupling. The target's side of it is
engine/verify.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Proposal
from bass_cli.engine.sampling_params import SamplingParams


def propose_shared(logits: Tensor, params: SamplingParams, places: Tensor) -> Tensor:
    """The draft's tokens [B] from its logits [B, V] with the very noise that the target will use
    at `places` [B]."""
    return ops.sample(logits, params.temperature, params.top_k, params.top_p, params.keys, places)


def propose_scored(logits: Tensor, params: SamplingParams, places: Tensor) -> tuple[Tensor, Tensor]:
    """`propose_shared`'s tokens [B] and the log-probability, at temperature 1, that the draft
    gives them, [B] float32; laws may be of B / N rows each, in a row."""
    tokens, scores = ops.sample_scored(
        logits, params.temperature, params.top_k, params.top_p, params.keys, places
    )
    return tokens, scores


def propose_maximal(
    logits: Tensor, params: SamplingParams, places: Tensor, lengths: Tensor
) -> tuple[Tensor, ops.Distribution]:
    """Tokens [B] and the laws [B, V] they were drawn from, with noise of the draft's own stream;
    lengths [B] tells this round's noise from every other round's."""
    return ops.draft_sample(
        logits, params.temperature, params.top_k, params.top_p, params.keys, places, lengths
    )


def propose_one(
    logits: Tensor, params: SamplingParams, places: Tensor, lengths: Tensor, *, coupling: str
) -> tuple[Tensor, ops.Distribution | None]:
    """Tokens [B] and, under maximal coupling, what they were drawn from."""
    if coupling == "shared":
        return propose_shared(logits, params, places), None
    return propose_maximal(logits, params, places, lengths)


def propose_chain(
    logits_of: Callable[[int, Tensor | None], Tensor],
    places: Tensor,
    params: SamplingParams,
    lengths: Tensor,
    *,
    coupling: str,
    goes_on: Callable[[Tensor], bool] | None = None,
) -> Proposal:
    """Drafts one after the other, for `places` [k, B], until `goes_on` (see
    Drafter.propose_while; shared coupling only) says no. `logits_of(step, tokens)`: [B, V] behind
    the tokens [B] of the step before, None at first."""
    chosen: list[Tensor] = []
    drawn_from: list[ops.Distribution] = []
    for step, at in enumerate(places):
        logits = logits_of(step, chosen[-1] if chosen else None)
        if goes_on is None:
            token, law = propose_one(logits, params, at, lengths, coupling=coupling)
            chosen.append(token)
            if law is not None:
                drawn_from.append(law)
        else:
            token, scores = propose_scored(logits, params, at)
            chosen.append(token)
            if not goes_on(scores.exp()):
                break
    return Proposal(torch.stack(chosen, 1), stacked(drawn_from) if drawn_from else None)


def propose_at_once(
    logits: Tensor, params: SamplingParams, batch: Batch, *, coupling: str
) -> Proposal:
    """Drafts from logits [B, k, V] of the places behind the batch's rows, each by itself; under
    shared coupling with their scores."""
    rows, length = logits.shape[:2]
    places = batch.places(0, length).flatten()
    flat = logits.flatten(0, 1)
    if coupling == "shared":
        found, scores = propose_scored(flat, params, places)
        return Proposal(found.view(rows, length), None, scores=scores.view(rows, length))
    starts = batch.lengths[:rows].repeat_interleave(length)
    tokens, law = propose_maximal(flat, params.repeat(length), places, starts)
    values, edges = (None if part is None else part.unflatten(0, (-1, length)) for part in law)
    assert values is not None
    return Proposal(tokens.view(rows, length), ops.Distribution(values, edges))


def stacked(params: list[ops.Distribution]) -> ops.Distribution:
    """The laws [B, V] of places one after the other as one, [B, k, V]."""
    values, edges = zip(*params, strict=True)
    return ops.Distribution(
        torch.stack(values, 1), None if edges[0] is None else torch.stack(edges, 1)
    )
