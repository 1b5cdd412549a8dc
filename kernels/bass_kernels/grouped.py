"""A weight matrix in groups of 32 numbers of 4 or 8 bits, each with scale and minimum, and its
product on a CPU.

GGUF files store such groups. torch's product of 4-bit groups reads them as they are. Numbers of 8
bits are two planes of 4 bits: v = 16 * high + low, and the product adds both. Scales, minima, the
activations and the product are bfloat16; sums and the weights themselves are float32. A token's
result does not depend on the number of tokens, which tests/kernels/test_grouped.py measures. Not
here: the blocks of a file (formats/gguf_blocks.py), weights in 8 bits by row (quantised.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

GROUP = 32
# torch packs rows in units of 16, so a matrix is padded to a multiple of it.
_UNIT = 16
# Rows that are packed at a time: torch packs int32. Its layout is one of blocks of 64 rows or less,
# so packed parts are put together.
_PACKED = 4096
# Processors for which torch has a vectorised product. Its plain one takes 25 times as long.
_CAPABLE = ("AVX2", "AVX512")


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix [N, K] on a CPU. Element = value * scale + minimum, with those of its group.

    Args:
        packed: torch's opaque layout of the planes side by side.
        scales: [planes * K / 32, N rounded up, 2] bfloat16, scale and minimum of each plane; for E
            matrices on each other [E, ...].
        shape: N and K, with the rows of all matrices.
    """

    packed: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, minima: Tensor, bits: int) -> Grouped:
        """Pack a matrix.

        Args:
            values: [N, K] int8 in [-8, 7] for 4 bits, or any for 8 bits.
            scales, minima: [N, K / 32] float32. They are rounded to bfloat16.
        """
        factors = torch.stack((scales, minima), -1)
        if bits == 8:
            high = torch.stack((16 * scales, torch.zeros_like(scales)), -1)
            factors = torch.cat((high, torch.stack((scales, minima + 8 * scales), -1)), 1)
        if len(values) % _UNIT:
            factors = torch.nn.functional.pad(factors, (0, 0, 0, 0, 0, -len(values) % _UNIT))
        parts = [_pack(part, bits) for part in values.split(_PACKED)]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return cls(packed, factors.transpose(0, 1).contiguous().bfloat16(), tuple(values.shape))

    @classmethod
    def stack(cls, parts: Sequence[Grouped]) -> Grouped:
        """Put matrices of one shape on each other, such as those of experts. They can be multiplied
        one by one (`rows`)."""
        shape = len(parts) * len(parts[0]), parts[0].shape[1]
        packed = torch.cat([part.packed for part in parts])
        return cls(packed, torch.stack([part.scales for part in parts]), shape)

    layout: ClassVar[str] = "file"

    def __len__(self) -> int:
        return self.shape[0]

    @staticmethod
    def bytes_of(shape: tuple[int, ...], bits: int = 8) -> int:
        """Return the bytes of a matrix of this shape in 4 or 8 bits, without the rows that are
        padded."""
        planes = bits // 4
        return planes * math.prod(shape) * (GROUP // 2 + 2 * torch.bfloat16.itemsize) // GROUP

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def dequantise(self) -> Tensor:
        """Return the matrix, [N, K] float32, each number rounded to bfloat16."""
        if self.scales.dim() == 4:
            every = len(self) // len(self.scales)
            firsts = range(0, len(self), every)
            return torch.cat([self.rows(first, first + every).dequantise() for first in firsts])
        return self.product(torch.eye(self.shape[1])).t().float()

    def first_rows(self, rows: int | None) -> Grouped:
        """Return the first rows of the matrix, in the same memory. Default: all."""
        return Grouped(self.packed, self.scales, (min(rows or len(self), len(self)), self.shape[1]))

    def rows(self, first: int, last: int) -> Grouped:
        """Return rows `first` to `last` - 1, which are one of the stacked matrices, in the same
        memory."""
        every = len(self) // len(self.scales)
        assert self.scales.dim() == 4
        assert first % every == 0
        assert last == first + every
        number, padded = first // every, len(self.packed) // len(self.scales)
        packed = self.packed[number * padded : (number + 1) * padded]
        return Grouped(packed, self.scales[number], (every, self.shape[1]))

    def product(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] of any float dtype by the matrix: [M, N] bfloat16."""
        x = x.bfloat16().contiguous()
        rows, width = self.shape
        if self.scales.shape[0] * GROUP > width:
            x = torch.cat((x, x), 1)
        found = torch._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales)
        return found if found.shape[1] == rows else found[:, :rows]


def _pack(values: Tensor, bits: int) -> Tensor:
    """Return rows of int8 values in torch's layout, with the planes side by side."""
    planes = values + 8 if bits == 4 else torch.cat(((values >> 4) + 8, values & 15), 1)
    if len(values) % _UNIT:
        planes = torch.nn.functional.pad(planes, (0, 0, 0, -len(values) % _UNIT))
    return torch._convert_weight_to_int4pack_for_cpu(planes.int(), 1)


def linear(x: Tensor, weight: Grouped, bias: Tensor | None) -> Tensor:
    """Multiply x [..., K] by a weight [N, K] and add bias [N]: [..., N] in x's dtype."""
    out = weight.product(x.reshape(-1, x.shape[-1])).to(x.dtype)
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


@functools.cache
def grouped_works() -> bool:
    """Return whether this build of torch has a fast product of 4-bit groups for this processor,
    and its result is right."""
    if torch.backends.cpu.get_cpu_capability() not in _CAPABLE:
        return False
    values = (torch.arange(32 * 64) % 256 - 128).to(torch.int8).view(32, 64)
    scales, minima = torch.ones(32, 2), torch.arange(64.0).view(32, 2)
    x = torch.arange(3 * 64).view(3, 64) % 5 - 2.0
    wanted = x @ (values.float() + minima.repeat_interleave(GROUP, 1)).t()
    try:
        found = Grouped.of(values, scales, minima, 8).product(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(found.float(), wanted, rtol=2**-7, atol=1.0)
