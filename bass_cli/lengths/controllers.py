"""Draft-length controllers: a fixed length, Algorithm 1 of BASS, a table by batch size.

`Bass` is Algorithm 1 of arXiv 2404.15778. `Table` is the best length by batch size of arXiv
2310.18813. `Capped` limits one by the other. Not here: goodput (goodput.py).
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Sequence
from typing import NamedTuple

from bass_cli.config.speculation import CONTROLLERS
from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.engine.graphs import ARITHMETIC
from bass_cli.engine.sizes import LONGEST
from bass_cli.lengths.goodput import Goodput
from bass_cli.lengths.surface import Surface


class LengthParts(NamedTuple):
    """What a controller may be made of.

    Args:
        limit: The longest draft.
        coupling: "shared" or "maximal".
        surface: What is known of this pair on this device.
        at_once: Whether one pass of the draft model makes all drafts of a round.
        arithmetic: See RoundCost.
    """

    limit: int
    coupling: str
    surface: Surface | None = None
    at_once: bool = False
    arithmetic: float = ARITHMETIC


def make_lengths(length: str | int, parts: LengthParts) -> DraftLength:
    """Return the controller for a draft length: an integer, or a word of CONTROLLERS
    (config/speculation.py)."""
    if isinstance(length, int):
        return Fixed(min(length, parts.limit))
    kind = next(kind for word, kind in CONTROLLERS.items() if word == length)
    controller = pkgutil.resolve_name(kind.make)(parts)
    assert isinstance(controller, DraftLength)
    return controller


def make_auto(parts: LengthParts) -> DraftLength:
    """Make the controller of "auto", which chooses by goodput.

    Goodput depends on timing. Under maximal coupling the samples depend on the draft lengths. There
    it uses the costs of a profile unchanged, so that a seed gives the same samples twice; without a
    profile it is Algorithm 1.
    """
    if parts.coupling == "shared":
        return Goodput(
            limit=parts.limit,
            surface=parts.surface,
            at_once=parts.at_once,
            arithmetic=parts.arithmetic,
        )
    if parts.surface is not None and parts.surface.measured:
        return Goodput(limit=parts.limit, surface=parts.surface, frozen=True)
    return make_bass(parts)


def make_bass(parts: LengthParts) -> Bass:
    """Make the controller of "bass"."""
    return Bass(limit=parts.limit)


def make_table(parts: LengthParts) -> Table:
    """Make the controller of "table"."""
    assert parts.surface is not None, "a table is made from a profile"
    return Table(parts.surface, limit=parts.limit)


def make_capped(parts: LengthParts) -> DraftLength:
    """Make the controller of "bass+table"."""
    return Capped(make_bass(parts), make_table(parts))


class Fixed(DraftLength):
    """Always return the same draft length."""

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
    """Algorithm 1 of BASS (arXiv 2404.15778): one length for the batch. It grows by 2 if a
    row accepts all drafts. Otherwise it shrinks, faster the second time in a row, but never
    below the most that a row accepted."""

    exact = True

    def __init__(self, *, start: int = 7, limit: int = 32):
        self._limit, self._length, self._shrank = limit, min(start, limit), 0

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        return self._length

    def observe(self, done: RoundResult) -> None:
        if done.width == 0:  # a round without drafts shows nothing
            return
        most = max(done.accepted)
        if most == self._length:
            self._length = min(self._length + 2, self._limit)
            self._shrank = 0
        else:
            shorter = self._length - math.ceil(self._length / 10) - self._shrank
            self._length = max(1, most, shorter)
            self._shrank = 1


_ACCEPTANCE = 0.8  # if the profile has no rate


class Table(DraftLength):
    """Return for each number of live rows the length that is best by the profile, 0 included. It
    depends on nothing else, so it may be used under both couplings."""

    def __init__(self, surface: Surface, *, limit: int):
        self._surface, self._lengths = surface, range(min(limit, LONGEST) + 1)
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
