"""Linear maps x W^T + b, with weights packed once for the device where that pays.

On a CPU in float32, oneDNN's packed layout reads a weight matrix two to three times as fast as the
plain layout if x has few rows, as in decoding. Elsewhere weights stay as they are.
"""

import functools

import torch
from torch import Tensor

from .dispatch import kind_for

# Elements of a weight from which its packed product is faster. The packed product takes some 45 us
# to start, in which a plain one reads a weight of this size from a processor's own cache.
_PACKED = 1 << 16


def pack(weight: Tensor) -> Tensor:
    """Return the weight [N, K] in the layout that `linear` reads fastest on its device: an opaque
    packed tensor, or the same tensor."""
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
    """Multiply x [..., K] by a weight [N, K], which may be packed, and add bias [N]: [..., N] in
    x's dtype."""
    if weight.layout is torch.strided:
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    out = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], -1)


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
