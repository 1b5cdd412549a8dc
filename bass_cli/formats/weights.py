"""Load a checkpoint's tensors into the decoder's fused tensors on the device, a few megabytes at a
time.

The host holds at most one part of a tensor for each thread (besides the model on a CPU). Not here:
reading a part (tensor_content.py), pairing stored tensors with the decoder's (checkpoint.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bass_cli.formats.checkpoint import Checkpoint, Piece, open_checkpoint, open_head
from bass_cli.formats.partition import Cut, cuts, kept, part_of
from bass_cli.formats.sources import locate
from bass_cli.formats.tensor_content import (
    DTYPES,
    Bytes,
    Stage,
    bytes_of,
    parts,
    read_into,
    stage_for,
)
from bass_cli.models.families import CODEGEN_BLOCKS, Slot
from bass_cli.models.ranks import Share
from bass_cli.models.spec import Spec, parameters, stored_dtype
from bass_kernels import import_kernels

__all__ = ["Checkpoint", "load", "locate", "open_checkpoint", "open_head"]

_WORKERS = 4  # reading threads: they copy from the page cache as fast as a GPU can receive


def load(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: Share | None = None,
    names: Collection[str] | None = None,
    on_read: Callable[[int], None] = lambda size: None,
) -> dict[str, Tensor]:
    """Load a checkpoint's tensors to the device in their `stored_dtype`. A tied head is the
    embedding itself.

    Args:
        share: load this process's part of a split model. Default: the whole model.
        names: load these tensors only. Default: all.
        on_read: called with the number of stored bytes after each tensor.
    """
    spec = checkpoint.spec
    shapes = checkpoint.shapes if share is None else parameters(part_of(spec, share.ranks))
    weights = {
        name: torch.empty(shape, dtype=stored_dtype(name, dtype), device=device)
        for name, shape in shapes.items()
        if not (spec.tied and name == "head.weight") and (names is None or name in names)
    }
    pieces = [piece for piece in checkpoint.pieces if piece.slot.name in weights]
    unfilled = {name: _rows(spec, name, weight, share) for name, weight in weights.items()}
    own = threading.local()

    def begin() -> None:
        own.stage = stage_for(device)

    pool = ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), initializer=begin)
    try:
        filled = pool.map(lambda piece: _fill(weights, piece, spec, own.stage, share), pieces)
        import_kernels(device)  # while the threads read
        for piece, (rows, size) in zip(pieces, filled, strict=True):
            unfilled[piece.slot.name] -= rows
            on_read(size)
    finally:
        pool.shutdown(cancel_futures=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # memory of the threads' streams is of no use to others
    assert not any(unfilled.values()), unfilled
    if spec.tied:
        weights["head.weight"] = weights["embed.weight"]
    return weights


def size_of(checkpoint: Checkpoint, share: Share | None = None) -> int:
    """Return the bytes of the stored tensors that `load` reads."""
    if share is None:
        return checkpoint.size
    return sum(
        bytes_of(piece.entry, cut.rows, cut.columns)
        for piece in checkpoint.pieces
        for cut in _cuts(checkpoint.spec, piece, share)
    )


def _rows(spec: Spec, name: str, weight: Tensor, share: Share | None) -> int:
    """Return how many rows of a process's tensor the checkpoint fills. The last part of a
    vocabulary may have more rows; they are set to 0."""
    found = None if share is None else kept(spec, name, share)
    if found is None or found.dim == 1:
        return len(weight)
    weight[found.size :] = 0
    return found.size


def _cuts(spec: Spec, piece: Piece, share: Share | None) -> Iterator[Cut]:
    return cuts(spec, piece, order_of(spec, piece.slot), share)


def _fill(
    weights: dict[str, Tensor], piece: Piece, spec: Spec, stage: Stage, share: Share | None
) -> tuple[int, int]:
    """Write a stored tensor, or this process's share of it, into its rows. Return the numbers of
    rows written and bytes read."""
    entry, slot = piece
    rows = size = 0
    with entry.file.open("rb", buffering=0) as file, stage.turn():
        for cut in _cuts(spec, piece, share):
            target = weights[slot.name][cut.first : cut.first + cut.taken]
            there = target.device.type == "cpu" and DTYPES.get(entry.dtype) is target.dtype
            read = bytes_of(entry, cut.rows, cut.columns)
            if there and not slot.how and cut.columns is None:
                width = read // max(len(cut.rows), 1)
                read_into(file, entry, Bytes(cut.rows.start * width, read), target)
            else:
                order = None if cut.order is None else cut.order.to(target.device)
                for first, part in parts(file, entry, stage, cut.rows, cut.columns):
                    _place(target, part, first, slot.how, order)
            rows += cut.taken if cut.order is None else len(cut.rows)
            size += read
    return rows, size


def _place(target: Tensor, part: Tensor, first: int, how: str, order: Tensor | None) -> None:
    """Transform stored rows from `first` on and write them. `order`: the target's row of each."""
    last = first + len(part)
    if order is not None:
        target.index_copy_(0, order[first:last], part.to(target.device, target.dtype))
    elif how == "transpose" and part.dim() == 2:
        target[:, first:last] = part.T
    elif how == "skip_two":
        target[max(first - 2, 0) : last - 2] = part[max(2 - first, 0) :]
    else:
        target[first:last] = part.float() + 1 if how == "plus_one" else part


def _deinterleave(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each stored row of q or k: in every head, even rotary dimensions
    come first."""
    assert spec.rope is not None
    place = torch.arange(spec.head_size)
    turning = place[: spec.rope.size]
    place[: spec.rope.size] = turning // 2 + (turning % 2) * (spec.rope.size // 2)
    return (torch.arange(0, rows, spec.head_size)[:, None] + place).flatten()


def _codegen(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each of CodeGen's fused rows: blocks of q, v, k, in that order,
    become q, k, v, with q and k deinterleaved."""
    width = rows // 3
    turned = _deinterleave(spec, width)
    q, v, k = (part * width for part in (0, 2, 1))
    fused = torch.stack([turned + q, torch.arange(width) + v, turned + k])
    return fused.view(3, CODEGEN_BLOCKS, -1).transpose(0, 1).flatten()


_ORDERS: dict[str, Callable[[Spec, int], Tensor]] = {
    "deinterleave": _deinterleave,
    "codegen": _codegen,
}


def order_of(spec: Spec, slot: Slot) -> Tensor | None:
    """Return the target row of each stored row of a slot; None if rows keep their order."""
    return _ORDERS[slot.how](spec, slot.rows) if slot.how in _ORDERS else None
