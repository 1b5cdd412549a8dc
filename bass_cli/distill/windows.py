"""Training windows: texts packed together, with masks placed behind some of their tokens.

A window shows the model what a pass of drafts/model.py shows it, for many anchors at once. An
anchor is a token of the text; the masks behind it attend to the text up to the anchor and to each
other, and predict one token each. Most anchors have few masks (conditional drop, arXiv
2504.18583). Masks are divided into groups that attend to the text and to themselves, because
attention over all masks would be too large.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

HELD_OUT = 0.02  # share of the prompts whose samples are held out for measuring
FEWEST = 2  # prompts: one for training, one held out
RATE, FLOOR = 0.7, 0.2  # the paper's rate of masks j + 1 to masks j, and the least share of all
_GROUPS = range(24, 41)  # anchors of a group; their masks nearly fill a tile of 128 queries
_ALIGNED = 8  # the masks of a group are a multiple, for the attention on a GPU


class Text(NamedTuple):
    """A prompt and a sample. `key`: the prompt; tokens from index `begins` on are the sample's."""

    key: str
    tokens: Sequence[int]
    begins: int


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Split texts into training and held-out ones. Prompts with the smallest hashes are held out.

    ValueError if there are fewer than FEWEST prompts.
    """
    keys = sorted({one.key for one in texts}, key=lambda key: hashlib.sha256(key.encode()).digest())
    if len(keys) < FEWEST:
        raise ValueError(f"only {len(keys)} prompts have samples, and at least {FEWEST} are needed")
    held = set(keys[: math.ceil(HELD_OUT * len(keys))])
    return [one for one in texts if one.key not in held], [one for one in texts if one.key in held]


class Batches:
    """The batches of a training.

    A batch depends only on the texts, the seed and the number of the step, so a resumed run
    continues with the next batch. The order of windows differs in every pass. Windows and masks do
    not depend on the number of processes.

    Args:
        size: windows in a step, over all processes.
        most: windows that fit into memory at once.
        rank, ranks: number of this process, and of all processes. Each gets a part of a batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        layout: Layout,
        *,
        size: int,
        most: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ):
        self._corpus, self._layout, self._seed = corpus, layout, seed
        self._size, self._most = size, most
        self._rank, self._ranks = rank, ranks

    def at(self, step: int) -> list[Windows]:
        """Return this process's part of a batch, divided into parts that fit into memory.

        `step` counts from 0.
        """
        places = range(step * self._size + self._rank, (step + 1) * self._size, self._ranks)
        parts = [places[cut : cut + self._most] for cut in range(0, len(places), self._most)]
        return [
            self._corpus.windows(
                [self._number(place) for place in part],
                self._layout,
                [(self._seed, place) for place in part],
            )
            for part in parts
        ]

    def _number(self, place: int) -> int:
        epoch, index = divmod(place, len(self._corpus))
        return int(_order(self._seed, epoch, len(self._corpus))[index])


@functools.lru_cache(2)  # a batch may lie in two passes
def _order(seed: int, epoch: int, count: int) -> numpy.ndarray:
    return numpy.random.default_rng((seed, epoch)).permutation(count)


class Corpus:
    """Texts packed into windows of `length` tokens; longer texts are cut into pieces."""

    def __init__(self, texts: Sequence[Text], length: int):
        self._length = length
        pieces = [piece for text in texts for piece in _pieces(text, length)]
        self._begins = numpy.array([begins for _, begins in pieces], dtype=numpy.int64)
        self._ends = numpy.cumsum([len(tokens) for tokens, _ in pieces])
        flat = [numpy.asarray(tokens, dtype=numpy.int32) for tokens, _ in pieces]
        self._tokens = numpy.concatenate([numpy.zeros(0, dtype=numpy.int32), *flat])
        self._windows = _packed([len(tokens) for tokens, _ in pieces], length)

    def __len__(self) -> int:
        return len(self._windows)

    def windows(
        self, numbers: Sequence[int], layout: Layout, seeds: Sequence[Sequence[int]]
    ) -> Windows:
        """Make these windows, each with anchors drawn from its own seed."""
        shape = (len(numbers), self._length)
        tokens, positions = numpy.zeros(shape, dtype=numpy.int64), numpy.zeros(shape, numpy.int64)
        texts = numpy.full(shape, -1, dtype=numpy.int64)
        learnable = numpy.zeros(shape, dtype=bool)  # whether the target chose the next token
        for row, number in enumerate(numbers):
            at = 0
            for order, piece in enumerate(self._windows[number]):
                first = self._ends[piece - 1] if piece else 0
                size = int(self._ends[piece] - first)
                to = slice(at, at + size)
                tokens[row, to] = self._tokens[first : first + size]
                positions[row, to] = numpy.arange(size)
                texts[row, to] = order
                learnable[row, at + max(int(self._begins[piece]) - 1, 0) : at + size - 1] = True
                at += size
        noise = [numpy.random.default_rng(seed) for seed in seeds]
        return lay_out(layout, tokens, positions, texts, learnable, noise)


def _pieces(text: Text, length: int) -> list[tuple[Sequence[int], int]]:
    """Cut a text into pieces of up to `length` tokens that contain tokens of the sample.

    A long prompt is cut from the left, to half of the first piece.

    Returns: pieces, and the index of the first sample token in each.
    """
    cut = max(text.begins - length // 2, 0) if len(text.tokens) > length else 0
    tokens, begins = text.tokens[cut:], text.begins - cut
    parts = [
        (tokens[at : at + length], max(begins - at, 0)) for at in range(0, len(tokens), length)
    ]
    return [(part, begin) for part, begin in parts if len(part) > max(begin, 1)]


def _packed(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Assign pieces to windows: best-fit decreasing bin packing."""
    windows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    for piece in sorted(range(len(sizes)), key=lambda piece: (-sizes[piece], piece)):
        size = sizes[piece]
        room = next((room for room in range(size, length + 1) if by_room[room]), None)
        if room is None:
            windows.append([piece])
            by_room[length - size].append(len(windows) - 1)
            continue
        window = by_room[room].pop()
        windows[window].append(piece)
        by_room[room - size].append(window)
    return windows


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

    @property
    def scarcity(self) -> list[float]:
        """By position in a draft, the inverse of the share of tokens that have a guess there."""
        return [1.0, *(self.window / (self.groups * count) for count in self.counts)]

    def slots(self) -> numpy.ndarray:
        """Return, for each mask of a group, its anchor and its number from 1 on, [2, masks]."""
        found = [(anchor, j) for j, count in enumerate(self.counts, 1) for anchor in range(count)]
        return numpy.array(found, dtype=numpy.int64).reshape(-1, 2).T


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
    before: the guess one position earlier in the draft, or itself at position 0. Its distribution
        comes earlier.
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
        if device.type != "cuda":
            return self
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                parts[name] = part.pin_memory().to(device, non_blocking=True)
        return Windows(**parts)

    @property
    def target(self) -> Tensor:
        """The place in [B, L] of the target's distribution for each guess, [N]."""
        return self.known[self.of]

    @property
    def following(self) -> Tensor:
        """The token of the text at the place of each guess, [N]."""
        return self.tokens.flatten()[self.target + 1]

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
    take = functools.partial(numpy.take_along_axis, axis=1)
    rows, length = tokens.shape
    each = layout.groups * layout.anchors
    chosen = numpy.full((rows, each), -1, dtype=numpy.int64)
    for own, places, generator in zip(chosen, learnable, noise, strict=True):
        found = generator.permutation(numpy.flatnonzero(places))[:each]
        own[generator.permutation(each)[: len(found)]] = found
    anchors = chosen.reshape(rows, layout.groups, layout.anchors)
    slots = layout.slots()
    anchor = anchors[:, :, slots[0]].reshape(rows, -1)  # of each mask, [B, C masks]
    number, size = (
        numpy.tile(part, layout.groups)
        for part in (slots[1], numpy.array((0, *layout.counts))[slots[1] - 1])
    )
    goal = numpy.clip(anchor + number, 0, length - 1)
    counted = (
        (anchor >= 0)
        & (anchor + number < length)
        & take(learnable, goal)
        & (take(texts, goal) == take(texts, numpy.maximum(anchor, 0)))
    )
    # Of all tokens, [B, L + C masks]: whether they guess, what, and the guess one position earlier,
    # which is the anchor, or the mask of the same anchor among the `size` masks before.
    text = numpy.tile(numpy.arange(length), (rows, 1))
    previous = numpy.where(number == 1, anchor, numpy.arange(length, layout.tokens) - size)
    guesses = numpy.concatenate((learnable, counted), 1)
    goals, earlier = numpy.concatenate((text, goal), 1), numpy.concatenate((text, previous), 1)
    place = numpy.concatenate((numpy.zeros(length), number))

    row, column = numpy.nonzero(guesses)
    known, of = numpy.unique(row * length + goals[row, column], return_inverse=True)
    order = numpy.argsort(of, kind="stable")
    row, column, of = row[order], column[order], of[order]
    student = row * layout.tokens + column
    index = numpy.zeros(guesses.size, dtype=numpy.int64)
    index[student] = numpy.arange(len(student))
    before = index[row * layout.tokens + earlier[row, column]]
    begins = numpy.searchsorted(of, numpy.arange(len(known) + 1))
    parts = (tokens, positions, texts, anchors, student, place[column], before, of, known, slots)
    return Windows(layout, begins, *(torch.from_numpy(part.astype(numpy.int64)) for part in parts))
