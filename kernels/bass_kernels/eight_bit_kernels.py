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


def in_pairs(store: Store) -> Store:
    """Return a store whose numbers in eight bits are pairs of neighbours, [K, S, D / 2] int16."""
    if not is_eight_bit(store):
        return store
    return *(part.view(torch.int16) for part in store[:2]), *store[2:]


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
def decode_pairs(pairs, like, NATIVE: tl.constexpr):
    """Return the numbers at even places and at odd places, each like `decode`. `pairs`: int16, the
    bits of two neighbours, the first one in the low half."""
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
        odd = (pairs & -0x8000) | ((pairs & 0x7F00) >> 1)
        even = (even.to(tl.int16).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
        odd = (odd.to(tl.int16).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    return even.to(like.dtype), odd.to(like.dtype)


@triton.jit
def split_pairs(x):
    """Return the even and the odd places of x [M, D], each [M, D / 2]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def join_pairs(bits):
    """Return the bits of numbers [M, D] uint8 as pairs of neighbours [M, D / 2] int16."""
    even, odd = split_pairs(bits)
    return even.to(tl.int16) | (odd.to(tl.int16) << 8)


@triton.jit
def in_float16(q):
    """Return queries [M, D] of 16 bits as float16 times powers of two [M] float32. Queries in
    float32 stay as they are. No power is 0, because masked scores of -inf are multiplied by it.
    With the least one, scores are too small to change a weight."""
    if q.dtype == tl.float32:
        scales = tl.full([q.shape[0]], 1.0, tl.float32)
    else:
        wide = q.to(tl.float32)
        peak = tl.max(tl.abs(wide), 1, keep_dims=True).to(tl.int32, bitcast=True)
        exponent = tl.minimum(tl.maximum((peak >> 23) - 127, -64), 126)
        q, scales = (wide * power(-exponent)).to(tl.float16), tl.sum(power(exponent), 1)
    return q, scales
