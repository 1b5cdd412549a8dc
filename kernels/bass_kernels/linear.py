"""Linear maps of a transformer block, alone and together with the ops around them.

On a CPU in float32, weights are packed once: oneDNN's packed layout reads a weight matrix two to
three times as fast as the plain layout if x has few rows, as in decoding. On a GPU, a launch of
linear_kernels.py replaces the library's product and the separate ops where that is faster.
Products with quantised weights are launches of quantised_products.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import dispatch, grouped, host, quantised, reference
from .grouped import Grouped
from .quantised import Quantised, Weight
from .segments import Store

# Elements of a weight from which its packed product is faster. The packed product takes some 45 us
# to start, in which a plain one reads a weight of this size from a processor's own cache.
_PACKED = 1 << 16

_norm = dispatch.by_device(reference.norm, "bass_kernels.pointwise")
_activation = dispatch.by_device(reference.activation, "bass_kernels.pointwise")
_rope_write = dispatch.by_device(host.rope_write, "bass_kernels.pointwise")
_quantised = dispatch.by_device(quantised.linear, "bass_kernels.quantised_products")

Affine = tuple[Tensor, Tensor | None]  # weight and bias
Map = tuple[Weight, Tensor | None]  # the same of a matrix


def pack(weight: Tensor) -> Tensor:
    """Return the weight [N, K] in the layout that `linear` reads fastest on its device: an opaque
    packed tensor, or the same tensor."""
    here = (
        weight.numel() >= _PACKED
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and dispatch.kind_for(weight) == "reference"
    )
    if not here or not _packing_works():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight is in the opaque layout of `pack`."""
    return weight.layout is not torch.strided


def unpack(weight: Tensor) -> Tensor:
    """Return a weight [N, K] of `pack` in the plain layout, with the same numbers."""
    return weight.to_dense() if is_packed(weight) else weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Multiply x [..., K] by a weight [N, K], which may be packed, quantised or grouped, and add
    bias [N]: [..., N].

    The result has x's dtype, or that of a plain weight: x is bfloat16 after a grouped matrix.
    """
    if isinstance(weight, Quantised):
        return _quantised(x, weight, bias)
    if isinstance(weight, Grouped):
        return grouped.linear(x, weight, bias)
    x = x.to(weight.dtype)
    if weight.layout is torch.strided:
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    lines = len(flat)
    if lines == 1 and weight.shape[1] > weight.shape[0]:
        # oneDNN sums a single line over many columns in another order than lines beside others
        flat = flat.repeat(2, 1)
    out = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out[:lines].view(*x.shape[:-1], -1)


def logits(x: Tensor, head: Weight, bias: Tensor | None) -> Tensor:
    """Do `linear` with a head, whose product with int8 weights has a launch of its own."""
    if isinstance(head, Quantised) and head.layout == "int8" and dispatch.kind_for(x) == "triton":
        from . import head_kernels

        return head_kernels.logits(x, head, bias)
    return linear(x, head, bias)


def project(
    residual: Tensor,
    norm: Affine | None,
    qkv: Map,
    angles: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    own: Store,
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kind: str,
    gated: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Normalise the residual stream [B, W, N] (if there is a norm), multiply it by the query, key
    and value weights, and do `rope_write`.

    `norms` of H D and K D weights instead of D norm all heads of q and of k as one vector.

    Args:
        gated: whether the H D rows of a gate come before the query weights.

    Returns: q [B, W, H, D], and the gate [B, W, H D] or None.
    """
    product, gate = _norm_linear(residual, norm, *qkv, eps, kind), None
    if gated:
        size = heads * own[0].shape[-1]
        gate, product = product.split((size, product.shape[-1] - size), -1)
    if norms is not None and norms[0].numel() != own[0].shape[-1]:
        product, norms = _norm_wide(product, norms, eps), None
    return _rope_write(product, angles, slots, own, heads=heads, norms=norms, eps=eps), gate


def _norm_linear(
    residual: Tensor,
    norm: Affine | None,
    weight: Weight,
    bias: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    if isinstance(weight, Quantised) and dispatch.kind_for(residual) == "triton":
        from . import quantised_products

        return quantised_products.norm_linear(residual, norm, weight, bias, eps=eps, kind=kind)
    return linear(_normed(residual, norm, eps, kind), weight, bias)


def _normed(residual: Tensor, norm: Affine | None, eps: float, kind: str) -> Tensor:
    if norm is None:
        return residual
    found: Tensor = _norm(None, residual, *norm, eps=eps, kind=kind)[0]
    return found


def _norm_wide(qkv: Tensor, norms: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Norm the queries and the keys of qkv [..., (H + 2K) D] as one vector each (RMS)."""
    sizes = [weight.numel() for weight in norms]
    parts = qkv.split((*sizes, sizes[1]), dim=-1)
    normed = (
        _norm(None, part, weight, None, eps=eps, kind="rms")[0]
        for part, weight in zip(parts, norms, strict=False)
    )
    return torch.cat((*normed, parts[2]), dim=-1)


def norm_up(
    residual: Tensor,
    norm: Affine | None,
    up: Map,
    *,
    eps: float,
    kind: str,
    activation: str,
    gated: bool,
) -> Tensor:
    """Normalise the residual stream [..., N] (if there is a norm), multiply it by `up` and apply
    the activation: [..., inner]."""
    weight, bias = up
    if isinstance(weight, Grouped) and bias is None:  # the next product takes bfloat16 too
        normed = _normed(residual, norm, eps, kind)
        inner = weight.product(normed.view(-1, normed.shape[-1]))
        inner = _activation(inner, activation, gated=gated)
        return inner.view(*residual.shape[:-1], -1)
    fused = gated and bias is None and dispatch.kind_for(residual) == "triton"
    if fused and isinstance(weight, Quantised):
        from . import quantised_products

        return quantised_products.norm_up(
            residual, norm, weight, eps=eps, kind=kind, activation=activation
        )
    normed = _normed(residual, norm, eps, kind)
    if fused and isinstance(weight, Tensor):
        from . import linear_kernels

        if linear_kernels.gates(residual.numel() // residual.shape[-1], weight):
            return linear_kernels.gate_up(normed, weight, activation=activation)
    return _activation(linear(normed, weight, bias), activation, gated=gated)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x W^T + bias, [..., N]. The residual may be overwritten."""
    if isinstance(weight, Grouped) and bias is None:
        residual.view(-1, residual.shape[-1]).add_(weight.product(x.reshape(-1, x.shape[-1])))
        return residual
    if isinstance(weight, Grouped) or dispatch.kind_for(x) == "reference":
        return residual + linear(x, weight, bias)
    if isinstance(weight, Quantised):
        from . import quantised_products

        return quantised_products.linear(x, weight, bias, residual)
    from . import linear_kernels

    if linear_kernels.streams(x.numel() // x.shape[-1], weight):
        return linear_kernels.stream(x, weight, bias, residual)
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    return residual if bias is None else residual.add_(bias)


def feed_forward(
    residual: Tensor,
    norm: Affine | None,
    up: Map,
    down: Map,
    *,
    eps: float,
    kind: str,
    activation: str,
    gated: bool,
) -> Tensor:
    """Do `norm_up`, and add its product with `down` to the residual stream [..., N], which may be
    overwritten."""
    first, (second, bias) = up[0], down
    fused = gated and up[1] is None and dispatch.kind_for(residual) == "triton"
    if fused and isinstance(first, Quantised) and isinstance(second, Quantised):
        from . import quantised_products

        return quantised_products.feed_forward(
            residual, norm, first, second, bias, eps=eps, kind=kind, activation=activation
        )
    inner = norm_up(residual, norm, up, eps=eps, kind=kind, activation=activation, gated=gated)
    return linear_add(inner, second, bias, residual)


@functools.cache
def _packing_works() -> bool:
    """Return whether this build of torch has the packed product and it gives the plain product's
    result."""
    weight, x = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.allclose(
            torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), x @ weight.T
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
