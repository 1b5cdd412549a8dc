"""One round: propose, verify, accept, commit; then one copy to the host. Rows join and leave between rounds.

Not here: which rows, when they end, what becomes of them (run.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.draft import Drafter, Proposal

from . import accept
from .batch import Batch, Row
from .clock import Clock
from .lengths import Lengths, Round


class Target(Protocol):
    """What the loop needs of the target: model/runner.py, or a toy law in a test."""

    def open(self, key: str, tokens: Sequence[int]) -> None: ...
    def close(self, key: str) -> None: ...
    def attach(self, row: int, key: str) -> None: ...
    def detach(self, row: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def forward(self, tokens: Tensor, positions: Tensor, ends: Sequence[int], *, last: int | None = None) -> Tensor: ...


class Loop:
    """A batch with its target, drafter and draft-length controller. `coupling` is "shared" or "maximal"."""

    def __init__(self, *, batch: Batch, target: Target, drafter: Drafter, lengths: Lengths, coupling: str, clock: Clock):
        assert coupling in ("shared", "maximal")
        self.batch, self.clock = batch, clock
        self._target, self._drafter, self._lengths, self._coupling = target, drafter, lengths, coupling

    @torch.inference_mode()
    def open(self, key: str, tokens: Sequence[int]) -> None:
        """A prompt begins: it is stored once for all rows that attach to it."""
        self._target.open(key, tokens)
        self._drafter.open(key, tokens)

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self._target.close(key)
        self._drafter.close(key)

    @torch.inference_mode()
    def admit(self, row: Row) -> None:
        """Make a row of an open prompt live."""
        index = self.batch.admit(row)
        self._target.attach(index, row.key)
        self._drafter.attach(index, row.key)

    @torch.inference_mode()
    def retire(self, index: int) -> None:
        """End row `index`; the last row takes its place."""
        moved = self.batch.retire(index)
        for part in (self._target, self._drafter):
            part.detach(index)
            if moved is not None:
                part.move(moved, index, len(self.batch.hosts[index].tokens))

    @torch.inference_mode()
    def round(self, deadline: float | None = None) -> Round:
        """Advance every live row by one token or more. A row's new tokens may go past an end-of-sequence token or its
        limit: it must be cut and retired before the next round. The draft length is cut to end by `deadline`."""
        batch, began = self.batch, self.clock.now()
        width = self.clock.longest_in_time(self._width(), deadline)
        proposal = self._drafter.propose(batch, width)
        width = proposal.tokens.shape[1]
        block, accepted, scores = self._verify(proposal)
        kept = self._to_host(block, accepted, scores, width)
        seconds = self.clock.now() - began
        self.clock.observe(width, seconds)
        done = Round(width, kept, seconds)
        self._lengths.observe(done)
        return done

    def _width(self) -> int:
        """The controller's draft length, capped by the room of the row that has most of it: no other row decides."""
        wanted = self._lengths.next(len(self.batch))
        return max(0, min(wanted, max(row.room for row in self.batch.hosts) - 1))

    def _verify(self, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        """The target's pass over the pending tokens and the drafts; commits. Returns the blocks [B, k + 1] to append,
        accepted [B], and the target's log-probabilities of the blocks' tokens [B, k + 1]."""
        batch = self.batch
        lengths = batch.lengths[: len(batch)].clone()
        pending, positions = batch.last(1)
        width = proposal.tokens.shape[1]
        positions = positions + torch.arange(width + 1, device=batch.device)
        ends = [len(row.tokens) + width for row in batch.hosts]
        logits = self._target.forward(torch.cat((pending, proposal.tokens), 1), positions, ends)
        if self._coupling == "shared":
            verdict = accept.shared(proposal.tokens, logits, batch.laws, lengths)
        else:
            verdict = accept.maximal(proposal.tokens, proposal.probs, logits, batch.laws, lengths)
        batch.commit(verdict.block, verdict.accepted)
        return verdict.block, verdict.accepted, ops.log_probability(logits, verdict.block)

    def _to_host(self, block: Tensor, accepted: Tensor, scores: Tensor, width: int) -> tuple[int, ...]:
        """The round's only copy to the host: extends the Rows; returns accepted by row."""
        packed = torch.cat((accepted[:, None], block, scores.view(torch.int32).long()), dim=1).cpu()
        values = packed[:, width + 2 :].to(torch.int32).view(torch.float32).tolist()
        for row, line, score in zip(self.batch.hosts, packed[:, : width + 2].tolist(), values, strict=True):
            count = line[0] + 1
            row.tokens += line[1 : 1 + count]
            row.log_probabilities += score[:count]
            row.rounds += 1
            row.drafted += width
            row.accepted += line[0]
        return tuple(packed[:, 0].tolist())
