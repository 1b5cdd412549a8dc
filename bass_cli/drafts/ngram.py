"""N-gram lookup: propose what followed the same n-gram in the sample, in other samples of the
prompt, in the prompt or in a reference text.

There is no model: each proposal is a point mass. It works on the host, from committed tokens only,
so the same job gets the same drafts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from bass_cli.config.speculation import SOURCES, parse_sources
from bass_cli.drafts.factory import DraftParts
from bass_cli.engine.batch import Batch, Change, Row
from bass_cli.engine.contracts import Drafter, InTime, Proposal, SkippedDrafts

# n-gram lengths; the longest match wins. Lengths 8 and 6 gain 2 to 3 %, length 1 gains 7 to 9 %.
SIZES = (8, 6, 4, 3, 2, 1)
_PLACE = 40  # bits for a place in its sequence; the bits above hold the sequence's number
_MASK = (1 << _PLACE) - 1
# Rounds after which skipped drafts are compared with the rows' tokens; each round adds at least
# one. All drafts of a lookup are reported together: otherwise the wrong ones would come first.
_HINDSIGHT = 8


class LookupDrafter(Drafter):
    """Draft by n-gram lookup in `sources`, a subset of SOURCES.

    All samples of a prompt share one index. It is freed when the prompt is closed and its last row
    has ended.
    """

    on_device = False

    def __init__(self, sources: Sequence[str] = SOURCES) -> None:
        self._sources = frozenset(sources)
        self._prompts: dict[str, Index] = {}
        self._samples: dict[int, _RowIndexes] = {}  # by the row's index
        self._acceptance = EstimatedAcceptance()
        self._found: list[tuple[Row, Guess]] = []  # of the last lookup, if worth verifying
        self._skipped: list[tuple[Row, Guess]] = []  # of a lookup that was not verified
        self._since = 0  # rounds since that lookup

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
        for index in change.ended:
            sample = self._samples.pop(index)
            if sample.row is not None:
                sample.catch_up(sample.row)
        for source, target in change.moved:
            self._samples[target] = self._samples.pop(source)
        for indices, key in change.begun:
            self._samples |= {index: self._begin(self._prompts[key]) for index in indices}

    def _begin(self, shared: Index) -> _RowIndexes:
        if "siblings" in self._sources:
            return _RowIndexes((shared,), shared)
        if "own" in self._sources:
            own = Index()
            return _RowIndexes((own, shared), own)
        return _RowIndexes((shared,), None)

    def propose(self, batch: Batch, length: int) -> Proposal:
        """Return up to `length` tokens for every live row. Tokens beyond a row's count are
        guesses or repeat its last token. If all counts are 0, nothing is proposed."""
        guesses = self.look_up(batch, length)
        counts = tuple([guess.count for guess in guesses])
        if not any(counts):
            return Proposal.empty(batch)._replace(num_drafts=counts)
        filled: list[int] = []
        for guess, row in zip(guesses, batch.live_rows, strict=True):
            filled += guess.tokens
            filled += row.tokens[-1:] * (length - len(guess.tokens))
        tokens = torch.from_numpy(numpy.array(filled, dtype=numpy.int64)).view(len(batch), length)
        return Proposal(tokens, None, counts)

    def forget(self) -> None:
        self._acceptance, self._skipped = EstimatedAcceptance(), []

    def learn(self, batch: Batch) -> None:
        """Index the new tokens of all rows before any lookup, because samples of a prompt share
        them."""
        for index, row in enumerate(batch.live_rows):
            sample = self._samples[index]
            self._judge(sample.guesses, row)
            sample.catch_up(row)

    def skip_last(self) -> None:
        if not self._skipped:
            self._skipped, self._since = self._found, 0

    def recall(self) -> SkippedDrafts | None:
        self._since += 1
        if not self._skipped or self._since < _HINDSIGHT:
            return None
        skipped, self._skipped = self._skipped, []
        judged = [guess.judged(row, guess.count) for row, guess in skipped]
        return SkippedDrafts(*zip(*judged, strict=True))

    def look_up(self, batch: Batch, length: int) -> list[Guess]:
        """Return a guess for every live row."""
        found, num_drafts, tail, enough = [], self._acceptance.num_drafts, SIZES[0], self._enough
        for index, row in enumerate(batch.live_rows):
            sample = self._samples[index]
            tokens, matched = follow(sample.indexes, row.tokens[-tail:], length, enough=enough)
            count = min(num_drafts(matched), max(row.room - 1, 0)) if tokens else 0
            guess = Guess(len(row.tokens), tokens, matched, count)
            if tokens:
                sample.guesses.append(guess)
            found.append(guess)
        rows = zip(batch.live_rows, found, strict=True)
        self._found = [(row, guess) for row, guess in rows if guess.count]
        return found

    def _enough(self, matched: list[int]) -> bool:
        return self._acceptance.num_drafts(matched) < len(matched)

    def _judge(self, guesses: list[Guess], row: Row) -> None:
        """Learn from guesses whose tokens are known now. Whether they were verified does not
        matter: the row's own tokens show which would have been accepted."""
        while guesses and guesses[0].start < len(row.tokens):
            guess = guesses.pop(0)
            accepted, known = guess.judged(row, len(guess.tokens))
            self._acceptance.learn(guess.matched[: min(known, accepted + 1)], accepted)


def make(parts: DraftParts) -> Drafter:
    """Make the drafter of "lookup", or "lookup:" and its sources."""
    return LookupDrafter(parse_sources(parts.argument) if parts.argument else SOURCES)


@dataclass(slots=True, eq=False)
class Guess:
    """The result of a lookup for one row.

    start: length of the row at the lookup.
    tokens: the tokens found.
    matched: matched tokens before each of them.
    count: how many of them are worth verifying.
    """

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    count: int = 0

    def judged(self, row: Row, count: int) -> tuple[int, int]:
        """Return how many of the first `count` tokens equal the row's own up to the first wrong
        one, and of how many that is known."""
        new = row.tokens[self.start : self.start + count]
        pairs = zip(self.tokens, new, strict=False)
        wrong = next((place for place, (token, own) in enumerate(pairs) if token != own), len(new))
        return wrong, len(new)


@dataclass(slots=True, eq=False)
class _RowIndexes:
    """A live row and the indexes for it.

    indexes: where its drafts are looked up.
    own: the index of its own tokens; None if they are no source.
    row: the row; None before its first round.
    number: the number of its sequence in `own`.
    guesses: lookups that were not compared with the row's tokens yet.
    """

    indexes: tuple[Index, ...]
    own: Index | None
    row: Row | None = None  # set in its first round
    number: int = 0
    guesses: list[Guess] = field(default_factory=list)

    def catch_up(self, row: Row) -> None:
        """Index the row's new tokens."""
        if self.own is None:
            return
        if self.row is None:
            self.row, self.number = row, self.own.begin(row.tokens, known=row.prompt_length)
        self.own.extend(self.number)


class Index:
    """For each n-gram of the lengths in SIZES, the place after its newest occurrence.

    after: for each size, a dict from the n-gram's hash to the place.
    sequences: the indexed sequences, by number.

    Sequences are kept by reference. They may grow at the end and lose tokens there, but never
    change. N-grams are stored as hashes of at least 61 bits: a collision would give a wrong draft,
    nothing worse. Each token costs one dict write for each size; nothing is searched or removed.
    """

    __slots__ = ("_known", "after", "sequences")

    def __init__(self) -> None:
        self.after: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self.sequences: list[list[int]] = []
        self._known: list[int] = []  # by sequence: how many of its tokens are in the index

    def begin(self, tokens: list[int], *, known: int = 0) -> int:
        """Add a sequence and return its number. Its first `known` tokens are context: n-grams
        may begin in them, but their places are not indexed."""
        self.sequences.append(tokens)
        self._known.append(known)
        return len(self.sequences) - 1

    def extend(self, number: int) -> None:
        """Index what sequence `number` has gained since the last call."""
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


def follow(
    indexes: Sequence[Index],
    tail: Sequence[int],
    length: int,
    *,
    enough: Callable[[list[int]], bool] | None = None,
) -> tuple[list[int], list[int]]:
    """Return up to `length` tokens that may follow `tail`, and for each of them how many tokens
    before it were matched.

    The longest n-gram in any index wins, and for equal lengths the first index. The tokens after it
    are copied. Where they end, the search continues from the copied tokens, because a repetition
    repeats.

    Args:
        tail: the last tokens of a sequence; SIZES[0] of them suffice.
        enough: ends the search if it returns True for the matched lengths so far.
    """
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
    """Return the length of the longest matching n-gram, and the sequence and the place in it
    after that n-gram."""
    for level, size in enumerate(SIZES):
        if size > len(last):
            continue
        key = hash(last[-size:])
        for index in indexes:
            found = index.after[level].get(key)
            if found is not None:
                return size, index.sequences[found >> _PLACE], found & _MASK
    return None


# Prior acceptance rate by matched tokens, from 1. Measured on samples of HumanEval at temperature
# 0.8.
_BEFORE = (0.25, 0.35, 0.6, 0.6, 0.62, 0.72, 0.75, 0.82)
_WEIGHT = 8.0  # prior weight, in drafts
_MEMORY = 512.0  # when a class has this many drafts, all weights are halved
_FLOOR = 0.1  # a token is worth verifying while P(all up to it are accepted) is at least this


class EstimatedAcceptance:
    """The estimated probability that a draft is accepted if all drafts before it are, by the
    number of matched tokens. Matches of len(_BEFORE) tokens and more share one class."""

    __slots__ = ("_accepted", "_rates", "_tried")

    def __init__(self) -> None:
        self._tried = [_WEIGHT] * len(_BEFORE)
        self._accepted = [_WEIGHT * rate for rate in _BEFORE]
        self._rates = list(_BEFORE)

    def rate(self, matched: int) -> float:
        """Return the estimate for one token after `matched` matched ones (1 or more)."""
        return self._rates[min(matched, len(_BEFORE)) - 1]

    def num_drafts(self, matched: Sequence[int]) -> int:
        """Return how many tokens of a draft are worth verifying, given the matched tokens before
        each."""
        rates, most, left = self._rates, len(_BEFORE), 1.0
        for count, size in enumerate(matched):
            left *= rates[size - 1 if size < most else -1]
            if left < _FLOOR:
                return count
        return len(matched)

    def learn(self, matched: Sequence[int], accepted: int) -> None:
        """Learn that the first `accepted` of these tokens were right, and that the one after
        them, if there is one, was wrong."""
        for count, size in enumerate(matched[: accepted + 1]):
            at = min(size, len(_BEFORE)) - 1
            self._tried[at] += 1
            self._accepted[at] += count < accepted
            self._rates[at] = self._accepted[at] / self._tried[at]
            if self._tried[at] > _MEMORY:
                self._tried[at] /= 2
                self._accepted[at] /= 2
