"""Drafts that come from the host: asked for before a round, cut to the length that pays, kept where
graphs find them.

Not here: who drafts (drafting/), what is done with them (step.py).
"""

from __future__ import annotations

from typing import NamedTuple

from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter, Foregone, Learns, Lengths, Proposal, Recalls, Trims
from bass_cli.engine.graphs import LONGEST


class Asked(NamedTuple):
    """What a round is to be: its draft length, drafts of the host's, the seconds in which it
    looked for them, and whether it did."""

    width: int
    offered: Proposal | None
    asking: float
    looked: bool

    def meant(self, width: int) -> tuple[int, ...] | None:
        """How many drafts each row has of the host's, in `width` places; None: of the device's."""
        if self.offered is None:
            return None
        return tuple(min(count, width) for count in self.offered.counts or ())


class Offers:
    """What one loop's drafter has from the host. A graph reads it at a fixed address: `put` puts
    it there. `learns_before`: the drafter learns before it is asked, not only while a device
    works."""

    def __init__(self, batch: Batch, drafter: Drafter, *, learns_before: bool):
        self._batch, self._drafter, self._learns_before = batch, drafter, learns_before
        self._learner = drafter if isinstance(drafter, Learns) else None
        self._recalls = drafter if isinstance(drafter, Recalls) else None
        self._tokens = batch.tokens.new_zeros(batch.capacity, LONGEST)

    def ask(self, width: int, lengths: Lengths) -> Proposal | None:
        """Drafts for the live rows, up to `width`, as many as `lengths` has use for; None: the
        device drafts in the round. The rows' counts never go beyond the width."""
        if self._learns_before:
            self.learn()
        if self._drafter.on_device:
            return None
        offered = self._drafter.propose(self._batch, width) if width else _nothing(self._batch)
        assert offered.counts is not None
        best = max(offered.counts)
        if best and isinstance(lengths, Trims):
            best = min(lengths.trim(offered.counts), best)
            if best == 0 and self._recalls is not None:
                self._recalls.forgo()
        if not best:
            return _nothing(self._batch)
        tokens = offered.tokens[:, :best]
        if (
            tokens.device.type != self._batch.device.type
        ):  # a device may be named without its number
            tokens = tokens.contiguous().pin_memory().to(self._batch.device, non_blocking=True)
        return Proposal(tokens, None, tuple(min(count, best) for count in offered.counts))

    def learn(self) -> None:
        """Let the drafter take in what the rows have become: some work, which need not keep a
        device waiting."""
        if self._learner is not None:
            self._learner.learn(self._batch)

    def forget(self) -> None:
        """Let it forget how well drafts stand."""
        if self._learner is not None:
            self._learner.forget()

    def recall(self) -> Foregone | None:
        """What has become of drafts that `lengths` had no use for."""
        return self._recalls.recall() if self._recalls is not None else None

    def put(self, offered: Proposal) -> None:
        """From now on `placed` has these drafts; beyond their length stands what stood there."""
        rows, width = offered.tokens.shape
        if width:
            self._tokens[:rows, :width] = offered.tokens

    def placed(self, rows: int, width: int) -> Proposal:
        """What a graph verifies, dummy rows included."""
        return Proposal(self._tokens[:rows, :width], None)


def _nothing(batch: Batch) -> Proposal:
    return Proposal(batch.tokens.new_zeros(len(batch), 0), None, (0,) * len(batch))
