"""Run tests of the Triton kernels on a GPU under NVIDIA's compute-sanitizer.

    python tests/kernels/sanitize.py [--limit SECONDS] [--only WORD] memcheck racecheck ...

The tests run once for each named tool: memcheck, racecheck, initcheck or synccheck; or none, which
only compiles the kernels. The first run shows that every kernel is launched. It exits with 1 if a
tool finds an error, a test fails, or a kernel is not launched.

Left out: exchanges with peers, because a kernel that waits for another process's kernel may never
end when launches are checked one after the other.
"""

import argparse
import ast
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

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
    ("kernels/test_head.py", "not tilings"),
    ("kernels/test_experts.py", "dtype2 and (router_equals or experts_equal and silu)"),
    ("kernels/test_experts.py", "dtype2 and (8_bits_equal or all_tokens)"),
    ("kernels/test_whole_decoder.py", "moe or gemma"),
    ("kernels/test_whole_decoder.py", "not moe and not gemma"),
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
    ("kernels/test_gated.py kernels/test_training_ops.py", "gate_up and dtype1 or layer or dtype2"),
)  # fmt: skip
# Kernels that none of these tests launches: they wait for kernels of other processes.
LEFT_OUT = {"peers._add"}
LINES = 24  # of a tool, and of a failed process, that are shown


class Run(NamedTuple):
    """One group under a tool."""

    tool: str
    number: int
    code: int
    seconds: float
    output: str

    @property
    def line(self) -> str:
        """What happened, in one line."""
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", self.output)
        tests = re.findall(r"\d+ (?:passed|failed|error).* in .*", self.output)
        name = GROUPS[self.number][0].replace("kernels/", "")
        parts = [*summary[-1:], *tests[-1:], f"{self.seconds:.0f} s"]
        result = "FAILED" if self.code else "ok"
        return f"{self.tool} {result} {name} ({GROUPS[self.number][1]}): {'; '.join(parts)}"

    def show(self) -> None:
        """Print the line, and after a failure the first lines of the tool and the last others."""
        print(self.line, flush=True)
        if self.code:
            tool = [one for one in self.output.splitlines() if one.startswith("=====")]
            rest = [one for one in self.output.splitlines() if not one.startswith("=====")]
            print(*tool[:LINES], *rest[-LINES:], sep="\n", flush=True)


@triton.jit
def planted(x_ptr, out_ptr):
    """Read 32 floats where there are 4: what memcheck must find."""
    at = tl.arange(0, 32)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


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


def run_here(number: int, record: str) -> int:
    """Run the tests of a group in this process. Record the kernels that they launch."""
    launched, run = set(), triton.JITFunction.run

    def noted(kernel, *arguments, **options):
        launched.add(name_of(kernel))
        return run(kernel, *arguments, **options)

    triton.JITFunction.run = noted
    files, selected = GROUPS[number]
    paths = [str(TESTS / name) for name in files.split()]
    code = pytest.main(["-p", "no:cacheprovider", "-x", "-k", selected, *paths])
    Path(record).write_text(json.dumps(sorted(launched)))
    return int(code)


def command_of(tool: str, place: int, names: set[str]) -> list[str]:
    """Return the command before `python`. `place` gives each process ports of its own."""
    if tool == "none":
        return []
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, "--error-exitcode", "1", "--print-limit", "20"]
    command += ["--port", str(49152 + 16 * place), "--target-processes", "application-only"]
    command += ["--kill", "--show-backtrace", "device"]
    if tool == "memcheck":  # torch and Triton try calls that may fail
        command += ["--report-api-errors", "no"]
    if tool == "initcheck":  # it must see who writes memory, so it checks torch's kernels too
        return command
    for name in sorted({name.rpartition(".")[2] for name in names}):
        command += ["--kernel-name", f"kernel_substring={name}"]
    return command


def run(tool: str, number: int, names: set[str], folder: Path, limit: float) -> Run:
    """Run a group in a process of its own."""
    record, began = folder / f"{number}.json", time.monotonic()
    command = command_of(tool, number, names)
    given = [str(number), "--record", str(record)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, *given], env=environment, timeout=limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = 124, f"{(error.stdout or b'').decode()}\nended after {limit:.0f} s"
    return Run(tool, number, code, time.monotonic() - began, output)


def is_found(folder: Path, limit: float) -> bool:
    """Return whether memcheck finds the planted error: it sees Triton's kernels and the bounds of
    torch's tensors."""
    number = len(GROUPS)
    done = run("memcheck", number, {"sanitize.planted"}, folder, limit)
    return done.code == 1 and "Invalid __global__ read of size" in done.output


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+", help="tools; or the number of a group")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a group")
    parser.add_argument("--only", default="", help="groups whose files contain this")
    parser.add_argument("--record")
    given = parser.parse_args()
    if given.record and given.what == [str(len(GROUPS))]:
        planted[(1,)](*(torch.zeros(count, device="cuda") for count in (4, 32)))
        torch.cuda.synchronize()
        return 0
    if given.record:
        return run_here(int(given.what[0]), given.record)
    failed, names, cores = False, kernels(), len(os.sched_getaffinity(0))
    numbers = [number for number, (files, _) in enumerate(GROUPS) if given.only in files]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(cores) as pool:
        folder = Path(temporary)
        for tool in given.what:
            runs = [pool.submit(run, tool, one, names, folder, given.limit) for one in numbers]
            if tool == "memcheck" and not is_found(folder, given.limit):
                failed = True
                print("memcheck does not find the planted error", flush=True)
            for done in (one.result() for one in as_completed(runs)):
                failed |= done.code != 0
                done.show()
        records = (folder / f"{number}.json" for number in numbers)
        texts = [one.read_text() for one in records if one.exists()]
    missing = names - LEFT_OUT - {name for text in texts for name in json.loads(text)}
    print(f"{len(names - missing)} kernels launched; not launched: {sorted(missing)}", flush=True)
    return int(failed or (bool(missing) and not given.only))


if __name__ == "__main__":
    sys.exit(main())
