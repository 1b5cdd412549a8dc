"""One round: propose, verify, accept, commit; then one copy to the host. Rows join and leave between rounds.

Not here: which rows, when they end, what becomes of them (run.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy
import torch
from torch import Tensor

from bass_cli.draft import Drafter, Proposal

from . import accept
from .batch import Batch, Row
from .captured import Captured
from .clock import Clock, Prefill
from .graphs import WIDTHS, Graphs, step_down, synchronise
from .ladder import Shape, Step
from .lengths import Lengths, Outlook, Round
from .target import Target

_CATCH_UP = (2, 8, 32)  # tokens a row that a drafter takes in at once: fewer graphs, and a few tokens more cost little


class Loop:
    """A batch with its target, drafter and draft-length controller. `coupling` is "shared" or "maximal".

    With `graphs`, rounds are captured and replayed by shape (ladder.py says which). `acceptance` is for
    benchmarks of random weights: each draft is accepted with that probability, and the output means nothing.
    """

    def __init__(self, *, batch: Batch, target: Target, drafter: Drafter, lengths: Lengths, coupling: str, clock: Clock,
                 acceptance: float | None = None, graphs: Graphs | None = None):
        assert coupling in ("shared", "maximal")
        assert acceptance is None or coupling == "shared"
        self.batch, self.clock, self.graphs = batch, clock, graphs
        self.target, self.drafter, self.lengths = target, drafter, lengths
        self._coupling, self._acceptance = coupling, acceptance
        # What is known of the rest of a job: tokens of samples that wait for a row; how many a sample is likely to have.
        self.backlog, self.typical = 0.0, math.inf
        self._captured: Captured | None = None
        if graphs is not None and graphs.enabled:
            self._captured = Captured(graphs, batch, clock, self.function, exact=coupling == "maximal",
                                      longest=drafter.longest)
        self._idle, self._catching = 0, 0.0  # plain rounds since the last drafts; seconds that catching up took last
        self._behind = batch.tokens.new_zeros(())  # where a drafter that catches up begins, tokens before each row's end
        self._drafts = batch.tokens.new_zeros(batch.capacity, WIDTHS[-1])  # where a graph finds a host drafter's tokens

    @torch.inference_mode()
    def open(self, key: str, tokens: Sequence[int], *, deadline: float | None = None) -> bool:
        """A prompt begins: it is stored once for all rows that attach to it. With a `deadline` it is given up (False) if it
        is not likely to be stored by then."""
        prefill = None if deadline is None else Prefill(self.clock, deadline)
        if not self.target.open(key, tokens, prefill):
            return False
        if prefill is not None:
            synchronise(self.batch.device)
            prefill.end()
        self.drafter.open(key, tokens)
        if deadline is not None:
            synchronise(self.batch.device)
        return True

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self.target.close(key)
        self.drafter.close(key)

    @torch.inference_mode()
    def admit(self, *rows: Row) -> None:
        """Make rows of open prompts live. Cheapest if a prompt's rows come together."""
        for key, group in itertools.groupby(rows, key=lambda row: row.key):
            index = self.batch.admit(*group)
            self.target.attach(index.start, key, len(index))
            self.drafter.attach(index.start, key, len(index))

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
        captured = self._captured
        if captured is None:
            width = self.clock.longest_in_time(self._width(self.batch.rooms()), deadline)
            self.catch_up(width)
            began = self.clock.now()
            packed, width = self._run(width)
        else:
            captured.renew(self._version)
            rooms = self.batch.rooms()
            wish = captured.wish("round", self._width_in_time(captured, deadline, rooms))
            step = captured.choose(wish, left=self._left(rooms), deadline=deadline)
            self.catch_up(step.shape.width)
            began = captured.start()
            packed, width = self._replay(captured, wish, step)
        kept = self._to_host(packed, width)
        seconds = self.clock.now() - began
        done = Round(width, kept, seconds) if captured is None else Round(width, kept, seconds - captured.capturing,
                                                                          captured.steady)
        if done.steady:
            self.clock.observe(width, done.seconds)
        self._idle = 0 if width else self._idle + 1
        self.lengths.observe(done)
        return done

    @torch.inference_mode()
    def prepare(self, rows: Iterable[int], widths: Iterable[int]) -> None:
        """Capture the graphs for these numbers of rows and draft lengths now, rather than when they are first met."""
        captured = self._captured
        if captured is None:
            return
        captured.renew(self._version)
        self._behind.fill_(_CATCH_UP[-1] + 2)  # what runs now must not read beyond a row's end
        for count, width in itertools.product(sorted({captured.bucket(n) for n in rows}), sorted(widths)):
            width = step_down(min(width, self.drafter.longest))
            captured.capture(Shape("round", count, width))
            for tokens in _CATCH_UP if width and self.drafter.on_device else ():
                captured.capture(Shape("catch up", count, tokens))

    @torch.inference_mode()
    def catch_up(self, width: int) -> None:
        """Let the drafter take in what it must before it drafts `width` tokens. It is due to plain rounds before, and not
        counted as what a round of this width takes."""
        captured, missing = self._captured, self.drafter.prepare(self.batch, width)
        if not missing:
            return
        if captured is None:
            began = self.clock.now()
            self.drafter.catch_up(self.batch, self._behind.fill_(missing + 2), missing)
            self._catching = self.clock.now() - began
            return
        began = captured.start()
        while missing > 0:
            wish = captured.wish("catch up", next((count for count in _CATCH_UP if count >= missing), _CATCH_UP[-1]))
            step = captured.choose(wish, left=self._left(self.batch.rooms()))
            self._behind.fill_(max(missing, step.shape.width) + 2)
            captured.perform(wish, step)
            missing -= step.shape.width
        self._catching = self.clock.now() - began - captured.capturing

    @property
    def _version(self) -> tuple[int, int, int]:
        """Changes when what graphs read has moved."""
        return self.batch.version, self.target.version, self.drafter.version

    def _left(self, rooms: list[int]) -> float:
        """How many rounds there may still be, at most."""
        return max(rooms) + self.backlog / self.batch.capacity

    def _width(self, rooms: list[int]) -> int:
        """The controller's draft length, capped by what the drafter can and by the room of the row that has most of it:
        no other row decides."""
        left = sum(min(room, self.typical) for room in rooms) + self.backlog
        outlook = Outlook(left / len(rooms), self._captured.entries() if self._captured else (),
                          self._catching if self._idle else 0.0)
        return max(0, min(self.lengths.next(len(rooms), outlook), self.drafter.longest, max(rooms) - 1))

    def _width_in_time(self, captured: Captured, deadline: float | None, rooms: list[int]) -> int:
        """The draft length that graphs are made for, and whose round should end by `deadline`, capturing included."""
        wanted = step_down(self._width(rooms))
        if deadline is None:
            return wanted

        def predict(width: int) -> float:
            step = captured.choose(captured.wish("round", step_down(width)), left=self._left(rooms), deadline=deadline)
            return self.clock.predict(step.shape.width) + captured.delay(step)

        return step_down(self.clock.longest_in_time(wanted, deadline, predict))

    def _run(self, width: int) -> tuple[Tensor, int]:
        proposal = self.drafter.propose(self.batch, width)
        return self._verify(proposal).cpu(), proposal.tokens.shape[1]

    def _replay(self, captured: Captured, wish: Shape, step: Step) -> tuple[Tensor, int]:
        """The same round as a graph, which may take some dummy rows too."""
        if not self.drafter.on_device:
            tokens = self.drafter.propose(self.batch, step.shape.width).tokens
            self._drafts[: len(self.batch), : tokens.shape[1]] = tokens
            if tokens.shape[1] != step.shape.width:
                wish = wish._replace(width=tokens.shape[1])
                step = captured.choose(wish, left=self._left(self.batch.rooms()), exact=True)
        packed = captured.perform(wish, step)
        assert packed is not None
        return packed, step.shape.width

    def function(self, shape: Shape) -> Callable[[], Tensor | None]:
        """What a graph of this shape does."""
        if shape.kind == "round":
            return lambda: self._verify(self._proposal(shape.rows, shape.width))
        return lambda: self.drafter.catch_up(self.batch, self._behind, shape.width)

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
        table = packed[: len(self.batch)].numpy()
        values = table[:, width + 2 :].astype(numpy.int32).view(numpy.float32).tolist()
        lines = table[:, : width + 2].tolist()
        for row, line, score in zip(self.batch.hosts, lines, values, strict=True):
            count = line[0] + 1
            row.tokens += line[1 : 1 + count]
            row.log_probabilities += score[:count]
            row.rounds += 1
            row.drafted += width
            row.accepted += line[0]
        return tuple(line[0] for line in lines)
