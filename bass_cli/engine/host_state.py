"""What the host knows of rows: columns by place, so that a round is taken in by a few operations
on all of them, and nothing is done for a single row until somebody asks for it.

Not here: which rows are live, and the device (batch.py); what ends one (scheduler.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

Integers = NDArray[numpy.int64]
# Columns of `numbers`: tokens in all, the prompt's, the most that may be generated, rounds,
# drafted, accepted, and how many were generated when the logits were not sound (-1: they are).
LENGTH, PROMPT, LIMIT, ROUNDS, DRAFTED, ACCEPTED, BROKEN = range(7)
_SLACK = 130  # places beyond a limit: two rounds of the longest draft length may go there


class News(NamedTuple):
    """What the last round brought: `places` [B] of the rows that it was of and that are live,
    block [B, W] their tokens, of which the first `counts` [B] are new."""

    places: Integers
    block: Integers
    counts: Integers


class HostState:
    """For up to `rows` rows. `numbers` [rows, 7] int64; `tokens` [rows, span] int32 and `scores`
    [rows, span] float32: what was generated, and the log-probabilities. `news`: see News."""

    def __init__(self, rows: int):
        self.numbers: Integers = numpy.zeros((rows, 7), dtype=numpy.int64)
        self.tokens = numpy.zeros((rows, 0), dtype=numpy.int32)
        self.scores = numpy.zeros((rows, 0), dtype=numpy.float32)
        self.news = News(*(numpy.zeros(shape, dtype=numpy.int64) for shape in (0, (0, 1), 0)))

    def widen(self, limit: int) -> None:
        """See to it that rows may generate so many tokens."""
        span = self.tokens.shape[1]
        if limit + _SLACK <= span:
            return
        more = ((0, 0), (0, max(limit + _SLACK, 2 * span) - span))
        self.tokens, self.scores = numpy.pad(self.tokens, more), numpy.pad(self.scores, more)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Rows take the places of others."""
        used = int(self._generated(sources).max(initial=0))
        self.numbers[targets] = self.numbers[sources]
        self.tokens[targets, :used] = self.tokens[sources, :used]
        self.scores[targets, :used] = self.scores[sources, :used]

    def take(
        self, table: Integers, places: Integers, *, width: int, num_drafts: Integers | int
    ) -> Integers:
        """A round with places for `width` drafts has brought `table` (packed.pack) to the rows
        at `places` [B]; returns accepted [B]. meant [B]: how many drafts each row had; what only
        filled its place up counts as drafted if it stood."""
        accepted, block = table[:, 0], table[:, 1 : width + 2]
        scores = table[:, width + 2 :].astype(numpy.int32).view(numpy.float32)
        counts = accepted + 1
        generated = self._generated(places)
        columns = generated[:, None] + numpy.arange(width + 1)
        columns = columns.clip(max=self.tokens.shape[1] - 1)  # only beyond a limit, and unread
        self.tokens[places[:, None], columns] = block
        self.scores[places[:, None], columns] = scores
        self._note_broken(places, scores, generated, counts)
        self.numbers[places, LENGTH] += counts
        self.numbers[places, ROUNDS] += 1
        self.numbers[places, DRAFTED] += numpy.maximum(num_drafts, accepted)
        self.numbers[places, ACCEPTED] += accepted
        self.news = News(places, block, counts)
        return accepted

    def _generated(self, places: Integers | list[int]) -> Integers:
        generated: Integers = self.numbers[places, LENGTH] - self.numbers[places, PROMPT]
        return generated

    def _note_broken(
        self, places: Integers, scores: NDArray[numpy.float32], before: Integers, counts: Integers
    ) -> None:
        """A committed token's log-probability is finite exactly where its logits were sound;
        scores [B, W]."""
        finite = numpy.isfinite(scores)
        if finite.all():
            return
        broken = ~finite & (numpy.arange(scores.shape[1]) < counts[:, None])
        new = broken.any(1) & (self.numbers[places, BROKEN] < 0)
        self.numbers[places[new], BROKEN] = before[new] + broken[new].argmax(1)


class Row:
    """One sample as it grows: what the host knows of it. `tokens` holds the prompt and what was
    generated; its last token is pending (the target has not seen it). `limit`: how many tokens
    it may generate. `top_k` 0 and `top_p` 1 truncate nothing; `temperature` 0 is greedy.
    `broken`: how many tokens it had generated when the target's logits were not sound
    (bass_kernels/sampling.py); its tokens after them mean nothing, and it must be retired.

    While it is live, all that a ledger knows of it stands at its `place` there, and its lists
    are brought up to date when they are asked for; they stay the same lists. `prompt`: the
    prompt's tokens, which its rows may share and nobody changes.
    """

    __slots__ = (
        "_generated",
        "_host_state",
        "_numbers",
        "_scores",
        "_tokens",
        "key",
        "place",
        "prompt",
        "sample",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    )

    def __init__(
        self,
        key: str,  # the prompt's id
        sample: int,
        seed: int,
        tokens: list[int],
        limit: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ):
        self.key, self.sample, self.seed = key, sample, seed
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.prompt = tokens
        self._tokens: list[int] | None = None  # nobody has asked for them
        self._generated, self._scores = list[int](), list[float]()
        self._numbers = [len(tokens), len(tokens), limit, 0, 0, 0, -1]  # where it is not live
        self._host_state: HostState | None = None
        self.place = -1

    def write_to(self, host_state: HostState, place: int) -> None:
        """From now on it lives at this place of a ledger, which has its line already if it was
        moved there."""
        if self.place < 0:
            host_state.numbers[place] = self._numbers
        self.place, self._host_state = place, host_state

    def leave(self) -> None:
        """It lives no more, and is as complete as it ever will be."""
        assert self._host_state is not None
        self._update()
        self._numbers = self.numbers()
        self._host_state, self.place = None, -1

    def cut(self, generated: int) -> None:
        """Drop the tokens beyond the first `generated` that it generated, all from its last
        round: the last one was the target's own, the others accepted drafts."""
        surplus = self.generated - generated
        if surplus > 0:
            self._update()
            if self._tokens is not None:
                del self.tokens[-surplus:]
            del self._generated[-surplus:]
            del self._scores[-surplus:]
            self._set(LENGTH, self.length - surplus)
            self._set(ACCEPTED, self.accepted - surplus + 1)

    def since(self, seen: int) -> list[int]:
        """What it generated after its first `seen` tokens."""
        if self._host_state is None:
            return self._generated[seen:]
        new: list[int] = self._host_state.tokens[self.place, seen : self.generated].tolist()
        return new

    def numbers(self) -> list[int]:
        """The columns of a ledger, all at once."""
        if self._host_state is None:
            return self._numbers
        found: list[int] = self._host_state.numbers[self.place].tolist()
        return found

    @property
    def tokens(self) -> list[int]:
        self._update()
        if self._tokens is None:
            self._tokens = list(self.prompt)
        self._tokens += self._generated[len(self._tokens) - len(self.prompt) :]
        return self._tokens

    @property
    def generated_tokens(self) -> list[int]:
        self._update()
        return self._generated

    @property
    def log_probabilities(self) -> list[float]:
        self._update()
        return self._scores

    @property
    def length(self) -> int:
        """Of its tokens."""
        return self._number(LENGTH)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def limit(self) -> int:
        return self._number(LIMIT)

    @limit.setter
    def limit(self, limit: int) -> None:
        self._set(LIMIT, limit)

    @property
    def rounds(self) -> int:
        return self._number(ROUNDS)

    @property
    def drafted(self) -> int:
        return self._number(DRAFTED)

    @property
    def accepted(self) -> int:
        return self._number(ACCEPTED)

    @property
    def broken(self) -> int | None:
        at = self._number(BROKEN)
        return None if at < 0 else at

    @property
    def generated(self) -> int:
        return self._number(LENGTH) - len(self.prompt)

    @property
    def room(self) -> int:
        """How many more tokens it may generate."""
        return self.limit - self.generated

    def _number(self, column: int) -> int:
        if self._host_state is None:
            return self._numbers[column]
        return int(self._host_state.numbers[self.place, column])

    def _set(self, column: int, value: int) -> None:
        if self._host_state is None:
            self._numbers[column] = value
        else:
            self._host_state.numbers[self.place, column] = value

    def _update(self) -> None:
        if self._host_state is None:
            return
        first, end, place = len(self._scores), self.generated, self.place
        if first < end:
            self._generated += self._host_state.tokens[place, first:end].tolist()
            self._scores += self._host_state.scores[place, first:end].tolist()
