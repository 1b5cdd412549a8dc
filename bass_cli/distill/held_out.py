"""Measure the acceptance of a student on held-out texts, by position in the draft.

The rates are computed from the distributions of target and student, without sampling noise. loss.py
computes the acceptance probability of a single draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bass_cli.distill.layout import Windows
from bass_cli.distill.loss import Agreement, maximal_agreement, shared_agreement
from bass_cli.distill.network import cast, run
from bass_cli.distill.student import head_of
from bass_cli.distill.trainer import Model

_ELEMENTS = 1 << 26  # logits at once; sorting them takes about ten times their memory


@dataclass(frozen=True, slots=True)
class HeldOutAcceptance:
    """Acceptance rates on held-out texts.

    shared: by position, the rate of drafts whose predecessors were all accepted, under shared
        coupling.
    maximal: the same under maximal coupling with token-wise verification, a lower bound for block
        verification; empty if it was not measured.
    kept: mean accepted drafts of a whole block under shared coupling; None without blocks.
    drafts: number of blocks measured.
    """

    shared: tuple[float, ...]
    maximal: tuple[float, ...]
    kept: float | None
    drafts: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


def measure_acceptance(
    target: Model,
    student: Model,
    windows: Sequence[Windows],
    *,
    mask: int | None,
    dtype: torch.dtype,
    temperature: float,
    both: bool = True,
) -> HeldOutAcceptance:
    """Measure over windows whose anchors have all their masks (layout.whole).

    The tokens of a text are samples of the target. Accepted drafts equal these tokens, so a
    position is weighted by the probability that all drafts before it are accepted, given the
    tokens.

    Args:
        mask: mask token of the student; None to draft token by token.
        both: False to measure only the maximal coupling, which costs a tenth; it then takes the
            place of the shared one in the result.
    """
    kinds = (shared_agreement, maximal_agreement) if both else (maximal_agreement,)
    sums: list[list[Tensor]] = [[] for _ in kinds]  # alternately: weights [K], accepted [K]
    drafts = 0
    device = student.weights["embed.weight"].device
    with torch.no_grad():
        weights = cast(student.weights, dtype)
        for part in windows:
            moved = part.to(device)
            places, goals = _places(moved, masks=mask is not None)
            if not len(places):
                continue
            drafts += len(places)
            expected = run(target.spec, target.weights, moved, None).flatten(0, 1)
            own = run(student.spec, weights, moved, mask).flatten(0, 1)
            tokens = moved.tokens.flatten()
            found = _agreements(
                target, student, (expected, own, tokens), (places, goals), kinds, temperature
            )
            for kind, one in zip(sums, found, strict=True):
                alive = torch.cumprod(one.given, 1).roll(1, 1)
                alive[:, 0] = 1.0
                kind += [alive.sum(0), (alive * one.accepted).sum(0)]
    shares = [
        (torch.stack(kind[1::2]).sum(0) / torch.stack(kind[::2]).sum(0)).nan_to_num(0.0).tolist()
        if kind
        else []
        for kind in sums
    ]
    kept = float(torch.stack(sums[0][1::2]).sum()) / drafts if drafts else None
    return HeldOutAcceptance(tuple(shares[0]), tuple(shares[1]) if both else (), kept, drafts)


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
    texts: tuple[Tensor, Tensor, Tensor],
    at: tuple[Tensor, Tensor],
    kinds: Sequence[Any],
    temperature: float,
) -> list[Agreement]:
    """Compute the agreement [N, K] of target and student for each kind of coupling."""
    expected, own, tokens = texts
    vocab = student.vocab
    heads = head_of(target.weights, vocab), head_of(student.weights, vocab)
    places, goals = (part.flatten() for part in at)
    found: list[list[Agreement]] = [[] for _ in kinds]
    step = max(_ELEMENTS // vocab, 1)
    for first in range(0, len(places), step):
        goal, place = goals[first : first + step], places[first : first + step]
        log_probs = [
            (head.logits(hidden[index]).float() / temperature).log_softmax(-1)
            for head, hidden, index in zip(heads, (expected, own), (goal, place), strict=True)
        ]
        following = tokens[goal + 1].clamp(max=vocab - 1)
        for kind, agree in zip(found, kinds, strict=True):
            kind.append(agree(*log_probs, following))
    return [
        Agreement(*(torch.cat(part).view(at[0].shape) for part in zip(*kind, strict=True)))
        for kind in found
    ]
