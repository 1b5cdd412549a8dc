"""A weight matrix in few bits with its scales, and its product with activations in plain torch: the
definition of 8-bit weights.

"int8" is W8A16: whole numbers, one scale a row; activations keep their dtype. "fp8" is W8A8: e4m3
(arXiv 2209.05433), one scale a row. Activations are rounded to e4m3 too, with one scale a token, at
every width of a pass: two formats would give wide passes another distribution than narrow ones.
Not here: which weights of a model are stored so (models/spec.py), Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .grouped import Grouped

# By layout: the dtype of the values, and the largest value
_KINDS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
LAYOUTS = tuple(_KINDS)
# The smallest scale that float32 holds with full precision. A row with a smaller one counts as
# zeros, because dividing by it could overflow.
_LEAST = torch.finfo(torch.float32).tiny
# Elements of a weight that a CPU converts at a time, so that they stay in its cache
_CONVERTED = 1 << 17
# Elements that are quantised at a time: some 100 MB of work space
_QUANTISED = 1 << 23
# On a CPU a line of MKL's product in float32 has the same bits for any multiple of 8 lines.
_LINES = 8


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight matrix [N, K] in few bits. Its memory never moves, so captured graphs stay valid
    after `write_rows`.

    Args:
        values: [N, K] int8 or float8_e4m3fn.
        scales: [N] float32. Row i of the matrix is values[i] * scales[i].
        layout: one of LAYOUTS.
    """

    values: Tensor
    scales: Tensor
    layout: str

    @classmethod
    def empty(cls, shape: tuple[int, ...], layout: str, device: torch.device) -> Quantised:
        """Return a matrix of this shape [N, K] with arbitrary values."""
        dtype, _ = _KINDS[layout]
        values = torch.empty(shape, dtype=dtype, device=device)
        return cls(values, torch.empty(shape[0], dtype=torch.float32, device=device), layout)

    @classmethod
    def of(cls, weight: Tensor, layout: str) -> Quantised:
        """Quantise a matrix [N, K] of any float dtype."""
        found = cls.empty(tuple(weight.shape), layout, weight.device)
        found.write_rows(0, weight)
        return found

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantise(self) -> Tensor:
        """Return the matrix, [N, K] float32."""
        return self.values.float() * self.scales[:, None]

    def write_from(self, other: Writable) -> None:
        """Write a matrix of this shape in place. Values of another layout are rounded a second
        time."""
        if isinstance(other, Tensor):
            self.write_rows(0, other)
            return
        step = max(_QUANTISED // self.shape[1], 1)
        for first in range(0, len(self), step):
            self.write_rows(first, other.rows(first, first + step).dequantise())

    def rows(self, first: int, last: int | None = None) -> Quantised:
        """Return rows [first, last) as a view. Default: to the end."""
        return Quantised(self.values[first:last], self.scales[first:last], self.layout)

    def write_rows(self, first: int | Tensor, rows: Tensor, columns: range | None = None) -> None:
        """Quantise rows [n, K] of any float dtype and write them in place.

        A row's scale is its largest magnitude over the largest value of the layout. Values are
        rounded to the nearest, ties to even. Rows of zeros get scale 1. A row that is not finite
        gets a scale that is not finite.

        Args:
            first: the row of the first one, or the row of each, [n] int64.
            columns: of the given rows, those that this matrix has. Default: all. Scales are those
                of the whole rows, so that the parts of a split matrix have the values of the whole.
        """
        step = max(_QUANTISED // rows.shape[1], 1)
        for at, part in zip(range(0, len(rows), step), rows.split(step), strict=True):
            values, scales = quantise(part.to(self.device), self.layout)
            places = first + at if isinstance(first, int) else first[at : at + len(part)]
            self.write_values(places, values, scales[:, 0], columns)

    def write_values(
        self, first: int | Tensor, values: Tensor, scales: Tensor, columns: range | None = None
    ) -> None:
        """Write rows that are quantised already, in place: values [n, K] of the layout's dtype and
        scales [n] float32, on this device. `first`, `columns`: see `write_rows`."""
        if columns is not None:
            values = values[:, columns.start : columns.stop]
        if isinstance(first, int):
            self.values[first : first + len(values)] = values
            self.scales[first : first + len(values)] = scales
            return
        places = first.to(self.device)
        raw = values.contiguous().view(torch.uint8)  # index_copy_ lacks float8
        self.values.view(torch.uint8).index_copy_(0, places, raw)
        self.scales.index_copy_(0, places, scales)


Writable = Tensor | Quantised  # matrices whose rows can be written
Weight = Writable | Grouped


def bytes_of(shape: tuple[int, ...], layout: str) -> int:
    """Return the bytes of a quantised matrix of this shape [N, K]; at most, if it is grouped."""
    if layout == Grouped.layout:
        return Grouped.bytes_of(shape)
    dtype, _ = _KINDS[layout]
    return shape[0] * (shape[1] * dtype.itemsize + torch.float32.itemsize)


def quantise(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return x [..., K] in a layout's values, and the scale of each line, [..., 1] float32."""
    dtype, most = _KINDS[layout]
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / most
    scales = torch.where(scales < _LEAST, 1.0, scales)
    x = x / scales
    if dtype == torch.int8:
        x = x.round_().nan_to_num_(0.0).clamp_(-most, most)
    return x.to(dtype), scales


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens x [M, K] in e4m3, and their scales [M, 1] float32. Tokens are multiplied by the
    reciprocals of their scales: kernels have no time for divisions."""
    x, (dtype, most) = x.float(), _KINDS["fp8"]
    # By a tensor, because CUDA multiplies by the reciprocal of a number instead
    scales = x.abs().amax(-1, keepdim=True) / torch.full((), most, device=x.device)
    scales = torch.where(scales < _LEAST, 1.0, scales)
    return (x * scales.reciprocal()).to(dtype), scales


def linear(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """Multiply x [..., K] by a quantised weight [N, K] and add bias [N]: [..., N] in x's dtype.

    Products are summed in float32 and multiplied by the scales, those of the tokens first. On a CPU
    a token's result does not depend on the other tokens: the sum of fp8 products is exact, and
    tokens are multiplied with int8 weights in multiples of 8.
    """
    flat = x.reshape(-1, x.shape[-1])
    if weight.layout == "fp8":
        values, scales = round_tokens(flat)
        sums = _sums(values, weight.values, exact=True).mul_(scales)
    else:
        sums = _sums(flat, weight.values, exact=False)
    out = sums.mul_(weight.scales)
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def _sums(x: Tensor, values: Tensor, *, exact: bool) -> Tensor:
    """Return x [M, K] times values [N, K]: [M, N] float32.

    Args:
        exact: sum in float64 on a CPU. A product of two e4m3 numbers is a multiple of 2^-18 below
            2^18, so float64 holds all sums of up to 2^17 of them exactly.
    """
    if x.device.type != "cpu":
        return x.float() @ values.float().t()
    wide = torch.float64 if exact else torch.float32
    lines, x = len(x), x.to(wide)
    if not exact:
        x = torch.nn.functional.pad(x, (0, 0, 0, -lines % _LINES))
    step = max(_CONVERTED // values.shape[1], 1)
    found = [(x @ part.to(wide).t())[:lines].float() for part in values.split(step)]
    return torch.cat(found, dim=-1)
