"""Schedule the runs of all cells, run batches through a loop, and time the parts of a round.

The end of sequence is ignored and finished rows are not replaced, so every row generates the same
number of tokens. Each part of a round is timed alone: on CUDA it is captured as a graph and timed
by events over many replays, elsewhere by the wall clock. The rest of a round's time is host time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bass_cli.bench.figures import ENOUGH_TOKENS, FEWEST, Run, Step, latency, spread
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.contracts import Proposal
from bass_cli.engine.graphs import Shape
from bass_cli.engine.loop import Loop
from bass_cli.engine.sizes import bucket
from bass_cli.engine.verify import judge
from bass_cli.models.capture import Capture, capture, synchronise
from bass_cli.models.runner import Runner

LEAST_TOKENS = 16  # of a row; fewer would measure little of a method
# share of the time limit for warm-up and runs; the rest is for timing the parts of rounds
_RUNS = 0.8
_CALLS, _REPLAYS = 5, 50
_NONE: Mapping[str, Sequence[int]] = MappingProxyType({})


class Key(NamedTuple):
    """A cell: its batch size and method, and the kind of text if several are measured."""

    batch: int
    method: str
    text: str = ""


class Schedule:
    """Orders the runs of all cells within a time limit, and estimates the time that is left.

    Every cell runs once before any cell runs again. The first cell always runs.

    Args:
        repeats: the most runs of a cell.
        limit: seconds from now on; None for no limit.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        *,
        repeats: int,
        limit: float | None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._keys, self._repeats, self._limit, self._now = tuple(keys), repeats, limit, now
        self._began = now()
        self._seconds: dict[Key, float] = {}
        self.runs: dict[Key, list[Run]] = {key: [] for key in keys}

    def exempt(self, seconds: float) -> None:
        """Exclude this many of the past seconds from the time limit."""
        self._began += seconds

    def tokens(self, warm: dict[Key, Run], most: int, *, least: int) -> int:
        """Choose the new tokens of a row so that the runs fit the time limit.

        If all repeats with ENOUGH_TOKENS do not fit, the number of repeats is reduced first, down
        to FEWEST, and then the number of tokens, down to LEAST_TOKENS.

        Args:
            warm: a short run of each cell.
            least, most: bounds of the result.
        """
        fixed = sum(run.prefill for run in warm.values())
        each = sum(latency(run).last / 1000.0 for run in warm.values())
        tokens = most
        if self._limit is not None:
            for repeats in range(self._repeats, min(FEWEST, self._repeats) - 1, -1):
                room = int((self._left() / repeats - fixed) / each)
                if room >= min(ENOUGH_TOKENS, most):
                    break
            tokens = min(most, max(least, LEAST_TOKENS, room))
        self._seconds = {
            key: run.prefill + tokens * latency(run).last / 1000.0 for key, run in warm.items()
        }
        return tokens

    def next(self) -> tuple[int, Key] | None:
        """Return repeat and cell of the next run; None if all are done or it would end late."""
        done = min(map(len, self.runs.values()))
        key = next(key for key in self._keys if len(self.runs[key]) == done)
        late = self._limit is not None and self._seconds[key] > self._left(_RUNS if done else 1.0)
        first = not self.runs[self._keys[0]]
        return None if done == self._repeats or (late and not first) else (done, key)

    def add(self, key: Key, run: Run, seconds: float) -> None:
        """Record a finished run and its seconds, prefill included."""
        self.runs[key].append(run)
        self._seconds[key] = seconds

    def seconds_left(self) -> float:
        """Estimate the seconds of the runs that are still to come."""
        rest = self._rest()
        return rest if self._limit is None else max(0.0, min(rest, self._left()))

    def in_time(self) -> bool:
        """Return whether the time limit has not passed yet."""
        return self._limit is None or self._now() - self._began < self._limit

    def report(self) -> dict[str, Any]:
        """Make the "repeats" of the document."""
        spreads = [
            spread([latency(run).mean for run in runs])
            for runs in self.runs.values()
            if len(runs) > 1
        ]
        return {
            "limit_seconds": self._limit,
            "seconds": self._now() - self._began,
            "repeats": self._repeats,
            "done": min(len(runs) for runs in self.runs.values() if runs),
            "missing_seconds": self._rest(),
            "missing": [
                [part for part in key if part] for key, runs in self.runs.items() if not runs
            ],
            "widest_spread": max(
                ((s.greatest - s.least) / s.median for s in spreads), default=None
            ),
        }

    def _rest(self) -> float:
        """Estimate the seconds of all missing runs from the last run of each cell."""
        return sum(
            self._seconds[key] * (self._repeats - len(runs)) for key, runs in self.runs.items()
        )

    def _left(self, share: float = _RUNS) -> float:
        assert self._limit is not None
        return share * self._limit - (self._now() - self._began)


def fill(loop: Loop, rows: list[Row], references: Mapping[str, Sequence[int]] = _NONE) -> float:
    """Prefill and admit the rows; each prompt is stored once.

    Args:
        references: token ids that answers may repeat, by the key of the rows.

    Returns: seconds of the prefill.
    """
    assert not len(loop.batch)
    synchronise(loop.batch.device)
    began = time.perf_counter()
    for key, group in groupby(rows, key=lambda row: row.key):
        members = list(group)
        loop.open(key, members[0].tokens, references.get(key, ()))
        loop.admit(*members)
        loop.close(key)
    synchronise(loop.batch.device)
    return time.perf_counter() - began


def decode(loop: Loop, rows: list[Row], *, prefill: float = 0.0) -> Run:
    """Decode the rows of the batch to their limits and time each round.

    A row leaves the batch after the round in which it reaches its limit.
    """
    contexts = tuple(len(row.tokens) for row in rows)
    captures = captured(loop)
    notes = []
    synchronise(loop.batch.device)
    began = time.perf_counter()
    while len(loop.batch):
        done = loop.round(ahead=True)
        notes.append((time.perf_counter() - began, done))
        if ended := [i for i, room in enumerate(loop.batch.rooms()) if room <= 0]:
            loop.retire(*ended)
    synchronise(loop.batch.device)
    index_of: dict[Hashable, int] = {row: index for index, row in enumerate(rows)}
    steps = tuple(
        Step(ended, done.width, tuple(index_of[row] for row in done.rows), done.accepted)
        for ended, done in notes
    )
    return Run(steps, contexts, rows[0].limit, prefill, captured(loop) - captures)


def empty(loop: Loop) -> None:
    """Retire all rows."""
    loop.retire(*range(len(loop.batch)))


def captured(loop: Loop) -> int:
    """Return how many graphs the loop has captured so far."""
    return 0 if loop.graphs is None else loop.graphs.captures


class Parts(NamedTuple):
    """Seconds of the parts of one round.

    width: draft length. draft: all draft steps. verify: the target's pass. accept: coupling and
    commit. device: the whole round on the device, with what connects these three.
    """

    width: int
    draft: float
    verify: float
    accept: float
    device: float


@torch.inference_mode()
def measure_parts(loop: Loop, width: int) -> Parts:
    """Time the parts of a round at this draft length. The rows of the loop do not change, but their
    recurrent states are not valid afterwards."""
    batch, drafter, target = loop.batch, loop.drafter, loop.target
    graphs = loop.graphs is not None and loop.graphs.enabled
    record = capture if loop.graphs is None else loop.graphs.record
    loop.catch_up(width)
    with _as_in_a_round(batch, graphs):
        proposal = _for_all_rows(drafter.propose(batch, width), batch)
        width = proposal.tokens.shape[1]
        tokens, positions = batch.pending(proposal.tokens)
        logits = target.forward(tokens, positions, batch.ends(width))

        def decide() -> None:
            verdict = judge(
                proposal, logits, batch, coupling=loop.coupling, simulated=loop.simulated
            )
            batch.commit(verdict.block, verdict.accepted)

        def verified(part: Callable[[], object]) -> Callable[[], object]:
            """Let the target's states roll forward, as in a round that follows another one."""

            def run() -> object:
                if isinstance(target, Runner):
                    target.step_back(batch.rows, width + 1)
                return part()

            return run

        def seconds(part: Callable[[], object], captured: bool = graphs) -> float:
            return _replayed(part, record) if captured else _called(part, batch.device)

        draft = (
            seconds(lambda: drafter.propose(batch, width), graphs and drafter.on_device)
            if width
            else 0.0
        )
        verify, choice = (
            seconds(verified(lambda: target.forward(tokens, positions, batch.ends(width)))),
            seconds(decide),
        )
        whole = draft + verify + choice
        if graphs:
            whole = seconds(verified(loop.function(Shape("round", batch.rows, width)))) + (
                0.0 if drafter.on_device else draft
            )
        return Parts(width, draft, verify, choice, whole)


@contextlib.contextmanager
def _as_in_a_round(batch: Batch, graphs: bool) -> Iterator[None]:
    """Keep all rows from advancing; with graphs, pad the batch as a captured round does."""
    if graphs:
        batch.pad(bucket(len(batch), batch.capacity))
    try:
        with batch.still():
            yield
    finally:
        batch.pad(None)


def _for_all_rows(proposal: Proposal, batch: Batch) -> Proposal:
    """Add drafts of 0 for padding rows, which a drafter on the host does not see."""
    missing = batch.rows - len(proposal.tokens)
    return (
        Proposal(torch.nn.functional.pad(proposal.tokens, (0, 0, 0, missing)), proposal.probs)
        if missing
        else proposal
    )


def _called(part: Callable[[], object], device: torch.device) -> float:
    """Return the median wall-clock seconds of a call."""
    found = []
    for _ in range(_CALLS):
        synchronise(device)
        began = time.perf_counter()
        part()
        synchronise(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _replayed(part: Callable[[], object], record: Capture) -> float:
    """Return the mean seconds of a captured call over many replays."""
    part()
    results: list[object] = []  # keeps the outputs, which lie in the graph's memory
    graph = record(lambda: results.append(part()), torch.cuda.graph_pool_handle())
    graph.replay()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(_REPLAYS):
        graph.replay()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1000.0 / _REPLAYS
