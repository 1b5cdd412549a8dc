"""The quantised blocks of GGUF, as groups of whole numbers with a scale and a minimum each.

`dequantise` is bit for bit the gguf package's numpy code: every product and sum is rounded as
there, and none is fused. Layouts: ggml-common.h of llama.cpp. Not here: reading blocks
(tensor_content.py), products with them (kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice e2m1's values
_SCALES = 12  # bytes of the sixteen packed 6-bit scales and minima of Q4_K and Q5_K


class Groups(NamedTuple):
    """Consecutive elements that share a scale. An element is value * scale + minimum.

    values: [n, groups, size] uint8 or int8.
    scales, minima: [n, groups, 1] float32. minima is None if all are 0.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def floats(self) -> Tensor:
        """Return the elements, [n, groups * size] float32."""
        found = self.values.float().mul_(self.scales)
        return (found if self.minima is None else found.add_(self.minima)).flatten(1)


def groups_of(raw: Tensor, dtype: str) -> Groups:
    """Return the groups of contiguous rows of whole blocks [n, bytes] uint8."""
    size, decode = BLOCKS[dtype]
    found = decode(raw.reshape(-1, size))
    parts = (None if part is None else part.reshape(len(raw), -1, part.shape[-1]) for part in found)
    return Groups(*parts)  # type: ignore[arg-type]


def dequantise(raw: Tensor, dtype: str) -> Tensor:
    """Convert contiguous rows of whole blocks [n, bytes] uint8 to [n, elements] float32."""
    return groups_of(raw, dtype).floats()


def fields(packed: Tensor, width: int, run: int) -> Tensor:
    """Unpack fields of `width` bits, [n, bytes] uint8 to [n, bytes / run, 8 / width, run]. Of every
    `run` bytes first all lowest fields, then all next ones."""
    groups = packed.reshape(len(packed), -1, 1, run)
    shifts = range(0, 8, width)
    found = torch.cat([groups >> shift for shift in shifts], dim=2)
    return found.bitwise_and_((1 << width) - 1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of every block, as float32 [n, 1, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float().unsqueeze(2)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack fields of four bits to [n, 2 * bytes], in the order of `fields`."""
    groups = packed.reshape(len(packed), -1, 1, run)
    return torch.cat([groups & 15, groups >> 4], dim=2).flatten(1)


def _flags(packed: Tensor) -> Tensor:
    """Unpack single bits to [n, 8 * bytes], byte by byte, the lowest first."""
    return fields(packed, 1, 1).flatten(1)


def _signed(values: Tensor, offset: int, size: int) -> Tensor:
    """Return uint8 values [n, elements] less `offset`, as int8 groups [n, groups, size]."""
    return values.view(torch.int8).sub_(offset).view(len(values), -1, size)


def _sub_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima, float32 [n, 8, 1] each. They are six-bit values in the
    twelve bytes after two float16, which they are multiplied by."""
    packed = blocks[:, 4 : 4 + _SCALES].clone(memory_format=torch.contiguous_format)
    words = packed.view(torch.int32)
    first, both = words[:, :2], words[:, 2:]  # four bytes at a time
    low = first & 0x3F3F3F3F
    high = (torch.cat([both, both >> 4], 1) & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    whole = torch.stack([low, high], 2).view(torch.uint8).float()
    scales, minima = (whole * blocks[:, :4].view(torch.float16).float()[..., None]).unbind(1)
    return scales.unsqueeze(2), minima.neg_().unsqueeze(2)


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_signed(_nibbles(blocks[:, 2:], 16), 8, 32), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:], 16)[:, None], _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    values = _nibbles(blocks[:, 6:], 16) | (_flags(blocks[:, 2:6]) << 4)
    return Groups(_signed(values, 16, 32), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    values = _nibbles(blocks[:, 8:], 16) | (_flags(blocks[:, 4:8]) << 4)
    return Groups(values[:, None], _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, None, 2:].view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Groups:
    packed, values = blocks[:, :16, None], fields(blocks[:, 16:80], 2, 32)
    scales = _half(blocks, 80) * (packed & 15).float()
    minima = _half(blocks, 82) * (packed >> 4).float()
    return Groups(values.view(-1, 16, 16), scales, minima.neg_())


def _q3_k(blocks: Tensor) -> Groups:
    missing = fields(blocks[:, :32], 1, 32).view(-1, 256) ^ 1  # a bit that is set takes nothing off
    values = fields(blocks[:, 32:96], 2, 32).view(-1, 256) - missing.mul_(4)  # wraps, as int8 does
    low = _nibbles(blocks[:, 96:104], 8)
    high = fields(blocks[:, 104:108], 2, 4).view(-1, 16)
    scales = _half(blocks, 108) * ((low | (high << 4)).float() - 32)[..., None]
    return Groups(values.view(torch.int8).view(-1, 16, 16), scales)


def _q4_k(blocks: Tensor) -> Groups:
    values = _nibbles(blocks[:, 4 + _SCALES :], 32).view(-1, 8, 32)
    return Groups(values, *_sub_scales(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    high = fields(blocks[:, 16:48], 1, 32).view(-1, 256)
    values = (_nibbles(blocks[:, 48:], 32) | (high << 4)).view(-1, 8, 32)
    return Groups(values, *_sub_scales(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    high = fields(blocks[:, 128:192], 2, 32).view(-1, 256)
    values = _nibbles(blocks[:, :128], 64) | (high << 4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()[..., None]
    return Groups(_signed(values, 32, 16), scales)


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(_looked_up(_nibbles(blocks[:, 2:], 16), _IQ4)[:, None], _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    low = fields(blocks[:, 4:8], 4, 1).flatten(1)
    high = fields(blocks[:, 2:4], 2, 1).flatten(1)
    scales = _half(blocks, 0) * ((low | (high << 4)).float() - 32)[..., None]
    return Groups(_looked_up(_nibbles(blocks[:, 8:], 16), _IQ4).view(-1, 8, 32), scales)


def _mxfp4(blocks: Tensor) -> Groups:
    exponents = blocks[:, :1].int()  # the scale is 2^(exponent - 128), perhaps subnormal
    bits = torch.where(exponents < 2, (1 << 21) << exponents.clamp(max=1), (exponents - 1) << 23)
    values = _looked_up(_nibbles(blocks[:, 1:], 16), _MXFP4)
    return Groups(values[:, None], bits.view(torch.float32)[..., None])


def _looked_up(places: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int8, device=places.device)[places.int()]


# By the name of a type: bytes of a block, and what decodes blocks [n, bytes].
BLOCKS: dict[str, tuple[int, Callable[[Tensor], Groups]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
}
QUANTISED = tuple(BLOCKS)
