"""Run tests of the Triton kernels on a GPU under NVIDIA's compute-sanitizer.

    python tests/kernels/sanitize.py [--limit SECONDS] [--total SECONDS] TOOL[:PATTERN] ...

The tests run once for each named tool: memcheck, racecheck, initcheck or synccheck; or none, which
only compiles the kernels. With a pattern only the groups run that contain it, in files or tests. It
exits with 1 if a tool finds an error, a test fails, a kernel is not launched under a tool without a
pattern, or a tool does not find the error that is planted for it.

A failed test ends its process, because memcheck ends the CUDA context, and a tool may crash. The
tests after it run in a new process.

Under racecheck and initcheck the library's products of 16 and 8 bits are done in float64. Their
kernels load and store through tensor descriptors. On an H100 racecheck 2025.3 ends them with
illegal accesses, and initcheck does not see what they write.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bass_kernels

TESTS = Path(__file__).parents[1]
# What each process runs: files, and an expression that selects small tests, mostly in bfloat16. Those
# that take longest to compile come first.
GROUPS = (
    ("kernels/test_eight_bits.py", "instructions and dtype2"),
    ("kernels/test_eight_bits.py", "instructions and fused"),
    ("kernels/test_eight_bits.py", "sizes or packed_rows or rope and dtype2"),
    ("kernels/test_quantised_products.py", "dtype1 and stream_match and fp8"),
    ("kernels/test_quantised_products.py", "dtype1 and stream_match and int8"),
    ("kernels/test_quantised_products.py", "dtype1 and linear_matches and fp8"),
    ("kernels/test_quantised_products.py", "dtype1 and linear_matches and int8"),
    ("kernels/test_quantised_products.py", "dtype1 and not match or padded or gated_factor"),
    ("kernels/test_wide_products.py",
     "matches_the and False-65 or many_tiles or 1000-130-silu or added"),
    ("kernels/test_head.py", "not tilings"),
    ("kernels/test_experts.py", "dtype2 and (router_equals or experts_equal and silu)"),
    ("kernels/test_experts.py", "dtype2 and (8_bits_equal or all_tokens)"),
    ("kernels/test_whole_decoder.py", "moe and fp8 or opt"),
    ("kernels/test_whole_decoder.py", "moe and not fp8 or gptj"),
    ("kernels/test_whole_decoder.py", "gemma or llama"),
    ("kernels/test_whole_decoder.py", "qwen2 or qwen3 and int8"),
    ("kernels/test_ragged.py", "without and dtype1 or tiles or resets"),
    ("kernels/test_ragged.py", "shared_prefix or caps"),
    ("kernels/test_likeliest.py kernels/test_hidden_store.py kernels/test_processing.py "
     "kernels/test_fetching.py",
     "triton or rows_without or not_depend"),
    ("kernels/test_rejection.py kernels/test_block_verification.py kernels/test_truncation.py "
     "kernels/test_rounds.py kernels/test_selection.py",
     "definition or triton or pending or commit or targets_tokens or angles or distinguish"),
    ("kernels/test_delta_kernels.py",
     "parts and dtype2 or more_tokens or many_rounds or a_round and (dtype2 or dtype5 or dtype8)"),
    ("kernels/test_packed_attention.py kernels/test_causal.py",
     "test_kernels or lines or causal_attention and dtype1 or long_prompts"),
    ("model/test_fused_decode.py", "dtype1"),
    ("kernels/test_triton.py", "dtype2 and not gelu and not relu and not 34000 or samples_equal"),
    ("kernels/test_gated.py kernels/test_training_ops.py kernels/test_peers.py",
     "gate_up and dtype1 or layer or dtype2 or all_parts and dtype0 or added_to_the_stream"),
)  # fmt: skip
LINES = 60  # of a tool, that are shown of a group
ENDING = 24  # lines of a failed process's other output
ATTEMPTS = 6  # processes of a group
LEAST = 8  # seconds in which a process may do anything
# Tools that do not support the library's products
NEED_PLAIN = ("racecheck", "initcheck")


class Run(NamedTuple):
    """One group under a tool."""

    tool: str
    number: int
    code: int
    seconds: float
    output: str
    found: str  # by the tool
    record: list[str]

    @property
    def line(self) -> str:
        """What happened, in one line."""
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", self.found)
        tests = re.findall(r"\d+ (?:passed|failed|error).* in .*", self.output)
        name = GROUPS[self.number][0].replace("kernels/", "")
        parts = [*summary, *tests, f"{self.seconds:.0f} s"]
        result = "FAILED" if self.code else "ok"
        return f"{self.tool} {result} {name} ({GROUPS[self.number][1]}): {'; '.join(parts)}"

    def show(self) -> None:
        """Print the line; after a failure what the tool printed, where a process ended early, and
        the last lines of its other output."""
        print(self.line, flush=True)
        if self.code:
            # one line of each place in a kernel, not of each thread
            tool = dict.fromkeys(
                one.lstrip("= ")
                for one in self.found.splitlines()
                if not re.search(r"^=+ *(by thread|Address|Write Thread|Read Thread|$)", one)
            )
            lines = self.output.splitlines()
            fatal = [one for one in lines if one.startswith("Fatal Python error")]
            shown = [*tool][:LINES], self.ends(), fatal, lines[-ENDING:]
            print(*itertools.chain(*shown), sep="\n", flush=True)

    def ends(self) -> list[str]:
        """Return the test, and the last kernel that it launched, of each process that ended before
        its last test."""
        found = []
        for at, line in enumerate(self.record):
            if line == "ended early":
                before = [one for one in self.record[:at] if one.startswith("test ")]
                found.append(f"ended early: {' '.join(before[-1:])}, {self.record[at - 1]}")
        return found

    def checked(self) -> set[str]:
        """Return the kernels that were launched by tests that a process ended."""
        found, own = set(), set()
        for line in self.record:
            word, _, name = line.partition(" ")
            if word == "kernel":
                own.add(name)
            else:
                found |= set() if word == "ended" else own
                own = set()
        return found


@triton.jit
def planted(x_ptr, out_ptr):
    """Copy 32 floats. memcheck must find that there are only 4, initcheck that none is written."""
    at = tl.arange(0, 32)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def planted_race(out_ptr):
    """Read what another warp writes to shared memory, without a barrier: what racecheck must find.
    Each of 128 threads writes a number, and reads that of the thread 32 after it."""
    at = tl.arange(0, 128)
    value = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b8 room[512];
        .reg .b32 base, write, read;
        mov.u32 base, room;
        and.b32 write, $1, 127;
        shl.b32 write, write, 2;
        add.u32 write, write, base;
        st.volatile.shared.b32 [write], $1;
        add.u32 read, $1, 32;
        and.b32 read, read, 127;
        shl.b32 read, read, 2;
        add.u32 read, read, base;
        ld.volatile.shared.b32 $0, [read];
        }""",
        "=r,r",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + at, value)


# What each tool says about the error that is planted for it.
PLANTED = {
    "memcheck": "Invalid __global__ read of size",
    "initcheck": "Uninitialized __global__ memory read",
    "racecheck": "Race reported between",
}


def run_planted(tool: str) -> None:
    """Launch the kernel with the error that a tool must find."""
    if tool == "racecheck":
        planted_race[(1,)](torch.empty(128, dtype=torch.int32, device="cuda"), num_warps=4)
    else:
        x = torch.empty(32 if tool == "initcheck" else 4, device="cuda")
        planted[(1,)](x, torch.zeros(32, device="cuda"))
    torch.cuda.synchronize()


def get(owner: object, name: str) -> object:
    return getattr(owner, name, None)


def kernels() -> set[str]:
    """Return the names, module.kernel, of all kernels that bass_kernels launches."""
    found = set()
    for place in Path(bass_kernels.__file__).parent.glob("*.py"):
        launches = [
            call.func.value
            for call in ast.walk(ast.parse(place.read_text()))
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        ]
        names = [ast.unparse(one) for one in launches if isinstance(one, ast.Name | ast.Attribute)]
        if names:
            module = importlib.import_module(f"bass_kernels.{place.stem}")
            objects = [functools.reduce(get, name.split("."), module) for name in names]
            found |= {
                name_of(one) for one in objects if isinstance(one, triton.runtime.KernelInterface)
            }
    return found


def name_of(kernel: triton.JITFunction) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


class PlainProducts(TorchDispatchMode):
    """Do products of matrices of 16 and 8 bits on a GPU in float64."""

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        name, named = operation.overloadpacket.__name__, named or {}
        narrow = len(given) and isinstance(given[0], Tensor) and given[0].itemsize <= 2
        if not narrow or not given[0].is_cuda:
            return operation(*given, **named)
        if name == "_scaled_mm":
            return scaled_product(*given, **named)
        if name not in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            return operation(*given, **named)
        wide = [one.double() if isinstance(one, Tensor) else one for one in given]
        result = getattr(torch, name.rstrip("_"))(*wide, **named).to(given[0].dtype)
        return given[0].copy_(result) if name.endswith("_") else result


def scaled_product(
    x, y, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
):
    """Do torch._scaled_mm for scales of whole matrices, or of rows and columns."""
    assert scale_result is None
    found = (x.float().double() * scale_a) @ (y.float().double() * scale_b)
    return (found if bias is None else found + bias).to(out_dtype)


class Recorder:
    """Writes which tests begin and which kernels they launch, and leaves out tests that an earlier
    process began."""

    def __init__(self, file: TextIO, begun: set[str]):
        self.file, self.begun = file, begun

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [one for one in items if f"test {one.nodeid}" not in self.begun]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"test {nodeid}", file=self.file)


def run_here(number: int, record: Path, tool: str) -> int:
    """Run the tests of a group in this process, and write what happens into `record`."""
    run, begun = triton.JITFunction.run, set(lines_of(record))
    files, selected = GROUPS[number]
    with record.open("a", buffering=1) as file:

        def noted(kernel, *arguments, **options):
            print(f"kernel {name_of(kernel)}", file=file)
            return run(kernel, *arguments, **options)

        triton.JITFunction.run = noted
        paths = [str(TESTS / name) for name in files.split()]
        options = ["-p", "no:cacheprovider", "-x", "-k", selected]
        with PlainProducts() if tool in NEED_PLAIN else contextlib.nullcontext():
            code = int(pytest.main([*options, *paths], [Recorder(file, begun)]))
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and begun:  # the last test ended early
            code = 0
        if code == 0:
            print("end", file=file)
    return code


def lines_of(record: Path) -> list[str]:
    return read(record).splitlines()


def command_of(tool: str, place: int, names: Iterable[str], log: Path) -> list[str]:
    """Return the command before `python`. `place` gives each process ports of its own. `log`: what
    the tool finds."""
    if tool == "none":
        return []
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, "--error-exitcode", "1", "--print-limit", "100"]
    command += ["--port", str(49152 + 16 * place), "--target-processes", "application-only"]
    command += ["--kill", "--show-backtrace", "device", "--log-file", str(log)]
    if tool == "memcheck":  # torch and Triton try calls that may fail
        command += ["--report-api-errors", "no"]
    if tool == "racecheck":  # by default each process has a worker for every core
        command += ["--racecheck-num-workers", "2"]
    if tool == "initcheck":  # it must see who writes memory, so it checks torch's kernels too
        return command
    for name in sorted({name.rpartition(".")[2] for name in names}):
        command += ["--kernel-name", f"kernel_name={name}"]
    return command


def run_process(command: list[str], tool: str, output: Path, limit: float) -> int:
    """Run a process, and what it has started, for at most `limit` seconds. Return its exit status,
    124 after that time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if tool in ("memcheck", "initcheck"):  # they see the bounds of torch's tensors then
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with output.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {limit:.0f} s\n".encode())
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(tool: str, number: int, place: int, names: set[str], folder: Path, end: float) -> Run:
    """Run a group until the time `end`, in as many processes as it takes."""
    record, output, log = (
        folder / f"{tool}-{number}.{word}" for word in ("record", "output", "log")
    )
    command = command_of(tool, place, names, log)
    command += [sys.executable, __file__, "--group", str(number), str(record), tool]
    began, failed, text, found = time.monotonic(), 0, "", ""
    for _ in range(ATTEMPTS):
        left, before = end - time.monotonic(), lines_of(record)
        if left < LEAST:
            failed, text = failed or 124, "no time is left"
            break
        failed = run_process(command, tool, output, left) or failed
        found += read(log)
        log.unlink(missing_ok=True)
        after = lines_of(record)
        if after[-1:] == ["end"] or len(after) == len(before):
            break
        with record.open("a") as file:
            print("ended early", file=file)
    seconds = time.monotonic() - began
    return Run(tool, number, failed, seconds, read(output) + text, found, lines_of(record))


def read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def finds(tool: str, place: int, names: set[str], folder: Path, limit: float) -> bool:
    """Return whether a tool finds the error that is planted for it, and so checks the kernels of
    Triton, selected by name among others."""
    output, log = folder / f"{tool}-planted.output", folder / f"{tool}-planted.log"
    own = {"sanitize.planted", "sanitize.planted_race"}
    command = [
        *command_of(tool, place, names | own, log),
        sys.executable,
        __file__,
        "--planted",
        tool,
    ]
    code = run_process(command, tool, output, limit)
    found = code == 1 and PLANTED[tool] in read(log)
    print(f"{tool} {'finds' if found else 'DOES NOT FIND'} the error planted for it", flush=True)
    if not found:
        print(*(read(log) + read(output)).splitlines()[-ENDING:], sep="\n", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("tools", nargs="*")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a group")
    parser.add_argument("--total", type=float, default=1e9, help="seconds of all groups")
    parser.add_argument(
        "--group", nargs=3, metavar=("NUMBER", "RECORD", "TOOL"), help=argparse.SUPPRESS
    )
    parser.add_argument("--planted", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.planted:
        run_planted(given.planted)
        return 0
    if given.group:
        return run_here(int(given.group[0]), Path(given.group[1]), given.group[2])
    failed, names, cores = False, kernels(), len(os.sched_getaffinity(0))
    end = time.monotonic() + given.total
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(cores) as pool:
        folder, runs, checks = Path(temporary), [], []
        for first, word in enumerate(given.tools):
            place = first * (len(GROUPS) + 1)
            tool, _, pattern = word.partition(":")
            numbers = [at for at, one in enumerate(GROUPS) if re.search(pattern, " ".join(one))]

            def limited(number, tool=tool, place=place):
                until = min(end, time.monotonic() + given.limit)
                return run(tool, number, place + number + 1, names, folder, until)

            if tool in PLANTED:
                checks.append(pool.submit(finds, tool, place, names, folder, given.limit))
            runs += [pool.submit(limited, number) for number in numbers]
        found: dict[str, set[str]] = {word.partition(":")[0]: set() for word in given.tools}
        for done in (one.result() for one in as_completed(runs)):
            failed |= done.code != 0
            found[done.tool] |= done.checked()
            done.show()
        failed |= not all(one.result() for one in checks)
    for tool, launched in found.items():
        missing = sorted(names - launched)
        print(f"{tool}: {len(names & launched)} kernels; not launched: {missing}", flush=True)
        failed |= bool(missing) and tool in given.tools
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
