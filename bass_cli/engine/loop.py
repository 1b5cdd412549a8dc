"""One round: propose, verify, accept, commit; then one copy to the host. Rows join and leave between rounds.

Not here: which rows, when they end, what becomes of them (run.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bass_cli.draft import Drafter, Proposal

from . import accept
from .batch import Batch, Row
from .clock import Clock
from .graphs import WIDTHS, Graphs, bucket, step_down
from .lengths import Lengths, Round


class Target(Protocol):
    """What the loop needs of the target: model/runner.py, or a toy law in a test."""

    def open(self, key: str, tokens: Sequence[int]) -> None: ...
    def close(self, key: str) -> None: ...
    def attach(self, row: int, key: str) -> None: ...
    def detach(self, row: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def forward(self, tokens: Tensor, positions: Tensor, ends: Sequence[int] | None, *,
                last: int | None = None) -> Tensor: ...

    @property
    def version(self) -> int: ...


class Loop:
    """A batch with its target, drafter and draft-length controller. `coupling` is "shared" or "maximal".

    With `graphs`, a round is captured once for each (rows bucket, draft length) and replayed. `acceptance` is for
    benchmarks of random weights: each draft is accepted with that probability, and the output means nothing.
    """

    def __init__(self, *, batch: Batch, target: Target, drafter: Drafter, lengths: Lengths, coupling: str, clock: Clock,
                 acceptance: float | None = None, graphs: Graphs | None = None):
        assert coupling in ("shared", "maximal")
        assert acceptance is None or coupling == "shared"
        self.batch, self.clock, self.graphs = batch, clock, graphs
        self.target, self.drafter, self.lengths = target, drafter, lengths
        self._coupling, self._acceptance = coupling, acceptance
        self._captured = graphs is not None and graphs.enabled
        self._capturing = 0.0  # seconds of this round that went into capturing: no round will take them again
        self._drafts = batch.tokens.new_zeros(batch.capacity, WIDTHS[-1])  # where a graph finds a host drafter's tokens

    @torch.inference_mode()
    def open(self, key: str, tokens: Sequence[int]) -> None:
        """A prompt begins: it is stored once for all rows that attach to it."""
        self.target.open(key, tokens)
        self.drafter.open(key, tokens)

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self.target.close(key)
        self.drafter.close(key)

    @torch.inference_mode()
    def admit(self, row: Row) -> None:
        """Make a row of an open prompt live."""
        index = self.batch.admit(row)
        self.target.attach(index, row.key)
        self.drafter.attach(index, row.key)

    @torch.inference_mode()
    def retire(self, index: int) -> None:
        """End row `index`; the last row takes its place."""
        moved = self.batch.retire(index)
        for part in (self.target, self.drafter):
            part.detach(index)
            if moved is not None:
                part.move(moved, index, len(self.batch.hosts[index].tokens))

    @torch.inference_mode()
    def round(self, deadline: float | None = None) -> Round:
        """Advance every live row by one token or more. A row's new tokens may go past an end-of-sequence token or its
        limit: it must be cut and retired before the next round. The draft length is cut to end by `deadline`."""
        width = self.clock.longest_in_time(self._width(), deadline)
        self.drafter.prepare(self.batch, width)  # catching up after plain rounds is not what a round of this width costs
        began = self.clock.now()
        packed, width = self._replay(width) if self._captured else self._run(width)
        kept = self._to_host(packed, width)
        seconds = self.clock.now() - began - self._capturing
        self._capturing = 0.0
        self.clock.observe(width, seconds)
        done = Round(width, kept, seconds)
        self.lengths.observe(done)
        return done

    @torch.inference_mode()
    def prepare(self, rows: Iterable[int], widths: Iterable[int]) -> None:
        """Capture the graphs for these numbers of rows and draft lengths now, rather than when they are first met."""
        if not self._captured:
            return
        for count, width in itertools.product(rows, widths):
            self._capture(bucket(count, self.batch.capacity), step_down(min(width, self.drafter.longest)))
        self._capturing = 0.0

    def _width(self) -> int:
        """The controller's draft length, capped by what the drafter can and by the room of the row that has most of it:
        no other row decides."""
        wanted = self.lengths.next(len(self.batch))
        width = max(0, min(wanted, self.drafter.longest, max(row.room for row in self.batch.hosts) - 1))
        return step_down(width) if self._captured else width

    def _run(self, width: int) -> tuple[Tensor, int]:
        proposal = self.drafter.propose(self.batch, width)
        return self._verify(proposal).cpu(), proposal.tokens.shape[1]

    def _replay(self, width: int) -> tuple[Tensor, int]:
        """The same round by a captured graph, which may take some dummy rows too."""
        live = len(self.batch)
        if not self.drafter.on_device:
            tokens = self.drafter.propose(self.batch, width).tokens
            width = tokens.shape[1]
            self._drafts[:live, :width] = tokens
        rows = bucket(live, self.batch.capacity)
        self._capture(rows, width)
        assert self.graphs is not None
        return self.graphs.replay((rows, width)), width

    def _capture(self, rows: int, width: int) -> None:
        """See to it that there is a graph of this shape."""
        batch, graphs = self.batch, self.graphs
        assert graphs is not None
        graphs.renew((batch.version, self.target.version, self.drafter.version))
        if graphs.holds((rows, width)):
            return
        began = self.clock.now()
        batch.pad(rows)
        with batch.still():
            graphs.capture((rows, width), lambda: self._verify(self._proposal(rows, width)))
        batch.pad(None)
        self._capturing += self.clock.now() - began

    def _proposal(self, rows: int, width: int) -> Proposal:
        if self.drafter.on_device:
            return self.drafter.propose(self.batch, width)
        return Proposal(self._drafts[:rows, :width], None)

    def _verify(self, proposal: Proposal) -> Tensor:
        """The target's pass over the pending tokens and the drafts; commits. Returns what the host needs to know,
        [B, 2k + 3] int64: how many drafts were accepted; the block of k + 1 tokens, valid up to and including that
        place; and the bits of their log-probabilities."""
        batch = self.batch
        lengths = batch.lengths[: batch.rows].clone()
        pending, positions = batch.last(1)
        drafts, law = proposal
        width = drafts.shape[1]
        positions = positions + torch.arange(width + 1, device=batch.device)
        logits = self.target.forward(torch.cat((pending, drafts), 1), positions, batch.ends(width))
        if self._acceptance is not None:
            verdict = accept.imposed(drafts, logits, batch.laws, lengths, self._acceptance)
        elif self._coupling == "shared":
            verdict = accept.shared(drafts, logits, batch.laws, lengths)
        else:
            verdict = accept.maximal(drafts, law, logits, batch.laws, lengths)
        batch.commit(verdict.block, verdict.accepted)
        return torch.cat((verdict.accepted[:, None], verdict.block, verdict.scores.view(torch.int32).long()), dim=1)

    def _to_host(self, packed: Tensor, width: int) -> tuple[int, ...]:
        """Extends the Rows by what a round gave (on the host); returns accepted by row."""
        packed = packed[: len(self.batch)]
        values = packed[:, width + 2 :].to(torch.int32).view(torch.float32).tolist()
        lines = packed[:, : width + 2].tolist()
        for row, line, score in zip(self.batch.hosts, lines, values, strict=True):
            count = line[0] + 1
            row.tokens += line[1 : 1 + count]
            row.log_probabilities += score[:count]
            row.rounds += 1
            row.drafted += width
            row.accepted += line[0]
        return tuple(line[0] for line in lines)
