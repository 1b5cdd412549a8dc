"""Draft-length controllers: they see what past rounds drafted, kept and took, and say how many
to draft next."""

from __future__ import annotations

import math

from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.lengths.goodput import Goodput
from bass_cli.lengths.round_cost import Surface
from bass_cli.lengths.table import Capped, Table


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
