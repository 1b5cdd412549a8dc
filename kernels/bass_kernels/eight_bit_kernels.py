"""Triton: the parts of kernels that write and read keys and values in eight bits. Definition:
segments.py.

Numbers are written with integer operations, because Triton has no e4m3 below compute capability
8.9. They are read as float16, which holds them exactly, and multiplied as float16. So queries of
16 bits become float16 too, with a power of two for each query that keeps them within its range.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import card
from .segments import Store, is_eight_bit


def arguments(*stores: Store) -> tuple[Tensor | int | None, ...]:
    """Return the launch arguments for stores of one form: the keys and values of each store, the
    scales of keys and of values of each, and how far the scales of two heads are apart in each.
    None in place of scales if not in eight bits."""
    numbers = [part for store in stores for part in store[:2]]
    if not is_eight_bit(stores[0]):
        return (*numbers, *(None,) * (3 * len(stores)))
    scales = [part for store in stores for part in store[2:]]
    assert all(part.stride(1) == 1 for part in scales)
    return (*numbers, *scales, *(store[2].stride(0) for store in stores))


def converts(device: torch.device) -> bool:
    """Return whether a device has instructions that convert e4m3 numbers."""
    return device.type == "cuda" and card(device).capability >= (8, 9)


@triton.jit
def power(exponent):
    """Return 2^exponent in float32, for exponents of -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(x):
    """Do segments.quantise for x [..., D] float32. Returns bits [..., D] uint8 and scales
    [..., 1] float32."""
    bad = tl.sum(x * 0, -1, keep_dims=True)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    sign, size = (x.to(tl.int32, bitcast=True) >> 24) & 0x80, tl.abs(x)
    peak = tl.max(size, -1, keep_dims=True).to(tl.int32, bitcast=True)
    exponent = ((peak + 0x1FFFFF) >> 23) - 135
    exponent = tl.minimum(tl.maximum(exponent, -22), 6)
    size = tl.minimum(size * power(-exponent), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # to three bits of mantissa, ties to even, and from float32's bias of 127 to 7
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below the smallest normal number: multiples of 2^-9, the last place of float32 numbers at 2^14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (code | sign).to(tl.uint8), power(exponent) + bad


@triton.jit
def decode(bits, like, NATIVE: tl.constexpr):
    """Return the numbers of `encode`'s bits, without scales, in the dtype of `like`: float16 or
    float32. NATIVE: whether the device converts."""
    if NATIVE:
        found = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # e4m3's exponent in float16's place is too small by 8
        wide = bits.to(tl.uint16)
        wide = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        found = (wide.to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    return found.to(like.dtype)


@triton.jit
def in_float16(q):
    """Return queries [M, D] of 16 bits as float16 times powers of two [M, 1] float32. Queries in
    float32 stay as they are."""
    if q.dtype == tl.float32:
        scales = tl.full([q.shape[0], 1], 1.0, tl.float32)
    else:
        wide = q.to(tl.float32)
        peak = tl.max(tl.abs(wide), 1, keep_dims=True).to(tl.int32, bitcast=True)
        exponent = tl.minimum((peak >> 23) - 127, 126)
        q, scales = (wide * power(-exponent)).to(tl.float16), power(exponent)
    return q, scales


@triton.jit
def load_scales(scale_ptr, place, inside):
    """Load the scales [N] at these places as float32; None without scales. `inside`: mask, None for
    all."""
    scales = None
    if scale_ptr is not None:
        if inside is None:
            scales = tl.load(scale_ptr + place).to(tl.float32)
        else:
            scales = tl.load(scale_ptr + place, mask=inside, other=0.0).to(tl.float32)
    return scales
