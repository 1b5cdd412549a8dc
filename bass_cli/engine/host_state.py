"""The host's record of rows, stored as columns by index, so that a round is recorded by a few array
operations. Python lists for one row are built only when they are read.

Not here: which rows are live, and the device (batch.py); what ends a row (run/tasks.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from bass_cli.engine.sampling import PLAIN, RowSampling
from bass_cli.engine.sizes import LONGEST
from bass_cli.formats.grammars import Matcher

Integers = NDArray[numpy.int64]
# Columns of `numbers`: all tokens, tokens of the prompt, the most that may be generated, rounds,
# drafted, accepted, and how many were generated when the logits were first non-finite (-1: never).
LENGTH, PROMPT, LIMIT, ROUNDS, DRAFTED, ACCEPTED, BROKEN = range(7)
_SLACK = 2 * (LONGEST + 1)  # positions beyond a limit, for two rounds of the longest draft length


# The numbers of likeliest tokens that rounds report; each has its own graphs.
_TOPS = (0, 5, 20, 64)


class Report(NamedTuple):
    """What is reported of each generated token besides its log-probability.

    top: number of likeliest tokens at its position, by the target's own distribution.
    processed: the same by the processed distribution, after the entry of the token itself; None for
        neither.
    """

    top: int = 0
    processed: int | None = None

    @property
    def parts(self) -> tuple[int, int]:
        """Entries of each token: by the target's own distribution, and by the processed one."""
        return self.top, 0 if self.processed is None else 1 + self.processed

    @property
    def columns(self) -> int:
        """Entries of each token in a round's result."""
        return sum(self.parts)


NO_REPORT = Report()


def covering(reports: Iterable[Report]) -> Report:
    """Return the report of a round that covers those of all its rows."""
    listed = list(reports)
    processed = [one.processed for one in listed if one.processed is not None]
    return Report(
        _step_up(max(one.top for one in listed)), _step_up(max(processed)) if processed else None
    )


def _step_up(most: int) -> int:
    return next(top for top in _TOPS if top >= most)


class NewTokens(NamedTuple):
    """The tokens of the last round.

    indices: [B], the present indices of its rows that are still live.
    block: [B, W], their tokens.
    counts: [B], how many tokens of each line of the block are new.
    """

    indices: Integers
    block: Integers
    counts: Integers


class HostState:
    """The record of up to `rows` rows.

    numbers: [rows, 7] int64, columns as named above.
    tokens: [rows, span] int32, the generated tokens.
    scores: [rows, span] float32, their log-probabilities.
    from_draft: [rows, span] bool, whether each was an accepted draft.
    entries: what reports add (bass_kernels.report_entries), for each of Report.parts [rows, span,
        columns] int64; no column if no row has such a report.
    new_tokens: the tokens of the last round.
    """

    def __init__(self, rows: int):
        self.numbers: Integers = numpy.zeros((rows, 7), dtype=numpy.int64)
        self.tokens = numpy.zeros((rows, 0), dtype=numpy.int32)
        self.scores = numpy.zeros((rows, 0), dtype=numpy.float32)
        self.from_draft = numpy.zeros((rows, 0), dtype=bool)
        self.entries: list[Integers] = [
            numpy.zeros((rows, 0, 0), dtype=numpy.int64) for _ in NO_REPORT.parts
        ]
        none = (numpy.zeros(shape, dtype=numpy.int64) for shape in (0, (0, 1), 0))
        self.new_tokens = NewTokens(*none)

    def widen(self, limit: int) -> None:
        """Make room for `limit` generated tokens in each row."""
        span = self.tokens.shape[1]
        if limit + _SLACK <= span:
            return
        more = ((0, 0), (0, max(limit + _SLACK, 2 * span) - span))
        self.tokens, self.scores = numpy.pad(self.tokens, more), numpy.pad(self.scores, more)
        self.from_draft = numpy.pad(self.from_draft, more)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move rows from the indices `sources` to `targets`."""
        used = int(self._generated(sources).max(initial=0))
        self.numbers[targets] = self.numbers[sources]
        self.tokens[targets, :used] = self.tokens[sources, :used]
        self.scores[targets, :used] = self.scores[sources, :used]
        self.from_draft[targets, :used] = self.from_draft[sources, :used]
        for entries in self.entries:
            if entries.size:
                entries[targets, :used] = entries[sources, :used]

    def take(
        self,
        table: Integers,
        indices: Integers,
        *,
        width: int,
        num_drafts: Integers | int,
        report: Report = NO_REPORT,
    ) -> Integers:
        """Record the result of a round.

        Args:
            table: the result (ops.report) of the rows with these `indices` [B], and after it the
                entries of the report: for each of its parts [B, width + 1, columns], flattened.
            width: drafts of each row that the table has room for.
            num_drafts: [B], drafts of each row. A padding token counts as drafted
                if it was accepted.
            report: what the table has entries for.

        Returns: accepted [B].
        """
        accepted, block = table[:, 0], table[:, 1 : width + 2]
        scores = table[:, width + 2 : 2 * width + 3].astype(numpy.int32).view(numpy.float32)
        counts = accepted + 1
        generated = self._generated(indices)
        steps = numpy.arange(width + 1)
        columns = generated[:, None] + steps
        columns = columns.clip(
            max=self.tokens.shape[1] - 1
        )  # clips only what lies beyond a limit; it is never read
        at = indices[:, None] * self.tokens.shape[1] + columns  # in the flat views
        self.tokens.reshape(-1)[at] = block
        self.scores.reshape(-1)[at] = scores
        self.from_draft.reshape(-1)[at] = steps < accepted[:, None]
        first = 2 * width + 3
        for part, size in enumerate(report.parts):
            if size:
                entries = table[:, first : first + (width + 1) * size].reshape(*block.shape, size)
                self._room_for(part, size)[indices[:, None], columns, :size] = entries
                first += (width + 1) * size
        self._note_broken(indices, scores, generated, counts)
        self.numbers[indices, LENGTH] += counts
        self.numbers[indices, ROUNDS] += 1
        self.numbers[indices, DRAFTED] += numpy.maximum(num_drafts, accepted)
        self.numbers[indices, ACCEPTED] += accepted
        self.new_tokens = NewTokens(indices, block, counts)
        return accepted

    def _room_for(self, part: int, columns: int) -> Integers:
        """Return `entries` of a part, with at least so many columns and room for each token.
        Memory that was never written to takes no space."""
        old = self.entries[part]
        if old.shape[1] < self.tokens.shape[1] or old.shape[2] < columns:
            new = numpy.zeros((*self.tokens.shape, max(old.shape[2], columns)), dtype=numpy.int64)
            for row in range(len(old)) if old.size else ():
                used = min(int(self._generated([row])[0]), old.shape[1])
                new[row, :used, : old.shape[2]] = old[row, :used]
            self.entries[part] = new
        return self.entries[part]

    def _generated(self, indices: Integers | list[int]) -> Integers:
        generated: Integers = self.numbers[indices, LENGTH] - self.numbers[indices, PROMPT]
        return generated

    def _note_broken(
        self, indices: Integers, scores: NDArray[numpy.float32], before: Integers, counts: Integers
    ) -> None:
        """Record where logits became non-finite: a committed token's log-probability is finite if
        and only if its logits were. scores: [B, W]."""
        finite = numpy.isfinite(scores)
        if finite.all():
            return
        broken = ~finite & (numpy.arange(scores.shape[1]) < counts[:, None])
        new = broken.any(1) & (self.numbers[indices, BROKEN] < 0)
        self.numbers[indices[new], BROKEN] = before[new] + broken[new].argmax(1)


class Row:
    """One sample as it grows, as the host sees it.

    tokens: the prompt and the generated tokens. The last token is pending: the target has not read
        it.
    key: the key of its prompt, which is open in target and drafter.
    noise_id: the prompt's id, on which its noise depends. Default: the key.
    prompt: the prompt's tokens, shared by its rows and never changed.
    limit: how many tokens it may generate.
    report: what is reported of each of its tokens.
    sampling: how its tokens are sampled.
    matcher: its state in a grammar, or before the end of a thinking part with a limit. None: any
        token may come at any position.
    broken: the number of generated tokens when the target's logits were first non-finite
        (bass_kernels/sampling.py); None if they are finite. Later tokens are meaningless and the
        row must be retired.

    While the row is live, its data lies in a HostState at `index`. Its lists are extended when they
    are read, and stay the same objects.
    """

    __slots__ = (
        "_entries",
        "_from_draft",
        "_generated",
        "_host_state",
        "_numbers",
        "_scores",
        "_tokens",
        "index",
        "key",
        "matcher",
        "noise_id",
        "prompt",
        "report",
        "sample",
        "sampling",
        "seed",
    )

    def __init__(
        self,
        key: str,
        sample: int,
        seed: int,
        tokens: list[int],
        limit: int,
        sampling: RowSampling = PLAIN,
        report: Report = NO_REPORT,
        noise_id: str | None = None,
    ):
        self.noise_id = key if noise_id is None else noise_id
        self.key, self.sample, self.seed, self.sampling = key, sample, seed, sampling
        self.prompt, self.report = tokens, report
        self.matcher: Matcher | None = None
        self._entries: Integers = numpy.zeros((0, 0), dtype=numpy.int64)  # while it is not live
        self._from_draft = numpy.zeros(0, dtype=bool)  # while it is not live
        self._tokens: list[int] | None = None  # built when first read
        self._generated, self._scores = list[int](), list[float]()
        self._numbers = [len(tokens), len(tokens), limit, 0, 0, 0, -1]  # used while it is not live
        self._host_state: HostState | None = None
        self.index = -1

    def write_to(self, host_state: HostState, index: int) -> None:
        """Attach to this index of a HostState. A row that was moved there has its numbers there
        already."""
        if self.index < 0:
            host_state.numbers[index] = self._numbers
        self.index, self._host_state = index, host_state

    def leave(self) -> None:
        """Detach from the batch and copy the final state."""
        assert self._host_state is not None
        self._update()
        self._numbers = self.numbers()
        if self.report.columns:
            self._entries = self.entries().copy()
        self._from_draft = self.from_draft().copy()
        self._host_state, self.index = None, -1

    def truncate(self, generated: int) -> None:
        """Drop the tokens after the first `generated` generated ones. All of them are from the last
        round: its last token was the target's own, the others accepted drafts."""
        surplus = self.generated - generated
        if surplus > 0:
            self._update()
            if self._tokens is not None:
                del self.tokens[-surplus:]
            del self._generated[-surplus:]
            del self._scores[-surplus:]
            self._set(LENGTH, self.length - surplus)
            self._set(ACCEPTED, self.accepted - surplus + 1)

    def generated_since(self, seen: int) -> list[int]:
        """Return the tokens that it generated after the first `seen`."""
        if self._host_state is None:
            return self._generated[seen:]
        new: list[int] = self._host_state.tokens[self.index, seen : self.generated].tolist()
        return new

    def entries(self) -> Integers:
        """Return what its report adds to each generated token, [generated, columns] int64."""
        if self._host_state is None:
            return self._entries[: self.generated]
        own, processed = self.report.parts
        part, columns = (1, processed) if processed else (0, own)
        return self._host_state.entries[part][self.index, : self.generated, :columns]

    def from_draft(self) -> NDArray[numpy.bool_]:
        """Return whether each generated token was an accepted draft, [generated] bool."""
        state = self._host_state
        marks = self._from_draft if state is None else state.from_draft[self.index]
        return marks[: self.generated]

    def numbers(self) -> list[int]:
        """Return its line of HostState.numbers."""
        if self._host_state is None:
            return self._numbers
        found: list[int] = self._host_state.numbers[self.index].tolist()
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
        """Number of its tokens, the prompt included."""
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
        return int(self._host_state.numbers[self.index, column])

    def _set(self, column: int, value: int) -> None:
        if self._host_state is None:
            self._numbers[column] = value
        else:
            self._host_state.numbers[self.index, column] = value

    def _update(self) -> None:
        if self._host_state is None:
            return
        first, end, index = len(self._scores), self.generated, self.index
        if first < end:
            self._generated += self._host_state.tokens[index, first:end].tolist()
            self._scores += self._host_state.scores[index, first:end].tolist()
