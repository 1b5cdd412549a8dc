"""What the Triton kernels' launches need beside their arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTERS: dict[torch.device, Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that every launch leaves zero; kept, since a captured graph remembers where they are."""
    held = _COUNTERS.get(device)
    if held is None or len(held) < count:
        held = _COUNTERS[device] = torch.zeros(max(65536, count), dtype=torch.int32, device=device)
    return held


def overlap(early: bool, device: torch.device) -> dict[str, Any]:
    """Launch options; with `early` a kernel may begin before the one ahead of it is done, where the device can do that
    (programmatic dependent launch): it must call `after` before it reads what others wrote."""
    return {"EARLY": True, "launch_pdl": True} if early and _can_overlap(device) else {"EARLY": False}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return hopper and hasattr(tl.extra.cuda, "gdc_wait")


@triton.jit
def after(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait for the one before."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter, where every program costs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
