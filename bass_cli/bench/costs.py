"""What a run had to read and compute at least, and how long that takes at the device's ceilings:
the floor.

Counted are weights and keys and values, each read once a pass, and the operations of products
and attention. Not counted: activations, norms, sampling, and the embedding's few rows.
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
    """A decoder as numbers: elements of the layers' matrices and of the head, bytes an element;
    elements of keys and values a position and layer; operations of attention a query, key and
    layer; the window of each layer, 0 for none."""

    body: int
    head: int
    item: int
    keys: int
    attention: int
    windows: tuple[int, ...]


class Work(NamedTuple):
    """Bytes read and floating-point operations."""

    bytes: float
    operations: float

    def floor(self, ceilings: Ceilings) -> float:
        """Seconds that a device at its ceilings needs."""
        return max(self.bytes / ceilings.bandwidth, self.operations / ceilings.operations)


class Needs(NamedTuple):
    """A run's work in all, and when each of its rounds would have ended at the floor, in
    seconds."""

    work: Work
    ends: tuple[float, ...]


def cost_of(decoder: Decoder, head: HeadSpec | None = None) -> Cost:
    """The numbers of a decoder, of the layers that it runs only; with the map of its taps to one
    feature, and its own vocabulary, for a drafter that reads them. (The bias of a DSpark is left
    out: a floor may be low.)"""
    spec = decoder.spec
    of_layer = parameters(spec) if head is None else head_parameters(head)
    body = sum(math.prod(of_layer[f"layers.{i}.{name}"]) for i in decoder.layers for name in _MAPS)
    aux_layers = 0 if head is None else len(head.aux_layers)
    known = min(decoder.vocab, spec.vocab)  # of a split one a part
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
    """One pass of `fed` tokens a row over rows with these contexts, `logits` of them with
    logits. `shared`: how many positions of the contexts are the same prompt's and need no second
    reading."""
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
    """The work of all rounds of a run; rows i of the same i // `samples` share a prompt. A
    draft's first step feeds two tokens a row, the others one; or `at_once` one pass of twice as
    many tokens as it drafts."""
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
    """Tokens a row that a draft's passes of a round take in, and logits that they give."""
    if at_once and width:
        yield 2 * width, width
        return
    for step in range(width):
        yield (1 if step else 2), 1


def _shared(rows: Sequence[int], prompts: Sequence[int], samples: int) -> int:
    """Positions of prompts that are read for another row already."""
    groups = itertools.groupby(sorted(rows), key=lambda row: row // samples)
    return sum(prompts[next(members)] * sum(1 for _ in members) for _, members in groups)
