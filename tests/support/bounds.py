"""Run kernels in Triton's interpreter and check that they access nothing but their arguments. On
a GPU an access beyond them may or may not end the process; on a CPU it reads some number that a
mask hides."""

import contextlib

import numpy
import torch
from triton.runtime import interpreter


class OutOfBoundsError(AssertionError):
    """An address outside the storage of every argument."""


@contextlib.contextmanager
def bounded(monkeypatch):
    """Check every load, store and atomic operation inside this context against the storages of
    its launch's arguments."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    given = []

    def check(pointers, mask):
        addresses = pointers.data[numpy.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        begins, ends = (
            numpy.array(part, dtype=numpy.uint64) for part in zip(*sorted(given), strict=True)
        )
        at = numpy.searchsorted(begins, addresses, side="right") - 1
        inside = (at >= 0) & (addresses + numpy.uint64(size) <= ends[numpy.maximum(at, 0)])
        if not inside.all():
            raise OutOfBoundsError(f"{(~inside).sum()} of {inside.size} places are in no argument")

    def watched(name, places):
        plain = getattr(builder, name)

        def call(self, *arguments):
            check(*(arguments[place] for place in places))
            return plain(self, *arguments)

        monkeypatch.setattr(builder, name, call)

    plain = executor._init_args_hst

    def begin(self, arguments, named):
        found = plain(self, arguments, named)
        given.clear()
        for one in (*found[0], *found[1].values()):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                given.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return found

    with monkeypatch.context() as monkeypatch:
        monkeypatch.setattr(executor, "_init_args_hst", begin)
        watched("create_masked_load", (0, 1))
        watched("create_masked_store", (0, 2))
        watched("create_atomic_rmw", (1, 3))
        yield
