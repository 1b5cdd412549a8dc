"""Compute the floor of a run: its least memory traffic and arithmetic, at the device's ceilings.

Counted: weights, keys and values, each read once in every pass; operations of matrix products and
attention. Not counted: activations, norms, sampling and the few embedding rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bass_cli.bench.ceilings import Ceilings
from bass_cli.bench.figures import Run
from bass_cli.models.decoder import Decoder
from bass_cli.models.spec import HeadSpec, head_parameters, parameters

_MAPS = ("qkv.weight", "o.weight", "up.weight", "down.weight")


class Cost(NamedTuple):
    """Sizes of a decoder.

    body, head: elements of the layers' matrices and of the output head. item: bytes of an element.
    keys: elements of K and V for one position and layer. attention: operations for one query, key
    and layer. windows: attention window of each layer, 0 if it has none.
    """

    body: int
    head: int
    item: int
    keys: int
    attention: int
    windows: tuple[int, ...]


class Work(NamedTuple):
    """Bytes to read and floating-point operations."""

    bytes: float
    operations: float

    def floor(self, ceilings: Ceilings) -> float:
        """Return the seconds of a device at its ceilings."""
        return max(self.bytes / ceilings.bandwidth, self.operations / ceilings.operations)


class Needs(NamedTuple):
    """Total work of a run; and, in seconds, when each round would end at the floor."""

    work: Work
    ends: tuple[float, ...]


def cost_of(decoder: Decoder, head: HeadSpec | None = None) -> Cost:
    """Return the sizes of a decoder, counting only the layers that it runs.

    For a drafter that reads hidden states of the target (`head`), the projection of these states
    and the drafter's own vocabulary are counted. The Markov bias of a DSpark is not counted, so
    its floor is slightly too low.
    """
    spec = decoder.spec
    of_layer = parameters(spec) if head is None else head_parameters(head)
    body = sum(math.prod(of_layer[f"layers.{i}.{name}"]) for i in decoder.layers for name in _MAPS)
    aux_layers = 0 if head is None else len(head.aux_layers)
    known = min(decoder.vocab, spec.vocab)  # with tensor parallelism, a part of it
    if head is not None and head.ids is not None:
        known = len(head.ids)
    return Cost(
        body + aux_layers * spec.width**2,
        known * spec.width,
        decoder.dtype.itemsize,
        2 * spec.kv_heads * spec.head_size,
        4 * spec.heads * spec.head_size,
        tuple(spec.windows[i] for i in decoder.layers),
    )


def pass_work(cost: Cost, *, contexts: Sequence[int], shared: int, fed: int, logits: int) -> Work:
    """Return the work of one pass.

    Args:
        contexts: tokens before the pass, for each row.
        shared: positions whose K and V another row of the same prompt reads already.
        fed: tokens of each row in this pass.
        logits: how many of them get logits.
    """
    rows = len(contexts)
    seen = [
        [min(length, window) if window else length for length in contexts]
        for window in cost.windows
    ]
    keys = sum(
        sum(layer) - (0 if window else shared)
        for layer, window in zip(seen, cost.windows, strict=True)
    )
    products = 2 * rows * (cost.body * fed + cost.head * logits)
    return Work(
        (cost.body + cost.head) * cost.item + keys * cost.keys * cost.item,
        products + cost.attention * fed * sum(map(sum, seen)),
    )


def needs(
    run: Run,
    target: Cost,
    draft: Cost | None,
    *,
    samples: int,
    ceilings: Ceilings,
    at_once: bool = False,
) -> Needs:
    """Return the work of all rounds of a run.

    Rows i with the same i // `samples` share a prompt. The first draft step takes two tokens of
    each row, later steps take one. With `at_once`, drafting is one pass over 2 * width tokens.
    """
    lengths = list(run.contexts)
    total, ends = Work(0, 0), [0.0]
    for step in run.steps:
        contexts = [lengths[row] for row in step.rows]
        shared = _shared(step.rows, run.contexts, samples)
        passes = [
            pass_work(
                target, contexts=contexts, shared=shared, fed=step.width + 1, logits=step.width + 1
            )
        ]
        if draft is not None:
            passes += [
                pass_work(draft, contexts=contexts, shared=shared, fed=fed, logits=logits)
                for fed, logits in _passes(step.width, at_once)
            ]
        ends.append(ends[-1] + sum(work.floor(ceilings) for work in passes))
        total = Work(
            total.bytes + sum(w.bytes for w in passes),
            total.operations + sum(w.operations for w in passes),
        )
        for row, accepted in zip(step.rows, step.accepted, strict=True):
            lengths[row] += accepted + 1
    return Needs(total, tuple(ends[1:]))


def _passes(width: int, at_once: bool) -> Iterator[tuple[int, int]]:
    """Yield, for each draft pass of a round, its tokens and its logits for one row."""
    if at_once and width:
        yield 2 * width, width
        return
    for step in range(width):
        yield (1 if step else 2), 1


def _shared(rows: Sequence[int], prompts: Sequence[int], samples: int) -> int:
    """Count prompt positions that are read for another row of the same prompt."""
    groups = itertools.groupby(sorted(rows), key=lambda row: row // samples)
    return sum(prompts[next(members)] * sum(1 for _ in members) for _, members in groups)
