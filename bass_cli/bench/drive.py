"""Run one batch through a loop: fill it, decode every row to its limit, and record the rounds.

The end of sequence is ignored and finished rows are not replaced, so every row generates the same
number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from bass_cli.bench.figures import Run, Step
from bass_cli.engine.batch import Row
from bass_cli.engine.graphs import synchronise
from bass_cli.engine.loop import Loop

_NONE: Mapping[str, Sequence[int]] = MappingProxyType({})


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
        for index in reversed(range(len(loop.batch))):
            if loop.batch.hosts[index].room <= 0:
                loop.retire(index)
    synchronise(loop.batch.device)
    index_of: dict[Hashable, int] = {row: index for index, row in enumerate(rows)}
    steps = tuple(
        Step(ended, done.width, tuple(index_of[row] for row in done.rows), done.accepted)
        for ended, done in notes
    )
    return Run(steps, contexts, rows[0].limit, prefill, captured(loop) - captures)


def empty(loop: Loop) -> None:
    """Retire all rows."""
    for index in reversed(range(len(loop.batch))):
        loop.retire(index)


def captured(loop: Loop) -> int:
    """Return how many graphs the loop has captured so far."""
    return 0 if loop.graphs is None else loop.graphs.captures
