"""How far laws are from others, straight from logits, and the gradient of that: a student's guesses
beside what a target says, for training a draft.

Here in plain torch, which defines them; distance_kernels.py has their Triton forms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Distances(NamedTuple):
    """Of N guesses, float32: KL(p, q) in nats; the overlap, sum of min(p, q); the mass of q where
    it is below p; log q(x) - log p(x) of a token; and both laws' log-normalisers. q is the
    guess, p what it should be."""

    divergence: Tensor
    overlap: Tensor
    below: Tensor
    ratio: Tensor
    own_norm: Tensor
    due_norm: Tensor


def distances(own: Tensor, due: Tensor, of: Tensor, tokens: Tensor, vocab: int) -> Distances:
    """Guesses' logits `own` [N, S], those of the laws `due` [M, S] of which guess i has number
    of[i], its token tokens[i]; ids from `vocab` on do not count."""
    q, own_norm = _log_law(own, vocab)
    p, due_norm = _log_law(due, vocab)
    p, due_norm = p[of], due_norm[of]
    p_mass, q_mass = p.exp(), q.exp()
    return Distances(
        (p_mass * (p - q)).sum(-1),
        torch.minimum(p_mass, q_mass).sum(-1),
        torch.where(q < p, q_mass, 0.0).sum(-1),
        (q - p).gather(-1, tokens[:, None])[:, 0],
        own_norm,
        due_norm,
    )


def distance_gradient(
    own: Tensor, due: Tensor, of: Tensor, found: Distances, slopes: Tensor, vocab: int
) -> None:
    """Write over `own` the gradient of sum of slopes[0] * divergence - slopes[1] * overlap; slopes
    [2, N] float32. It is 0 for ids that do not count."""
    q, p = _log_law(own, vocab)[0], _log_law(due, vocab)[0][of]
    mass = q.exp()
    apart = slopes[0, :, None] * (mass - p.exp())
    apart += slopes[1, :, None] * mass * (found.below[:, None] - (q < p).float())
    own[:, :vocab] = apart.to(own.dtype)
    own[:, vocab:] = 0.0


def _log_law(logits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    kept = logits[:, :vocab].float()
    norm = kept.logsumexp(-1)
    return kept - norm[:, None], norm
