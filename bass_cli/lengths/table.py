"""A table from batch size to draft length (Su et al., arXiv 2310.18813), made from a profile,
alone or as a cap."""

from __future__ import annotations

from collections.abc import Sequence

from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.lengths.round_cost import Surface

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
