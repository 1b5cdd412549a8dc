"""Check plain decoding on a GPU: a round over its graph alone, and the graph over reading the
weights and keys.

    python benchmarks/plain.py [SHAPE]

These are ratios of one run, so they hold on any machine. Exits with 1 if one is above its bound:
then the host delays the device, or kernels have become slower. `make test-gpu` runs it.
"""

import argparse
import json
import subprocess
import sys

ROWS = (8, 64)
HOST = 1.05  # largest ratio of a round to its graph: host time between two rounds must be hidden
# Largest ratio of a graph to its floor, by rows: a tenth above those measured on an H200 with
# qwen2.5-7b, 1.23 and 1.40.
KERNELS = {8: 1.35, 64: 1.55}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="qwen2.5-7b")
    shape = parser.parse_args().shape
    command = [
        sys.executable,
        "-c",
        "from bass_cli.cli.commands import main; main()",
        "bench",
        "--shape",
        shape,
        "--methods",
        "plain",
        "--batch-sizes",
        ",".join(map(str, ROWS)),
        "--prompt-tokens",
        "236",
        "--repeats",
        "3",
        "--json",
    ]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    bad = False
    print(
        f"{shape}, plain decoding: ms a round, its graph alone, the floor; round / graph, graph / "
        "floor"
    )
    for cell in json.loads(found.stdout)["cells"]:
        rows, parts = cell["batch"], cell["parts_ms"]
        taken, graph, floor = parts["round"], parts["device"], cell["floor_ms_per_token"]["mean"]
        good = taken <= HOST * graph and graph <= KERNELS[rows] * floor
        bad = bad or not good
        print(
            f"{rows:3d} rows  {taken:6.3f} {graph:6.3f} {floor:6.3f}   {taken / graph:5.3f} "
            f"{graph / floor:5.3f}   {'ok' if good else f'more than {HOST} or {KERNELS[rows]}'}"
        )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
