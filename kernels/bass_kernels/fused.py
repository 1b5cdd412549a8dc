"""Linear maps of a transformer block together with the ops around them: the library's products and
separate ops, or one launch of skinny.py or gated.py where that is faster."""

from __future__ import annotations

from torch import Tensor

from . import dispatch, reference
from .linear import linear

_norm = dispatch.by_device(reference.norm, "bass_kernels.pointwise")
_activation = dispatch.by_device(reference.activation, "bass_kernels.pointwise")
_rope_write = dispatch.by_device(reference.rope_write, "bass_kernels.pointwise")

Affine = tuple[Tensor, Tensor | None]  # weight and bias


def project(
    residual: Tensor,
    norm: Affine,
    qkv: Affine,
    angles: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    own: tuple[Tensor, Tensor],
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kind: str,
) -> Tensor:
    """Normalise the residual stream [B, W, N], multiply it by the query, key and value weights, and
    do `rope_write`. Returns q [B, W, H, D]."""
    return _rope_write(
        linear(_norm(None, residual, *norm, eps=eps, kind=kind)[0], *qkv),
        angles,
        slots,
        own,
        heads=heads,
        norms=norms,
        eps=eps,
    )


def norm_up(
    residual: Tensor,
    norm: Affine,
    up: Affine,
    *,
    eps: float,
    kind: str,
    activation: str,
    gated: bool,
) -> Tensor:
    """Normalise the residual stream [..., N], multiply it by `up` and apply the activation: [...,
    inner]."""
    normed, (weight, bias) = _norm(None, residual, *norm, eps=eps, kind=kind)[0], up
    if gated and bias is None and dispatch.kind_for(residual) == "triton":
        from .gated import gate_up, serves

        if serves(residual.numel() // residual.shape[-1], weight):
            return gate_up(normed, weight, activation=activation)
    return _activation(linear(normed, weight, bias), activation, gated=gated)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x W^T + bias, [..., N]. The residual may be overwritten."""
    if dispatch.kind_for(x) == "reference":
        return residual + linear(x, weight, bias)
    from . import skinny

    if skinny.serves(x.numel() // x.shape[-1], weight):
        return skinny.stream(x, weight, bias, residual)
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    return residual if bias is None else residual.add_(bias)
