"""Rows as they come and go, and all that follows them: batch, target, drafter, imposed acceptance.

Not here: rounds (step.py), when a row comes or goes (conductor.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from bass_cli.engine.batch import Batch, Change, Row
from bass_cli.engine.contracts import Drafter, FollowsRows, Target
from bass_cli.engine.deadline import Clock, Prefill
from bass_cli.engine.graphs import synchronise
from bass_cli.engine.imposed import Imposed


class Members:
    """The prompts and rows of one loop."""

    def __init__(
        self, batch: Batch, target: Target, drafter: Drafter, imposed: Imposed | None, clock: Clock
    ):
        self._batch, self._target, self._drafter, self._clock = batch, target, drafter, clock
        self._followers: tuple[FollowsRows, ...] = (target, drafter)
        if imposed is not None:
            self._followers = (target, drafter, imposed)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when what graphs read has moved."""
        return self._batch.version, *(follower.version for follower in self._followers)

    def open(
        self, key: str, tokens: Sequence[int], reference: Sequence[int], deadline: float | None
    ) -> bool:
        """A prompt begins: it is stored once for all its rows, or given up (False) if a
        `deadline` is likely to come first. `reference`: see Drafter.open."""
        if deadline is None:
            return self._target.open(key, tokens) and self._drafter.open(key, tokens, reference)
        target, draft = (
            Prefill(
                self._clock.passes[model],
                deadline,
                now=self._clock.now,
                wait=lambda: synchronise(self._batch.device),
            )
            for model in ("target", "draft")
        )
        if not self._target.open(key, tokens, target):
            return False
        target.end()
        if not self._drafter.open(key, tokens, reference, draft):
            self._target.close(key)
            return False
        draft.end()
        return True

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self._target.close(key)
        self._drafter.close(key)

    def grow(self) -> list[Row]:
        """See to it that the rows' pieces hold what two rounds may bring, whether the host knows
        of the first or not; rows that had to be put back for that are live no more."""
        back: list[Row] = []
        while True:
            change, fails = self._batch.grow()
            if change is not None:
                self._follow(change)
            if fails is None:
                return back
            surplus = self._batch.surplus(fails)
            back += [self._batch.hosts[place] for place in surplus]
            self.exchange(surplus, ())

    def exchange(self, ended: Sequence[int], rows: Sequence[Row]) -> None:
        """Batch.exchange; the rows' prompts must be open."""
        self._follow(self._batch.exchange(ended, rows))

    def _follow(self, change: Change) -> None:
        for follower in self._followers:
            follower.follow(change)
