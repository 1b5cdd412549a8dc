"""How many drafts of a student stand on held-out texts, by place in the draft, from the laws
themselves: no draw adds noise to what little there is of them.

Not here: the chance that one stands (loss.py).
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

_ELEMENTS = 1 << 26  # logits at once: sorting them takes some ten times their memory


@dataclass(frozen=True, slots=True)
class Standing:
    """By place, of drafts whose earlier ones all stood: the share that stands under shared
    coupling, and under maximal (empty where it was not asked for), there tested one by one, the
    least that a block keeps. `kept`: drafts that stand of a whole block, on average, under the
    first, None if there are none. `drafts`: blocks that were looked at."""

    shared: tuple[float, ...]
    maximal: tuple[float, ...]
    kept: float | None
    drafts: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


def standing(
    target: Model,
    student: Model,
    windows: Sequence[Windows],
    *,
    mask: int | None,
    dtype: torch.dtype,
    temperature: float,
    both: bool = True,
) -> Standing:
    """Over windows whose anchors have all their masks (layout.whole). mask None: the student drafts
    token by token instead, seeing the drafts before. `both` couplings, or the maximal one alone,
    which costs a tenth, in the place of the shared one.

    A text's tokens are the target's own. Where the first j drafts stand, they are those: a place
    counts as much as it is likely that those before it stand, given their tokens."""
    kinds = (shared_agreement, maximal_agreement) if both else (maximal_agreement,)
    sums: list[list[Tensor]] = [[] for _ in kinds]  # of weights, of what stands: [K] each, in turn
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
            due = run(target.spec, target.weights, moved, None).flatten(0, 1)
            own = run(student.spec, weights, moved, mask).flatten(0, 1)
            tokens = moved.tokens.flatten()
            found = _agreements(
                target, student, (due, own, tokens), (places, goals), kinds, temperature
            )
            for kind, one in zip(sums, found, strict=True):
                alive = torch.cumprod(one.given, 1).roll(1, 1)
                alive[:, 0] = 1.0
                kind += [alive.sum(0), (alive * one.stands).sum(0)]
    shares = [
        (torch.stack(kind[1::2]).sum(0) / torch.stack(kind[::2]).sum(0)).nan_to_num(0.0).tolist()
        if kind
        else []
        for kind in sums
    ]
    kept = float(torch.stack(sums[0][1::2]).sum()) / drafts if drafts else None
    return Standing(tuple(shares[0]), tuple(shares[1]) if both else (), kept, drafts)


def _places(windows: Windows, *, masks: bool) -> tuple[Tensor, Tensor]:
    """Of every anchor all of whose guesses count: where they are made, and where the target knows
    what they should be [N, K] each. Without masks they are made where the target's are."""
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
    """By kind, [N, K]."""
    due, own, tokens = texts
    vocab = student.vocab
    heads = head_of(target.weights, vocab), head_of(student.weights, vocab)
    places, goals = (part.flatten() for part in at)
    found: list[list[Agreement]] = [[] for _ in kinds]
    step = max(_ELEMENTS // vocab, 1)
    for first in range(0, len(places), step):
        goal, place = goals[first : first + step], places[first : first + step]
        laws = [
            (head.logits(hidden[index]).float() / temperature).log_softmax(-1)
            for head, hidden, index in zip(heads, (due, own), (goal, place), strict=True)
        ]
        following = tokens[goal + 1].clamp(max=vocab - 1)
        for kind, agree in zip(found, kinds, strict=True):
            kind.append(agree(*laws, following))
    return [
        Agreement(*(torch.cat(part).view(at[0].shape) for part in zip(*kind, strict=True)))
        for kind in found
    ]
