"""One of two processes of a split model on a CPU whose sums go through memory that both can write,
by kernels in Triton's interpreter. No tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from forked import Forked
from torch import Tensor

import bass_kernels as ops
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.models import decoder as module
from bass_cli.models import ranks as ranks_module
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share, part_of
from bass_cli.models.ranks import Ranks
from bass_cli.models.runner import Runner

CPU = torch.device("cpu")
LENGTHS = (1, 3, 6)  # of prompts
VOCAB = 300
_CODE = "import sys, halves; halves.be(*sys.argv[1:])"
_CAPACITY, _LIMIT, _PATIENCE = 1 << 14, 10**8, 240.0


def begin(folder: Path, what: str) -> list[Tensor | bool]:
    """Run both processes in a folder, and return what each found. `what`: "trial" or "logits"."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    children = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("w") as log:
            children.append(Forked(_CODE, what, str(rank), cwd=folder, env=env, stderr=log))
    for rank, child in enumerate(children):
        assert child.wait(_PATIENCE) == 0, (folder / f"{rank}.log").read_text()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def be(what: str, number: str) -> None:
    """Be process `number`."""
    from bass_kernels import peers, products

    torch.set_num_threads(1)
    rank, size = int(number), 2 * 2 * _CAPACITY
    buffers = [
        torch.from_file(f"buffer{one}", shared=True, size=size, dtype=torch.int64)
        for one in range(2)
    ]
    flags = torch.zeros(2, dtype=torch.int32)
    own = peers.Peers(
        rank,
        2,
        torch.tensor([one.data_ptr() for one in (*buffers, flags)]),
        torch.tensor([1, 0], dtype=torch.int32),
        flags,
        _CAPACITY,
        _LIMIT,
    )
    products.processors = lambda device: 132  # the tiles of few processors would not fit at once
    found: Tensor | bool
    if what == "trial":
        example = ranks_module._example  # the interpreter has no bfloat16
        ranks_module._example = lambda *given: example(*given).half()
        found = ranks_module.try_peers(own)
    else:
        found = _split_logits(rank, own)
    torch.save(found, f"{rank}.pt")
    (Path(f"{rank}.over")).touch()
    while not Path(f"{1 - rank}.over").exists():  # it may still read what this process sent
        time.sleep(0.01)


def _split_logits(rank: int, peers: object) -> Tensor:
    """Return logits_of this process's half of the model in the folder "model"."""
    ops.use("triton")
    ranks, port = Ranks(Share(rank, 2)), Path("port")
    if rank == 0:
        Path("new").write_text(str(ranks.meet()))
        Path("new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    ranks.join(int(port.read_text()), CPU)
    ranks.peers = peers
    launched, run = [], module.run_fused

    def fused(*given: object) -> Tensor:
        launched.append(1)
        return run(*given)

    module.run_fused = fused
    checkpoint = open_checkpoint(Path("model"))
    weights = load(checkpoint, dtype=torch.float32, device=CPU, share=Share(rank, 2))
    spec = part_of(checkpoint.spec, 2)
    found = logits_of(Decoder(spec, weights, vocab=VOCAB, ranks=ranks))
    assert len(launched) == 2
    assert peers.state[0] > 2 * 2 * spec.layers
    return found


@torch.inference_mode()
def logits_of(decoder: Decoder) -> Tensor:
    """Return logits of rows of unequal lengths, at one token and then at three."""
    runner = Runner(decoder, rows=3, span=40, pending=1)
    for row, length in enumerate(LENGTHS):
        runner.open(str(row), [5 + i % 7 for i in range(length)])
        runner.follow(Change((), (), (((row,), str(row)),)))
    tokens, places = torch.arange(12).view(3, 4), torch.tensor(LENGTHS)[:, None] - 1
    first = runner.forward(tokens[:, :1], places, [*LENGTHS])
    ends = [length + 3 for length in LENGTHS]
    rest = runner.forward(tokens[:, 1:], places + torch.arange(1, 4), ends)
    return torch.cat((first, rest), 1)
