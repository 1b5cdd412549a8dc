"""Divide the cases of a parametrised test between `make test` and `make test-slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch


def thinned(cases: Iterable[Any], kept: Collection[Any] | int) -> list[Any]:
    """Mark all cases slow but those in `kept`, or but every `kept`-th one. A case is a tuple of
    values, or one value that is no tuple."""
    cases = list(cases)
    if not isinstance(kept, int):
        assert all(case in cases for case in kept), "a kept case is not among the cases"
    return [
        case
        if (at % kept == 0 if isinstance(kept, int) else case in kept)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for at, case in enumerate(cases)
    ]


def thinned_on_cpu(cases: Iterable[Any], kept: Collection[Any] | int) -> list[Any]:
    """Do so without a CUDA device. A GPU, where kernels need no interpreter, has all cases."""
    return list(cases) if torch.cuda.is_available() else thinned(cases, kept)
