"""Functions of single elements in plain torch, with the same bits at every place of a tensor.

On a CPU torch computes whole vectors in one way and the elements that are left over in another,
which may differ in the last bit. Elements are left over at the end of each thread's part too. So
the result for a token could depend on the width of a pass, and a draft could change a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_VECTORS = 64  # a multiple of the elements that torch computes at once, for all processors
# torch gives a thread at least so many elements, and divides no tensor of the second size.
_SHARE, _ALONE = 32768, 16384


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return _in_vectors(functional.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return _in_vectors(torch.sigmoid, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the approximation of GELU by tanh (arXiv 1606.08415)."""
    return _in_vectors(lambda part: functional.gelu(part, approximate="tanh"), x)


def gelu(x: Tensor) -> Tensor:
    """Return x times the normal distribution function of x (GELU, arXiv 1606.08415). torch uses
    another library on a CPU if x is contiguous; its `erf` has the same bits everywhere."""
    if x.device.type != "cpu":
        return functional.gelu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def _in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) for a function of single elements. On a CPU no call has elements beyond
    whole vectors: all threads get equal shares of the first call, and one thread computes each of
    the others, of which the last is padded."""
    if x.device.type != "cpu":
        return function(x)
    flat, count = x.reshape(-1), x.numel()
    if count % _VECTORS:
        flat = functional.pad(flat, (0, -count % _VECTORS))
    if len(flat) <= _ALONE:
        return function(flat)[:count].view(x.shape)
    every = _SHARE * torch.get_num_threads()
    shared = len(flat) // every * every
    found = [function(flat[:shared])] if shared else []
    found += map(function, flat[shared:].split(_ALONE))
    return torch.cat(found)[:count].view(x.shape)
