"""N-gram lookup: propose what followed the same n-gram in the sample, its siblings, the prompt or a
reference text.

No model and no distributions: each proposal is a point mass. It works on the host, from committed
tokens only, so the same job drafts the same twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from bass_cli.config.draft_spec import SOURCES
from bass_cli.engine.batch import Batch, Change, Row
from bass_cli.engine.contracts import Drafter, InTime, Proposal, SkippedDrafts

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


# Chances by matched tokens, from 1, measured on samples of HumanEval at temperature 0.8: where
# learning begins.
_BEFORE = (0.25, 0.35, 0.6, 0.6, 0.62, 0.72, 0.75, 0.82)
_WEIGHT = 8.0  # tokens that this counts as
_MEMORY = 512.0  # beyond so many tokens the old ones count half
_FLOOR = 0.1  # a token counts as a draft while the chance that all stand up to it is no less


class Trust:
    """The chance that a token stands if all before it in its draft do; matches of len(_BEFORE)
    tokens and more are one class."""

    __slots__ = ("_chances", "_stood", "_tried")

    def __init__(self) -> None:
        self._tried = [_WEIGHT] * len(_BEFORE)
        self._stood = [_WEIGHT * chance for chance in _BEFORE]
        self._chances = list(_BEFORE)

    def chance(self, matched: int) -> float:
        """Of one token after so many matched ones (1 or more)."""
        return self._chances[min(matched, len(_BEFORE)) - 1]

    def worth(self, matched: Sequence[int]) -> int:
        """How many tokens of a draft count, given how many tokens were matched before each."""
        chances, most, left = self._chances, len(_BEFORE), 1.0
        for count, size in enumerate(matched):
            left *= chances[size - 1 if size < most else -1]
            if left < _FLOOR:
                return count
        return len(matched)

    def learn(self, matched: Sequence[int], stood: int) -> None:
        """The first `stood` of these tokens were right, and the one after them, if it is there,
        was wrong."""
        for count, size in enumerate(matched[: stood + 1]):
            at = min(size, len(_BEFORE)) - 1
            self._tried[at] += 1
            self._stood[at] += count < stood
            self._chances[at] = self._stood[at] / self._tried[at]
            if self._tried[at] > _MEMORY:
                self._tried[at] /= 2
                self._stood[at] /= 2


# Rounds after which it is seen what a draft would have been worth that nobody verified: each has
# brought a token, and all of a look are told of together, or those that failed would come first.
_HINDSIGHT = 8


@dataclass(slots=True, eq=False)
class Guess:
    """What was looked up for a row: tokens, how many tokens were matched before each, and how
    many are worth a place in the round. `start`: the length of the row then."""

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    count: int = 0

    def judged(self, row: Row) -> tuple[int, int]:
        """How many of its tokens the row has in their places before the first that it has not;
        of how many, of those that count, anything is known."""
        new = row.tokens[self.start : self.start + self.count]
        pairs = zip(self.tokens, new, strict=False)
        wrong = next((place for place, (token, due) in enumerate(pairs) if token != due), len(new))
        return wrong, len(new)


@dataclass(slots=True, eq=False)
class _Sample:
    """A live row: the indexes it is looked up in, the one that takes in its own output (None: no
    source is its output), its number there, and the guesses that nothing was learnt from yet."""

    indexes: tuple[Index, ...]
    own: Index | None
    row: Row | None = None  # known from its first round on
    number: int = 0
    guesses: list[Guess] = field(default_factory=list)

    def catch_up(self, row: Row) -> None:
        """Put the row's new tokens into the index."""
        if self.own is None:
            return
        if self.row is None:
            self.row, self.number = row, self.own.begin(row.tokens, known=row.prompt_length)
        self.own.extend(self.number)


class LookupDrafter(Drafter):
    """Drafts by n-gram lookup in `sources`, a part of SOURCES. The prompt's samples share one
    index, which goes when the prompt is closed and its last row has ended."""

    on_device, longest = False, sys.maxsize

    def __init__(self, sources: Sequence[str] = SOURCES) -> None:
        self._sources = frozenset(sources)
        self._prompts: dict[str, Index] = {}
        self._samples: dict[int, _Sample] = {}  # by row
        self._trust = Trust()
        self._found: list[tuple[Row, Guess]] = []  # by the last look, where it counts
        self._skipped: list[tuple[Row, Guess]] = []  # by one whose drafts were not verified
        self._since = 0  # rounds since then

    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        in_time: InTime | None = None,
    ) -> bool:
        self._prompts[key] = index = Index()
        for source, text in (("reference", reference), ("prompt", tokens)):
            if source in self._sources and text:
                index.extend(index.begin(list(text)))
        return True

    def close(self, key: str) -> None:
        del self._prompts[key]

    def follow(self, change: Change) -> None:
        for place in change.ended:
            sample = self._samples.pop(place)
            if sample.row is not None:
                sample.catch_up(sample.row)
        for source, target in change.moved:
            self._samples[target] = self._samples.pop(source)
        for places, key in change.begun:
            self._samples |= {place: self._begin(self._prompts[key]) for place in places}

    def _begin(self, shared: Index) -> _Sample:
        if "siblings" in self._sources:
            return _Sample((shared,), shared)
        if "own" in self._sources:
            own = Index()
            return _Sample((own, shared), own)
        return _Sample((shared,), None)

    def propose(self, batch: Batch, length: int) -> Proposal:
        """Up to `length` tokens for every live row. Those beyond a row's count are no more than
        a guess, or its last token again; if no row's count is above 0, nothing is proposed."""
        guesses = self.look_up(batch, length)
        counts = tuple([guess.count for guess in guesses])
        if not any(counts):
            return Proposal(batch.tokens.new_zeros(len(batch), 0), None, counts)
        filled: list[int] = []
        for guess, row in zip(guesses, batch.hosts, strict=True):
            filled += guess.tokens
            filled += row.tokens[-1:] * (length - len(guess.tokens))
        tokens = torch.from_numpy(numpy.array(filled, dtype=numpy.int64)).view(len(batch), length)
        return Proposal(tokens, None, counts)

    def forget(self) -> None:
        self._trust, self._skipped = Trust(), []

    def learn(self, batch: Batch) -> None:
        """Of all rows, before any of them is looked up: samples see each other's."""
        for place, row in enumerate(batch.hosts):
            sample = self._samples[place]
            self._judge(sample.guesses, row)
            sample.catch_up(row)

    def skip_last(self) -> None:
        if not self._skipped:
            self._skipped, self._since = self._found, 0

    def recall(self) -> SkippedDrafts | None:
        self._since += 1
        if not self._skipped or self._since < _HINDSIGHT:
            return None
        told, self._skipped = self._skipped, []
        judged = [guess.judged(row) for row, guess in told]
        return SkippedDrafts(*zip(*judged, strict=True))

    def look_up(self, batch: Batch, length: int) -> list[Guess]:
        """A guess for every live row, in what was learnt so far."""
        found, worth, tail, enough = [], self._trust.worth, SIZES[0], self._enough
        for place, row in enumerate(batch.hosts):
            sample = self._samples[place]
            tokens, matched = follow(sample.indexes, row.tokens[-tail:], length, enough=enough)
            count = min(worth(matched), max(row.room - 1, 0)) if tokens else 0
            guess = Guess(len(row.tokens), tokens, matched, count)
            if tokens:
                sample.guesses.append(guess)
            found.append(guess)
        rows = zip(batch.hosts, found, strict=True)
        self._found = [(row, guess) for row, guess in rows if guess.count]
        return found

    def _enough(self, matched: list[int]) -> bool:
        return self._trust.worth(matched) < len(matched)

    def _judge(self, guesses: list[Guess], row: Row) -> None:
        """Whether they were drafted does not matter: what the row became says what would have
        stood."""
        while guesses and guesses[0].start < len(row.tokens):
            guess, stood = guesses.pop(0), 0
            new = row.tokens[guess.start : guess.start + len(guess.tokens)]
            for token, due in zip(guess.tokens, new, strict=False):
                if token != due:
                    break
                stood += 1
            self._trust.learn(guess.matched[: min(len(new), stood + 1)], stood)
