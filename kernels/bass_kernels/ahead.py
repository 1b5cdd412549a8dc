"""Compile many Triton kernels at once, ahead of their first launch. One after the other they take
seconds each."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from torch import Tensor

_MOST = 16  # compiler threads
_LAUNCH = triton.JITFunction.run


def compile_ahead(works: Iterable[Callable[[], object]]) -> None:
    """Run `works` with kernel launches replaced by compilation. Everything else in them runs, on
    outputs that no kernel has written."""
    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5
        return
    with contextlib.ExitStack() as stack:
        if triton.JITFunction.run is _LAUNCH:  # else this call is nested in another
            pool = stack.enter_context(ThreadPoolExecutor(min(_MOST, len(os.sched_getaffinity(0)))))
            stack.enter_context(triton.AsyncCompileMode(pool))
            stack.enter_context(_parsed_alone())
            stack.enter_context(_nothing_launched())
        for work in works:
            work()


@contextlib.contextmanager
def _parsed_alone() -> Iterator[None]:
    """Parse kernels one at a time. In CPython 3.11 a parser may fail if another thread interrupts
    it ("AST constructor recursion depth mismatch")."""
    parse, lock = triton.JITFunction.parse, threading.RLock()

    def alone(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    triton.JITFunction.parse = alone
    try:
        yield
    finally:
        triton.JITFunction.parse = parse


def _trait(parameter: Any, argument: Any) -> object:
    """Return the properties of an argument that the compiler may specialise on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, tuple(argument.block_shape)
    return type(argument) if parameter.do_not_specialize else argument


@contextlib.contextmanager
def _nothing_launched() -> Iterator[None]:
    seen = set()  # Triton may take a millisecond to notice that a kernel is being compiled already

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch = kernel, tuple(map(_trait, kernel.params, arguments)), tuple(options.items())
        if launch not in seen:
            seen.add(launch)
            _LAUNCH(kernel, *arguments, grid=grid, warmup=True, **options)

    triton.JITFunction.run = compile_only
    try:
        yield
    finally:
        triton.JITFunction.run = _LAUNCH
