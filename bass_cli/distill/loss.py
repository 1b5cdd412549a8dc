"""How far a student's guesses are from the target's laws, and how often they would stand.

Laws over a whole vocabulary are large: they are made for some guesses at a time, together with
the gradient, and never kept. Both models' laws are at temperature 1, over the ids that both know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ELEMENTS = 1 << 28  # logits made at once: 1 GiB in float32, of which there are five


class Head(NamedTuple):
    """weight [V, width], bias [V] or None, of the ids that count."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] of hidden [N, width], in its dtype."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)


def divergence(student: Tensor, head: Head, target: Tensor, target_head: Head) -> Tensor:
    """The sum of KL(target's law, student's law) over N guesses, in nats. student [N, width],
    target [N, its width]: final norms' outputs of one guess each. Gradients reach `student` and
    `head`."""
    found: Tensor = _Divergence.apply(student, head.weight, head.bias, target, target_head)
    return found


class _Divergence(torch.autograd.Function):
    """The gradient of a law's logits is its difference from the target's law, so it is made
    where both laws are there, and forward leaves nothing to do for backward."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, law: Head
    ) -> Tensor:
        dtype, step = student.dtype, max(ELEMENTS // len(weight), 1)
        own = Head(weight.to(dtype), bias)
        other = Head(law.weight.to(dtype), law.bias)
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        grads = [torch.empty_like(student), torch.zeros_like(weight, dtype=torch.float32)]
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for first in range(0, len(student), step):
            hidden = student[first : first + step]
            due = _law(other.logits(target[first : first + step]))
            found = _law(own.logits(hidden))
            chance = due.exp()
            total += (due.sub_(found) * chance).sum()
            apart = found.exp_().sub_(chance)
            if grad_bias is not None:
                grad_bias += apart.sum(0)
            apart = apart.to(dtype)
            grads[0][first : first + step] = apart @ own.weight
            grads[1] += apart.T @ hidden
        ctx.grads = (*grads, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        student, weight, bias = ctx.grads
        ctx.grads = None
        scaled = (None if one is None else one.mul_(outer[0]) for one in (student, weight, bias))
        return (*scaled, None, None)


def _law(logits: Tensor) -> Tensor:
    """Log-probabilities in float32, without a copy of the logits in it before."""
    return logits.log_softmax(-1, dtype=torch.float32)


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
