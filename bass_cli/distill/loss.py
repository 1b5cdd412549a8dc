"""How far a student's guesses are from the target's laws, and how often they would stand.

Distributions over a whole vocabulary are large: they are made for some guesses at a time, with
the gradient, and never kept. Both models' laws are at temperature 1, over the ids that both know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import functional

import bass_kernels as ops

# Logits made at once: in plain torch 1 GiB in float32, of which there are five; the kernels need
# them in bfloat16 alone, and the head's gradient is added up less often.
ELEMENTS, _ELEMENTS_OF_KERNELS = 1 << 28, 1 << 30
_ALIGNED = 64  # ids: a product whose rows are no multiple of 16 bytes takes several times as long
# Of the loss, what is distance of masses (2 - 2 * overlap), the rest being divergence: what stands
# is the overlap, but far from the target's law only the divergence says where it lies. DSpark's
# share (arXiv 2607.05147), and the best of three: with 0, 0.5 and 0.9 small drafts of 8 had 1.12,
# 1.26 and 1.35 tokens accepted at T = 1, 1.21, 1.32 and 1.38 at T = 0.8 (one seed, a CPU).
APART = 0.9
LEAST = 0.3  # of a guess's weight, where drafts before it hardly stand: else it would never learn
STANDS = 0.8  # the chance of a draft behind one that stands, as held-out ones have it once trained


class Head(NamedTuple):
    """weight [V, width], bias [V] or None, of the ids that count."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] of hidden [N, width], in its dtype."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)

    def padded(self, dtype: torch.dtype) -> Head:
        """In `dtype`, with rows of zeros to a multiple of _ALIGNED."""

        def wider(x: Tensor) -> Tensor:
            size = -(-len(x) // _ALIGNED) * _ALIGNED
            if size == len(x):
                return x.to(dtype)
            padded = torch.zeros(size, *x.shape[1:], dtype=dtype, device=x.device)
            padded[: len(x)] = x
            return padded

        return Head(wider(self.weight), None if self.bias is None else wider(self.bias))


class Guesses(NamedTuple):
    """N guesses in the order of the M laws that they are compared with: `of` [N] says with which,
    `begins` [M + 1] (on the host) where those of each law begin. `before` [N]: the guess one place
    earlier in the same draft, itself at place 0; its law's number is smaller. `tokens` [N]: what
    came there; `scarcity` [N]: of how many such guesses one was made; `worth` [N]: how many drafts
    more stand on average if it does (`worths`). `longest`: a draft's most."""

    begins: numpy.ndarray
    of: Tensor
    before: Tensor
    tokens: Tensor
    scarcity: Tensor
    worth: Tensor
    longest: int

    def parts(self, most: int) -> list[tuple[slice, slice]]:
        """Guesses and their laws, of up to so many guesses where a law has no more."""
        found, law, laws = [], 0, len(self.begins) - 1
        while law < laws:
            last = int(numpy.searchsorted(self.begins, self.begins[law] + most, "right")) - 1
            last = max(last, law + 1)
            found.append((slice(*self.begins[[law, last]].tolist()), slice(law, last)))
            law = last
        return found


def worths(places: int) -> list[float]:
    """By place in a draft: what stands of the rest of it, itself included, if one there stands. The
    first ones carry all that follow: without it their share of the loss is that of the last, and
    the first, which was right before any mask was learnt, gets worse."""
    return [sum(STANDS**later for later in range(places - place)) for place in range(places)]


def divergence(
    student: Tensor, head: Head, target: Tensor, target_head: Head, guesses: Guesses
) -> Tensor:
    """The sum over N guesses of weight * ((1 - APART) * KL(target's law, student's law) + APART *
    (2 - 2 * overlap)). student [N, width], target [M, its width]: final norms' outputs. Gradients
    reach `student` and `head`.

    The weight is how much more of a draft stands if one there does. It only matters where the
    drafts before it stand, so it is LEAST, and for the rest their chance: the product of
    min(1, q / p) at what came; tested one by one it is just that, under both couplings near it.
    Times its worth, for those behind it. Those rarely made count for those that are not."""
    found: Tensor = _Divergence.apply(student, head.weight, head.bias, target, target_head, guesses)
    return found


class _Divergence(torch.autograd.Function):
    """The gradient of a law's logits is made where both laws are there, and forward leaves
    nothing to do for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        law: Head,
        guesses: Guesses,
    ) -> Tensor:
        dtype, vocab = student.dtype, len(weight)
        own, other = Head(weight, bias).padded(dtype), law.padded(dtype)
        most = _ELEMENTS_OF_KERNELS if ops.kind_for(student) == "triton" else ELEMENTS
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        stand = torch.ones(len(student), dtype=torch.float32, device=student.device)
        grads = [torch.empty_like(student), torch.zeros_like(weight, dtype=torch.float32)]
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part, laws in guesses.parts(max(most // vocab, 1)):
            logits, due = own.logits(student[part]), other.logits(target[laws])
            of = guesses.of[part] - laws.start
            found = ops.distances(logits, due, of, guesses.tokens[part], vocab)
            weights = _weights(guesses, part, stand, found.ratio)
            total += (weights * _mixed(found)).sum()
            slopes = torch.stack((weights * (1.0 - APART), weights * (2.0 * APART)))
            ops.distance_gradient(logits, due, of, found, slopes, vocab)
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


def _weights(guesses: Guesses, part: slice, stand: Tensor, ratio: Tensor) -> Tensor:
    """Of a part's guesses. `stand` [N]: the chance that a guess stands with all before it, of those
    before the part; the part's own is filled in."""
    own = ratio.clamp(max=0.0).exp()
    before, scarcity = guesses.before[part], guesses.scarcity[part]
    alone = before == torch.arange(part.start, part.stop, device=before.device)
    ahead = own.new_zeros(len(own))
    for _ in range(guesses.longest):
        ahead = torch.where(alone, 1.0, stand[before])
        stand[part] = ahead * own
    return torch.where(alone, 1.0, LEAST + (1.0 - LEAST) * ahead * scarcity) * guesses.worth[part]


class Agreement(NamedTuple):
    """Of each guess [N], under a coupling: the chance that it stands, and that it stands where the
    target's token is the given one."""

    stands: Tensor
    given: Tensor


def shared_agreement(target: Tensor, student: Tensor, tokens: Tensor) -> Agreement:
    """Under shared coupling, from log-laws [N, V] and the target's tokens [N]: token i is both
    models' with the chance 1 / sum over j of max(p_j / p_i, q_j / q_i).

    The maximum is p's for the tokens whose p / q is at least that of i, and q's for the others:
    two sums up to i's place in the order of p / q."""
    order = (target - student).argsort(-1, descending=True)
    p, q = (law.gather(-1, order).double().exp() for law in (target, student))
    above, below = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    both = 1.0 / (above / p + below.clamp(min=0.0) / q)
    both = both.nan_to_num(0.0, 0.0, 0.0)
    at = (order == tokens[:, None]).double()
    own = (both * at).sum(-1) / (p * at).sum(-1)
    return Agreement(both.sum(-1).float(), own.nan_to_num(0.0, 0.0, 0.0).float())


def maximal_agreement(target: Tensor, student: Tensor, tokens: Tensor) -> Agreement:
    """The same under maximal coupling: the overlap of the laws, and min(1, q / p) at the token."""
    stands = torch.minimum(target, student).exp().sum(-1)
    apart = (student - target).gather(-1, tokens[:, None])[:, 0]
    return Agreement(stands, apart.clamp(max=0.0).exp())
