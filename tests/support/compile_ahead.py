"""Compile ahead without a GPU: go through all rounds of a loop for a Hopper GPU that is not
present, on CPU tensors, with the worst possible content in memory that kernels would have filled.
Afterwards nothing may be left to compile.

Run as a script, without the interpreter: quick|whole FOLDER DRAFT COUPLING ..., of a target with
its drafter. It prints the number of kernels of each. `quick` skips turning kernels into machine
code, which compile_launches.py tests.
"""

import gc
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler

import bass_kernels as ops
from bass_cli.drafts.factory import DraftParts, make_drafter
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.loop import Loop
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import Cut
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import open_head, open_mtp
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.capture import Graphs
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import make_head
from bass_cli.models.runner import Runner


class Absent:
    """The answers that Triton needs from a driver before a launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def skip_machine_code():
    """Skip machine code: a kernel's parts and its shared memory are known before."""

    def named(self, source, metadata, *rest):
        metadata["name"] = "none"
        return ""

    compiler.llvm.optimize_module = lambda *arguments, **options: None
    compiler.CUDABackend.make_ptx, compiler.CUDABackend.make_cubin = named, lambda self, *rest: b""


def skip_code():
    """Skip all code: which kernels there are is known before."""

    def shared(source, metadata, *rest):
        metadata["shared"] = 0
        return ""

    skip_machine_code()
    compiler.CUDABackend.make_ttgir = staticmethod(lambda source, *rest: source)
    compiler.CUDABackend.make_llir = lambda self, *given: shared(*given)


class Uncapturable(Graphs):
    """Graphs that seem to exist on a CPU."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.enabled = True


def loop_for(folder, draft, coupling):
    checkpoint = open_checkpoint(folder)
    words = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    target, head = Decoder(checkpoint.spec, load(checkpoint, **words)), None
    if draft == "mtp" or draft.startswith("heads:"):
        path = folder / draft.removeprefix("heads:")
        opened = open_mtp(checkpoint) if draft == "mtp" else open_head(path, checkpoint.spec)
        head = make_head(opened.head, load(opened, **words), target)
        target = target.read_by(head)
    whole = Runner(target, rows=5, span=64, pending=1)
    runner = None if head is None else whole
    mask = 5 if draft.startswith("parallel:") else None
    if draft == "model" or mask is not None:
        runner = Runner(target.keep_layers([0]), rows=5, span=64, pending=2)
    words = {"runner": runner, "head": head, "mask": mask, "temperature": None}
    drafter = make_drafter(draft, DraftParts(coupling=coupling, **words))
    return Loop(
        batch=Batch(rows=5, context=64, device=torch.device("cpu")),
        target=whole,
        drafter=drafter,
        controller=Fixed(3),
        coupling=coupling,
        clock=Clock(),
        graphs=Uncapturable(),
        cut=Cut(16, 0, 2),
    )


def noting(name):
    """Record the kernels on which this method is called from now on."""
    called, method = [], getattr(triton.JITFunction, name)

    def noted(kernel, *arguments, **options):
        called.append(kernel.__name__)
        return method(kernel, *arguments, **options)

    setattr(triton.JITFunction, name, noted)
    return called


def forget_all():
    """Be like a process that has compiled nothing; only files of earlier compilations remain."""
    kernels = [one for one in gc.get_objects() if isinstance(one, triton.JITFunction)]
    for kernel in kernels:
        kernel.device_caches.clear()


def hold(folder, draft, coupling, compiled, asked):
    """Compile that drafter's rounds twice; `compiled` and `asked` record kernels meanwhile."""
    forget_all()
    compiled.clear()
    asked.clear()
    loop, tokens = loop_for(folder, draft, coupling), list(range(2, 20))
    ops.use("triton")
    torch.use_deterministic_algorithms(
        True
    )  # memory that was not written is NaN, or a place far outside
    torch.utils.deterministic.fill_uninitialized_memory = True

    def work():
        loop.open("a", tokens)
        loop.admit(
            Row("a", 0, 0, list(tokens), 12, sampling=RowSampling(temperature=0.8, top_p=0.9))
        )
        loop.prepare(range(1, 6), (0, 1, 3, 4), only_compile=True)
        assert loop.batch.lengths.tolist() == [len(tokens), 1, 1, 1, 1]
        assert loop.batch.tokens[0, : len(tokens)].tolist() == tokens
        loop.retire(0)
        loop.close("a")

    loop.graphs.compile([work])
    before = len(compiled)
    loop.graphs.compile([work])
    assert before > 0
    assert len(compiled) == before, compiled[before:]
    assert len(asked) < 120, "layers that are alike are asked for once"
    print(before, sorted(set(compiled)))


def main(how, folder, *kinds):
    triton.runtime.driver.set_active(Absent())
    # machine code of all kernels is made by compile_launches.py
    skip_code() if how == "quick" else skip_machine_code()
    compiled, asked = noting("_do_compile"), noting("run")
    for draft, coupling in zip(kinds[::2], kinds[1::2], strict=True):
        hold(Path(folder), draft, coupling, compiled, asked)


if __name__ == "__main__":
    main(*sys.argv[1:])
