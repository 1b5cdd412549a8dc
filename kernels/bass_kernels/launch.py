"""Launch support for the Triton kernels: counters, programmatic dependent launch, prefetching of
weights, device limits, and compilation of many kernels at once, ahead of their first launch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from . import dispatch

_COMPILERS = 16  # maximum number of compiler threads
Option = TypeVar("Option")
_COUNTERS: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Return at least `count` int32 zeros that every launch resets to zero. Earlier tensors are not
    freed when more are needed, because captured graphs hold their addresses. Each is at least twice
    as large as the one before, so all together take less than twice the last."""
    held = _COUNTERS.setdefault(device, [])
    if not held or len(held[-1]) < count:
        size = max(65536, count, 2 * len(held[-1]) if held else 0)
        held.append(torch.zeros(size, dtype=torch.int32, device=device))
    return held[-1]


def scratch(like: Tensor, splits: int, units: int, *sizes: int) -> tuple[Tensor, ...]:
    """Return float32 buffers of `sizes` elements for what the splits of all units found, and an
    arrival counter for each unit. With one split they are not used: all are `like`."""
    if splits == 1:
        return (like,) * (len(sizes) + 1)
    found = (like.new_empty(size, dtype=torch.float32) for size in sizes)
    return *found, counters(like.device, units)


def overlap(early: bool, device: torch.device) -> dict[str, Any]:
    """Return the launch options of programmatic dependent launch.

    With `early`, and on a device that supports it, a kernel may begin before the kernel ahead of it
    has finished. It must call `after` before it reads what other kernels wrote, and before it
    writes anything. It may prefetch weights to L2 before.

    A chain of such launches begins with a kernel that calls `begin_chain` instead. Then any later
    kernel of the chain may read what was written before the chain even before `after`. The reason:
    a kernel begins only when every program of the one ahead has let it, so it begins after every
    program of the first kernel has waited for all earlier launches and their writes. A processor's
    L1 cache may still hold stale values, so such reads must bypass it (cache_modifier=".cg"). Only
    such kernels may be launched within a chain.
    """
    return (
        {"EARLY": True, "launch_pdl": True} if early and _can_overlap(device) else {"EARLY": False}
    )


def leading(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that waits for all earlier work as usual, but lets the
    next kernel begin early (`let_next`)."""
    return {"LEADS": _can_overlap(device)}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    # Triton 3.4 has the instructions, but cannot compile them
    return hopper and hasattr(triton, "AsyncCompileMode")


@triton.jit
def after(EARLY: tl.constexpr):
    """Let the next kernel begin, then wait for the one before."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next(LEADS: tl.constexpr):
    """Let the next kernel begin, if it was launched with `overlap`. That kernel waits for this one
    itself."""
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_chain(EARLY: tl.constexpr):
    """Begin a chain (see `overlap`): wait for the kernel before, and only then let the next one
    begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class Card(NamedTuple):
    """Limits of a launch: compute capability, and bytes of shared memory that a program may use."""

    capability: tuple[int, int]
    shared: int

    @property
    def reads_shared(self) -> bool:
        """Whether matrix products read both operands from shared memory, as on Hopper and
        data-centre Blackwell. These buffers cannot be overwritten meanwhile, so pipelines need one
        buffer more."""
        return self.capability[0] in (9, 10)


HOPPER = Card((9, 0), 227 * 1024)
SPARE = 2048
"""Upper bound of the shared memory in bytes that a program uses beside its buffers, for reductions.
"""


@functools.cache
def card(device: torch.device) -> Card:
    """Return the limits of this device. For the interpreter they are those of a Hopper GPU, on
    which everything was measured."""
    if device.type != "cuda":
        return HOPPER
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Card(torch.cuda.get_device_capability(index), shared)


def loads_tiles(device: torch.device) -> bool:
    """Return whether kernels that load tiles through tensor descriptors run on a device. They were
    measured on Hopper only."""
    return card(device).capability[0] == 9


def fitting(options: Iterable[Option], needs: Callable[[Option], int], shared: int) -> Option:
    """Return the first option that needs at most `shared` bytes of shared memory. Raises Triton's
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
    """Return the number of streaming multiprocessors of a CUDA device; 1 for the interpreter, where
    every program costs time."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def compile_ahead(works: Iterable[Callable[[], object]]) -> None:
    """Run `works` with kernel launches replaced by compilation, many kernels at a time; one after
    the other they take seconds each. Everything else in `works` runs, on outputs that no kernel has
    written. A work may call this function again."""
    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5
        return
    with contextlib.ExitStack() as stack:
        if not dispatch.compiling():
            threads = min(_COMPILERS, len(os.sched_getaffinity(0)))
            # the threads parse until the pool has ended
            stack.enter_context(_replaced("parse", _parse_alone(triton.JITFunction.parse)))
            pool = stack.enter_context(_Compilers(threads))
            stack.enter_context(triton.AsyncCompileMode(pool))
            stack.enter_context(_replaced("run", _compile_only(triton.JITFunction.run)))
            stack.enter_context(dispatch.compile_only())
        for work in works:
            work()


class _Compilers(ThreadPoolExecutor):
    """Compiles kernels, and the C code that launches them: until Triton 3.6, a C compiler makes a
    library for each signature, which takes 0.2 s at the kernel's first launch. The cache keeps it.
    """

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        def compile_both() -> Any:
            kernel = compile_kernel()
            launcher = getattr(triton.runtime.driver.active, "launcher_cls", None)
            if launcher is not None:
                launcher(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compile_both)


@contextlib.contextmanager
def _replaced(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of all Triton kernels."""
    before = getattr(triton.JITFunction, name)
    setattr(triton.JITFunction, name, replacement)
    try:
        yield
    finally:
        setattr(triton.JITFunction, name, before)


def _parse_alone(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a method that parses kernels one at a time. In CPython 3.11 a parser may fail if
    another thread interrupts it ("AST constructor recursion depth mismatch")."""
    lock = threading.RLock()

    def alone(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    return alone


def _compile_only(launch: Callable[..., Any]) -> Callable[..., None]:
    """Return a method that compiles instead of `launch`."""
    seen = set()  # Triton may take a millisecond to notice that a kernel is being compiled already

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        form = kernel, tuple(map(_trait, kernel.params, arguments)), tuple(options.items())
        if form not in seen:
            seen.add(form)
            launch(kernel, *arguments, grid=grid, warmup=True, **options)

    return compile_only


def _trait(parameter: Any, argument: Any) -> object:
    """Return the properties of an argument that the compiler may specialise on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, tuple(argument.block_shape)
    return type(argument) if parameter.do_not_specialize else argument


def input_precision(x: Tensor) -> str:
    """Return how products round float32 inputs: not, if the model is in float32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def stages_that_fit(size: int, x: Tensor, *, most: int = 4) -> int:
    """Return `most` pipeline stages of `size` bytes, or as many as fit."""
    return pipeline_that_fits(size, 0, x, deep=1, most=most)[1]


def pipeline_that_fits(
    size: int, least: int, x: Tensor, *, deep: int, most: int
) -> tuple[int, int]:
    """Return the inputs of a step and the pipeline stages: `deep` and `most`, or fewer stages, or
    half as many inputs, if only that fits. An input takes `size` bytes in each stage, and `least`
    beside them."""
    return fitting(
        itertools.product(sorted({deep, max(1, deep // 2)}, reverse=True), range(most, 0, -1)),
        lambda option: option[0] * (size * option[1] + least) + SPARE,
        card(x.device).shared,
    )


_MOST_TOKENS = 64  # in a pass; with more tokens products are compute-bound
# Maximum bytes of a weight to prefetch. One H200, 8B model, 64 tokens, us a pass: none 5,229, 16
# MiB 5,222, 32 MiB 5,207. With contexts of some 4,000 tokens: 6,404, 6,371, 6,345.
_MOST = 32 << 20
_PREFETCH_BYTES = tl.constexpr(2048)  # bytes a thread prefetches with one instruction
_LANES = tl.constexpr(128)


def can_prefetch(device: torch.device) -> bool:
    """Return whether a device has the bulk prefetch instruction."""
    return device.type == "cuda" and card(device).capability >= (9, 0)


def prefetch_blocks(weight: Tensor | None, tokens: int) -> int:
    """Return how many blocks of _PREFETCH_BYTES of a weight to prefetch in a pass over so many
    tokens; 0 if prefetching does not pay or is not possible."""
    if weight is None or tokens > _MOST_TOKENS or not can_prefetch(weight.device):
        return 0
    if weight.data_ptr() % 16:
        return 0
    return min(_MOST, weight.numel() * weight.element_size()) // _PREFETCH_BYTES.value


@triton.jit
def prefetch_weight(weight_ptr, blocks, program, programs):
    """Prefetch this program's share of the first `blocks` of a weight, without waiting."""
    share = tl.cdiv(blocks, programs)
    for first in range(0, share, _LANES):
        lane = first + tl.arange(0, _LANES)
        block = program * share + lane
        inside = (lane < share) & (block < blocks)
        at = weight_ptr.to(tl.int64) + block.to(tl.int64) * _PREFETCH_BYTES
        tl.inline_asm_elementwise(
            """{
            .reg .pred here;
            setp.ne.s32 here, $2, 0;
            @here cp.async.bulk.prefetch.L2.global [$1], 2048;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [at, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
