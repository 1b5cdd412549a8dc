"""Lookup and a model in one round: a row for which lookup is more likely to be right takes what was looked up, and the
model goes on from there; the other rows take the model's. If all rows have a full draft, the model does not run at all.

Shared coupling only: there a draft needs no law. Not here: how either of the two drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.graphs import WIDTHS
from bass_cli.model.runner import Runner

from . import InTime, Proposal
from .lookup import Guess, LookupDrafter
from .model import Given, ModelDrafter

_BEFORE = 0.8  # chance that a draft of the model stands, before anything was seen
_MEMORY = 0.02  # weight of a newly seen draft


class CombinedDrafter:
    """`lookup` before a ModelDrafter with `runner`. A token that was looked up is taken while such tokens (the same number
    matched before) have stood at least as often as the model's do. The model's cache takes the looked-up tokens in as if
    they were its own; after rounds in which it did not run, it catches up as after plain ones."""

    def __init__(self, lookup: LookupDrafter, runner: Runner, *, temperature: float | None = None):
        self._given = Given(torch.zeros(runner.rows, WIDTHS[-1], dtype=torch.int64, device=runner.device),
                            torch.zeros(runner.rows, dtype=torch.int64, device=runner.device))
        self._lookup = lookup
        self._model = ModelDrafter(runner, coupling="shared", temperature=temperature, given=self._given)
        self.on_device, self.offers, self.longest = True, True, self._model.longest
        self._chance = _BEFORE
        self._alone: dict[Row, int] = {}  # rows in which only the model drafted in the last round, with their length then
        self._width = 0  # of that round

    @property
    def version(self) -> int:
        return self._model.version

    def open(self, key: str, tokens: Sequence[int], reference: Sequence[int] = (), in_time: InTime | None = None) -> bool:
        return self._model.open(key, tokens, reference, in_time) and self._lookup.open(key, tokens, reference)

    def close(self, key: str) -> None:
        self._lookup.close(key)
        self._model.close(key)

    def attach(self, row: int, key: str, count: int = 1) -> None:
        self._lookup.attach(row, key, count)
        self._model.attach(row, key, count)

    def detach(self, row: int) -> None:
        self._lookup.detach(row)
        self._model.detach(row)

    def move(self, source: int, target: int, length: int) -> None:
        self._lookup.move(source, target, length)
        self._model.move(source, target, length)

    def offer(self, batch: Batch, length: int) -> Proposal | None:
        """Looked-up tokens if they are all that the round needs; otherwise they wait for `propose`."""
        self._learn()
        guesses = self._lookup.look_up(batch, length)
        counts = [self._settled(guess) for guess in guesses]
        if length and min(counts) >= length:
            return Proposal(torch.tensor([guess.tokens for guess in guesses], device=batch.device), None, tuple(counts))
        self._settle([guess.tokens[: min(count, WIDTHS[-1])] for guess, count in zip(guesses, counts, strict=True)])
        self._alone = {row: len(row.tokens) for row, count in zip(batch.hosts, counts, strict=True) if not count}
        return None

    def forget(self) -> None:
        self._lookup.forget()
        self._chance = _BEFORE

    def learn(self, batch: Batch) -> None:
        self._lookup.learn(batch)

    def prepare(self, batch: Batch, length: int) -> int:
        self._width = length
        return self._model.prepare(batch, length)

    def catch_up(self, batch: Batch, behind: Tensor, count: int) -> None:
        self._model.catch_up(batch, behind, count)

    def propose(self, batch: Batch, length: int) -> Proposal:
        return self._model.propose(batch, length)

    def _settled(self, guess: Guess) -> int:
        """How many tokens of a guess are at least as good as the model's."""
        good = takewhile(lambda size: self._lookup.chance(size) >= self._chance, guess.matched)
        return sum(1 for _ in good)

    def _settle(self, kept: list[list[int]]) -> None:
        width = self._given.tokens.shape[1]
        table = torch.tensor([[len(one), *one, *([0] * (width - len(one)))] for one in kept])
        table = table.to(self._given.tokens.device)
        self._given.counts[: len(kept)] = table[:, 0]
        self._given.tokens[: len(kept)] = table[:, 1:]

    def _learn(self) -> None:
        """How many of the model's own drafts stood, in rows that took nothing else: all new tokens but a round's last."""
        for row, start in self._alone.items() if self._width else ():
            kept = min(len(row.tokens) - start - 1, self._width)
            for stood in [1] * kept + [0] * (kept < self._width):
                self._chance += _MEMORY * (stood - self._chance)
        self._alone = {}
