"""Triton: ops for training. Definitions: reference.py.

The distances keep logits in their dtype. A program reads a student's row and its target's row
twice, and the gradient overwrites the student's logits. Loads cover whole rows, so they are
vectorised if the row's width is a multiple of 16, for any `vocab`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Distances

_BLOCK = 4096
_FAR = tl.constexpr(-30000.0)  # below every logit, and finite in float16


def distances(
    student: Tensor, target: Tensor, rows: Tensor, tokens: Tensor, vocab: int
) -> Distances:
    """Do reference.distances."""
    count, width = student.shape
    found = torch.empty(6, count, dtype=torch.float32, device=student.device)
    assert student.stride(1) == target.stride(1) == 1
    assert target.shape[1] == width
    if count:
        _distances[(count,)](
            student, target, rows, tokens, found, count, vocab, width, student.stride(0),
            target.stride(0), BLOCK=_block(vocab), num_warps=8,
        )  # fmt: skip
    return Distances(*found)


def distance_gradient(
    student: Tensor, target: Tensor, rows: Tensor, found: Distances, slopes: Tensor, vocab: int
) -> None:
    """Do reference.distance_gradient."""
    count, width = student.shape
    if count:
        _distance_gradient[(count, triton.cdiv(width, _block(vocab)))](
            student, target, rows, found.below, found.q_norm, found.p_norm, slopes.contiguous(),
            count, vocab, width, student.stride(0), target.stride(0), BLOCK=_block(vocab),
            num_warps=8,
        )  # fmt: skip


def _block(vocab: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab))


@triton.jit
def _distances(
    q_ptr, p_ptr, target_row_ptr, token_ptr, found_ptr, count, vocab, width, q_stride,
    p_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: rows. The first pass over the vocabulary finds the normalisers and the divergence,
    the second one the overlap."""
    row = tl.program_id(0)
    q_ptr += row.to(tl.int64) * q_stride
    p_ptr += tl.load(target_row_ptr + row).to(tl.int64) * p_stride
    lane = tl.arange(0, BLOCK)
    # For each lane: the highest logit so far, the mass relative to it, and the sum of p (log p -
    # log q). The highest logit is finite from the first block on, because each lane of it holds a
    # valid id or _FAR.
    q_top, p_top = tl.full([BLOCK], -1e30, tl.float32), tl.full([BLOCK], -1e30, tl.float32)
    q_mass, p_mass = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    difference = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        stored, inside = first + lane < width, first + lane < vocab
        q = tl.load(q_ptr + first + lane, mask=stored, other=_FAR).to(tl.float32)
        p = tl.load(p_ptr + first + lane, mask=stored, other=_FAR).to(tl.float32)
        q, p = tl.where(inside, q, _FAR), tl.where(inside, p, _FAR)
        q_high, p_high = tl.maximum(q_top, q), tl.maximum(p_top, p)
        q_mass = q_mass * tl.exp(q_top - q_high)
        q_mass += tl.where(inside, tl.exp(q - q_high), 0.0)
        fade, mass = tl.exp(p_top - p_high), tl.where(inside, tl.exp(p - p_high), 0.0)
        p_mass = p_mass * fade + mass
        difference = difference * fade + tl.where(inside, mass * (p - q), 0.0)
        q_top, p_top = q_high, p_high
    q_peak, p_peak = tl.max(q_top, 0), tl.max(p_top, 0)
    fade = tl.exp(p_top - p_peak)
    total = tl.sum(p_mass * fade, 0)
    q_norm = q_peak + tl.log(tl.sum(q_mass * tl.exp(q_top - q_peak), 0))
    p_norm = p_peak + tl.log(total)
    divergence = tl.sum(difference * fade, 0) / total - p_norm + q_norm
    overlap, below = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        stored, inside = first + lane < width, first + lane < vocab
        q = tl.load(q_ptr + first + lane, mask=stored, other=_FAR).to(tl.float32) - q_norm
        p = tl.load(p_ptr + first + lane, mask=stored, other=_FAR).to(tl.float32) - p_norm
        overlap += tl.where(inside, tl.exp(tl.minimum(p, q)), 0.0)
        below += tl.where(inside & (q < p), tl.exp(q), 0.0)
    token = tl.load(token_ptr + row)
    q = tl.load(q_ptr + token).to(tl.float32) - q_norm
    p = tl.load(p_ptr + token).to(tl.float32) - p_norm
    tl.store(found_ptr + row, divergence)
    tl.store(found_ptr + count + row, tl.sum(overlap, 0))
    tl.store(found_ptr + 2 * count + row, tl.sum(below, 0))
    tl.store(found_ptr + 3 * count + row, q - p)
    tl.store(found_ptr + 4 * count + row, q_norm)
    tl.store(found_ptr + 5 * count + row, p_norm)


@triton.jit
def _distance_gradient(
    q_ptr, p_ptr, target_row_ptr, below_ptr, q_norm_ptr, p_norm_ptr, slope_ptr, count, vocab, width,
    q_stride, p_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q_ptr += row.to(tl.int64) * q_stride
    p_ptr += tl.load(target_row_ptr + row).to(tl.int64) * p_stride
    stored, inside = at < width, at < vocab
    q = tl.load(q_ptr + at, mask=stored, other=_FAR).to(tl.float32)
    p = tl.load(p_ptr + at, mask=stored, other=_FAR).to(tl.float32)
    q -= tl.load(q_norm_ptr + row)
    p -= tl.load(p_norm_ptr + row)
    mass = tl.exp(q)
    found = tl.load(slope_ptr + row) * (mass - tl.exp(p))
    step = tl.load(below_ptr + row) - tl.where(q < p, 1.0, 0.0)
    found += tl.load(slope_ptr + count + row) * mass * step
    found = tl.where(inside, found, 0.0)
    tl.store(q_ptr + at, found.to(q_ptr.dtype.element_ty), mask=stored)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Do reference.rotate, one program a token."""
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
    rotated, low = d < 2 * HALF, d < HALF
    own = tl.load(start + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + tl.where(low, d + HALF, d - HALF), mask=inside & rotated, other=0.0)
    angle = token * HALF + tl.where(low, d, d - HALF)
    cos = tl.load(cos_ptr + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=rotated, other=0.0)
    if BACK:
        sin = -sin
    found = own * cos + tl.where(low, -sin, sin) * other.to(tl.float32)
    at = out_ptr + (token * H + head) * D + d
    tl.store(at, found.to(out_ptr.dtype.element_ty), mask=inside)


def gate_gradient(x: Tensor, outer: Tensor) -> Tensor:
    """Do reference.gate_gradient."""
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
    outer = tl.load(outer_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + 2 * row * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + 2 * row * size + size + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dtype = found_ptr.dtype.element_ty
    activated = (gate * sigmoid).to(dtype).to(tl.float32)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(found_ptr + 2 * row * size + at, (outer * up * slope).to(dtype), mask=inside)
    tl.store(found_ptr + 2 * row * size + size + at, (outer * activated).to(dtype), mask=inside)
