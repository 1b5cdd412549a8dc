"""A whole job without models or a GPU: the real loop, graph policy and controllers on a fake
clock, random acceptance in place of tensors. No tests."""

import functools
import random

import torch
from fakes import FakeGraphs, Ticks

from bass_cli.drafts.factory import NoDrafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import PendingWork, Proposal
from bass_cli.engine.loop import Loop
from bass_cli.lengths.controllers import Fixed


class Forgetful(NoDrafter):
    """A draft model as the loop sees it: it lacks a token for each plain round."""

    longest, catches_up = 1000, True

    def __init__(self):
        self._lacks = 0

    def expect(self, batch, length):
        lacks = self._lacks
        self._lacks = 0 if length else lacks + 1
        return lacks if length else 0

    def catch_up(self, batch, behind, count):
        pass

    def reaches(self, before, length):
        return not length or before > 0


class Finder(NoDrafter):
    """A host drafter whose lookup takes `asking` seconds: a row has up to six drafts with
    probability `found`."""

    on_device, longest = False, 1000

    def __init__(self, found, *, lookup_seconds, ticks):
        self.num_drafts, self._found, self._asking, self._ticks = (), found, lookup_seconds, ticks
        self._chance, self.looks = random.Random(1), 0

    def propose(self, batch, length):
        self._ticks.seconds += self._asking
        self.looks += 1
        self.num_drafts = tuple(
            min(self._chance.randint(1, 6), length, max(row.room - 1, 0))
            if self._chance.random() < self._found
            else 0
            for row in batch.live_rows
        )
        return Proposal(
            batch.tokens.new_zeros(len(batch), max(self.num_drafts)), None, self.num_drafts
        )


class Simulated(Loop):
    """Each draft is accepted with probability `rate`; see FakeGraphs for the times."""

    def __init__(self, lengths, rate, *, rows=8, drafter=None, graphs=None, seed=0):
        graphs = graphs or FakeGraphs(Ticks())
        self._chance, self._rate = random.Random(seed), rate
        batch = Batch(rows=rows, context=1024, device=torch.device("cpu"))
        super().__init__(
            batch=batch,
            target=NoDrafter(),
            drafter=drafter or Forgetful(),
            controller=lengths,
            coupling="shared",
            clock=Clock(graphs.ticks),
            graphs=graphs,
        )

    def function(self, shape):
        return lambda: self._result(shape.width) if shape.kind != "catch up" else None

    def _result(self, width):
        width, places = min(width, self._executor.most), width
        most = (
            self.drafter.num_drafts
            if isinstance(self.drafter, Finder)
            else (width,) * self.batch.rows
        )
        most = (*most, *(0,) * self.batch.rows)[: self.batch.rows]  # padding rows have none
        kept = [
            next(
                (i for i in range(min(width, m)) if self._chance.random() > self._rate),
                min(width, m),
            )
            for m in most
        ]
        return torch.cat(
            (
                torch.tensor(kept)[:, None],
                torch.zeros(len(kept), 2 * places + 2, dtype=torch.int64),
            ),
            1,
        )


def seconds_of(loop, *, prompts=16, n=8, limit=128):
    """Run a job of prompts x n samples of `limit` tokens and return its seconds without prefill."""
    waiting = [Row(str(p), s, 0, [1] * 20, limit) for p in range(prompts) for s in range(n)]
    while waiting or len(loop.batch):
        while waiting and len(loop.batch) < loop.batch.capacity:
            loop.admit(waiting.pop(0))
        loop.round(pending_work=PendingWork(len(waiting) * limit))
        for index in reversed(range(len(loop.batch))):
            if loop.batch.live_rows[index].room <= 0:
                loop.retire(index)
    return loop.clock.now()


@functools.cache
def plain_seconds(**job):
    """Return the same for plain decoding, which depends only on the job."""
    return seconds_of(Simulated(Fixed(0), 0.0, drafter=NoDrafter()), **job)
