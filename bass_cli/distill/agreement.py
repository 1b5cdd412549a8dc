"""Compare a student with its target: the training loss, and the acceptance on held-out texts.

Distributions over a whole vocabulary are large, so they are computed for some guesses at a time,
and not stored. Training compares both models at temperature 1, over the ids that they share.
Acceptance rates are computed from the distributions, without sampling noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.distill.network import Head, Model, run
from bass_cli.distill.windows import Windows

# Logits computed at once. Plain torch needs five tensors of 1 GiB in float32. The kernels need them
# in bfloat16 only; with more at once the head's gradient is added up less often.
ELEMENTS, _ELEMENTS_OF_KERNELS = 1 << 28, 1 << 30
_SORTED = 1 << 26  # logits at once; sorting them takes about ten times their memory
# Share of the total variation term (2 - 2 * overlap) in the loss; the rest is KL divergence. The
# overlap is the acceptance rate, but far from the target's distribution only the divergence has a
# useful gradient. 0.9 is DSpark's value (arXiv 2607.05147). With 0, 0.5 and 0.9 small drafts of 8
# had 1.12, 1.26 and 1.35 tokens accepted at T = 1 (one seed, a CPU).
APART = 0.9
LEAST = 0.3  # least weight of a guess behind unlikely drafts, so that it learns at all
FOLLOWING = 0.8  # acceptance rate behind an accepted draft, as measured on held-out texts


def worths(places: int) -> list[float]:
    """Return, by position, the expected accepted drafts from it on, if a draft there is accepted.

    Early positions weigh more because all later ones depend on them. Without these weights the
    first position, which is good before the training, gets worse.
    """
    return [sum(FOLLOWING**later for later in range(places - place)) for place in range(places)]


def divergence(
    student: Tensor, head: Head, target: Tensor, target_head: Head, windows: Windows
) -> Tensor:
    """Return the weighted loss, summed over the N guesses of some windows.

    The student cannot predict tokens beyond its head; they are replaced by the head's last id.

    The loss of a guess is (1 - APART) * KL(target, student) + APART * (2 - 2 * overlap).

    The weight of a guess estimates how many accepted drafts depend on it. It is the product of
    three factors: the probability that all drafts before it are accepted, with LEAST as a floor;
    the worth of the guess's position (`worths`); and the position's scarcity (`Layout`). The
    probability is the product of min(1, q / p) at the tokens of the text: exact for token-wise
    verification, and close under both couplings.

    Args:
        student, target: outputs of the final norms, [N, width] and [M, width of the target].
            Gradients reach `student` and `head`.
    """
    found: Tensor = _Divergence.apply(student, head.weight, head.bias, target, target_head, windows)
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
        windows: Windows,
    ) -> Tensor:
        dtype, vocab = student.dtype, len(weight)
        tokens = windows.following.clamp(max=vocab - 1)
        scarcity = windows.layout.scarcity
        by_place = torch.tensor([scarcity, worths(len(scarcity))], device=student.device)
        own, other = Head(weight, bias).padded(dtype), target_head.padded(dtype)
        most = _ELEMENTS_OF_KERNELS if ops.kind_for(student) == "triton" else ELEMENTS
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        accepted = torch.ones(len(student), dtype=torch.float32, device=student.device)
        grads = [torch.empty_like(student), torch.zeros_like(weight, dtype=torch.float32)]
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part, group in _parts(windows.begins, max(most // vocab, 1)):
            logits, expected = own.logits(student[part]), other.logits(target[group])
            of = windows.of[part] - group.start
            found = ops.distances(logits, expected, of, tokens[part], vocab)
            weights = _weights(windows, part, accepted, found.ratio, by_place)
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


def _parts(begins: numpy.ndarray, most: int) -> list[tuple[slice, slice]]:
    """Divide guesses and their distributions into parts of up to `most` guesses.

    The guesses of one distribution are never divided. `begins`: see Windows.
    """
    found, first, groups = [], 0, len(begins) - 1
    while first < groups:
        last = int(numpy.searchsorted(begins, begins[first] + most, "right")) - 1
        last = max(last, first + 1)
        found.append((slice(*begins[[first, last]].tolist()), slice(first, last)))
        first = last
    return found


def _weights(
    windows: Windows, part: slice, accepted: Tensor, ratio: Tensor, by_place: Tensor
) -> Tensor:
    """Return the weights of a part's guesses.

    accepted [N]: probability that a guess and all before it are accepted. It is known for earlier
    parts; that of this part is filled in. by_place [2, K]: scarcity and worth by position.
    """
    own, before = ratio.clamp(max=0.0).exp(), windows.before[part]
    scarcity, worth = by_place[:, windows.place[part]]
    alone = before == torch.arange(part.start, part.stop, device=before.device)
    ahead = own.new_zeros(len(own))
    for _ in range(by_place.shape[1]):
        ahead = torch.where(alone, 1.0, accepted[before])
        accepted[part] = ahead * own
    return torch.where(alone, 1.0, LEAST + (1.0 - LEAST) * ahead * scarcity) * worth


class Acceptance(NamedTuple):
    """Acceptance rates on held-out texts.

    shared: by position, the rate of drafts whose predecessors were all accepted, under shared
        coupling.
    maximal: the same under maximal coupling with token-wise verification, a lower bound for block
        verification; empty if it was not measured.
    kept: mean accepted drafts of a whole block under shared coupling; None without blocks.
    drafts: number of blocks measured.
    """

    shared: list[float]
    maximal: list[float]
    kept: float | None
    drafts: int


def measure_acceptance(
    target: Model,
    student: Model,
    windows: Sequence[Windows],
    *,
    temperature: float,
    both: bool = True,
) -> Acceptance:
    """Measure over windows whose anchors have all their masks (windows.whole).

    The tokens of a text are samples of the target. Accepted drafts equal these tokens, so a
    position is weighted by the probability that all drafts before it are accepted, given the
    tokens. A student without a mask token drafts token by token.

    Args:
        both: False to measure only the maximal coupling, which costs a tenth; it then takes the
            place of the shared one in the result.
    """
    couplings = (shared_agreement, maximal_agreement) if both else (maximal_agreement,)
    device = student.weights["embed.weight"].device
    parts = []  # by window: final hidden states of both models, and the text's tokens, by draft
    with torch.no_grad():
        student = student.cast()
        for one in windows:
            moved = one.to(device)
            places, goals = _places(moved, masks=student.mask is not None)
            expected, own = run(target, moved).flatten(0, 1), run(student, moved).flatten(0, 1)
            parts.append((expected[goals], own[places], moved.tokens.flatten()[goals + 1]))
        texts = [torch.cat(part) for part in zip(*parts, strict=True)]
        drafts = len(texts[0])
        if not drafts:
            return Acceptance([], [], None, 0)
        found = _agreements(target, student, texts, couplings, temperature)
    sums = [_sums(agreement) for agreement in found]
    rates = [(accepted / weight).nan_to_num(0.0).tolist() for accepted, weight in sums]
    kept = float(sums[0][0].sum()) / drafts
    return Acceptance(rates[0], rates[1] if both else [], kept, drafts)


def _sums(agreement: Agreement) -> tuple[Tensor, Tensor]:
    """Sum by position, [K] each: accepted drafts, and probabilities that a draft is reached."""
    reached = torch.cumprod(agreement.given, 1).roll(1, 1)
    reached[:, 0] = 1.0
    return (reached * agreement.accepted).sum(0), reached.sum(0)


def _places(windows: Windows, *, masks: bool) -> tuple[Tensor, Tensor]:
    """Return places of guesses and of the target's distributions for them, [N, K] each.

    Only anchors whose K guesses all count are taken. Without masks both places are the same.
    """
    layout, (rows, length) = windows.layout, windows.tokens.shape
    device, numbers = windows.tokens.device, len(layout.counts) + 1
    counted = torch.full((rows * layout.tokens,), -1, device=device)
    counted[windows.student] = windows.target
    row = torch.arange(rows, device=device)[:, None, None] * layout.tokens
    group = torch.arange(layout.groups, device=device)[:, None] * layout.masks
    slot = torch.arange(layout.anchors, device=device)
    steps = [row + length + group + number * layout.anchors + slot for number in range(numbers - 1)]
    every = torch.stack((row + windows.anchors.clamp(min=0), *steps), -1).flatten(0, -2)
    goals = counted[every]
    whole = (goals >= 0).all(1) & (windows.anchors.flatten() >= 0)
    return (every if masks else goals)[whole], goals[whole]


def _agreements(
    target: Model,
    student: Model,
    texts: Sequence[Tensor],
    couplings: Sequence[Callable[[Tensor, Tensor, Tensor], Agreement]],
    temperature: float,
) -> list[Agreement]:
    """Compute the agreement of target and student for each coupling.

    texts: final hidden states of both, [N, K, width] each, and the text's tokens there, [N, K].
    """
    shape, heads = texts[2].shape, (target.head, student.head)
    step = max(_SORTED // student.vocab, 1)
    found: list[list[Agreement]] = [[] for _ in couplings]
    for *hidden, tokens in zip(*(part.flatten(0, 1).split(step) for part in texts), strict=True):
        expected, own = (
            (head.logits(states).float() / temperature).log_softmax(-1)
            for head, states in zip(heads, hidden, strict=True)
        )
        for kind, agreement in zip(found, couplings, strict=True):
            kind.append(agreement(expected, own, tokens.clamp(max=student.vocab - 1)))
    return [
        Agreement._make(torch.cat(part).view(shape) for part in zip(*kind, strict=True))
        for kind in found
    ]


class Agreement(NamedTuple):
    """Acceptance probabilities of guesses under a coupling, all of one shape.

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
