"""Draft-length controllers: a fixed length, Algorithm 1 of BASS, and a table by batch size.

`Bass` is Algorithm 1 of arXiv 2404.15778. `Table` is the best length by batch size of arXiv
2310.18813. `Capped` limits one by the other. Not here: choosing by goodput (goodput.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.engine.sizes import LONGEST
from bass_cli.lengths.costs import Surface
from bass_cli.lengths.goodput import Goodput


def make_lengths(
    length: str | int,
    *,
    limit: int,
    coupling: str,
    surface: Surface | None = None,
    at_once: bool = False,
) -> DraftLength:
    """Return the controller for a draft length: an integer, "bass", "table", "bass+table" or
    "auto".

    "auto" chooses by goodput, which depends on timing. Under maximal coupling the samples depend on
    the draft lengths. There it uses the costs of a profile unchanged, so that a seed gives the same
    samples twice; without a profile it is Algorithm 1.

    Args:
        surface: what is known of this pair on this device. A table needs one.
        at_once: one pass of the draft model makes all drafts of a round.
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


class Fixed(DraftLength):
    """Always return the same draft length."""

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
    """Algorithm 1 of BASS (arXiv 2404.15778): one length for the batch. It grows by `step` if a
    row accepts all drafts. Otherwise it shrinks, faster the second time in a row, but never
    below the most that a row accepted."""

    exact = True

    def __init__(self, *, start: int = 7, step: int = 2, divisor: int = 10, limit: int = 32):
        self._step, self._divisor, self._limit = step, divisor, limit
        self._length = min(start, limit)
        self._shrank = 0

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        return self._length

    def observe(self, done: RoundResult) -> None:
        if done.width == 0:  # a round without drafts shows nothing
            return
        most = max(done.accepted)
        if most == self._length:
            self._length = min(self._length + self._step, self._limit)
            self._shrank = 0
        else:
            shorter = self._length - math.ceil(self._length / self._divisor) - self._shrank
            self._length = max(1, most, shorter)
            self._shrank = 1


_ACCEPTANCE = 0.8  # if the profile has no rate
_CHOICES = tuple(range(LONGEST + 1))


class Table(DraftLength):
    """Return for each number of live rows the length that is best by the profile, 0 included. It
    depends on nothing else, so it may be used under both couplings."""

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
    """Limit a controller by a table. A round that was shortened by the table teaches the inner
    controller what it can see of it."""

    def __init__(self, inner: DraftLength, table: Table):
        self._inner, self._table, self.exact = inner, table, inner.exact

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        return min(self._inner.next(rows, inputs), self._table.next(rows))

    def observe(self, done: RoundResult) -> None:
        self._inner.observe(done)


def best_length(surface: Surface, rows: int, acceptance: float, lengths: Sequence[int]) -> int:
    """Return the draft length with the fewest seconds a token if each draft is accepted with
    probability `acceptance`, given that all before it are."""

    def seconds(k: int) -> float:
        return surface.seconds(rows, k) / sum(acceptance**i for i in range(k + 1))

    return min(lengths, key=seconds)
