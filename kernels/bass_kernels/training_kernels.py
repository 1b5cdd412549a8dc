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


def distances(own: Tensor, due: Tensor, of: Tensor, tokens: Tensor, vocab: int) -> Distances:
    """Do reference.distances."""
    found = torch.empty(6, len(own), dtype=torch.float32, device=own.device)
    assert own.stride(1) == due.stride(1) == 1
    assert own.shape[1] == due.shape[1]
    if len(own):
        _compare[(len(own),)](
            own, due, of, tokens, found, len(own), vocab, own.shape[1], own.stride(0),
            due.stride(0), BLOCK=_block(vocab), num_warps=8,
        )  # fmt: skip
    return Distances(*found)


def distance_gradient(
    own: Tensor, due: Tensor, of: Tensor, found: Distances, slopes: Tensor, vocab: int
) -> None:
    """Do reference.distance_gradient."""
    slopes = slopes.contiguous()
    if len(own):
        _differ[(len(own), triton.cdiv(own.shape[1], _block(vocab)))](
            own, due, of, found.below, found.own_norm, found.due_norm, slopes, len(own), vocab,
            own.shape[1], own.stride(0), due.stride(0), BLOCK=_block(vocab), num_warps=8,
        )  # fmt: skip


def _block(vocab: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab))


@triton.jit
def _compare(
    own_ptr, due_ptr, of_ptr, token_ptr, found_ptr, count, vocab, width, own_stride,
    due_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    guess = tl.program_id(0)
    own_ptr += guess.to(tl.int64) * own_stride
    due_ptr += tl.load(of_ptr + guess).to(tl.int64) * due_stride
    lane = tl.arange(0, BLOCK)
    # For each lane: the highest logit so far, the mass relative to it, and the sum of p (log p -
    # log q). The highest logit is finite from the first block on, because each lane of it holds a
    # valid id or _FAR.
    own_top, due_top = tl.full([BLOCK], -1e30, tl.float32), tl.full([BLOCK], -1e30, tl.float32)
    own_mass, due_mass = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    apart = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        there, inside = first + lane < width, first + lane < vocab
        q = tl.load(own_ptr + first + lane, mask=there, other=_FAR).to(tl.float32)
        p = tl.load(due_ptr + first + lane, mask=there, other=_FAR).to(tl.float32)
        q, p = tl.where(inside, q, _FAR), tl.where(inside, p, _FAR)
        own_high, due_high = tl.maximum(own_top, q), tl.maximum(due_top, p)
        own_mass = own_mass * tl.exp(own_top - own_high)
        own_mass += tl.where(inside, tl.exp(q - own_high), 0.0)
        fade, mass = tl.exp(due_top - due_high), tl.where(inside, tl.exp(p - due_high), 0.0)
        due_mass = due_mass * fade + mass
        apart = apart * fade + tl.where(inside, mass * (p - q), 0.0)
        own_top, due_top = own_high, due_high
    own_peak, due_peak = tl.max(own_top, 0), tl.max(due_top, 0)
    fade = tl.exp(due_top - due_peak)
    total = tl.sum(due_mass * fade, 0)
    own_norm = own_peak + tl.log(tl.sum(own_mass * tl.exp(own_top - own_peak), 0))
    due_norm = due_peak + tl.log(total)
    divergence = tl.sum(apart * fade, 0) / total - due_norm + own_norm
    overlap, below = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        there, inside = first + lane < width, first + lane < vocab
        q = tl.load(own_ptr + first + lane, mask=there, other=_FAR).to(tl.float32) - own_norm
        p = tl.load(due_ptr + first + lane, mask=there, other=_FAR).to(tl.float32) - due_norm
        overlap += tl.where(inside, tl.exp(tl.minimum(p, q)), 0.0)
        below += tl.where(inside & (q < p), tl.exp(q), 0.0)
    token = tl.load(token_ptr + guess)
    q = tl.load(own_ptr + token).to(tl.float32) - own_norm
    p = tl.load(due_ptr + token).to(tl.float32) - due_norm
    tl.store(found_ptr + guess, divergence)
    tl.store(found_ptr + count + guess, tl.sum(overlap, 0))
    tl.store(found_ptr + 2 * count + guess, tl.sum(below, 0))
    tl.store(found_ptr + 3 * count + guess, q - p)
    tl.store(found_ptr + 4 * count + guess, own_norm)
    tl.store(found_ptr + 5 * count + guess, due_norm)


@triton.jit
def _differ(
    own_ptr, due_ptr, of_ptr, below_ptr, own_norm_ptr, due_norm_ptr, slope_ptr, count, vocab, width,
    own_stride, due_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    guess = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own_ptr += guess.to(tl.int64) * own_stride
    due_ptr += tl.load(of_ptr + guess).to(tl.int64) * due_stride
    there, inside = at < width, at < vocab
    q = tl.load(own_ptr + at, mask=there, other=_FAR).to(tl.float32)
    p = tl.load(due_ptr + at, mask=there, other=_FAR).to(tl.float32)
    q -= tl.load(own_norm_ptr + guess)
    p -= tl.load(due_norm_ptr + guess)
    mass = tl.exp(q)
    found = tl.load(slope_ptr + guess) * (mass - tl.exp(p))
    step = tl.load(below_ptr + guess) - tl.where(q < p, 1.0, 0.0)
    found += tl.load(slope_ptr + count + guess) * mass * step
    found = tl.where(inside, found, 0.0)
    tl.store(own_ptr + at, found.to(own_ptr.dtype.element_ty), mask=there)


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
    due = tl.load(outer_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + 2 * row * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + 2 * row * size + size + at, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    dtype = found_ptr.dtype.element_ty
    passed = (gate * chance).to(dtype).to(tl.float32)
    slope = chance * (1.0 + gate * (1.0 - chance))
    tl.store(found_ptr + 2 * row * size + at, (due * up * slope).to(dtype), mask=inside)
    tl.store(found_ptr + 2 * row * size + size + at, (due * passed).to(dtype), mask=inside)
