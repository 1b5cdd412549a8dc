"""What the Triton kernels' launches need beside their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

Option = TypeVar("Option")
_COUNTERS: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros that every launch leaves zero. Those given before are not freed
    when more are needed: captured graphs remember where they are. There are twice as many each
    time, so all together take less than twice the last."""
    held = _COUNTERS.setdefault(device, [])
    if not held or len(held[-1]) < count:
        size = max(65536, count, 2 * len(held[-1]) if held else 0)
        held.append(torch.zeros(size, dtype=torch.int32, device=device))
    return held[-1]


def overlap(early: bool, device: torch.device) -> dict[str, Any]:
    """Launch options; with `early` a kernel may begin before the one ahead of it is done, where the
    device can do that (programmatic dependent launch): it must call `after` before it reads what
    others wrote, or writes anything.

    A chain of such launches begins with one that calls `begin_chain` instead. Then what was
    written before the chain may be read by any later kernel of it even before `after`: a kernel
    may begin once every program of the one ahead has let it, so none does before every program
    of the first had waited until all that was launched before was done and its writes could be
    seen. But a processor's own cache may still hold what stood there earlier: it must be read
    past that cache (cache_modifier=".cg"). Nothing but such kernels may be launched within a
    chain."""
    return (
        {"EARLY": True, "launch_pdl": True} if early and _can_overlap(device) else {"EARLY": False}
    )


def leading(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that itself begins when all before it is done, but lets the next
    one begin early (`let_next`)."""
    return {"LEADS": _can_overlap(device)}


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
def let_next(LEADS: tl.constexpr):
    """Let the next kernel begin, if it was launched to begin early; it waits by itself until this
    one is done."""
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_chain(EARLY: tl.constexpr):
    """The same for the kernel that begins a chain, the other way round: wait, and only then let
    the next one begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class Card(NamedTuple):
    """What a launch must fit: compute capability, and bytes of shared memory that one program
    may take."""

    capability: tuple[int, int]
    shared: int

    @property
    def reads_shared(self) -> bool:
        """Whether products of matrices read both of them from shared memory, of Hopper and
        data-centre Blackwell: what they read cannot be overwritten meanwhile, so pipelines take
        one buffer more."""
        return self.capability[0] in (9, 10)


HOPPER = Card((9, 0), 227 * 1024)
SPARE = 2048
"""Bytes that a program takes beyond its buffers, at most: what its reductions exchange."""


@functools.cache
def card(device: torch.device) -> Card:
    """What this device offers; for the interpreter a Hopper GPU, on which everything was
    measured."""
    if device.type != "cuda":
        return HOPPER
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Card(torch.cuda.get_device_capability(index), shared)


def fitting(options: Iterable[Option], needs: Callable[[Option], int], shared: int) -> Option:
    """The first option that needs no more than so many bytes of shared memory; Triton's
    OutOfResources if there is none."""
    least = None
    for option in options:
        need = needs(option)
        if need <= shared:
            return option
        least = need if least is None else min(least, need)
    raise OutOfResources(least, shared, "shared memory")


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter, where every program
    costs."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
