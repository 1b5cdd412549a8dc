"""Time the prefill of a long prompt, and its share of the rate of large matrix products.

    python benchmarks/long_prompt.py [--shapes qwen2.5-1.5b,qwen2.5-7b] [--tokens 32000]
                                     [--repeats 3] [--device auto]

Random weights of real shapes, bfloat16. Operations are those of the layers' products and of causal
attention; the rate is that of large products (bench/costs.py).
"""

import argparse
import math
import time

import torch

from bass_cli.bench.costs import ceilings_of
from bass_cli.bench.shapes import SHAPES, random_weights
from bass_cli.models.decoder import Decoder
from bass_cli.models.runner import Runner
from bass_cli.models.spec import Spec, parameters

_MATRICES = ("qkv.weight", "o.weight", "up.weight", "down.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen2.5-1.5b,qwen2.5-7b")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    rate = ceilings_of(device, torch.bfloat16).operations
    print(f"products: {rate / 1e12:.1f} TFLOP/s")
    print("shape           seconds  least   most  of the rate")
    for name in args.shapes.split(","):
        spec = SHAPES[name](None)
        found = sorted(seconds(spec, device, args.tokens, args.repeats))
        middle = found[len(found) // 2]
        share = operations(spec, args.tokens) / rate / middle
        least, most = found[0], found[-1]
        print(f"{name:<14} {middle:8.3f} {least:6.3f} {most:6.3f} {share:12.2f}", flush=True)


def seconds(spec: Spec, device: torch.device, tokens: int, repeats: int) -> list[float]:
    """Time the prefill of this many tokens several times; the first time does not count."""
    weights = random_weights(spec, dtype=torch.bfloat16, device=device, seed=0)
    decoder, found = Decoder(spec, weights), []
    for turn in range(repeats + 1):
        runner = Runner(decoder, rows=1, span=8, lag=1)
        synchronize(device)
        began = time.perf_counter()
        runner.open("prompt", [(7919 * i + turn) % spec.vocab for i in range(tokens)])
        while runner.read():
            pass
        synchronize(device)
        found.append(time.perf_counter() - began)
    return found[1:]


def operations(spec: Spec, tokens: int) -> float:
    """Count the floating-point operations of the layers for a prompt, without the head."""
    products = sum(
        math.prod(shape) for name, shape in parameters(spec).items() if name.endswith(_MATRICES)
    )
    return 2 * tokens * products + 2 * spec.layers * spec.heads * spec.head_size * tokens**2


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
