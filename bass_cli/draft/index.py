"""Which tokens came last after an n-gram, over many growing sequences at once: what lookup drafts from.

Not here: whose sequences these are, and how far a draft is trusted (lookup.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SIZES = (8, 6, 4, 3, 2, 1)  # n-gram lengths, the first that matches wins
_PLACE = 40  # bits of a place inside its sequence; the sequence's number stands above them
_MASK = (1 << _PLACE) - 1


class Match(NamedTuple):
    """The n-gram's length, and where what followed it begins: a sequence and a place in it."""

    size: int
    tokens: list[int]
    place: int


class Index:
    """N-gram to the newest place after it, for each of SIZES.

    Sequences are kept by reference: they may grow at their end, and lose tokens there, but never change. An n-gram is
    stored as its hash, 61 bits or more: a false match would be a wrong draft and nothing worse. One dictionary write for
    each token and size; nothing is ever searched or removed.
    """

    __slots__ = ("_after", "_known", "_sequences")

    def __init__(self) -> None:
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._sequences: list[list[int]] = []
        self._known: list[int] = []  # by sequence: how many of its tokens are in the index

    def begin(self, tokens: list[int], *, known: int = 0) -> int:
        """A sequence whose first `known` tokens are not to be found in it, but go before the rest. Returns its number."""
        self._sequences.append(tokens)
        self._known.append(known)
        return len(self._sequences) - 1

    def extend(self, number: int) -> None:
        """Take in what sequence `number` has gained since the last time."""
        tokens, first = self._sequences[number], self._known[number]
        end = len(tokens)
        if first == end:
            return
        base = number << _PLACE
        for size, after in zip(SIZES, self._after, strict=True):
            for place in range(max(first, size), end):
                after[hash(tuple(tokens[place - size : place]))] = base + place
        self._known[number] = end

    def find(self, level: int, key: int) -> Match | None:
        """What followed the n-gram of length SIZES[level] with this hash the last time, if anything did."""
        found = self._after[level].get(key)
        if found is None:
            return None
        return Match(SIZES[level], self._sequences[found >> _PLACE], found & _MASK)

    def __len__(self) -> int:
        """How many n-grams there are."""
        return sum(map(len, self._after))


def follow(indexes: Sequence[Index], tail: list[int], length: int) -> tuple[list[int], list[int]]:
    """Up to `length` tokens that may follow `tail` (a sequence's last tokens, SIZES[0] are enough), and by token how many
    tokens before it were matched. The longest n-gram that any index knows wins; of equal ones, the first index. What
    followed it is copied; where that ends, the search goes on from what was copied: a repetition repeats."""
    draft: list[int] = []
    matched: list[int] = []
    while len(draft) < length:
        found = _longest(indexes, tail)
        if found is None:
            break
        size, tokens, place = found
        piece = tokens[place : place + length - len(draft)]
        if not piece:  # a sequence that was cut where it ended
            break
        draft += piece
        matched += range(size, size + len(piece))
        tail = (tail + piece)[-SIZES[0] :]
    return draft, matched


def _longest(indexes: Sequence[Index], tail: list[int]) -> Match | None:
    for level, size in enumerate(SIZES):
        if size > len(tail):
            continue
        key = hash(tuple(tail[-size:]))
        for index in indexes:
            found = index.find(level, key)
            if found is not None:
                return found
    return None
