"""What the Triton kernels' launches need beside their arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTERS: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros that every launch leaves zero. Those given before are not freed when more are needed: captured
    graphs remember where they are. There are twice as many each time, so all together take less than twice the last."""
    held = _COUNTERS.setdefault(device, [])
    if not held or len(held[-1]) < count:
        size = max(65536, count, 2 * len(held[-1]) if held else 0)
        held.append(torch.zeros(size, dtype=torch.int32, device=device))
    return held[-1]


def overlap(early: bool, device: torch.device) -> dict[str, Any]:
    """Launch options; with `early` a kernel may begin before the one ahead of it is done, where the device can do that
    (programmatic dependent launch): it must call `after` before it reads what others wrote, or writes anything.

    A chain of such launches begins with one that calls `begin_chain` instead. Then what was written before the chain may be
    read by any later kernel of it even before `after`: a kernel may begin once every program of the one ahead has let it,
    so none does before every program of the first had waited until all that was launched before was done and its writes
    could be seen. But a processor's own cache may still hold what stood there earlier: it must be read past that cache
    (cache_modifier=".cg"). Nothing but such kernels may be launched within a chain."""
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


@triton.jit
def begin_chain(EARLY: tl.constexpr):
    """The same for the kernel that begins a chain, the other way round: wait, and only then let the next one begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter, where every program costs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
