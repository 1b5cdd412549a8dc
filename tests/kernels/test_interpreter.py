"""The interpreter as tests speed it up (tests/support/fast_interpreter.py) does what it did."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the device", allow_module_level=True)

import triton
import triton.language as tl
from fast_interpreter import speed_up


@triton.jit
def _scaled(x, weight):
    return tl.where(x > 0.5, x * weight, x.to(tl.float16).to(tl.float32))


@triton.jit
def _sums(x_ptr, out_ptr, size, width: tl.constexpr):
    rows, columns = tl.arange(0, 4), tl.arange(0, width)
    inside = (columns < size)[None, :] & (rows < 3)[:, None]
    x = tl.load(x_ptr + rows[:, None] * size + columns[None, :], mask=inside, other=0.0)
    found = tl.where(inside, _scaled(x, tl.sum(x, 1)[:, None]) + rows[:, None], 0.0)
    tl.store(out_ptr + rows, tl.sum(_scaled(found, 2.0), 1), mask=rows < 3)


def sums(x):
    out = torch.zeros(3)
    _sums[(1,)](x, out, x.shape[1], width=8)
    return out


def test_results_are_equal_and_the_language_is_restored(fast_interpreter):
    """Also of shapes that are broadcast, of casts, and of a device function called twice."""
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    load, found = tl.load, sums(x)
    assert tl.load is load
    fast_interpreter.undo()
    try:
        due = sums(x)
    finally:
        speed_up(fast_interpreter)
    assert found.tolist() == due.tolist()
    inner = torch.where(x > 0.5, x * x.sum(1, keepdim=True), x.half().float())
    inner += torch.arange(3)[:, None]
    definition = torch.where(inner > 0.5, inner * 2, inner.half().float()).sum(1)
    torch.testing.assert_close(found, definition)
