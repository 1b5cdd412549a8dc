"""Loading: a checkpoint's tensors into the decoder's fused ones on the device, a few megabytes at a
time.

The host never holds more than one part of a tensor for each thread, and the model where the
device is the host. Not here: reading a part (tensor_content.py), where it belongs, which is
settled when the checkpoint is opened (checkpoint.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bass_cli.model.checkpoint import Checkpoint, Piece, open_checkpoint, open_head
from bass_cli.model.families import CODEGEN_BLOCKS, Slot
from bass_cli.model.sources import locate
from bass_cli.model.spec import Spec, stored_dtype
from bass_cli.model.tensor_content import Stage, parts, read_into, stage_for
from bass_cli.model.tensor_files import DTYPES
from bass_kernels import import_kernels

__all__ = ["Checkpoint", "load", "locate", "open_checkpoint", "open_head"]

_WORKERS = 4  # threads that read: enough to copy from the page cache as fast as a GPU takes it


def load(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_read: Callable[[int], None] = lambda size: None,
) -> dict[str, Tensor]:
    """All of its `shapes` on the device in their `stored_dtype`; a tied head is the
    embedding itself. `on_read` is told the bytes of each tensor that is done."""
    spec = checkpoint.spec
    weights = {
        name: torch.empty(shape, dtype=stored_dtype(name, dtype), device=device)
        for name, shape in checkpoint.shapes.items()
        if not (spec.tied and name == "head.weight")
    }
    own = threading.local()

    def begin() -> None:
        own.stage = stage_for(device)

    pool = ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), initializer=begin)
    try:
        filled = pool.map(lambda piece: _fill(weights, piece, spec, own.stage), checkpoint.pieces)
        import_kernels(device)  # while others read
        for piece, _ in zip(checkpoint.pieces, filled, strict=True):
            on_read(piece.entry.size)
    finally:
        pool.shutdown(cancel_futures=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    unfilled = {name: len(weight) for name, weight in weights.items()}
    for piece in checkpoint.pieces:
        unfilled[piece.slot.name] -= piece.slot.rows
    assert not any(unfilled.values()), unfilled
    if spec.tied:
        weights["head.weight"] = weights["embed.weight"]
    return weights


def _fill(weights: dict[str, Tensor], piece: Piece, spec: Spec, stage: Stage) -> None:
    """Write a stored tensor into its rows."""
    entry, slot = piece
    target = weights[slot.name][slot.first : slot.first + slot.rows]
    with entry.file.open("rb", buffering=0) as file, stage.turn():
        if not slot.how and target.device.type == "cpu" and DTYPES.get(entry.dtype) is target.dtype:
            read_into(file, entry, 0, target)
            return
        order = order_of(spec, slot)
        order = None if order is None else order.to(target.device)
        for first, part in parts(file, entry, stage):
            _place(target, part, first, slot.how, order)


def _place(target: Tensor, part: Tensor, first: int, how: str, order: Tensor | None) -> None:
    """Write stored rows from `first` on, transformed; `order` says which rows of the target they
    become."""
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
    """For each stored row of q or k the row it becomes: in every head, even rotary dimensions
    come first."""
    assert spec.rope is not None
    place = torch.arange(spec.head_size)
    turning = place[: spec.rope.size]
    place[: spec.rope.size] = turning // 2 + (turning % 2) * (spec.rope.size // 2)
    return (torch.arange(0, rows, spec.head_size)[:, None] + place).flatten()


def _codegen(spec: Spec, rows: int) -> Tensor:
    """The same for CodeGen's fused rows: blocks of q, v, k (the order is theirs) become q, k, v,
    q and k reordered."""
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
    """For each stored row of a slot the row of its part that it becomes, where rows are sorted."""
    return _ORDERS[slot.how](spec, slot.rows) if slot.how in _ORDERS else None
