"""Ops for training only: rotary embedding of whole tensors, and the gradient of a gated activation.

This file is the definition in plain torch; trained_kernels.py has the Triton kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the first `size` dimensions of x [B, T, H, D] in pairs that are half of `size` apart.
    cos and sin: [B, T, 1, size / 2] float32. `back`: rotate by the opposite angle, for gradients.
    """
    half = cos.shape[-1]
    if back:
        sin = -sin
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


def gate_gradient(x: Tensor, outer: Tensor) -> Tensor:
    """Return the gradient of silu(gate) * up with respect to x [..., 2 I] (gate, then up), given
    the gradient `outer` [..., I] of the result."""
    gate, up = x.float().chunk(2, -1)
    due, chance = outer.float(), gate.sigmoid()
    slope = chance * (1.0 + gate * (1.0 - chance))
    passed = (gate * chance).to(x.dtype).float()
    return torch.cat((due * up * slope, due * passed), -1).to(x.dtype)
