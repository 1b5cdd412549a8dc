"""Draft-length controllers: a fixed length, Algorithm 1 of BASS, and a table by batch size.

`Bass` is Algorithm 1 of arXiv 2404.15778, `Table` the best length by batch size of
arXiv 2310.18813, `Capped` the first within the second. Not here: choosing by goodput (goodput.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.lengths.costs import Surface
from bass_cli.lengths.goodput import Goodput

_ACCEPTANCE = 0.8  # where the profile could not tell
_CHOICES = tuple(range(65))


class Table(DraftLength):
    """For each number of live rows the length that was best when the profile was made, 0
    included. It depends on nothing else, so it may gate either coupling."""

    foresees = True

    def __init__(self, surface: Surface, *, limit: int):
        self._surface, self._lengths = surface, _CHOICES[: limit + 1]
        self._best: dict[int, int] = {}

    def needs_result(self, width: int) -> bool:
        return False

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        if rows not in self._best:
            known = self._surface.acceptance
            self._best[rows] = best_length(
                self._surface, rows, _ACCEPTANCE if known is None else known, self._lengths
            )
        return self._best[rows]

    def observe(self, done: RoundResult) -> None:
        pass


class Capped(DraftLength):
    """The length of a controller that only sees rounds, but never more than a table's. A round
    that was cut teaches it what it can see of it."""

    def __init__(self, inner: DraftLength, table: Table):
        self._inner, self._table, self.exact = inner, table, inner.exact

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        return min(self._inner.next(rows, inputs), self._table.next(rows))

    def observe(self, done: RoundResult) -> None:
        self._inner.observe(done)


def best_length(surface: Surface, rows: int, acceptance: float, lengths: Sequence[int]) -> int:
    """The draft length of fewest seconds a token, where each draft whose turn comes stands with
    this chance."""

    def seconds(k: int) -> float:
        return surface.seconds(rows, k) / sum(acceptance**i for i in range(k + 1))

    return min(lengths, key=seconds)


class Fixed(DraftLength):
    """Always the same draft length."""

    foresees = True

    def __init__(self, length: int):
        self._length = length

    @property
    def drafts(self) -> bool:
        return self._length > 0

    def needs_result(self, width: int) -> bool:
        return False

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        return self._length

    def observe(self, done: RoundResult) -> None:
        pass


class Bass(DraftLength):
    """Algorithm 1 of BASS (arXiv 2404.15778): one length for the batch. It grows by `step` when
    a row keeps all of the drafts, and otherwise shrinks, faster the second time in a row, but
    never below what some row kept."""

    exact = True

    def __init__(self, *, start: int = 7, step: int = 2, divisor: int = 10, limit: int = 32):
        self._step, self._divisor, self._limit = step, divisor, limit
        self._length = min(start, limit)
        self._shrank = 0

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        return self._length

    def observe(self, done: RoundResult) -> None:
        if done.width == 0:  # nothing was drafted, nothing was learnt
            return
        most = max(done.accepted)
        if most == self._length:
            self._length = min(self._length + self._step, self._limit)
            self._shrank = 0
        else:
            shorter = self._length - math.ceil(self._length / self._divisor) - self._shrank
            self._length = max(1, most, shorter)
            self._shrank = 1


def make_lengths(
    length: str | int,
    *,
    limit: int,
    coupling: str,
    surface: Surface | None = None,
    at_once: bool = False,
) -> DraftLength:
    """The controller named by `--draft-length`: an integer, "bass", "table", "bass+table" or
    "auto". `surface`: what is known of this pair on this device; a table needs one.
    `at_once`: all drafts of a round take one pass of the draft model.

    "auto" chooses by goodput, which depends on timing. Under maximal coupling the samples depend
    on the draft lengths, so there it takes costs from a profile as they are, and a seed still
    gives the same samples twice; without a profile it is Algorithm 1.
    """
    if isinstance(length, int):
        return Fixed(min(length, limit))
    if length == "auto" and coupling == "shared":
        return Goodput(limit=limit, surface=surface, at_once=at_once)
    if length == "auto" and surface is not None and surface.measured:
        return Goodput(limit=limit, surface=surface, frozen=True)
    if length in ("auto", "bass"):
        return Bass(limit=limit)
    assert surface is not None, "a table is made from a profile"
    table = Table(surface, limit=limit)
    return table if length == "table" else Capped(Bass(limit=limit), table)
