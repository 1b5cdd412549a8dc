"""Products of many tokens in e4m3 with e4m3 weights, on Hopper (quantised_products.py).

torch's product has two forms. Scaled by rows it always multiplies tiles of 128 by 128, which leave
many processors idle if the weight has few rows. Without scales it has other tiles, and splits the
depth; then a launch here applies scales and adds the residual stream. Gate and up are multiplied by
a kernel of ours, which stores half as much.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from . import quantised_kernels as kernels
from .launch import card, overlap, processors
from .pointwise import KINDS
from .quantised import Quantised

try:
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        raise ImportError("Before Triton 3.6 warp_specialize takes other arguments.")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import wide_kernels as wide
except ImportError:
    wide = None  # type: ignore[assignment]

_TOKENS = 64  # with more, products are faster here
# The library multiplies blocks of so many tokens. On an H100 the layers of an 8B take it 20 %
# longer for 448 tokens than for 512, so tokens are padded to whole blocks.
BLOCK = 128
_STAGES = 6  # buffers of gate and up: as many as fit into 227 KB
_COLUMNS = 1024  # of a program that adds a product to the residual stream


def supports(x: Tensor, weight: Quantised) -> bool:
    """Return whether to multiply x [..., K] here. The library takes matrices of whole blocks of 16
    and gives bfloat16.

    One H100, microseconds of the four products of a 7B's layer, here / by rows alone / by
    quantised_products: 128 tokens 117 / 143 / 152, 256 tokens 133 / 149. It was not measured on
    other generations of GPUs.
    """
    return (
        x.shape[:-1].numel() > _TOKENS
        and weight.layout == "fp8"
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and card(x.device).capability[0] == 9
        and not any(size % 16 for size in weight.shape)
    )


def linear(
    x: Tensor, scales: Tensor, weight: Quantised, bias: Tensor | None, *, count: int
) -> Tensor:
    """Return x W^T + bias, [count, N] bfloat16, for rounded tokens x [at least count, K] and their
    scales."""
    found = torch._scaled_mm(
        x,
        weight.values.t(),
        scale_a=scales[:, None],
        scale_b=weight.scales[None],
        bias=bias,
        out_dtype=torch.bfloat16,
    )
    return found[:count]


def linear_add(
    x: Tensor, scales: Tensor, weight: Quantised, bias: Tensor | None, residual: Tensor
) -> Tensor:
    """Return residual + x W^T + bias, in the shape of `residual` [..., N]. The residual may be
    overwritten. x, scales: see `linear`. That form multiplies if its tiles fill all processors
    twice, because sums in float32 take more memory."""
    residual = residual.contiguous()
    count, lines, unit = residual.shape[:-1].numel(), len(weight), _unit(x.device)
    if triton.cdiv(count, BLOCK) * triton.cdiv(lines, BLOCK) > 2 * processors(x.device):
        return residual.add_(linear(x, scales, weight, bias, count=count).view(residual.shape))
    sums = torch._scaled_mm(
        x, weight.values.t(), scale_a=unit, scale_b=unit, out_dtype=torch.float32
    )
    kernels.add_product_kernel[(count, triton.cdiv(lines, _COLUMNS))](
        sums,
        scales,
        weight.scales,
        residual if bias is None else bias,
        residual,
        lines,
        BIAS=bias is not None,
        BLOCK=_COLUMNS,
        num_warps=4,
        **overlap(True, x.device),
    )
    return residual


@functools.cache
def _unit(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def gates() -> bool:
    """Return whether this Triton has what `gate_up` needs."""
    return wide is not None


def gate_up(x: Tensor, scales: Tensor, weight: Quantised, *, count: int, activation: str) -> Tensor:
    """Return activation(x G^T) * (x U^T), [count, N] bfloat16, for G above U. x, scales: see
    `linear`."""
    size, depth = len(weight) // 2, weight.shape[1]
    out = torch.empty(count, size, dtype=torch.bfloat16, device=x.device)
    programs = processors(x.device)  # though there may be fewer tiles, for one compiled form
    wide.gate_up_kernel[(programs,)](
        _described(x, wide.TOKENS),
        _described(weight.values, wide.LINES),
        scales,
        weight.scales,
        out,
        count,
        SIZE=size,
        DEPTH=depth,
        STAGES=_STAGES,
        PROGRAMS=programs,
        ACTIVATION=KINDS[activation],
        num_warps=4,
    )
    return out


def _described(matrix: Tensor, rows: int) -> Any:
    """Return a descriptor of tiles of so many rows of an e4m3 matrix."""
    return TensorDescriptor.from_tensor(matrix, [rows, wide.DEEP], _layout(rows))


@functools.cache
def _layout(rows: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, wide.DEEP], gl.float8e4nv)
