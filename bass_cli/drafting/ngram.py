"""N-gram lookup as drafter: what followed a row's last tokens before, in its own output, in that of
the other samples of its prompt (live or finished), in the prompt, or in a reference text that the
prompt carries.

No model and no laws: each proposal is a point mass. Works on the host. What it proposes depends
on committed tokens only, so the same job drafts the same twice. Not here: the search
(ngram_index.py), how long a draft is worth (ngram_trust.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import torch

from bass_cli.config.draft_spec import SOURCES
from bass_cli.drafting.ngram_index import SIZES, Index, follow
from bass_cli.drafting.ngram_trust import Trust
from bass_cli.engine.batch import Batch, Change, Row
from bass_cli.engine.contracts import Drafter, InTime, Proposal, SkippedDrafts

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
