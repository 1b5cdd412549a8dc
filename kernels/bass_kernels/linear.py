"""Linear maps: x W^T + b, with weights laid out once for the device where that pays.

On a CPU in float32, oneDNN's packed layout reads a weight matrix two to three times as fast as
the plain layout when x has few rows, which is what decoding is made of. Elsewhere weights stay
as they are.
"""

import functools

import torch
from torch import Tensor

from .dispatch import kind_for

# Numbers of a weight from which its packed product is the faster one: it takes some 45 us before
# it begins, in which a plain one reads a weight of this size from a processor's own cache.
_PACKED = 1 << 16


def pack(weight: Tensor) -> Tensor:
    """The weight [N, K] in the layout that `linear` reads fastest on its device: opaque, or the
    same tensor."""
    here = (
        weight.numel() >= _PACKED
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and kind_for(weight) == "reference"
    )
    if not here or not _packing_works():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times a weight [N, K] that may be packed, plus bias [N]: [..., N] in x's dtype."""
    if weight.layout is torch.strided:
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    out = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], -1)


@functools.cache
def _packing_works() -> bool:
    """Whether this build of torch has the packed product, and it gives what the plain one gives."""
    weight, x = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.allclose(
            torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), x @ weight.T
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
