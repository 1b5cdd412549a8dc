"""Time the demo's job on an idle machine, beside one busy loop on every core, and beside two.

    python benchmarks/company.py [--tokens 128] [--repeats 1] [--json] [-- COMMAND ...]

Prints the seconds of the whole command, loading included, and their ratio to those of the idle
machine. Beside k busy loops on every core, a fair share of the machine is one in k + 1. Exits with
1 if the ratios are above 3 and 5. This tests the command's choice of threads
(bass_cli/system/threads.py); to test another one, give --threads N or OMP_NUM_THREADS in COMMAND.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

BOUNDS = {0: 1.0, 1: 3.0, 2: 5.0}  # busy loops on each core: largest ratio to the idle time
_LOOP = "while True: pass"


@contextlib.contextmanager
def company(count):
    """Run this many busy loops."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        time.sleep(1.0 if loops else 0.0)  # until all loops run
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of(command, cores, loops):
    with company(loops * cores):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    command = args.command or [sys.executable, "examples/demo.py", "--tokens", str(args.tokens)]
    cores = len(os.sched_getaffinity(0))
    found: dict[int, list[float]] = {loops: [] for loops in BOUNDS}
    for _ in range(args.repeats):
        for loops in BOUNDS:
            found[loops].append(seconds_of(command, cores, loops))
            print(
                f"{loops} busy loops on each of {cores} cores: {found[loops][-1]:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    idle = statistics.median(found[0])
    ratios = {loops: statistics.median(seconds) / idle for loops, seconds in found.items()}
    if args.json:
        print(json.dumps({"command": command, "cores": cores, "seconds": found, "ratios": ratios}))
    else:
        for loops, ratio in ratios.items():
            print(f"{loops} a core: {ratio:.2f}x the idle time, the bound is {BOUNDS[loops]:.0f}x")
    sys.exit(any(ratio > BOUNDS[loops] for loops, ratio in ratios.items()))


if __name__ == "__main__":
    main()
