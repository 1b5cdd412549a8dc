"""The training loss, and the acceptance probabilities of a student's guesses.

Distributions over a whole vocabulary are large, so they are computed for some guesses at a time,
with the gradient, and not stored. Training compares both models at temperature 1, over the ids that
they share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import functional

import bass_kernels as ops

# Logits computed at once. Plain torch needs five tensors of 1 GiB in float32. The kernels need them
# in bfloat16 only; with more at once the head's gradient is added up less often.
ELEMENTS, _ELEMENTS_OF_KERNELS = 1 << 28, 1 << 30
_ALIGNED = 64  # ids; a product with rows of no multiple of 16 bytes takes several times as long
# Share of the total variation term (2 - 2 * overlap) in the loss; the rest is KL divergence. The
# overlap is the acceptance rate, but far from the target's distribution only the divergence has a
# useful gradient. 0.9 is DSpark's value (arXiv 2607.05147). With 0, 0.5 and 0.9 small drafts of 8
# had 1.12, 1.26 and 1.35 tokens accepted at T = 1 (one seed, a CPU).
APART = 0.9
LEAST = 0.3  # least weight of a guess behind unlikely drafts, so that it learns at all
FOLLOWING = 0.8  # acceptance rate behind an accepted draft, as measured on held-out texts


class Head(NamedTuple):
    """Output head: weight [V, width], bias [V] or None, for the V ids that are compared."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of hidden [N, width], in the dtype of `hidden`."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)

    def padded(self, dtype: torch.dtype) -> Head:
        """Return the head in `dtype`, with rows of zeros added to a multiple of _ALIGNED."""

        def wider(x: Tensor) -> Tensor:
            size = -(-len(x) // _ALIGNED) * _ALIGNED
            if size == len(x):
                return x.to(dtype)
            padded = torch.zeros(size, *x.shape[1:], dtype=dtype, device=x.device)
            padded[: len(x)] = x
            return padded

        return Head(wider(self.weight), None if self.bias is None else wider(self.bias))


class Guesses(NamedTuple):
    """N guesses, in the order of the M target distributions that they are compared with.

    begins [M + 1], on the host: the first guess of each distribution.
    of [N]: the distribution of each guess.
    before [N]: the guess one position earlier in the same draft, or itself at position 0. Its
        distribution comes earlier.
    tokens [N]: the token of the text.
    scarcity [N]: inverse of the share of anchors that have a guess at this position.
    worth [N]: expected accepted drafts from this position on, if it is accepted (`worths`).
    longest: guesses of the longest draft.
    """

    begins: numpy.ndarray
    of: Tensor
    before: Tensor
    tokens: Tensor
    scarcity: Tensor
    worth: Tensor
    longest: int

    def parts(self, most: int) -> list[tuple[slice, slice]]:
        """Divide guesses and distributions into parts of up to `most` guesses.

        The guesses of one distribution are never divided.
        """
        found, first, groups = [], 0, len(self.begins) - 1
        while first < groups:
            last = int(numpy.searchsorted(self.begins, self.begins[first] + most, "right")) - 1
            last = max(last, first + 1)
            found.append((slice(*self.begins[[first, last]].tolist()), slice(first, last)))
            first = last
        return found


def worths(places: int) -> list[float]:
    """Return, by position, the expected accepted drafts from it on, if a draft there is accepted.

    Early positions weigh more because all later ones depend on them. Without these weights the
    first position, which is good before the training, gets worse.
    """
    return [sum(FOLLOWING**later for later in range(places - place)) for place in range(places)]


def divergence(
    student: Tensor, head: Head, target: Tensor, target_head: Head, guesses: Guesses
) -> Tensor:
    """Return the weighted loss, summed over N guesses.

    The loss of a guess is (1 - APART) * KL(target, student) + APART * (2 - 2 * overlap).

    The weight of a guess estimates how many accepted drafts depend on it. It is the product of
    three factors: the probability that all drafts before it are accepted, with LEAST as a floor;
    the guess's `worth`; and its `scarcity`. The probability is the product of min(1, q / p) at the
    tokens of the text: exact for token-wise verification, and close under both couplings.

    Args:
        student, target: outputs of the final norms, [N, width] and [M, width of the target].
            Gradients reach `student` and `head`.
    """
    found: Tensor = _Divergence.apply(student, head.weight, head.bias, target, target_head, guesses)
    return found


class _Divergence(torch.autograd.Function):
    """Computes gradients in the forward pass, where both distributions are in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        target_head: Head,
        guesses: Guesses,
    ) -> Tensor:
        dtype, vocab = student.dtype, len(weight)
        own, other = Head(weight, bias).padded(dtype), target_head.padded(dtype)
        most = _ELEMENTS_OF_KERNELS if ops.kind_for(student) == "triton" else ELEMENTS
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        accepted = torch.ones(len(student), dtype=torch.float32, device=student.device)
        grads = [torch.empty_like(student), torch.zeros_like(weight, dtype=torch.float32)]
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part, group in guesses.parts(max(most // vocab, 1)):
            logits, expected = own.logits(student[part]), other.logits(target[group])
            of = guesses.of[part] - group.start
            found = ops.distances(logits, expected, of, guesses.tokens[part], vocab)
            weights = _weights(guesses, part, accepted, found.ratio)
            total += (weights * _mixed(found)).sum()
            slopes = torch.stack((weights * (1.0 - APART), weights * (2.0 * APART)))
            ops.distance_gradient(logits, expected, of, found, slopes, vocab)
            if grad_bias is not None:
                grad_bias += logits[:, :vocab].sum(0, dtype=torch.float32)
            grads[0][part] = logits @ own.weight
            grads[1] += (logits.T @ student[part])[:vocab]
        ctx.grads = (*grads, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        student, weight, bias = ctx.grads
        ctx.grads = None
        scaled = (None if one is None else one.mul_(outer[0]) for one in (student, weight, bias))
        return (*scaled, None, None, None)


def _mixed(found: ops.Distances) -> Tensor:
    return (1.0 - APART) * found.divergence + APART * (2.0 - 2.0 * found.overlap)


def _weights(guesses: Guesses, part: slice, accepted: Tensor, ratio: Tensor) -> Tensor:
    """Return the weights of a part's guesses.

    accepted [N]: probability that a guess and all before it are accepted. It is known for earlier
    parts; that of this part is filled in.
    """
    own = ratio.clamp(max=0.0).exp()
    before, scarcity = guesses.before[part], guesses.scarcity[part]
    alone = before == torch.arange(part.start, part.stop, device=before.device)
    ahead = own.new_zeros(len(own))
    for _ in range(guesses.longest):
        ahead = torch.where(alone, 1.0, accepted[before])
        accepted[part] = ahead * own
    return torch.where(alone, 1.0, LEAST + (1.0 - LEAST) * ahead * scarcity) * guesses.worth[part]


class Agreement(NamedTuple):
    """Acceptance probabilities of guesses under a coupling, [N] each.

    accepted: over all tokens of the target. given: if the target's token is the given one.
    """

    accepted: Tensor
    given: Tensor


def shared_agreement(target: Tensor, student: Tensor, tokens: Tensor) -> Agreement:
    """Compute acceptance under shared coupling from log-probs [N, V] and the target's tokens [N].

    Both models draw token i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i). Sorted
    by p / q, the maximum is p's ratio up to i and q's ratio behind it, so two cumulative sums are
    enough.
    """
    order = (target - student).argsort(-1, descending=True)
    p, q = (log_probs.gather(-1, order).double().exp() for log_probs in (target, student))
    above, below = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    both = 1.0 / (above / p + below.clamp(min=0.0) / q)
    both = both.nan_to_num(0.0, 0.0, 0.0)
    at = (order == tokens[:, None]).double()
    own = (both * at).sum(-1) / (p * at).sum(-1)
    return Agreement(both.sum(-1).float(), own.nan_to_num(0.0, 0.0, 0.0).float())


def maximal_agreement(target: Tensor, student: Tensor, tokens: Tensor) -> Agreement:
    """Compute acceptance under maximal coupling: the overlap, and min(1, q / p) at the token."""
    accepted = torch.minimum(target, student).exp().sum(-1)
    apart = (student - target).gather(-1, tokens[:, None])[:, 0]
    return Agreement(accepted, apart.clamp(max=0.0).exp())
