"""Compound: a matrix that is stored as several tensors, numbers of few bits and their scales.

Every element is (number - zero) * scale, computed in float32. A scale belongs to the whole matrix,
a row, or a block of rows and columns. A few megabytes are unpacked at a time, on the device. Not
here: which tensors belong together (quantised_config.py), single tensors (tensor_content.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bass_cli.formats import tensor_content
from bass_cli.formats.gguf_blocks import fields
from bass_cli.formats.tensor_content import DTYPES, Bytes, Stage
from bass_cli.formats.tensor_files import Entry, opened

# torch's types of the tensors of a compound, by their names in safetensors and torch files.
TYPES: dict[str, torch.dtype] = {
    **DTYPES,
    **{
        name: dtype
        for short, dtype in {
            "F8_E4M3": torch.float8_e4m3fn,
            "F8_E8M0": torch.float8_e8m0fnu,
            "I8": torch.int8,
            "U8": torch.uint8,
            "I32": torch.int32,
            "I64": torch.int64,
        }.items()
        for name in (short, str(dtype))
    },
}
# The numbers of e2m1 (sign, two bits of exponent, one of mantissa): OCP Microscaling Formats 1.0.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The place in an int32 of each of eight columns, in AWQ's "gemm" version.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
_MOST_INT8 = 127  # bitsandbytes scales rows to this
_BLOCK_OF_SCALES = 256  # scales that share a scale, where bitsandbytes quantises scales too

# The tensors of a compound besides its numbers, by role: scales, zeros, groups, tables
QuantParams = Mapping[str, Tensor]


class Grid(NamedTuple):
    """The scales of a matrix, and zeros of the same shape or None: [R, C] float32.

    R is 1, or the number of groups of rows; C the same of columns.
    """

    scales: Tensor
    zeros: Tensor | None = None


class Layout(NamedTuple):
    """How the tensors of a compound make a matrix.

    name: for users, such as "GPTQ".
    bits: of a number.
    unpack: converts rows of "values", [n, bytes] uint8, to numbers [n * unit, columns or more]
        float32.
    grid: computes the scales.
    group: the rows and the columns that share a scale.
    unit: rows of the matrix in a row of "values".
    transposed: whether the matrix is stored as [inputs, outputs].
    offset: of the stored zeros.
    stacked: number of experts whose matrices are stacked by rows; 0 for one matrix. transformers
        has them as [experts, inputs, outputs].
    """

    name: str
    bits: int
    unpack: Callable[[Tensor, QuantParams], Tensor]
    grid: Callable[[QuantParams], Grid]
    group: tuple[int, int]
    unit: int = 1
    transposed: bool = False
    offset: int = 0
    stacked: int = 0


class Compound(NamedTuple):
    """A matrix that is stored as several tensors.

    shape: of the matrix as it is stored, [inputs, outputs] if the layout is transposed.
    tensors: by role. "values" has the numbers, row by row, and "groups" the group of each input.
    """

    layout: Layout
    shape: tuple[int, ...]
    tensors: Mapping[str, Entry]

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.size for entry in self.tensors.values())

    @property
    def file(self) -> Path:
        """The file of its numbers, for messages."""
        return self.tensors["values"].file

    @property
    def by_row(self) -> str | None:
        """The layout of bass_kernels.Quantised that holds it as it is stored: 8 bits and one scale
        a row. None if there is none."""
        (tall, wide), (rows, columns) = self.layout.group, self.shape
        if wide < columns or tall not in (1, rows) or "zeros" in self.tensors:
            return None
        return _BY_ROW.get(self.layout.unpack)

    @property
    def identity(self) -> tuple[object, ...]:
        """What its elements depend on besides the tensors, for fingerprints."""
        layout = self.layout
        return layout.name, layout.bits, layout.group, layout.offset


class Factor(NamedTuple):
    """A stored factor of a low-rank change, or its transpose."""

    entry: Entry
    transposed: bool = False

    def read(self, stage: Stage) -> Tensor:
        found = content(self.entry, stage).float()
        return found.T if self.transposed else found


class Delta(NamedTuple):
    """A low-rank change of a matrix: scale * left [rows, rank] @ right [rank, columns].

    magnitude: the norm that each row has after the change (DoRA); None for any.
    """

    left: Factor
    right: Factor
    scale: float
    magnitude: Entry | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        own = self.left.entry, self.right.entry
        return own if self.magnitude is None else (*own, self.magnitude)


class Adapted(NamedTuple):
    """A stored matrix with low-rank changes (lora.py)."""

    base: Entry | Compound
    deltas: tuple[Delta, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def size(self) -> int:
        """Bytes of all tensors that make it."""
        changes = sum(entry.size for delta in self.deltas for entry in delta.entries)
        return self.base.size + changes

    @property
    def file(self) -> Path:
        return self.base.file

    @property
    def identity(self) -> tuple[object, ...]:
        """What its elements depend on besides the tensors, for fingerprints."""
        base = self.base.identity if isinstance(self.base, Compound) else ()
        return (*base, *(delta.scale for delta in self.deltas))

    @property
    def by_norm(self) -> bool:
        """Whether a row's change depends on the whole row."""
        return any(delta.magnitude is not None for delta in self.deltas)


Stored = Entry | Compound | Adapted


class StoredRows(NamedTuple):
    """Rows of a matrix in 8 bits as they are stored: the number of rows before these, values [n, K]
    and scales [n] float32."""

    first: int
    values: Tensor
    scales: Tensor


def entries_of(stored: Stored) -> tuple[Entry, ...]:
    """Return the tensors in files that make a stored tensor."""
    if isinstance(stored, Adapted):
        changes = [entry for delta in stored.deltas for entry in delta.entries]
        return (*entries_of(stored.base), *changes)
    return tuple(stored.tensors.values()) if isinstance(stored, Compound) else (stored,)


def bytes_of(stored: Stored, rows: range, columns: range | None) -> int:
    """Return how many bytes `parts` reads: of a compound, whole rows and all scales."""
    if isinstance(stored, Entry):
        return tensor_content.bytes_of(stored, rows, columns)
    if isinstance(stored, Adapted):
        base = bytes_of(stored.base, rows, None if stored.by_norm else columns)
        return base + stored.size - stored.base.size
    values, unit = stored.tensors["values"], stored.layout.unit
    lines = len(_lines(rows, unit))
    return lines * _width(values) + stored.size - values.size


def parts(
    stored: Stored,
    stage: Stage | None = None,
    rows: range | None = None,
    columns: range | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield a stored tensor's rows in order, some at a time. See tensor_content.parts."""
    stage = stage or Stage()
    if isinstance(stored, Entry):
        with stored.file.open("rb", buffering=0) as file:
            yield from tensor_content.parts(file, stored, stage, rows, columns)
        return
    rows = range(stored.shape[0]) if rows is None else rows
    if isinstance(stored, Compound):
        yield from _unpacked(stored, stage, rows, columns)
    else:
        yield from _changed(stored, stage, rows, columns)


def content(entry: Entry, stage: Stage | None = None) -> Tensor:
    """Return a copy of a whole small tensor, on the stage's device."""
    with opened(entry.file) as file:
        raw = (stage or Stage()).fetch(file, entry, Bytes(0, entry.size)).clone()
    return raw.view(TYPES[entry.dtype]).view(entry.shape)


def _changed(
    stored: Adapted, stage: Stage, rows: range, columns: range | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of a matrix with its changes, float32."""
    kept = range(stored.shape[1]) if columns is None else columns
    read = None if stored.by_norm else columns
    factors = [
        (delta.left.read(stage), delta.right.read(stage) * delta.scale) for delta in stored.deltas
    ]
    norms = [
        None if delta.magnitude is None else content(delta.magnitude, stage).float().view(-1, 1)
        for delta in stored.deltas
    ]
    for first, part in parts(stored.base, stage, rows, read):
        at = slice(rows.start + first, rows.start + first + len(part))
        whole = part.float()
        for (left, right), norm in zip(factors, norms, strict=True):
            change = left[at] @ (right if read is None else right[:, read.start : read.stop])
            whole = whole + change
            if norm is not None:
                whole = whole * (norm[at] / whole.norm(dim=1, keepdim=True))
        yield first, whole if read is columns else whole[:, kept.start : kept.stop]


def stored_rows(stored: Compound, stage: Stage, rows: range) -> Iterator[StoredRows]:
    """Yield rows of a matrix that is stored `by_row`, on the stage's device. They are valid until
    the next step."""
    scales = stored.layout.grid(_params_of(stored, stage)).scales.flatten()
    scales = scales.expand(stored.shape[0])
    dtype = TYPES[stored.tensors["values"].dtype]
    for lines, raw in _lines_of(stored, stage, rows):
        yield StoredRows(
            lines.start - rows.start, raw.view(dtype), scales[lines.start : lines.stop]
        )


def _unpacked(
    stored: Compound, stage: Stage, rows: range, columns: range | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of a compound, float32."""
    layout, params, unit = stored.layout, _params_of(stored, stage), stored.layout.unit
    grid, groups = layout.grid(params), params.get("groups")
    for lines, raw in _lines_of(stored, stage, rows):
        first = lines.start * unit
        inside = range(max(first, rows.start), min(lines.stop * unit, rows.stop))
        numbers = layout.unpack(raw, params)[:, : stored.shape[1]]
        numbers = numbers[inside.start - first : inside.stop - first]
        if grid.zeros is not None:
            numbers = numbers - _spread(grid.zeros, stored, inside, groups)
        part = numbers * _spread(grid.scales, stored, inside, groups)
        if columns is not None:
            part = part[:, columns.start : columns.stop]
        yield inside.start - rows.start, part


def _params_of(stored: Compound, stage: Stage) -> QuantParams:
    """Return all tensors but the numbers."""
    return {role: content(one, stage) for role, one in stored.tensors.items() if role != "values"}


def _lines_of(stored: Compound, stage: Stage, rows: range) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows of "values" with these rows of the matrix, and their bytes, some at a time."""
    values, unit = stored.tensors["values"], stored.layout.unit
    line, lines = _width(values), _lines(rows, unit)
    elements = tensor_content.ELEMENTS[stage.device.type] // (stored.shape[1] * unit)
    step = max(min(elements, tensor_content.BYTES // line), 1)
    with values.file.open("rb", buffering=0) as file:
        for first in range(lines.start, lines.stop, step):
            count = min(step, lines.stop - first)
            raw = stage.fetch(file, values, Bytes(first * line, count * line))
            yield range(first, first + count), raw.view(count, line)


def _spread(grid: Tensor, stored: Compound, rows: range, groups: Tensor | None) -> Tensor:
    """Return the scales or zeros of some rows of a matrix, in a shape that broadcasts to them."""
    transposed, (tall, wide) = stored.layout.transposed, stored.layout.group
    if len(grid) > 1:
        if transposed and groups is not None:
            grid = grid[groups[rows.start : rows.stop].long()]
        elif tall == 1:
            grid = grid[rows.start : rows.stop]
        else:
            grid = grid[torch.arange(rows.start, rows.stop, device=grid.device) // tall]
    if grid.shape[1] > 1 and not transposed:
        if groups is not None:
            return grid[:, groups.long()]
        grid = grid.repeat_interleave(wide, 1)[:, : stored.shape[1]] if wide > 1 else grid
    return grid


def _width(values: Entry) -> int:
    """Return the bytes of a row of numbers."""
    return values.size // max(values.shape[0], 1)


def _lines(rows: range, unit: int) -> range:
    """Return the rows of "values" that hold these rows of the matrix."""
    return range(rows.start // unit, -(-rows.stop // unit))


# Numbers


def e4m3(raw: Tensor, params: QuantParams) -> Tensor:
    """Unpack floats of 8 bits."""
    return raw.view(torch.float8_e4m3fn).float()


def int8(raw: Tensor, params: QuantParams) -> Tensor:
    """Unpack signed integers of 8 bits."""
    return raw.view(torch.int8).float()


def centred(raw: Tensor, params: QuantParams, *, bits: int) -> Tensor:
    """Unpack unsigned fields, the lowest first, minus half of their range (compressed-tensors)."""
    return fields(raw, bits, 1).flatten(1).float().sub_(1 << (bits - 1))


def e2m1(raw: Tensor, params: QuantParams) -> Tensor:
    """Unpack floats of 4 bits, the lower first."""
    table = torch.tensor(_E2M1, device=raw.device)
    return table[fields(raw, 4, 1).flatten(1).int()]


def table(raw: Tensor, params: QuantParams) -> Tensor:
    """Unpack places in a table of 16 floats, the upper first (bitsandbytes)."""
    places = torch.stack([raw >> 4, raw & 15], 2).flatten(1)
    return params["table"].float()[places.int()]


def down_columns(raw: Tensor, params: QuantParams, *, bits: int) -> Tensor:
    """Unpack fields of int32 that follow each other down a column, the lowest first (GPTQ)."""
    words = raw.view(torch.int32)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=raw.device)
    numbers = (words[:, None] >> shifts[:, None]) & ((1 << bits) - 1)
    return numbers.flatten(0, 1).float()


def along_rows(raw: Tensor, *, bits: int) -> Tensor:
    """Unpack unsigned fields of int32 [n, words] along rows, the lowest first."""
    return fields(raw.view(torch.uint8), bits, 1).flatten(1).float()


def awq(raw: Tensor, params: QuantParams) -> Tensor:
    """Unpack fields of 4 bits in AWQ's order of the eight columns of an int32."""
    found = fields(raw.view(torch.uint8), 4, 1).view(len(raw), -1, 8)
    return found[..., torch.tensor(_AWQ, device=raw.device)].flatten(1).float()


# The layouts of bass_kernels.Quantised whose values are stored so
_BY_ROW: dict[object, str] = {e4m3: "fp8", int8: "int8"}

# Scales


def _two(param: Tensor) -> Tensor:
    """Return scales as [R, C] float32. A single number is [1, 1], a vector is a number a row."""
    return (param.reshape(-1, 1) if param.dim() < 2 else param).float()


def plain(params: QuantParams) -> Grid:
    """Scales, and perhaps zeros, are stored as they are."""
    zeros = params.get("zeros")
    return Grid(_two(params["scales"]), None if zeros is None else _two(zeros))


def packed_zeros(params: QuantParams, *, bits: int) -> Grid:
    """Zeros are packed down columns, minus half of their range (compressed-tensors)."""
    scales = _two(params["scales"])
    if "zeros" not in params:
        return Grid(scales)
    found = down_columns(params["zeros"].contiguous().view(torch.uint8), params, bits=bits)
    return Grid(scales, found[: len(scales)] - (1 << (bits - 1)))


def divided(params: QuantParams) -> Grid:
    """Scales are divided by a scale of the matrix (NVFP4 of compressed-tensors)."""
    return Grid(_two(params["scales"]) / params["whole"].float().reshape(1, 1))


def multiplied(params: QuantParams) -> Grid:
    """Scales are multiplied by a scale of the matrix (NVFP4 of modelopt)."""
    return Grid(_two(params["scales"]) * params["whole"].float().reshape(1, 1))


def powers(params: QuantParams) -> Grid:
    """Scales are exponents of two, plus 127: e8m0 of OCP Microscaling Formats 1.0."""
    exponents = params["scales"].view(torch.uint8).int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 has no normal form
    return Grid(bits.view(torch.float32))


def rows_of_int8(params: QuantParams) -> Grid:
    """Scales are the largest magnitudes of rows (bitsandbytes, 8 bits)."""
    return Grid(_two(params["scales"]) / _MOST_INT8)


def gptq(params: QuantParams, *, bits: int, offset: int) -> Grid:
    """Zeros are packed along rows, minus `offset` (GPTQ; 1 in its first format)."""
    scales = params["scales"].float()
    return Grid(scales, along_rows(params["zeros"], bits=bits)[:, : scales.shape[1]] + offset)


def awq_scales(params: QuantParams) -> Grid:
    """Zeros are packed as the numbers are (AWQ)."""
    return Grid(params["scales"].float(), awq(params["zeros"], params))


def blocks(params: QuantParams, *, shape: tuple[int, int], offset: float) -> Grid:
    """Scales of blocks of a flattened matrix (bitsandbytes, 4 bits; arXiv 2305.14314).

    They are numbers, or places in a table of numbers that are scaled in blocks in turn.
    """
    scales = params["scales"]
    if "scale_table" in params:
        outer = params["scale_scales"].float().repeat_interleave(_BLOCK_OF_SCALES)
        scales = params["scale_table"].float()[scales.int()] * outer[: len(scales)] + offset
    return Grid(scales.float().view(shape))
