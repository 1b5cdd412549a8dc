"""Where masks stand in a training window, and what they see: what a pass of drafts/parallel.py
shows its model, for many anchors at once.

An anchor is a token of a text behind which a draft is tried: masks follow it, see the text up to
it and each other, and guess a token each, as it does itself. Most anchors have few masks
(conditional drop, arXiv 2504.18583). They stand in groups, each of which sees the text and itself:
a pass over all would look at too many pairs. Not here: texts (corpus.py), attention (network.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

RATE, FLOOR = 0.7, 0.2  # the paper's: each mask is kept for so many of those before it, and of all
_GROUPS = range(24, 41)  # anchors: their masks fill a tile of 128 queries, with little left over
_ALIGNED = 8  # masks of a group, as the attention of a GPU reads them


@dataclass(frozen=True, slots=True)
class Layout:
    """`window` tokens of text, and `groups` of masks: counts[j] anchors of each group have a mask
    number j + 1. Masks of a group are ordered by that number, then by anchor."""

    window: int
    groups: int
    counts: tuple[int, ...]

    @property
    def anchors(self) -> int:
        """Of a group."""
        return self.counts[0] if self.counts else 0

    @property
    def masks(self) -> int:
        """Of a group."""
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        """Of a whole window, text and masks."""
        return self.window + self.groups * self.masks

    def slots(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Of each mask of a group its anchor's number, and its own from 1 on: [masks] each."""
        anchors = [numpy.arange(count) for count in self.counts]
        numbers = [numpy.full(count, j + 1) for j, count in enumerate(self.counts)]
        nothing = numpy.zeros(0, dtype=numpy.int64)
        return numpy.concatenate((nothing, *anchors)), numpy.concatenate((nothing, *numbers))


def thinned(window: int, drafts: int) -> Layout:
    """For drafts of up to so many tokens, one more than masks: of a window's tokens a share of
    max(RATE ** j, FLOOR) has a mask number j."""

    def counts(anchors: int) -> tuple[int, ...]:
        shares = (max(RATE**j, FLOOR) / RATE for j in range(1, drafts))
        return tuple(round(anchors * share) for share in shares)

    if drafts < 2:
        return Layout(window, 0, ())
    wanted = RATE * window
    fitting = [size for size in _GROUPS if sum(counts(size)) % _ALIGNED == 0]
    size = min((fitting or list(_GROUPS))[-1], max(round(wanted), 1))
    return Layout(window, max(round(wanted / size), 1), counts(size))


def whole(window: int, drafts: int, anchors: int) -> Layout:
    """For measuring: so many anchors a group, each with all its masks, two groups a window."""
    return Layout(window, 2, (anchors,) * (drafts - 1))


@dataclass(frozen=True, slots=True)
class Windows:
    """B windows, int64. tokens, positions (in their text), texts (which one a token is of; -1:
    none) [B, L]; anchors [B, C, A]: places in the window, -1 where there is none. student: places
    in [B, L + C masks] whose guesses are compared; place: the number of the guess, 0 for an
    anchor's own; before: which guess is that of one number less, itself where there is none; of:
    the number in `known` of what it should be. [N] each, by `of`. known [M]: places of the text in
    [B, L] that know what a guess should be; begins [M + 1], on the host: the first guess of each.
    slots [2, masks]: the layout's."""

    layout: Layout
    begins: numpy.ndarray
    tokens: Tensor
    positions: Tensor
    texts: Tensor
    anchors: Tensor
    student: Tensor
    place: Tensor
    before: Tensor
    of: Tensor
    known: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> Windows:
        """A copy there. To a CUDA device it goes while that is still busy."""
        parts: dict[str, Any] = {
            name: part for name in Windows.__dataclass_fields__
            if isinstance(part := getattr(self, name), Tensor)
        }  # fmt: skip
        if device.type == "cuda":
            parts = {
                name: part.pin_memory().to(device, non_blocking=True)
                for name, part in parts.items()
            }
        return replace(self, **parts)

    @property
    def target(self) -> Tensor:
        """[N]: the place in [B, L] that knows what a guess should be."""
        return self.known[self.of]

    def inputs(self, mask: int) -> tuple[Tensor, Tensor]:
        """Tokens and positions with the masks behind them, [B, L + C masks] each."""
        rows = len(self.tokens)
        anchors, numbers = self.slots
        at = self.anchors.clamp(min=0)[:, :, anchors].flatten(1)
        behind = self.positions.gather(1, at) + numbers.repeat(self.layout.groups)
        masks = self.tokens.new_full((rows, behind.shape[1]), mask)
        return torch.cat((self.tokens, masks), 1), torch.cat((self.positions, behind), 1)

    def seen(self, window: int = 0) -> tuple[Tensor, Tensor | None]:
        """What sees what, bool: the text itself [B, L, L]; masks the text and their own group
        [B C, masks, L + masks], None without masks. window: how many of the latest positions are
        seen, itself included; 0 for all."""
        length = self.layout.window
        order = torch.arange(length, device=self.tokens.device)
        same = self.texts[:, :, None] == self.texts[:, None, :]
        text = same & (order[:, None] >= order)
        if window:
            text &= order[:, None] - order < window
        if not self.layout.groups:
            return text, None
        anchors, numbers = self.slots
        at = self.anchors.clamp(min=0)[:, :, anchors]  # [B, C, masks]
        own = self.texts.gather(1, at.flatten(1)).view_as(at)
        before = (own[..., None] == self.texts[:, None, None]) & (order <= at[..., None])
        chain = (anchors[:, None] == anchors) & (numbers[:, None] >= numbers)
        if window:
            before &= (at + numbers)[..., None] - order < window
            chain &= numbers[:, None] - numbers < window
        both = torch.cat((before, chain.expand(*at.shape[:2], -1, -1)), -1)
        return text, both.flatten(0, 1)


def lay_out(
    layout: Layout,
    tokens: numpy.ndarray,
    positions: numpy.ndarray,
    texts: numpy.ndarray,
    due: numpy.ndarray,
    noise: Sequence[numpy.random.Generator],
) -> Windows:
    """Windows with anchors drawn from the places that are `due` [B, L] bool: whose next token the
    target itself chose. A mask counts where its own place is due too, in its anchor's text.
    `noise`: one for each window, so that it does not matter which others it comes with."""
    rows, length = tokens.shape
    each = layout.groups * layout.anchors
    anchors = numpy.full((rows, each), -1, dtype=numpy.int64)
    for row in range(rows):
        found = noise[row].permutation(numpy.flatnonzero(due[row]))[:each]
        anchors[row, noise[row].permutation(each)[: len(found)]] = found
    shaped = anchors.reshape(rows, layout.groups, layout.anchors)
    slot_anchors, numbers = layout.slots()
    at = shaped[:, :, slot_anchors].reshape(rows, -1)
    goal = at + numpy.tile(numbers, layout.groups)
    inside = (at >= 0) & (goal < length)
    clipped = numpy.minimum(numpy.maximum(goal, 0), length - 1)
    own = numpy.take_along_axis(texts, numpy.maximum(at, 0), 1)
    counts = (
        inside
        & numpy.take_along_axis(due, clipped, 1)
        & (numpy.take_along_axis(texts, clipped, 1) == own)
    )
    every = numpy.concatenate((due, counts), 1)
    goals = numpy.concatenate((numpy.tile(numpy.arange(length), (rows, 1)), clipped), 1)
    places = numpy.concatenate((numpy.zeros(length), numpy.tile(numbers, layout.groups)))
    chosen = numpy.nonzero(every)
    known, of = numpy.unique(chosen[0] * length + goals[chosen], return_inverse=True)
    order = numpy.argsort(of, kind="stable")
    student = numpy.flatnonzero(every)[order]
    guess_at = numpy.zeros(every.size, dtype=numpy.int64)
    guess_at[student] = numpy.arange(len(student))
    earlier = numpy.concatenate(
        (numpy.tile(numpy.arange(length), (rows, 1)), _earlier(layout, at, length)), 1
    )
    before = guess_at[chosen[0] * layout.tokens + earlier[chosen]][order]
    parts = (
        tokens,
        positions,
        texts,
        shaped,
        student,
        places[chosen[1]][order],
        before,
        of[order],
        known,
        numpy.stack((slot_anchors, numbers)),
    )
    begins = numpy.searchsorted(of[order], numpy.arange(len(known) + 1))
    return Windows(layout, begins, *(torch.from_numpy(part.astype(numpy.int64)) for part in parts))


def _earlier(layout: Layout, at: numpy.ndarray, length: int) -> numpy.ndarray:
    """Of every mask [B, C masks], anchored `at`, where the guess of one number less stands."""
    anchors, numbers = layout.slots()
    starts = numpy.concatenate(([0, 0], numpy.cumsum(layout.counts)[:-1])).astype(numpy.int64)
    own = length + starts[numbers - 1] + anchors if layout.groups else numbers
    groups = numpy.repeat(numpy.arange(layout.groups) * layout.masks, layout.masks)
    return numpy.where(
        numpy.tile(numbers, layout.groups) == 1, at, numpy.tile(own, layout.groups) + groups
    )
