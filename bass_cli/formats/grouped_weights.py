"""Load matrices of a GGUF file in the numbers that the file has, for products on a CPU.

Groups of 4-bit and 8-bit numbers keep their values; their scales and minima become bfloat16. Types
with groups of 16 (Q2_K, Q3_K, Q6_K) are rounded again, to 8 bits in groups of 32. Matrices that a
file stores as floats are not loaded here (weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bass_cli.errors import UserError
from bass_cli.formats.arrangement import columns_of, order_of
from bass_cli.formats.checkpoint import Checkpoint, Piece
from bass_cli.formats.gguf_blocks import QUANTISED, groups_of
from bass_cli.formats.tensor_content import Bytes, Stage
from bass_cli.formats.tensor_files import Entry
from bass_cli.models.spec import EXPERT_MAPS, FILE, PLAIN, Layouts, Spec
from bass_kernels import GROUP, Grouped

_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
# Unsigned numbers are stored less the middle of their range, so that the rounding of a scale moves
# them least.
_MIDDLE = {"Q4_1": 8, "Q4_K": 8, "Q5_1": 16, "Q5_K": 16}
# Ways in which only the order of rows changes
_ORDERED = ("", "deinterleave", "codegen", "gated", "delta", "tiled")
# Stored bytes that are converted at a time: it takes about 40 bytes of memory for each
_BYTES = 1 << 20


def grouped_pieces(checkpoint: Checkpoint, layouts: Layouts) -> dict[str, list[Piece]]:
    """Return the stored tensors of each matrix that is loaded in the file's numbers. A tied head
    has those of the embedding."""
    found: dict[str, list[Piece]] = {}
    tied = checkpoint.spec.tied
    for piece in checkpoint.pieces:
        name = piece.slot.name
        if name == "embed.weight" and tied:
            name = "head.weight"
        if layouts.of(name) == FILE:
            found.setdefault(name, []).append(piece)
    return {
        name: pieces
        for name, pieces in found.items()
        if all(_is_grouped(piece, checkpoint.spec) for piece in pieces)
    }


def file_layouts(checkpoint: Checkpoint) -> Layouts:
    """Return the layouts of a model that keeps the numbers of its file: plain ones if the file has
    no such matrix, and for a head that it stores as floats."""
    found = grouped_pieces(checkpoint, Layouts(FILE, FILE))
    if not found:
        return PLAIN
    bits = tuple((name, _bits(pieces)) for name, pieces in found.items())
    return Layouts(FILE, FILE if "head.weight" in found else None, bits)


def _bits(pieces: Sequence[Piece]) -> int:
    """Return the bits of the numbers of a matrix with these tensors."""
    kinds = {piece.entry.dtype for piece in pieces if isinstance(piece.entry, Entry)}
    return 4 if kinds <= {*_FOUR_BITS} else 8


def _is_grouped(piece: Piece, spec: Spec) -> bool:
    entry, slot = piece
    ordered = slot.how in _ORDERED
    if slot.how == "tiled_columns" and spec.recurrent is not None:
        ordered = spec.recurrent.value_size % GROUP == 0  # groups are moved whole
    return isinstance(entry, Entry) and entry.dtype in QUANTISED and ordered


def read_grouped(pieces: Sequence[Piece], spec: Spec, stage: Stage) -> Grouped:
    """Read a matrix from its stored tensors, which are its rows. Those of experts are stacked.

    Args:
        spec: of the whole model.

    Raises:
        UserError: a scale is not finite.
    """
    if spec.experts is None or pieces[0].slot.name.split(".")[-2] not in EXPERT_MAPS:
        return _read_matrix(pieces, spec, stage)
    every = sum(piece.slot.rows for piece in pieces) // spec.experts.total
    parts: list[list[Piece]] = [[] for _ in range(spec.experts.total)]
    for piece in pieces:
        number, first = divmod(piece.slot.first, every)
        parts[number].append(piece._replace(slot=piece.slot._replace(first=first)))
    return Grouped.stack([_read_matrix(part, spec, stage) for part in parts])


def _read_matrix(pieces: Sequence[Piece], spec: Spec, stage: Stage) -> Grouped:
    rows = sum(piece.slot.rows for piece in pieces)
    width = pieces[0].entry.shape[-1]
    bits = _bits(pieces)
    values = torch.empty(rows, width, dtype=torch.int8)
    scales, minima = (torch.empty(rows, width // GROUP) for _ in range(2))
    for entry, slot in pieces:
        assert isinstance(entry, Entry)
        order, source = order_of(spec, slot), columns_of(spec, slot)
        mine = slice(slot.first, slot.first + slot.rows)
        places = None if order is None else slot.first + order
        pitch = entry.size // slot.rows
        with entry.file.open("rb", buffering=0) as file:
            step = max(_BYTES // pitch, 1)
            for first in range(0, slot.rows, step):
                last = min(first + step, slot.rows)
                region = Bytes(first * pitch, (last - first) * pitch)
                raw = stage.fetch(file, entry, region).view(last - first, pitch)
                found = numbers_of(raw, entry.dtype)
                if source is not None:
                    groups = source[::GROUP] // GROUP
                    found = found[0][:, source], found[1][:, groups], found[2][:, groups]
                for whole, part in zip((values, scales, minima), found, strict=True):
                    if places is None:  # much faster than rows by number
                        whole[slot.first + first : slot.first + last] = part
                    else:
                        whole[places[first:last]] = part
        if not (scales[mine].isfinite().all() and minima[mine].isfinite().all()):
            raise UserError(
                f"{entry.file}: {slot.name} has scales that are not finite; the file is damaged"
            )
    return Grouped.of(values, scales, minima, bits)


def numbers_of(raw: Tensor, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, scales and minima of rows of whole blocks [n, bytes]: [n, K] int8, and [n,
    K / 32] float32 twice."""
    groups = groups_of(raw, dtype)
    if groups.values.shape[-1] != GROUP:
        return _rounded(groups.floats())
    values, scales = groups.values.view(torch.int8), groups.scales.squeeze(2)
    if groups.minima is None:
        return values.flatten(1), scales, torch.zeros_like(scales)
    middle = _MIDDLE[dtype]
    return (values - middle).flatten(1), scales, groups.minima.squeeze(2) + middle * scales


def _rounded(floats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows [n, K] to whole numbers of 8 bits in groups of 32; see `numbers_of`."""
    groups = floats.view(len(floats), -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    divisors = torch.where(scales > 0, scales, 1.0)[..., None]
    values = (groups / divisors).round_().nan_to_num_(0.0).to(torch.int8)
    return values.flatten(1), scales, torch.zeros_like(scales)
