"""Choose the form of an op: Triton for CUDA tensors, plain torch for others. `use` overrides the
choice, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SCHEDULES = ("ragged", "pad", "split")
# modules of Triton kernels that every round uses
_USUAL = ("pointwise", "fused_attention", "ragged", "sampling_kernels", "round_kernels")
_override: str | None = None
_schedule = "ragged"
_compiling = False
_too_large: set[str] = set()  # ops for which the warning was logged


def use(kind: str | None) -> None:
    """Run every op as "triton" or "reference" from now on; None chooses by device. Triton on CPU
    tensors needs its interpreter (set TRITON_INTERPRET=1 before the first such op)."""
    global _override
    assert kind in ("triton", "reference", None)
    _override = kind


def attention_schedule(name: str) -> None:
    """Set how the Triton attention runs rows of unequal length. The results are the same.

    Args:
        name: "ragged": one launch, each row at its own length, a shared prompt read once. The other
            two are the schedules of BASS (arXiv 2404.15778, section 3.1). "pad": one launch, every
            row as long as the longest of the batch. "split": one launch a row, each at its own
            length.
    """
    global _schedule
    assert name in SCHEDULES
    _schedule = name


def schedule() -> str:
    """Return the schedule that `attention_schedule` set."""
    return _schedule


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kind_for(tensor: Tensor) -> str:
    """Return the form that ops on this tensor take: "triton" or "reference"."""
    if _override is not None:
        return _override
    return "triton" if tensor.is_cuda and has_triton() else "reference"


def import_kernels(device: torch.device) -> None:
    """Import Triton and the kernels of a round ahead of the first op on a CUDA device, which would
    wait some tenths of a second for them. An import error is raised by the op that needs the
    module."""
    if device.type == "cuda" and _override is None and has_triton():
        with contextlib.suppress(Exception):
            for name in _USUAL:
                importlib.import_module(f"bass_kernels.{name}")


def compiling() -> bool:
    """Return whether launches are replaced by compilation now (launch.compile_ahead)."""
    return _compiling


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Let `compiling` return True inside this context."""
    global _compiling
    _compiling = True
    try:
        yield
    finally:
        _compiling = False


def by_device(reference: Callable[..., Any], module: str) -> Callable[..., Any]:
    """Return an op that calls `reference`, or the function of the same name in the Triton `module`,
    by the device of its first tensor. If a launch does not fit the device, the op logs one warning
    and calls `reference`."""

    @functools.wraps(reference)
    def op(*arguments: Any, **options: Any) -> Any:
        first = arguments[0]
        if not isinstance(first, Tensor):
            first = next(a for a in arguments if isinstance(a, Tensor))
        if kind_for(first) == "reference":
            return reference(*arguments, **options)
        kernels = importlib.import_module(module)
        from triton.runtime.errors import OutOfResources

        try:
            return getattr(kernels, reference.__name__)(*arguments, **options)
        except OutOfResources as error:
            _warn(reference.__name__, error)
            return reference(*arguments, **options)

    return op


def _warn(name: str, error: Exception) -> None:
    if name not in _too_large:
        _too_large.add(name)
        logging.getLogger("bass").warning(
            "%s does not fit this device and is done without a kernel: %s", name, error
        )
