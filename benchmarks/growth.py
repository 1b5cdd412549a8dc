"""Measure how the time of a job grows with samples, prompts and prompt length, beside its floor;
draw a chart.

    python benchmarks/growth.py --pair PAIR [--n 1,16,1024] [--prompts 1,128,2048]
                                [--prompt-tokens 256,8192,32000] [--tokens 64] [--chart FILE.png]

Values that are not varied: 8 prompts of 256 tokens, n = 8. Plain decoding. The seconds are those of
`bass_cli.generate` in a process that has imported everything: plan, weights, capturing, prompts,
rounds. The floor counts prompts and rounds only: the larger of weights over bandwidth and
operations over rate, for each batch that the rows need.
"""

import argparse
import math
import time
from typing import NamedTuple

from bass_cli import Job, Sampling, generate, load_pair
from bass_cli.bench.floor import ceilings_of
from bass_cli.models.spec import parameters
from bass_cli.run.plan import make_plan
from bass_cli.run.profile import joined

BASE = {"n": 8, "prompts": 8, "prompt_tokens": 256}


class Point(NamedTuple):
    varied: str
    value: int
    rows: int
    seconds: float
    floor: float
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", required=True)
    parser.add_argument("--n", default="1,16,128,1024")
    parser.add_argument("--prompts", default="1,32,256,2048")
    parser.add_argument("--prompt-tokens", default="256,2048,8192,32000")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chart")
    args = parser.parse_args()
    run(args, {**BASE, "prompts": 1})  # compiles the kernels
    print("varied          value   rows   seconds     floor    tokens/s", flush=True)
    points = []
    for varied in BASE:
        for value in map(int, getattr(args, varied).split(",")):
            point = run(args, {**BASE, varied: value}, varied)
            points.append(point)
            print(
                f"{varied:<13} {value:>7} {point.rows:>6} {point.seconds:>9.2f} "
                f"{point.floor:>9.2f} {point.tokens / point.seconds:>11.0f}",
                flush=True,
            )
    if args.chart:
        draw(points, args.chart)


def run(args: argparse.Namespace, size: dict[str, int], varied: str = "") -> Point:
    pair = load_pair(args.pair)
    job = Job(
        pair=pair.model_copy(update={"draft": "none"}),
        n=size["n"],
        device=args.device,
        chat=False,
        sampling=Sampling(temperature=0.8, top_p=0.95, max_new_tokens=args.tokens),
    )
    tokenizer = make_plan(job).files.tokenizer
    prompts = [
        tokenizer.decode(joined(tokenizer, i, size["prompt_tokens"])) + f" {i}"
        for i in range(size["prompts"])
    ]
    began = time.perf_counter()
    plan = make_plan(job, longest_prompt=max(prompts, key=len), prompts=len(prompts))
    done = list(generate(prompts, plan, count=len(prompts)))
    seconds = time.perf_counter() - began
    assert not any(one.error for one in done), next(one.error for one in done if one.error)
    length = sum(one.prompt_tokens for one in done) / len(done)
    return Point(
        varied,
        size.get(varied, 0),
        plan.rows,
        seconds,
        floor(plan, size, length, args.tokens),
        sum(one.tokens for one in done),
    )


def floor(plan, size: dict[str, int], length: float, tokens: int) -> float:
    """Return the floor in seconds: prompts by operations, rounds by the larger of both."""
    best = ceilings_of(plan.device, plan.dtype)
    shapes = parameters(plan.files.target.spec)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name != "embed.weight")
    rounds = -(-size["n"] * size["prompts"] // plan.rows) * tokens
    read = weights * plan.dtype.itemsize / best.bandwidth
    work = 2 * weights / best.operations
    return rounds * max(read, plan.rows * work) + size["prompts"] * length * work


def draw(points: list[Point], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(BASE), figsize=(10, 3.2), sharey=True)
    for axis, varied in zip(axes, BASE, strict=True):
        found = [point for point in points if point.varied == varied]
        axis.plot([p.value for p in found], [p.seconds for p in found], "o-", label="wall clock")
        axis.plot([p.value for p in found], [p.floor for p in found], ":", label="floor")
        axis.set(xscale="log", yscale="log", xlabel=varied.replace("_", " "))
    axes[0].set_ylabel("seconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
