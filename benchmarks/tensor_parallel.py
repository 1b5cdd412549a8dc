"""Compare one model on one GPU and on several: ms per token and sequence, plain and with drafts.

    python benchmarks/tensor_parallel.py [--ranks 1,2] [OPTIONS OF bass bench]

Default: the 7B shape, 8 rows, plain decoding and a drafter of one pass at acceptance 0.85. Each
number of GPUs is a `bass bench` of its own with its own random weights; the floor is that of the
first GPU. Exits with 1 if one of them fails.
"""

import json
import subprocess
import sys

USUAL = [
    *("--shape", "qwen2.5-7b", "--draft-shape", "pard-0.5b", "--acceptance", "0.85"),
    *("--methods", "plain,4,6,8", "--batch-sizes", "8", "--prompt-tokens", "236"),
    *("--repeats", "3"),
]


def measured(ranks: str, options: list[str]) -> list[dict] | None:
    """Run one bench; return its cells, or None if it failed and printed an error."""
    code = "from bass_cli.cli.commands import main; main()"
    command = [sys.executable, "-c", code, "bench", *options, "--tensor-parallel", ranks, "--json"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        return None
    document = json.loads(found.stdout)
    graphs = sum(capture["graphs"] for capture in document["captures"])
    print(f"{ranks} GPUs: {document['pair']['label']}, {graphs} graphs", flush=True)
    return document["cells"]


def main() -> int:
    options, ranks = sys.argv[1:], "1,2"
    if options[:1] == ["--ranks"]:
        ranks, options = options[1], options[2:]
    if "--shape" not in options:
        options = [*USUAL, *options]
    every = {one: measured(one, options) for one in ranks.split(",")}
    print("GPUs rows method  ms/token least-most     floor  round  graph draft verify accept")
    for one, cells in every.items():
        for cell in cells or []:
            least, most = cell["ms_per_token_spread"]["mean"]
            parts = cell["parts_ms"] or {}
            names = ("round", "device", "draft", "verify", "accept")
            each = " ".join(f"{parts.get(name) or 0:6.3f}" for name in names)
            print(
                f"{one:>4} {cell['batch']:>4} {cell['method']:<7} "
                f"{cell['ms_per_token']['mean']:8.3f} {least:.3f}-{most:.3f} "
                f"{cell['floor_ms_per_token']['mean']:7.3f} {each}"
            )
    return int(None in every.values())


if __name__ == "__main__":
    sys.exit(main())
