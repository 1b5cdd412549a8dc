"""Draft-length controllers: they see how many drafts each row kept, and say how many to draft next. Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Lengths(Protocol):
    """A draft-length controller. It sees past rounds only, never a token, so it may gate either coupling."""

    def next(self, rows: int) -> int:
        """Draft length for the next round of `rows` live rows; 0 means plain decoding."""

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        """A round with draft length `width` (at most what `next` said) kept `accepted` drafts in each live row."""


class Fixed:
    """Always the same draft length."""

    def __init__(self, length: int):
        self._length = length

    def next(self, rows: int) -> int:
        return self._length

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        pass


class Bass:
    """Algorithm 1 of BASS (arXiv 2404.15778): one length for the batch. It grows by `step` when a row keeps all of
    the drafts, and otherwise shrinks, faster the second time in a row, but never below what some row kept."""

    def __init__(self, *, start: int = 7, step: int = 2, divisor: int = 10, limit: int = 32):
        self._step, self._divisor, self._limit = step, divisor, limit
        self._length = min(start, limit)
        self._shrank = 0

    def next(self, rows: int) -> int:
        return self._length

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        if width == 0:  # nothing was drafted, nothing was learnt
            return
        most = max(accepted)
        if most == self._length:
            self._length = min(self._length + self._step, self._limit)
            self._shrank = 0
        else:
            shorter = self._length - math.ceil(self._length / self._divisor) - self._shrank
            self._length = max(1, most, shorter)
            self._shrank = 1


def make_lengths(length: str | int, *, limit: int) -> Lengths:
    """The controller named by `--draft-length`: an integer, or "bass"; "auto" is Algorithm 1 until a better one."""
    if isinstance(length, int):
        return Fixed(min(length, limit))
    assert length in ("auto", "bass"), length
    return Bass(limit=limit)
