"""Texts in windows of one length, and the batches of a training step: which windows, where masks
stand in them. All of it follows from the texts, a seed and the number of the step, so that a run
that was killed goes on with the very batch that it had not seen.

Not here: where texts come from (sampling.py), what masks see (layout.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from bass_cli.distill.layout import Layout, Windows, lay_out

HELD_OUT = 0.02  # of the prompts: their samples are for measuring
FEWEST = 2  # prompts, of which one is for either


class Text(NamedTuple):
    """A sample behind its prompt: `key` says which prompt, tokens from `begins` on are the
    target's."""

    key: str
    tokens: Sequence[int]
    begins: int


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Those to learn from, and those of held-out prompts: the ones whose hashes are smallest.
    ValueError where there are too few prompts for both."""
    keys = sorted({one.key for one in texts}, key=lambda key: hashlib.sha256(key.encode()).digest())
    if len(keys) < FEWEST:
        raise ValueError(f"{len(keys)} prompts have samples, and {FEWEST} are the fewest")
    held = set(keys[: math.ceil(HELD_OUT * len(keys))])
    return [one for one in texts if one.key not in held], [one for one in texts if one.key in held]


class Corpus:
    """Texts in windows of `length` tokens, as many in each as fit; longer ones are cut."""

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

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    def windows(
        self, numbers: Sequence[int], layout: Layout, seeds: Sequence[Sequence[int]]
    ) -> Windows:
        """These windows, with anchors drawn by a seed for each."""
        shape = (len(numbers), self._length)
        tokens, positions = numpy.zeros(shape, dtype=numpy.int64), numpy.zeros(shape, numpy.int64)
        texts, due = numpy.full(shape, -1, dtype=numpy.int64), numpy.zeros(shape, dtype=bool)
        for row, number in enumerate(numbers):
            at = 0
            for order, piece in enumerate(self._windows[number]):
                first = self._ends[piece - 1] if piece else 0
                size = int(self._ends[piece] - first)
                to = slice(at, at + size)
                tokens[row, to] = self._tokens[first : first + size]
                positions[row, to] = numpy.arange(size)
                texts[row, to] = order
                due[row, at + max(int(self._begins[piece]) - 1, 0) : at + size - 1] = True
                at += size
        noise = [numpy.random.default_rng(seed) for seed in seeds]
        return lay_out(layout, tokens, positions, texts, due, noise)


class Batches:
    """The batches of training: `size` windows a step, in an order that is another in every pass
    over them; `most` windows at once, where memory holds no more. Of `ranks` processes that learn
    from the same batches each gets a part, by its `rank`: which windows, and where masks stand, is
    the same for all numbers of them."""

    def __init__(
        self, corpus: Corpus, layout: Layout, *, size: int, most: int, seed: int, rank: int = 0,
        ranks: int = 1,
    ):  # fmt: skip
        self._corpus, self._layout, self._seed = corpus, layout, seed
        self.size, self._most = size, most
        self._rank, self._ranks = rank, ranks
        self._orders: dict[int, numpy.ndarray] = {}

    def at(self, step: int) -> list[Windows]:
        """The batch of a step, counted from 0, in parts; of several ranks this one's."""
        places = range(step * self.size + self._rank, (step + 1) * self.size, self._ranks)
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
        turn, index = divmod(place, len(self._corpus))
        if turn not in self._orders:
            noise = numpy.random.default_rng((self._seed, turn))
            self._orders = {turn: noise.permutation(len(self._corpus))} | {
                t: order for t, order in self._orders.items() if t == turn - 1
            }
        return int(self._orders[turn][index])


def _pieces(text: Text, length: int) -> list[tuple[Sequence[int], int]]:
    """Parts of up to `length` tokens in which something is the target's, with the place of its
    first such token. Of a long prompt its end stays, in half of the first part."""
    cut = max(text.begins - length // 2, 0) if len(text.tokens) > length else 0
    tokens, begins = text.tokens[cut:], text.begins - cut
    parts = [
        (tokens[at : at + length], max(begins - at, 0)) for at in range(0, len(tokens), length)
    ]
    return [(part, begin) for part, begin in parts if len(part) > max(begin, 1)]


def _packed(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which pieces share a window: from the longest on, each where it leaves the least room."""
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
