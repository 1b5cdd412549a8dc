"""Keys and values in eight bits: e4m3 numbers with one scale for each token and head.

A stored token depends on its own key and value only, so neither later tokens nor rejected drafts
can change it. Here is the definition in plain torch. The Triton form, which the kernels that write
and read the store use, is in eight_bit_kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keys and values [K, S, D] each, in the model's dtype. In eight bits: uint8, which hold the bits of
# e4m3 numbers, and then the scales of keys and of values, [K, S] float16 each.
Store = tuple[Tensor, ...]

SCALE = 2  # bytes of a scale
LARGEST = 448.0  # of e4m3 (OCP 8-bit floating point, revision 1.0)
# Exponents of scales. A scale times 256 and a softmax weight must fit float16, in which the kernels
# multiply. So numbers beyond 2^6 * 448 = 28,672 are stored as 28,672.
LEAST_EXPONENT, MOST_EXPONENT = -22, 6


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., D], of any float dtype, to e4m3 numbers times a power of two.

    The scale is the smallest power of two with which the largest number fits e4m3. Multiplication
    by a power of two does not round. So dequantised numbers are exact in bfloat16 and float32.

    Returns:
        The bits of the numbers, [..., D] uint8, and scales [...] float16. If a number is not
        finite, it is stored as 0 and the scale is NaN.
    """
    x = x.float()
    found = x.nan_to_num(0.0, 0.0, 0.0)
    bits = found.abs().amax(-1).view(torch.int32)
    # float32 exponent of the largest number, one more if its mantissa is above that of LARGEST
    exponents = ((bits + 0x1FFFFF) >> 23) - (127 + 8)
    exponents = exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT)
    scales = ((exponents + 127) << 23).view(torch.float32)
    numbers = (found / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8), (scales + (x * 0).sum(-1)).half()


def dequantise(bits: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers [..., D] of `quantise` in a float dtype.

    The bits are moved to float16's places, where the exponent is too small by 8. On a CPU this is
    four times as fast as torch's conversion."""
    wide = bits.to(torch.int16)
    small = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16)
    return small.to(dtype).mul_((scales.to(dtype) * 256)[..., None])


def is_eight_bit(store: Store) -> bool:
    """Return whether a store holds numbers in eight bits."""
    return len(store) > 2


def plain(
    keys: Tensor, values: Tensor, *scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a store, or of a part of it, [..., D] each. Those in eight bits are
    dequantised to `dtype`."""
    if not scales:
        return keys, values
    return dequantise(keys, scales[0], dtype), dequantise(values, scales[1], dtype)


def write(store: Store, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [K, ..., D] at `slots` [...] of a store."""
    if is_eight_bit(store):
        (keys, key_scales), (values, value_scales) = quantise(keys), quantise(values)
        store[2][:, slots], store[3][:, slots] = key_scales, value_scales
    store[0][:, slots], store[1][:, slots] = keys, values
