"""Ops that only training needs: rotary embedding of whole tensors, and what a gated activation
passes back.

Here in plain torch, which defines them; trained_kernels.py has their Triton forms.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x [B, T, H, D], its first dimensions turned in pairs half of `size` apart; cos and sin
    [B, T, 1, size / 2] float32. `back`: by the opposite angle, as gradients are."""
    half = cos.shape[-1]
    if back:
        sin = -sin
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


def gate_gradient(x: Tensor, outer: Tensor) -> Tensor:
    """Of silu(gate) * up, x [..., 2 I] being gate, then up: what reaches x of `outer` [..., I]."""
    gate, up = x.float().chunk(2, -1)
    due, chance = outer.float(), gate.sigmoid()
    slope = chance * (1.0 + gate * (1.0 - chance))
    passed = (gate * chance).to(x.dtype).float()
    return torch.cat((due * up * slope, due * passed), -1).to(x.dtype)
