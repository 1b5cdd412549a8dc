"""Profile a training step of `bass distill`: its parts beside the floor of its matrix products,
peak memory, and the longest kernels.

    python benchmarks/distill_step.py [--forms reference,default] [--windows 16] [--ranks K]
        [--tiny]

Random weights and tokens; layout and batch of the command, shapes of 1.5B and 0.5B. A form is that
of the ops (bass_kernels.use): plain torch, or the device's default. --ranks splits the batch over K
processes with a GPU each, and times the all-reduce of their gradients alone; rank 0's figures are
shown. --tiny is for a CPU.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy
import torch

import bass_kernels as ops
from bass_cli.bench.shapes import SHAPES, random_weights
from bass_cli.distill import trainer as training
from bass_cli.distill.exchange import Alone, RankInfo, Store
from bass_cli.distill.network import Model
from bass_cli.distill.settings import weights_of
from bass_cli.distill.windows import Batches, Corpus, Text, thinned
from bass_cli.models.spec import Spec

RATE = 790e12  # dense bfloat16 operations per second of an H200
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_size": 16}
TINY |= {"inner": 96, "vocab": 500, "windows": (0, 0)}


def tiny(spec: Spec) -> Spec:
    assert spec.rope is not None
    return replace(spec, rope=spec.rope._replace(size=16), **TINY)


def now():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def parts_of(trainer, batch):
    """Time the parts of a step, one after the other, and the time between them."""
    found, last = dict[str, float](), [0.0]

    def mark(name):
        moment = now()
        found[name] = found.get(name, 0.0) + moment - last[0]
        last[0] = moment

    def watched(function, before, name):
        def call(*given, **words):
            mark(before)
            made = function(*given, **words)
            mark(name or ("forward, student" if given[3] is not None else "forward, target"))
            return made

        return call

    places = (
        (training, "run", "between", None),
        (training, "divergence", "between", "loss"),
        (torch.nn.utils, "clip_grad_norm_", "backward", "clipping"),
    )
    kept = [getattr(home, name) for home, name, *_ in places]
    for (home, name, *words), function in zip(places, kept, strict=True):
        setattr(home, name, watched(function, *words))
    last[0] = now()
    trainer._step(batch, time.monotonic)
    mark("optimizer")
    for (home, name, *_), function in zip(places, kept, strict=True):
        setattr(home, name, function)
    return found


def steps_of(trainer, batch, count):
    found = []
    for _ in range(count):
        began = now()
        trainer._step(batch, time.monotonic)
        found.append(now() - began)
    return found


def show_kernels(trainer, batch, most=25):
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[getattr(kind, DEVICE.type.upper())]) as seen:
        trainer._step(batch, time.monotonic)
    spent = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    found = sorted(((getattr(one, spent) / 1e3, one) for one in seen.key_averages()),
                   key=lambda pair: -pair[0])  # fmt: skip
    print(f"{sum(took for took, _ in found):9.2f} ms in all kernels; ms, calls, name:")
    for took, one in found[:most]:
        print(f"{took:9.2f} {one.count:6d}  {one.key[:110]}")


def group_of(ranks, rank, port):
    """Start the processes that train together; the first one starts the others."""
    if ranks == 1:
        return Alone()
    store, devices = Store(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    for number in range(1, ranks if rank == 0 else 0):
        seen = devices[number] if number < len(devices) else str(number)
        more = ["--rank", str(number), "--port", str(store.port)]
        subprocess.Popen(
            [sys.executable, *sys.argv, *more],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": seen},
            stdout=subprocess.DEVNULL,
        )
    return store.join(RankInfo(rank, ranks, "127.0.0.1", port or store.port, ranks), DEVICE)


def show_exchange(trainer, peers):
    """Time the all-reduce of all gradients, without a backward pass that hides it."""
    trainer._gradients.finish()
    took = []
    for _ in range(5):
        began = now()
        trainer._gradients.finish()
        took.append(now() - began)
    size = 4 * sum(weight.numel() for weight in trainer.weights.values())
    least = min(took)
    rate = 2 * (peers.ranks - 1) / peers.ranks * size / least / 1e9
    print(f"{size / 1e9:.2f} GB of gradients, alone: {1e3 * least:.1f} ms, {rate:.1f} GB/s a GPU")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default="reference,default")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the command does
    peers = group_of(given.ranks, given.rank, given.port)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    specs = [SHAPES[name](None) for name in ("qwen2.5-1.5b", "qwen2.5-0.5b")]
    if given.tiny:
        specs = [tiny(spec) for spec in specs]
    layout, noise = thinned(64 if given.tiny else 512, 8), numpy.random.default_rng(0)
    mask = specs[1].vocab - 1
    texts = [Text(str(n), noise.integers(0, mask, layout.window // 2 - 6).tolist(), 8)
             for n in range(4 * given.windows)]  # fmt: skip
    corpus, many = Corpus(texts, layout.window), given.windows
    batches = Batches(corpus, layout, size=many, most=many, seed=0, rank=peers.rank,
                      ranks=peers.ranks)  # fmt: skip
    batch = batches.at(0)
    many = len(range(peers.rank, many, peers.ranks))
    guesses, text = sum(len(part.student) for part in batch), many * layout.window
    large, small = (weights_of(spec) - spec.vocab * spec.width for spec in specs)
    heads = (
        6 * guesses * specs[1].width + 2 * text * specs[0].width
    )  # one distribution for each token is enough
    floor = {"target": 2 * text * large, "student": 6 * many * layout.tokens * small,
             "loss": heads * mask}  # fmt: skip
    print(f"{text} tokens, {many * layout.tokens} with masks, {guesses} guesses; products' floor:")
    print({name: f"{count / RATE * 1e3:.1f} ms" for name, count in floor.items()})
    for form in given.forms.split(","):
        ops.use(None if form == "default" else form)
        target, student = (
            Model(spec, random_weights(spec, dtype=kind, device=DEVICE, seed=0), mask)
            for spec, kind in zip(specs, (dtype, torch.float32), strict=True)
        )
        goal = training.Goal(1000, None, 1e-5)
        trainer = training.Trainer(
            target, student, batches, goal, mask=mask, dtype=dtype, peers=peers
        )
        first, took = sum(steps_of(trainer, batch, 2)), sorted(steps_of(trainer, batch, 5))
        print(f"\n{form}: ms a step {', '.join(f'{1e3 * one:.1f}' for one in took)}; the first two "
              f"{first:.2f} s; loss {trainer.progress.loss:.4f}")  # fmt: skip
        if DEVICE.type == "cuda":
            print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
            torch.cuda.reset_peak_memory_stats()
        if peers.ranks > 1:
            show_exchange(trainer, peers)
        parts = parts_of(trainer, batch)
        print({name: f"{1e3 * took:.1f} ms" for name, took in parts.items()})
        show_kernels(trainer, batch)


if __name__ == "__main__":
    main()
