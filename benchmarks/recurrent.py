"""Time the rounds and prompts of one recurrent layer of Qwen3.5-27B on a CUDA device, captured in
graphs: `python benchmarks/recurrent.py`. Prints microseconds a layer, medians of 5, beside the time
of reading and writing the state once at the measured bandwidth of memory.
"""

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bass_kernels import DeltaState, DeltaWeights, delta_prompt, delta_round
from bass_kernels.delta_rule import places

HEADS, KEY_HEADS, SIZE, KERNEL = 48, 16, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
LAYERS = {1: 48, 8: 10, 64: 2}  # by rows, so that the states do not fit into the L2 cache


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call, captured in a graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[1:])


def inputs(*tokens: int) -> tuple[Tensor, ...]:
    sizes = CHANNELS, 2 * HEADS, HEADS * SIZE
    return torch.randn(*tokens, sum(sizes)).bfloat16().split(sizes, -1)


def states(rows: int, width: int) -> DeltaState:
    state = 0.1 * torch.randn(rows, HEADS, SIZE, SIZE)
    return DeltaState(
        state, torch.randn(rows, places(KERNEL, width), CHANNELS + 2 * HEADS).bfloat16()
    )


def time_rounds(weights: DeltaWeights, rows: int, width: int, accepted: int) -> tuple[float, int]:
    """Return the seconds of a layer in a round, and the bytes of its states."""
    layers, given = [states(rows, width) for _ in range(LAYERS[rows])], inputs(rows, width)
    options = {
        "slots": torch.arange(rows),
        "positions": (100 + torch.arange(width)).repeat(rows, 1),
        "advance": torch.full((rows,), accepted),
    }

    def work() -> None:
        for one in layers:
            delta_round(*given, weights, one, **options, eps=1e-6)

    return seconds(work) / len(layers), layers[0].state.nbytes


def time_prompt(weights: DeltaWeights, tokens: int) -> float:
    """Return the seconds of a layer in a pass over one prompt."""
    given, one, parts = inputs(tokens), states(1, 4), torch.tensor([[0, 0, tokens, 0]])
    return seconds(lambda: delta_prompt(*given, weights, one, parts=parts, eps=1e-6))


def main() -> None:
    torch.set_default_device("cuda")
    weights = DeltaWeights(
        torch.randn(CHANNELS, KERNEL).bfloat16(),
        torch.randn(HEADS),
        torch.randn(HEADS),
        torch.ones(SIZE).bfloat16(),
    )
    large = torch.ones(1 << 28)
    bandwidth = 2 * large.nbytes / seconds(lambda: large.mul_(1.0))
    print(f"{torch.cuda.get_device_name()}, {bandwidth / 1e12:.2f} TB/s")
    for rows, width in itertools.product(LAYERS, (1, 4)):
        for accepted in (0, width):
            took, state = time_rounds(weights, rows, width, accepted)
            floor = state * (2 if accepted else 1) / bandwidth
            print(
                f"{rows} rows, {width} new tokens, {accepted} accepted: {1e6 * took:.1f} "
                f"(state: {1e6 * floor:.1f})"
            )
    for tokens in (512, 8192):
        print(f"a prompt of {tokens} tokens: {1e6 * time_prompt(weights, tokens):.1f}")


if __name__ == "__main__":
    main()
