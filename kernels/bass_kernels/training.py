"""Ops for training a draft, in plain torch: rotary embedding of whole tensors, the gradient of a
gated activation, and divergence and overlap of a student's distributions and a target's, straight
from logits, with their gradient. The Triton kernels: training_kernels.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the first `size` dimensions of x [B, T, H, D] in pairs that are half of `size` apart.
    cos and sin: [B, T, 1, size / 2] float32. `back`: rotate by the opposite angle, for gradients.
    """
    half = cos.shape[-1]
    if back:
        sin = -sin
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


def gate_gradient(x: Tensor, outer: Tensor) -> Tensor:
    """Return the gradient of silu(gate) * up with respect to x [..., 2 I] (gate, then up), given
    the gradient `outer` [..., I] of the result."""
    gate, up = x.float().chunk(2, -1)
    due, chance = outer.float(), gate.sigmoid()
    slope = chance * (1.0 + gate * (1.0 - chance))
    passed = (gate * chance).to(x.dtype).float()
    return torch.cat((due * up * slope, due * passed), -1).to(x.dtype)


class Distances(NamedTuple):
    """Comparison of N student distributions q with target distributions p, [N] float32 each.

    divergence: KL(p, q) in nats. overlap: sum of min(p, q). below: the mass of q where q < p.
    ratio: log q(x) - log p(x) of the given token. own_norm, due_norm: log-normalisers of q and p.
    """

    divergence: Tensor
    overlap: Tensor
    below: Tensor
    ratio: Tensor
    own_norm: Tensor
    due_norm: Tensor


def distances(own: Tensor, due: Tensor, of: Tensor, tokens: Tensor, vocab: int) -> Distances:
    """Compare N student distributions with their targets.

    Args:
        own: the student's logits [N, S].
        due: the target's logits [M, S].
        of: [N] int64, the row of `due` for each student row.
        tokens: [N] int64, the token for `ratio`.
        vocab: ids from here on are ignored.
    """
    q, own_norm = _log_probs(own, vocab)
    p, due_norm = _log_probs(due, vocab)
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
    """Overwrite `own` with the gradient of the sum of slopes[0] * divergence - slopes[1] * overlap.
    slopes: [2, N] float32. The gradient is 0 for ignored ids."""
    q, p = _log_probs(own, vocab)[0], _log_probs(due, vocab)[0][of]
    mass = q.exp()
    apart = slopes[0, :, None] * (mass - p.exp())
    apart += slopes[1, :, None] * mass * (found.below[:, None] - (q < p).float())
    own[:, :vocab] = apart.to(own.dtype)
    own[:, vocab:] = 0.0


def _log_probs(logits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    kept = logits[:, :vocab].float()
    norm = kept.logsumexp(-1)
    return kept - norm[:, None], norm
