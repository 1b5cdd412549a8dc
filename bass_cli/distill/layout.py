"""Place masks in training windows and define the attention between text and masks.

A window shows the model what a pass of drafts/model.py shows it, for many anchors at once. An
anchor is a token of the text; the masks behind it attend to the text up to the anchor and to each
other, and predict one token each. Most anchors have few masks (conditional drop, arXiv
2504.18583). Masks are divided into groups that attend to the text and to themselves, because
attention over all masks would be too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

RATE, FLOOR = 0.7, 0.2  # the paper's rate of masks j + 1 to masks j, and the least share of all
_GROUPS = range(24, 41)  # anchors of a group; their masks nearly fill a tile of 128 queries
_ALIGNED = 8  # the masks of a group are a multiple, for the attention on a GPU


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a window: `window` tokens of text and `groups` groups of masks.

    counts[j] anchors of each group have a mask number j + 1. The masks of a group are ordered by
    number, then by anchor.
    """

    window: int
    groups: int
    counts: tuple[int, ...]

    @property
    def anchors(self) -> int:
        """Anchors of a group."""
        return self.counts[0] if self.counts else 0

    @property
    def masks(self) -> int:
        """Masks of a group."""
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        """Tokens of a whole window, text and masks."""
        return self.window + self.groups * self.masks

    def slots(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return, for each mask of a group, its anchor and its number from 1 on, [masks] each."""
        anchors = [numpy.arange(count) for count in self.counts]
        numbers = [numpy.full(count, j + 1) for j, count in enumerate(self.counts)]
        nothing = numpy.zeros(0, dtype=numpy.int64)
        return numpy.concatenate((nothing, *anchors)), numpy.concatenate((nothing, *numbers))


def thinned(window: int, drafts: int) -> Layout:
    """Make the training layout for drafts of up to `drafts` tokens, one more than masks.

    A share of max(RATE ** j, FLOOR) of the window's tokens has a mask number j.
    """

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
    """Make a layout for measuring: two groups of `anchors` anchors, each with all its masks."""
    return Layout(window, 2, (anchors,) * (drafts - 1))


@dataclass(frozen=True, slots=True)
class Windows:
    """B windows with N guesses to learn from; all tensors are int64.

    tokens, positions, texts [B, L]: tokens, their positions in their text, and the number of the
        text, -1 for none.
    anchors [B, C, A]: places in the window, -1 for none.
    known [M]: places in [B, L] at which the target gives the distribution of a guess.
    begins [M + 1], on the host: the first guess of each of these places.
    The following are [N] each, ordered by `of`:
    student: places of the guesses in [B, L + C masks].
    place: position of the guess in its draft, 0 for the one of the anchor.
    before: the guess one position earlier in the draft, or itself at position 0.
    of: index of the guess's place in `known`.
    slots [2, masks]: Layout.slots.
    """

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
        """Copy to a device; to a CUDA device asynchronously."""
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
        """The place in [B, L] of the target's distribution for each guess, [N]."""
        return self.known[self.of]

    def inputs(self, mask: int) -> tuple[Tensor, Tensor]:
        """Return tokens and positions with masks appended, [B, L + C masks] each."""
        rows = len(self.tokens)
        anchors, numbers = self.slots
        at = self.anchors.clamp(min=0)[:, :, anchors].flatten(1)
        behind = self.positions.gather(1, at) + numbers.repeat(self.layout.groups)
        masks = self.tokens.new_full((rows, behind.shape[1]), mask)
        return torch.cat((self.tokens, masks), 1), torch.cat((self.positions, behind), 1)

    def seen(self, window: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return the attention masks, bool, True where a query attends to a key.

        Args:
            window: positions that a query attends to, itself included; 0 for all.

        Returns: text to text [B, L, L]; masks to the text and their group
            [B C, masks, L + masks], None without masks.
        """
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
    learnable: numpy.ndarray,
    noise: Sequence[numpy.random.Generator],
) -> Windows:
    """Make windows with random anchors.

    Args:
        learnable: [B, L] bool, whether the target chose the next token. Anchors are drawn from
            these places. A mask counts if its own place is one of them too, in its anchor's text.
        noise: a generator for each window, so that it does not depend on the others.
    """
    rows, length = tokens.shape
    each = layout.groups * layout.anchors
    anchors = numpy.full((rows, each), -1, dtype=numpy.int64)
    for row in range(rows):
        found = noise[row].permutation(numpy.flatnonzero(learnable[row]))[:each]
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
        & numpy.take_along_axis(learnable, clipped, 1)
        & (numpy.take_along_axis(texts, clipped, 1) == own)
    )
    every = numpy.concatenate((learnable, counts), 1)
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
    """Return, for every mask, the place of the guess one position earlier, [B, C masks].

    at: the anchor of each mask.
    """
    anchors, numbers = layout.slots()
    starts = numpy.concatenate(([0, 0], numpy.cumsum(layout.counts)[:-1])).astype(numpy.int64)
    own = length + starts[numbers - 1] + anchors if layout.groups else numbers
    groups = numpy.repeat(numpy.arange(layout.groups) * layout.masks, layout.masks)
    return numpy.where(
        numpy.tile(numbers, layout.groups) == 1, at, numpy.tile(own, layout.groups) + groups
    )
