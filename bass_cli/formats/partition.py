"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): the part of every tensor that each process
holds, and the rows and columns of a checkpoint that it reads for it.

Heads, feed-forward and vocabulary are split: maps into them by rows, maps out of them by columns,
embedding and head by tokens. Norms, learned positions and biases of summed outputs are not split.
Not here: the sums (ranks.py), reading (weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Piece
from bass_cli.models.ranks import Share
from bass_cli.models.spec import Spec

_BY_TOKENS = ("embed", "head")


class Kept(NamedTuple):
    """The part of a tensor that a process holds: these runs of indexes of dimension `dim`, in its
    order."""

    dim: int
    runs: tuple[range, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.runs))


class Cut(NamedTuple):
    """A part of a stored tensor that a process reads.

    rows, columns: of the stored tensor; None for all columns.
    first, taken: the part fills rows [first, first + taken) of the process's decoder tensor.
    order: the target row of each stored row, if rows are reordered.
    """

    rows: range
    columns: range | None
    first: int
    taken: int
    order: Tensor | None = None


def check_divisible(spec: Spec, ranks: int, *, model: str) -> None:
    """Raise a UserError unless this model can be split over so many devices."""
    for what, count in (("attention heads", spec.heads), ("feed-forward size", spec.inner)):
        if count % ranks:
            raise UserError(
                f"--tensor-parallel {ranks}: {model} has {what} {count}, which {ranks} does not "
                "divide; use another number"
            )
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise UserError(
            f"--tensor-parallel {ranks}: {model} has key/value heads {spec.kv_heads}, which "
            f"neither divides {ranks} nor is divided by it; use another number"
        )


def part_of(spec: Spec, ranks: int) -> Spec:
    """Return the spec of one process's part. With fewer key/value heads than processes, several
    processes hold the same head. The vocabulary is rounded up, and the last parts are padded."""
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(spec.kv_heads // ranks, 1),
        inner=spec.inner // ranks,
        vocab=-(-spec.vocab // ranks),
    )


def kept(spec: Spec, name: str, share: Share) -> Kept | None:
    """Return what process `share` holds of a tensor of `parameters(spec)`; None if all of it."""
    part, (rank, ranks) = part_of(spec, share.ranks), share
    layer, kind = name.split(".")[-2:]
    if layer in _BY_TOKENS:
        first = min(rank * part.vocab, spec.vocab)
        return Kept(0, (range(first, min(first + part.vocab, spec.vocab)),))
    size, query, key = spec.head_size, spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    queries = range(rank * part.heads * size, (rank + 1) * part.heads * size)
    first = rank * spec.kv_heads // ranks * size
    keys = range(first, first + part.kv_heads * size)
    inner = range(rank * part.inner, (rank + 1) * part.inner)
    if layer == "qkv":
        return Kept(0, (queries, _moved(keys, query), _moved(keys, query + key)))
    if layer == "up":
        return Kept(0, (inner, _moved(inner, spec.inner)) if spec.gated else (inner,))
    if layer in ("o", "down") and kind == "weight":
        return Kept(1, (queries if layer == "o" else inner,))
    return None


def cuts(spec: Spec, piece: Piece, order: Tensor | None, share: Share | None) -> Iterator[Cut]:
    """Yield the parts of a stored tensor that process `share` reads.

    Args:
        order: see weights.order_of.
        share: None for a model that is not split.
    """
    (entry, slot), found = piece, None if share is None else kept(spec, piece.slot.name, share)
    every = range(entry.shape[0])
    turned = slot.how == "transpose" and len(entry.shape) == 2
    if found is None:
        yield Cut(every, None, slot.first, slot.rows, order)
    elif found.dim == 1:
        (run,) = found.runs
        assert order is None
        yield Cut(run if turned else every, None if turned else run, slot.first, slot.rows)
    elif order is not None:
        yield from _sorted_cuts(order + slot.first, found)
    else:
        for rows, first in _within(found, range(slot.first, slot.first + slot.rows)):
            stored = _moved(rows, -slot.first)
            yield Cut(every if turned else stored, stored if turned else None, first, len(stored))


def _within(found: Kept, slot: range) -> Iterator[tuple[range, int]]:
    """Yield the kept rows inside a slot, each run with its first index among all kept rows."""
    at = 0
    for run in found.runs:
        rows = range(max(run.start, slot.start), min(run.stop, slot.stop))
        if rows:
            yield rows, at + rows.start - run.start
        at += len(run)


def _sorted_cuts(order: Tensor, found: Kept) -> Iterator[Cut]:
    """Yield runs of stored rows that are kept. Stored row i is row `order[i]` of the tensor."""
    places = torch.full_like(order, -1)
    at = 0
    for run in found.runs:
        inside = (order >= run.start) & (order < run.stop)
        places[inside] = order[inside] - run.start + at
        at += len(run)
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (places[end] >= 0) != (places[begin] >= 0):
            if places[begin] >= 0:
                yield Cut(range(begin, end), None, 0, found.size, places[begin:end])
            begin = end


def _moved(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)
