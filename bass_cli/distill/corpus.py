"""Pack texts into training windows, and choose the windows of each batch.

A batch depends only on the texts, the seed and the number of the step, so a resumed run continues
with the next batch. sampling.py reads the texts; layout.py places the masks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from bass_cli.distill.layout import Layout, Windows, lay_out

HELD_OUT = 0.02  # share of the prompts whose samples are held out for measuring
FEWEST = 2  # prompts: one for training, one held out


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

    @property
    def tokens(self) -> int:
        return len(self._tokens)

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


class Batches:
    """The batches of a training.

    The order of windows differs in every pass. Windows and masks of a batch do not depend on the
    number of processes.

    Args:
        size: windows in a step, over all processes.
        most: windows that fit into memory at once.
        rank, ranks: number of this process, and of all processes. Each gets a part of a batch.
    """

    def __init__(
        self, corpus: Corpus, layout: Layout, *, size: int, most: int, seed: int, rank: int = 0,
        ranks: int = 1,
    ):  # fmt: skip
        self._corpus, self._layout, self._seed = corpus, layout, seed
        self.size, self._most = size, most
        self._rank, self._ranks = rank, ranks
        self._orders: dict[int, numpy.ndarray] = {}

    def at(self, step: int) -> list[Windows]:
        """Return this process's part of a batch, divided into parts that fit into memory.

        `step` counts from 0.
        """
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
        epoch, index = divmod(place, len(self._corpus))
        if epoch not in self._orders:
            noise = numpy.random.default_rng((self._seed, epoch))
            self._orders = {epoch: noise.permutation(len(self._corpus))} | {
                e: order for e, order in self._orders.items() if e == epoch - 1
            }
        return int(self._orders[epoch][index])


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
