"""Which tokens came last after an n-gram, over many growing sequences at once: what lookup drafts
from.

Not here: whose sequences these are, and how far a draft is trusted (ngram.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# n-gram lengths, the first that matches wins: 8 and 6 gain 2 to 3 %, 1 gains 7 to 9 %
SIZES = (8, 6, 4, 3, 2, 1)
_PLACE = 40  # bits of a place inside its sequence; the sequence's number stands above them
_MASK = (1 << _PLACE) - 1


class Index:
    """N-gram to the newest place after it, for each of SIZES.

    Sequences are kept by reference: they may grow at their end, and lose tokens there, but never
    change. An n-gram is stored as its hash, 61 bits or more: a false match would be a wrong
    draft and nothing worse. One dictionary write for each token and size; nothing is ever
    searched or removed. `after`: by size, hash to place; `sequences`: by number.
    """

    __slots__ = ("_known", "after", "sequences")

    def __init__(self) -> None:
        self.after: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self.sequences: list[list[int]] = []
        self._known: list[int] = []  # by sequence: how many of its tokens are in the index

    def begin(self, tokens: list[int], *, known: int = 0) -> int:
        """A sequence whose first `known` tokens are not to be found in it, but go before the
        rest. Returns its number."""
        self.sequences.append(tokens)
        self._known.append(known)
        return len(self.sequences) - 1

    def extend(self, number: int) -> None:
        """Take in what sequence `number` has gained since the last time."""
        tokens, first = self.sequences[number], self._known[number]
        end = len(tokens)
        if first == end:
            return
        start = max(first - SIZES[0], 0)
        near, base = tuple(tokens[start:]), (number << _PLACE) + start
        for size, after in zip(SIZES, self.after, strict=True):
            for place in range(max(first - start, size), end - start):
                after[hash(near[place - size : place])] = base + place
        self._known[number] = end

    def __len__(self) -> int:
        """How many n-grams there are."""
        return sum(map(len, self.after))


def follow(
    indexes: Sequence[Index],
    tail: Sequence[int],
    length: int,
    *,
    enough: Callable[[list[int]], bool] | None = None,
) -> tuple[list[int], list[int]]:
    """Up to `length` tokens that may follow `tail` (a sequence's last tokens, SIZES[0] are
    enough), and by token how many tokens before it were matched. The longest n-gram that any
    index knows wins; of equal ones, the first index. What followed it is copied; where that
    ends, the search goes on from what was copied (a repetition repeats), unless what was matched
    so far is `enough`."""
    draft: list[int] = []
    matched: list[int] = []
    last = tuple(tail)
    while len(draft) < length:
        found = _longest(indexes, last)
        if found is None:
            break
        size, tokens, place = found
        piece = tokens[place : place + length - len(draft)]
        draft += piece
        matched += range(size, size + len(piece))
        if not piece or (enough is not None and enough(matched)):
            break
        last = (*last, *piece)[-SIZES[0] :]
    return draft, matched


def _longest(indexes: Sequence[Index], last: tuple[int, ...]) -> tuple[int, list[int], int] | None:
    """The length of the n-gram, and where what followed it begins: a sequence and a place in it."""
    for level, size in enumerate(SIZES):
        if size > len(last):
            continue
        key = hash(last[-size:])
        for index in indexes:
            found = index.after[level].get(key)
            if found is not None:
                return size, index.sequences[found >> _PLACE], found & _MASK
    return None
