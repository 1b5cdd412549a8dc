"""How a draft model chooses its tokens under each coupling. The target's side of it is
engine/verify.py."""

from __future__ import annotations

from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.laws import Laws


def propose_shared(logits: Tensor, laws: Laws, places: Tensor) -> Tensor:
    """The draft's tokens [B] from its logits [B, V] with the very noise that the target will use
    at `places` [B]."""
    return ops.sample(logits, laws.temperature, laws.top_k, laws.top_p, laws.keys, places)


def propose_scored(logits: Tensor, laws: Laws, places: Tensor) -> tuple[Tensor, Tensor]:
    """`propose_shared`'s tokens [B] and the log-probability, at temperature 1, that the draft
    gives them, [B] float32."""
    tokens, scores = ops.sample_scored(
        logits, laws.temperature, laws.top_k, laws.top_p, laws.keys, places
    )
    return tokens, scores


def propose_maximal(
    logits: Tensor, laws: Laws, places: Tensor, lengths: Tensor
) -> tuple[Tensor, ops.Law]:
    """Tokens [B] and the laws [B, V] they were drawn from, with noise of the draft's own stream;
    lengths [B] tells this round's noise from every other round's."""
    return ops.draft_sample(
        logits, laws.temperature, laws.top_k, laws.top_p, laws.keys, places, lengths
    )
