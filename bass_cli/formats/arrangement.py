"""How files arrange what the decoder has in another order: rows, columns, tensors of all experts.

Published files of gpt-oss have the experts' matrices in MXFP4, [outputs, inputs]
(quantised_config.py joins their numbers and scales). Files of transformers have them in plain
numbers, [inputs, outputs], as do those of Qwen3-VL. Those of Qwen3.5 have plain numbers, [outputs,
inputs], gate before up. Not here: which slots have which order (models/families.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.compound import Adapted, Compound, Stored
from bass_cli.formats.tensor_files import Entry
from bass_cli.models.families import CODEGEN_BLOCKS, Slot
from bass_cli.models.spec import Spec
from bass_cli.reading import shown


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


# Experts

_EXPERTS = re.compile(
    r"(?P<layer>.*layers\.\d+\.mlp\.experts)\.(?P<map>gate_up_proj|down_proj)(?P<kind>|_bias)"
)
# Transforms of matrices that are stored as [outputs, inputs]
_UPRIGHT = {"pairs": "alternate", "transpose": ""}


def is_stacked(name: str) -> bool:
    """Return whether this is the name of a tensor of all experts of a layer."""
    return _EXPERTS.fullmatch(name) is not None


def unstack(
    entries: Mapping[str, Stored], experts: int, *, halves: bool = False
) -> dict[str, Stored]:
    """Return the entries with those of experts split, `experts.3.down_proj.weight` for the fourth
    part of `experts.down_proj`.

    Args:
        halves: whether a part of `gate_up_proj` becomes two entries, `gate_proj` and `up_proj`.

    Raises:
        UserError: a tensor does not have this number of experts.
    """
    found: dict[str, Stored] = {}
    for name, entry in entries.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            found[name] = entry
            continue
        assert not isinstance(entry, Adapted)
        words, kind = _words(match, halves)
        for expert, part in enumerate(parts_of_experts(name, entry, experts)):
            for number, word in enumerate(words):
                half = part if len(words) == 1 else _half(part, number, name)
                found[f"{match['layer']}.{expert}.{word}.{kind}"] = half
    return found


def split_tensor(
    name: str, tensor: Tensor, experts: int, *, halves: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a tensor of all experts [experts, ...] with the names that `unstack` gives
    them.

    Raises:
        UserError: the tensor does not have this number of experts, or `halves` are not whole.
    """
    match = _EXPERTS.fullmatch(name)
    assert match is not None, name
    words, kind = _words(match, halves)
    if tensor.dim() < 2 or len(tensor) != experts or tensor.shape[1] % len(words):
        even = ", and the second one even" if len(words) == 2 else ""
        raise UserError(
            f'tensor "{name}" has shape {shown(list(tensor.shape))}; the first size must be the '
            f"number of experts, {experts}{even}"
        )
    for expert, part in enumerate(tensor):
        for word, rows in zip(words, part.chunk(len(words)), strict=True):
            yield f"{match['layer']}.{expert}.{word}.{kind}", rows


def _words(match: re.Match[str], halves: bool) -> tuple[tuple[str, ...], str]:
    """Return the words for an expert's part or its halves in names, and the kind of tensor."""
    split = halves and match["map"] == "gate_up_proj"
    words = ("gate_proj", "up_proj") if split else (match["map"],)
    return words, match["kind"].removeprefix("_") or "weight"


def _half(entry: Entry | Compound, number: int, name: str) -> Entry:
    """Return the first or the second half of the rows of a plain entry, a part of tensor `name`."""
    if isinstance(entry, Compound) or entry.shape[0] % 2:
        raise UserError(
            f'{entry.file}: tensor "{name}": an even number of rows in plain numbers is needed for '
            f"this family, not {shown(list(entry.shape))} for each expert"
        )
    return _rows(entry, number, 2)


def upright(slots: Mapping[str, Slot], entries: Mapping[str, Stored]) -> dict[str, Slot]:
    """Return the slots, changed for experts that are stored as [outputs, inputs]."""
    return {
        name: slot._replace(how=_UPRIGHT.get(slot.how, slot.how))
        if _is_upright(slot, entries.get(name))
        else slot
        for name, slot in slots.items()
    }


def _is_upright(slot: Slot, entry: Stored | None) -> bool:
    """Return whether a matrix of an expert is stored as [outputs, inputs], not [inputs, outputs].
    Plain numbers of a square matrix are taken as [inputs, outputs]."""
    if isinstance(entry, Compound):
        return True
    sizes = () if entry is None or slot.how != "transpose" else entry.shape
    return len(sizes) == 2 and sizes[0] == slot.rows != sizes[1]


def parts_of_experts(name: str, entry: Entry | Compound, experts: int) -> list[Entry | Compound]:
    """Return the parts of a tensor of all experts of a layer, one for each.

    Raises:
        UserError: the tensor does not have this number of experts.
    """
    total = entry.layout.stacked if isinstance(entry, Compound) else (*entry.shape, 0)[0]
    if total != experts or len(entry.shape) < 2:
        raise UserError(
            f'{entry.file}: tensor "{name}" has shape {shown(list(entry.shape))}; the first size '
            f"must be the number of experts, {experts}"
        )
    return [_part(entry, expert, experts) for expert in range(experts)]


def _part(entry: Entry | Compound, expert: int, experts: int) -> Entry | Compound:
    """Return the part of one expert, of which the rows follow each other."""
    if isinstance(entry, Compound):
        parts = {role: _rows(one, expert, experts) for role, one in entry.tensors.items()}
        layout = entry.layout._replace(stacked=0)
        return Compound(layout, (entry.shape[0] // experts, entry.shape[1]), parts)
    part = _rows(entry, expert, experts)
    return part._replace(shape=entry.shape[1:])


def _rows(entry: Entry, expert: int, experts: int) -> Entry:
    size, rows = entry.size // experts, entry.shape[0] // experts
    return entry._replace(
        shape=(rows, *entry.shape[1:]), start=entry.start + expert * size, size=size
    )
