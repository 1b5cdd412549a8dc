"""Triton: rotary embedding of whole tensors, and the gradient of a gated activation, each reading
and writing once. Definitions: trained.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Do trained.rotate, one program a token."""
    rows, width, heads, size = x.shape
    if x.stride(3) != 1 or x.stride(0) != width * x.stride(1):
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = x.new_empty(x.shape)
    if out.numel():
        _rotate[(rows * width,)](
            x, cos, sin, out, x.stride(1), x.stride(2),
            H=heads, D=size, HALF=cos.shape[-1], BACK=back,
            BLOCK_H=triton.next_power_of_2(heads), BLOCK_D=triton.next_power_of_2(size),
            num_warps=4 if heads * size > 512 else 1,
        )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, token_stride, head_stride, H: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BACK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (head < H) & (d < D)
    start = x_ptr + token * token_stride + head * head_stride
    turned, low = d < 2 * HALF, d < HALF
    own = tl.load(start + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + tl.where(low, d + HALF, d - HALF), mask=inside & turned, other=0.0)
    angle = token * HALF + tl.where(low, d, d - HALF)
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
    if BACK:
        sin = -sin
    found = own * cos + tl.where(low, -sin, sin) * other.to(tl.float32)
    at = out_ptr + (token * H + head) * D + d
    tl.store(at, found.to(out_ptr.dtype.element_ty), mask=inside)


def gate_gradient(x: Tensor, outer: Tensor) -> Tensor:
    """Do trained.gate_gradient."""
    x, outer = x.contiguous(), outer.contiguous()
    found, size = torch.empty_like(x), outer.shape[-1]
    block = min(1024, triton.next_power_of_2(size))
    if outer.numel():
        _gate_gradient[(outer.numel() // size, triton.cdiv(size, block))](
            x, outer, found, size, BLOCK=block, num_warps=4
        )
    return found


@triton.jit
def _gate_gradient(x_ptr, outer_ptr, found_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    due = tl.load(outer_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + 2 * row * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + 2 * row * size + size + at, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    dtype = found_ptr.dtype.element_ty
    passed = (gate * chance).to(dtype).to(tl.float32)
    slope = chance * (1.0 + gate * (1.0 - chance))
    tl.store(found_ptr + 2 * row * size + at, (due * up * slope).to(dtype), mask=inside)
    tl.store(found_ptr + 2 * row * size + size + at, (due * passed).to(dtype), mask=inside)
