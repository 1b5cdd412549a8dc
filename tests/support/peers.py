"""Processes that train a tiny model together, without the program that begins and watches them.
No tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from forked import Forked

from bass_cli.distill.network import Model, source_of, student_weights
from bass_cli.distill.training import Goal, Trainer
from bass_cli.distill.windows import Batches, Corpus, Text, thinned
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load

WINDOW, VOCAB, WINDOWS, STEPS = 48, 299, 5, 6
_CODE = "import sys, peers; peers.be(*sys.argv[1:])"
_PATIENCE = 60.0


def corpus() -> Corpus:
    """Texts of which no two fit into a window, with long and short answers, so that windows differ
    in how many guesses they have."""
    noise = numpy.random.default_rng(0)
    sizes = {48: 44, 47: 2, 46: 30, 45: 38, 44: 5, 40: 35, 39: 2}
    texts = [Text(str(n), noise.integers(3, VOCAB, n).tolist(), at) for n, at in sizes.items()]
    return Corpus(texts, WINDOW)


def trainer(folder: Path, device: str = "cpu", **words: Any) -> Trainer:
    """Of the folder's models; `words`: Trainer's and those of its batches. On a GPU in bfloat16, a
    window at a time, which is the same whatever others a process has."""
    target, small = open_checkpoint(folder / "target"), open_checkpoint(folder / "small")
    where, dtype = torch.device(device), torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
        words["most"] = 1
    model = Model(target.spec, load(target, dtype=dtype, device=where), VOCAB, dtype)
    source = source_of(small, layers=None, mask=None, vocab=VOCAB, size=VOCAB)
    student = Model(source.spec, student_weights(source, where), VOCAB, dtype, source.mask)
    peers = words.pop("peers", None)
    most = words.pop("most", WINDOWS)
    batches = Batches(corpus(), thinned(WINDOW, 4), size=words.pop("size", WINDOWS), most=most,
                      seed=0, **words)  # fmt: skip
    return Trainer(model, student, batches, Goal(STEPS, None, 0.01), peers)


def watch(found: list[dict[str, torch.Tensor]], of: Trainer, cut: Any) -> Any:
    """What stands for clip_grad_norm_, `cut`, and keeps the gradients of every step."""

    def watched(*given: Any) -> Any:
        found.append({name: weight.grad.cpu().clone() for name, weight in of.weights.items()})
        return cut(*given)

    return watched


def be(folder: str, device: str, rank: str, ranks: str, *sizes: str) -> None:
    """One of them, from meeting the others to files with gradients, weights and progress, of one
    training after the other, by how many windows a batch has."""
    from bass_cli.distill import exchange

    exchange._BUCKET = 4096  # several, of these few weights
    torch.set_num_threads(1)
    place, number = Path(folder), int(rank)
    store, port = exchange.Store(), place / "port"
    if not number:
        (place / "new").write_text(str(store.port))
        (place / "new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    info = exchange.RankInfo(number, int(ranks), "127.0.0.1", int(port.read_text()), int(ranks))
    peers = store.join(info, torch.device(device))
    cut = torch.nn.utils.clip_grad_norm_
    for size in sizes:
        mine = trainer(place, device, peers=peers, most=2, size=int(size), rank=number,
                       ranks=int(ranks))  # fmt: skip
        grads: list[dict[str, torch.Tensor]] = []
        torch.nn.utils.clip_grad_norm_ = watch(grads, mine, cut)
        mine.run(lambda done: None, checkpoint=None if number else place / f"{size}.checkpoint")
        own = [sum(len(part.student) for part in mine._batches.at(step)) for step in range(STEPS)]
        done = mine.progress
        kept = {"guesses": done.guesses, "tokens": done.tokens, "loss": done.loss, "own": own}
        weights = {name: weight.detach().cpu() for name, weight in mine.weights.items()}
        torch.save((grads, weights, kept), place / f"{rank}-{size}.pt")


def train(
    folder: Path, ranks: int, sizes: list[int], device: str = "cpu"
) -> dict[int, list[tuple[Any, ...]]]:
    """What each process comes to, by size: gradients by step, weights, progress. Each on a GPU of
    its own, or on a CPU."""
    children = []
    for rank in range(ranks):
        with (folder / f"{rank}.log").open("w") as log:
            given = (str(folder), device, str(rank), str(ranks), *map(str, sizes))
            env = os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)}
            children.append(Forked(_CODE, *given, cwd=folder, env=env, stderr=log))
    for rank, child in enumerate(children):
        assert child.wait(_PATIENCE) == 0, (folder / f"{rank}.log").read_text()
    return {
        size: [torch.load(folder / f"{rank}-{size}.pt") for rank in range(ranks)] for size in sizes
    }
