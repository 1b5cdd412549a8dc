"""N-gram lookup as drafter: what followed the row's last tokens before, in its prompt or its own output.

No model and no laws: each proposal is a point mass. Works on the host; an index costs a few dictionary writes a token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Row

from . import Proposal

_SIZES = (4, 3, 2)  # n-gram lengths, the first that matches wins


class _Index:
    """Where each n-gram of a growing sequence was last followed by something: n-gram to the place after it."""

    __slots__ = ("_after", "_length")

    def __init__(self, length: int = 0):
        self._after: dict[tuple[int, ...], int] = {}
        self._length = length

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens[length so far:]; the n-grams before each new token are now followed by it."""
        for place in range(self._length, len(tokens)):
            for size in _SIZES:
                if size <= place:
                    self._after[tuple(tokens[place - size : place])] = place
        self._length = len(tokens)

    def find(self, gram: tuple[int, ...]) -> int | None:
        return self._after.get(gram)


class LookupDrafter:
    """Drafts by n-gram lookup. A row without a match gets its last token repeated; if no row has one, nothing is
    proposed, and the round is a plain one."""

    on_device, longest, version = False, sys.maxsize, 0

    def __init__(self) -> None:
        self._prompts: dict[str, _Index] = {}
        self._rows: list[tuple[_Index, _Index]] = []  # by row: its prompt's index, its own

    def open(self, key: str, tokens: Sequence[int]) -> None:
        self._prompts[key] = index = _Index()
        index.extend(tokens)

    def close(self, key: str) -> None:
        del self._prompts[key]

    def attach(self, row: int, key: str, count: int = 1) -> None:
        assert row == len(self._rows)
        prompt = self._prompts[key]
        self._rows += [(prompt, _Index(prompt._length)) for _ in range(count)]

    def detach(self, row: int) -> None:
        if row == len(self._rows) - 1:
            self._rows.pop()

    def move(self, source: int, target: int, length: int) -> None:
        self._rows[target] = self._rows.pop()

    def prepare(self, batch: Batch, length: int) -> int:
        return 0

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        pass

    def propose(self, batch: Batch, length: int) -> Proposal:
        found = [self._continue(indexes, row, length) for indexes, row in zip(self._rows, batch.hosts, strict=True)]
        if length == 0 or not any(found):
            return Proposal(batch.tokens.new_zeros(batch.rows, 0), None)
        filled = [f or [row.tokens[-1]] * length for f, row in zip(found, batch.hosts, strict=True)]
        return Proposal(torch.tensor(filled, device=batch.device), None)

    def _continue(self, indexes: tuple[_Index, _Index], row: Row, length: int) -> list[int]:
        """`length` tokens that may follow the row's, or none. Where a match runs into the row's end, it goes on in
        what was just proposed: a repetition repeats."""
        prompt, own = indexes
        own.extend(row.tokens)
        for size in _SIZES:
            gram = tuple(row.tokens[-size:])
            place = own.find(gram)
            place = prompt.find(gram) if place is None else place
            if place is not None:
                period = len(row.tokens) - place
                known = row.tokens[place : place + length]
                return [known[j % period] for j in range(length)]
        return []
