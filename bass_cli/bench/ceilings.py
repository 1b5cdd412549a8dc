"""Peak memory bandwidth and arithmetic rate of a device.

A few devices have known values, which were measured once. All others are measured here, in a
second or two.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

# (device name, dtype): measured bytes per second of a pass over the weights, and measured
# floating-point operations per second of a large matrix product
_KNOWN = {("H200", torch.bfloat16): (4.3e12, 790e12)}


class Ceilings(NamedTuple):
    """Peak rates of a device.

    bandwidth: bytes per second. operations: floating-point operations per second. source: "known"
    or "measured".
    """

    bandwidth: float
    operations: float
    source: str


@functools.cache
def ceilings_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the ceilings of a device for models of this dtype. Measures at most once a process."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for (known, its_dtype), (bandwidth, operations) in _KNOWN.items():
            if known in name and its_dtype == dtype:
                return Ceilings(bandwidth, operations, "known")
    return Ceilings(_bandwidth(device), _operations(device, dtype), "measured")


def _bandwidth(device: torch.device) -> float:
    """Measure bytes per second, read and written, of a copy."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _operations(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best(lambda: left @ left, device)


def _best(function: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the seconds of the fastest call."""
    found = []
    for _ in range(times + 1):  # the first call initialises libraries and is never the fastest
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
