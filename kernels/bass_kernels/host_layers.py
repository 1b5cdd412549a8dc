"""The parts of a transformer layer on a CPU in float32, in the fewest calls for a decoding pass.

With one row a layer has some fifty microseconds of products, and a call of torch takes one to five.
The residual stream is therefore stored as (x, -x): its RMS norm is one layer norm, because its mean
is 0. Queries, keys and values are rotated together. What is computed is defined in reference.py.
The results of a token do not depend on the others of a pass, bit for bit. Not here: attention
(host.py), the order of the parts (bass_cli/models/fused_decode.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .grouped import Grouped
from .linear import linear
from .quantised import Weight


class Rotation(NamedTuple):
    """The rotary embedding of the tokens of a pass, for queries, keys and values.

    cos, sin: [M, H + 2K, D]. Values have cos 1 and sin 0.
    places: [D], for each dimension the one it is rotated with; None if that is half a head away.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor | None


def begin(embedded: Tensor) -> Tensor:
    """Return the residual stream of tokens [..., N] as pairs (x, -x), [M, 2, N] float32."""
    flat = embedded.reshape(-1, embedded.shape[-1])
    return torch.stack((flat, -flat), 1)


def rms_norm(pair: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Return the RMS norm of a residual stream [M, 2, N] times weight [N], in `out` [M, N] of any
    float dtype."""
    lines, _, size = pair.shape
    normed = torch.layer_norm(pair.view(lines, 2 * size), (2 * size,), eps=eps)
    return torch.mul(normed[:, :size], weight, out=out)


def add(pair: Tensor, x: Tensor) -> None:
    """Add x [M, N] of any float dtype to a residual stream [M, 2, N], in place."""
    pair.addcmul_(x.float()[:, None], _signs())


@functools.cache
def _signs() -> Tensor:
    return torch.tensor([[1.0], [-1.0]])


def inputs_of(weight: Weight, spare: dict[torch.dtype, Tensor]) -> Tensor:
    """Return the tensor of `spare` that has the dtype in which `product` reads its input."""
    return spare[torch.bfloat16 if isinstance(weight, Grouped) else torch.float32]


def product(x: Tensor, weight: Weight) -> Tensor:
    """Multiply x [M, K] by a matrix [N, K]: [M, N], in bfloat16 for a grouped one."""
    return weight.product(x) if isinstance(weight, Grouped) else linear(x, weight, None)


def rotation(angles: tuple[Tensor, Tensor], *, heads: int, kv_heads: int, size: int) -> Rotation:
    """Return the rotary embedding for angles: cos and sin [B, W, half], of which 2 half <= D."""
    half = angles[0].shape[-1]
    cos, sin = (part.reshape(-1, 1, half) for part in angles)
    cosines = torch.ones(len(cos), heads + 2 * kv_heads, size)
    sines = torch.zeros_like(cosines)
    cosines[:, : heads + kv_heads, : 2 * half] = cos.repeat(1, 1, 2)
    sines[:, : heads + kv_heads, : 2 * half] = torch.cat((-sin, sin), -1)
    if 2 * half == size:
        return Rotation(cosines, sines, None)
    places = torch.arange(size)
    places[: 2 * half] = places[: 2 * half].roll(half)
    return Rotation(cosines, sines, places)


def rotate(qkv: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the queries and keys of qkv [M, H + 2K, D]."""
    cos, sin, places = rotation
    half = qkv.shape[-1] // 2
    other = qkv.roll(half, -1) if places is None else qkv.index_select(-1, places)
    return torch.mul(qkv, cos).addcmul_(other, sin)


def norm_heads(qkv: Tensor, norms: tuple[Tensor, Tensor], kv_heads: int, eps: float) -> Tensor:
    """Norm the heads of q and k in qkv [M, H + 2K, D] with these weights [D]."""
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    normed = (
        torch.rms_norm(x, x.shape[-1:], weight, eps)
        for x, weight in zip((q, k), norms, strict=True)
    )
    return torch.cat((*normed, v), 1)


def write(qkv: Tensor, own: Tensor, slots: Tensor) -> Tensor:
    """Write the keys and values of qkv [M, H + 2K, D] to the private store of a layer, own
    [2, K, S, D], at slots [M]. Return the queries, [M, H, D]."""
    kv_heads = own.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    both = qkv[:, heads:].unflatten(1, (2, kv_heads))
    own.index_copy_(2, slots, both.permute(1, 2, 0, 3))
    return qkv[:, :heads]
