"""Dequantise blocks of GGUF files to float32 in plain torch, on any device.

The result is bit for bit that of the gguf package's numpy code: every product and sum is rounded
as there, and none is fused. Layouts: ggml-common.h of llama.cpp. Not here: reading
(tensor_content.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SCALES = 12  # bytes of the sixteen packed 6-bit scales and minima of Q4_K and Q5_K


def dequantise(raw: Tensor, dtype: str) -> Tensor:
    """Convert contiguous rows of whole blocks [n, bytes] uint8 to [n, elements] float32."""
    size, decode = _KINDS[dtype]
    return decode(raw.view(-1, size)).view(len(raw), -1)


def block_bytes(dtype: str) -> int:
    """Return the bytes of a block of this type."""
    return _KINDS[dtype][0]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _bits(packed: Tensor, width: int, run: int) -> Tensor:
    """Unpack fields of `width` bits, [n, bytes] uint8 to [n, bytes / run, 8 / width, run]. Of every
    `run` bytes first all lowest fields, then all next ones."""
    groups = packed.reshape(len(packed), -1, 1, run)
    shifts = range(0, 8, width)
    fields = torch.cat([groups >> shift for shift in shifts], dim=2)
    return fields.bitwise_and_((1 << width) - 1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack fields of four bits to [n, 2 * bytes], in the order of `_bits`."""
    groups = packed.reshape(len(packed), -1, 1, run)
    return torch.cat([groups & 15, groups >> 4], dim=2).flatten(1)


def _flags(packed: Tensor) -> Tensor:
    """Unpack single bits to [n, 8 * bytes], byte by byte, the lowest first."""
    return _bits(packed, 1, 1).flatten(1)


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
    return scales.unsqueeze(2), minima.unsqueeze(2)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:], 16) | (_flags(blocks[:, 2:6]) << 4)
    return values.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:], 16) | (_flags(blocks[:, 4:8]) << 4)
    return values.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    packed, values = blocks[:, :16], _bits(blocks[:, 16:80], 2, 32)
    scales = (_half(blocks, 80) * (packed & 15).float()).unsqueeze(2)
    minima = (_half(blocks, 82) * (packed >> 4).float()).unsqueeze(2)
    return values.view(-1, 16, 16).float().mul_(scales).sub_(minima)


def _q3_k(blocks: Tensor) -> Tensor:
    missing = _bits(blocks[:, :32], 1, 32).view(-1, 256) ^ 1  # a bit that is set takes nothing off
    values = _bits(blocks[:, 32:96], 2, 32).view(-1, 256) - missing.mul_(4)  # wraps, as int8 does
    low = _nibbles(blocks[:, 96:104], 8)
    high = _bits(blocks[:, 104:108], 2, 4).view(-1, 16)
    scales = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    return values.view(torch.int8).float().view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _sub_scales(blocks)
    values = _nibbles(blocks[:, 4 + _SCALES :], 32).view(-1, 8, 32).float()
    return values.mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _sub_scales(blocks)
    high = _bits(blocks[:, 16:48], 1, 32).view(-1, 256)
    values = (_nibbles(blocks[:, 48:], 32) | (high << 4)).view(-1, 8, 32).float()
    return values.mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks[:, 128:192], 2, 32).view(-1, 256)
    values = (_nibbles(blocks[:, :128], 64) | (high << 4)).float().sub_(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return values.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _looked_up(_nibbles(blocks[:, 2:], 16)) * _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 4:8], 4, 1).flatten(1)
    high = _bits(blocks[:, 2:4], 2, 1).flatten(1)
    scales = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return _looked_up(_nibbles(blocks[:, 8:], 16)).view(-1, 8, 32) * scales.unsqueeze(2)


def _looked_up(places: Tensor) -> Tensor:
    table = torch.tensor(_IQ4, dtype=torch.float32, device=places.device)
    return table[places.int()]


# By the name of a type: bytes of a block, and what decodes blocks [n, bytes].
_KINDS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
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
}
QUANTISED = tuple(_KINDS)
