"""What the Triton kernels' launches need beside their arguments."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_COUNTERS: dict[torch.device, Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that every launch leaves zero; kept, since a captured graph remembers where they are."""
    held = _COUNTERS.get(device)
    if held is None or len(held) < count:
        held = _COUNTERS[device] = torch.zeros(max(65536, count), dtype=torch.int32, device=device)
    return held


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter, where every program costs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
