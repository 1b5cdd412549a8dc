"""Drafters that read the target's hidden states: a whole block in one pass (DFlash), optionally
with a bias at each position from the token before it (DSpark); or token by token (EAGLE-3).

Every pass of the target writes what they read (models/heads.py). So nothing is missing after plain
rounds or before a row's first round, and these drafters need not follow prompts and rows. A block
always has all its positions, however few drafts are wanted. They attend to each other, so a draft
would otherwise depend on how many others there are, and on which graphs exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bass_cli.drafts.factory import DraftParts
from bass_cli.drafts.model import propose_at_once, propose_chain
from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter, Proposal
from bass_cli.models.heads import ChainHead, FeatureHead
from bass_cli.models.runner import Runner

_Head = TypeVar("_Head", FeatureHead, ChainHead)


class ReadingDrafter(Drafter, Generic[_Head]):
    """The common part of drafters with a `head` that reads the target of `runner`.

    Args:
        coupling: "shared" or "maximal".
        temperature: replaces the rows' own temperatures, unless theirs is 0.
    """

    def __init__(
        self, runner: Runner, head: _Head, *, coupling: str, temperature: float | None = None
    ):
        assert runner.decoder.reader is head
        self.runner = runner
        self.head: _Head = head
        self._coupling, self._temperature = coupling, temperature
        self.longest = head.spec.drafts


class HeadDrafter(ReadingDrafter[FeatureHead]):
    """Draft a block in one pass."""

    at_once = True

    def __init__(
        self, runner: Runner, head: FeatureHead, *, coupling: str, temperature: float | None = None
    ):
        super().__init__(runner, head, coupling=coupling, temperature=temperature)
        self._masks = torch.tensor([head.spec.mask], device=runner.decoder.device)

    def propose(self, batch: Batch, length: int) -> Proposal:
        length = min(length, self.longest)
        if length == 0:
            return Proposal.empty(batch)
        spec, further = self.head.spec, self.head.spec.block - 1
        # The rows' last tokens, each with masks after it: [B, block].
        block, positions = batch.pending(self._masks.expand(batch.rows, further))
        step = self.runner.cache.decode_pass(positions, batch.ends(further))
        logits = self.head.draft(block, step, length)
        params = batch.params.at(self._temperature)
        if not spec.rank:
            logits = self.head.whole(logits)
            return propose_at_once(logits, params, batch, coupling=self._coupling)
        # Every position has a bias from the token before it.
        lengths = batch.lengths[: batch.rows]
        targets = lengths + batch.steps(0, length)[:, None]

        def logits_of(step: int, last: Tensor | None) -> Tensor:
            last = block[:, 0] if last is None else last
            return self.head.whole(self.head.after(last, logits[:, step]))

        return propose_chain(
            logits_of, targets, params, batch, coupling=self._coupling, scored=True
        )


class ChainDrafter(ReadingDrafter[ChainHead]):
    """Draft token by token: k drafts take k passes of one layer."""

    stops_short = True

    def propose(self, batch: Batch, length: int) -> Proposal:
        return self.propose_while(batch, length, None)

    def propose_while(
        self, batch: Batch, length: int, goes_on: Callable[[Tensor], bool] | None
    ) -> Proposal:
        """See Drafter.propose_while. None: draft all."""
        if length == 0:
            return Proposal.empty(batch)
        params, lengths = batch.params.at(self._temperature), batch.lengths[: batch.rows]
        # Step by step, so that each line is contiguous.
        targets = lengths + batch.steps(0, length)[:, None]
        # A row's last token is paired with the feature of the token before it, at that position.
        positions, ends = targets[:, :, None] - 2, batch.ends(length - 1)
        features: Tensor | None = None

        def logits_of(step: int, last: Tensor | None) -> Tensor:
            nonlocal features
            tokens = batch.last(1)[0] if last is None else last[:, None]
            # A row of one token has none before it: its first draft reads zeros and stores no key.
            seen = self.runner.cache.decode_pass(positions[step].clamp(min=0), ends)
            if features is None:
                features = self.head.found(seen, positions[step])
            logits, features = self.head.draft(tokens, features, seen)
            return self.head.whole(logits)

        return propose_chain(
            logits_of, targets, params, batch, coupling=self._coupling, goes_on=goes_on
        )


def make(parts: DraftParts) -> Drafter:
    """Make the drafter for the parts' head."""
    assert parts.runner is not None
    assert parts.head is not None
    if isinstance(parts.head, ChainHead):
        return ChainDrafter(parts.runner, parts.head, **parts.how)
    return HeadDrafter(parts.runner, parts.head, **parts.how)
