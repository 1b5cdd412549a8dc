"""Which form of an op runs: Triton on CUDA tensors, plain torch elsewhere; `use` overrides it, for tests and benchmarks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

_override: str | None = None


def use(kind: str | None) -> None:
    """Run every op as "triton" or "reference" from now on; None: by the device. Triton on CPU tensors needs its
    interpreter (TRITON_INTERPRET=1 before the first such op)."""
    global _override
    assert kind in ("triton", "reference", None)
    _override = kind


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kind_for(tensor: Tensor) -> str:
    """The form that ops on this tensor take: "triton" or "reference"."""
    if _override is not None:
        return _override
    return "triton" if tensor.is_cuda and has_triton() else "reference"


def by_device(reference: Callable[..., Any], module: str) -> Callable[..., Any]:
    """An op that is `reference`, or the function of that name in the Triton `module`, by its first tensor."""

    @functools.wraps(reference)
    def op(*arguments: Any, **options: Any) -> Any:
        first = next(a for a in arguments if isinstance(a, Tensor))
        if kind_for(first) == "reference":
            return reference(*arguments, **options)
        return getattr(importlib.import_module(module), reference.__name__)(*arguments, **options)

    return op
