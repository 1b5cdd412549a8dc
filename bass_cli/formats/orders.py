"""The order of a checkpoint's rows and columns in the decoder's tensors.

Not here: which slots have which order (models/families.py), reading (weights.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bass_cli.models.families import CODEGEN_BLOCKS, Slot
from bass_cli.models.spec import Spec


def _deinterleave(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each stored row of q or k: in every head, even rotary dimensions
    come first."""
    assert spec.rope is not None
    place = torch.arange(spec.head_size)
    rotary = place[: spec.rope.size]
    place[: spec.rope.size] = rotary // 2 + (rotary % 2) * (spec.rope.size // 2)
    return (torch.arange(0, rows, spec.head_size)[:, None] + place).flatten()


def _codegen(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each of CodeGen's fused rows: blocks of q, v, k, in that order,
    become q, k, v, with q and k deinterleaved."""
    width = rows // 3
    reordered = _deinterleave(spec, width)
    q, v, k = (part * width for part in (0, 2, 1))
    fused = torch.stack([reordered + q, torch.arange(width) + v, reordered + k])
    return fused.view(3, CODEGEN_BLOCKS, -1).transpose(0, 1).flatten()


def _alternate(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each stored row of gpt-oss: gate and up take turns."""
    row = torch.arange(rows)
    return (row % 2) * (rows // 2) + row // 2


def _gated(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each stored row of a query projection with an output gate: all
    gates, then all queries. Each stored head has its query, then its gate."""
    row, size = torch.arange(rows), spec.head_size
    head, place = row // (2 * size), row % (2 * size)
    return head * size + torch.where(place < size, place + rows // 2, place - size)


def _delta(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each of Qwen3-Next's fused rows. Each key head has its query, its
    key, and the values and gates of its value heads; they become q, k, v, gate."""
    recurrent = spec.recurrent
    assert recurrent is not None
    values = recurrent.values // recurrent.key_heads  # of a key head
    sizes = [recurrent.key_size, recurrent.key_size, values, values]
    return _by_head(recurrent.key_heads, sizes)


def _delta_gates(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each stored row of Qwen3-Next's beta and decay, which are fused by
    key head."""
    assert spec.recurrent is not None
    heads = spec.recurrent.key_heads
    return _by_head(heads, [rows // 2 // heads] * 2)


def _by_head(heads: int, sizes: Sequence[int]) -> Tensor:
    """Return the target row of rows that are stored head by head, each head with parts of these
    sizes, and become part by part."""
    firsts = itertools.accumulate((heads * size for size in sizes), initial=0)
    parts = [
        first + torch.arange(heads * size).view(heads, size)
        for first, size in zip(firsts, sizes, strict=False)
    ]
    return torch.cat(parts, 1).flatten()


def _tiled(spec: Spec, rows: int) -> Tensor:
    """Return the target row of each stored row of values that follow a convolution's queries and
    keys, or of numbers of value heads.

    A file has the first value head of every key head, then their second ones. The decoder has the
    value heads of a key head side by side.
    """
    recurrent = spec.recurrent
    assert recurrent is not None
    heads = recurrent.value_heads
    size = 1 if rows == heads else recurrent.value_size
    before, each = rows - heads * size, heads // recurrent.key_heads
    moved = before + torch.arange(heads * size).view(recurrent.key_heads, each, size)
    return torch.cat((torch.arange(before), moved.transpose(0, 1).flatten()))


_ORDERS: dict[str, Callable[[Spec, int], Tensor]] = {
    "gated": _gated,
    "delta": _delta,
    "delta_gates": _delta_gates,
    "alternate": _alternate,
    "deinterleave": _deinterleave,
    "codegen": _codegen,
    "tiled": _tiled,
    "tiled_decay": _tiled,
}


def order_of(spec: Spec, slot: Slot) -> Tensor | None:
    """Return the target row of each stored row of a slot; None if rows keep their order."""
    return _ORDERS[slot.how](spec, slot.rows) if slot.how in _ORDERS else None


def columns_of(spec: Spec, slot: Slot) -> Tensor | None:
    """Return the stored column of each target column of a slot; None if columns keep their
    order."""
    if slot.how != "tiled_columns":
        return None
    assert spec.recurrent is not None
    return _tiled(spec, spec.recurrent.values).argsort()
