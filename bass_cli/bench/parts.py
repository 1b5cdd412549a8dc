"""Time the parts of a round, each alone: draft, verify and accept.

On CUDA each part, and the whole round, is captured as a graph and timed by events over many
replays. On other devices the wall clock is used. The rest of a round's time is host time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Proposal
from bass_cli.engine.graphs import Shape, synchronise
from bass_cli.engine.loop import Loop
from bass_cli.engine.sizes import bucket
from bass_cli.engine.verify import judge
from bass_cli.models.capture import Capture, capture

_CALLS, _REPLAYS = 5, 50


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
def measure_parts(loop: Loop, width: int, *, coupling: str) -> Parts:
    """Time the parts of a round at this draft length. The rows of the loop do not change."""
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
                proposal, logits, batch, coupling=coupling, simulated_acceptance=loop.simulated
            )
            batch.commit(verdict.block, verdict.accepted)

        def seconds(part: Callable[[], object], captured: bool = graphs) -> float:
            return _replayed(part, record) if captured else _called(part, batch.device)

        draft = (
            seconds(lambda: drafter.propose(batch, width), graphs and drafter.on_device)
            if width
            else 0.0
        )
        verify, choice = (
            seconds(lambda: target.forward(tokens, positions, batch.ends(width))),
            seconds(decide),
        )
        whole = draft + verify + choice
        if graphs:
            whole = seconds(loop.function(Shape("round", batch.rows, width))) + (
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
