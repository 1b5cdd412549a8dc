"""A model split over two decoders gives the logits of the whole model, for every family. Threads
stand in for processes; tests/test_tensor_parallel.py has real ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import SPLIT, write_checkpoint
from torch import Tensor

from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.models import ranks as module
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.partition import Share, part_of
from bass_cli.models.ranks import Ranks
from bass_cli.models.runner import Runner

CPU = torch.device("cpu")
PROMPTS = ([5, 9, 7, 8, 3, 2, 6, 4, 11], [9, 3, 7], [12, 250, 300, 17, 150, 151])


class Exchanges:
    """The functions of torch.distributed that Ranks uses, between threads. A thread sets
    `own.rank`. Exchanges are complete when they return, so there is no work to wait for."""

    def __init__(self, ranks: int):
        self.own = threading.local()
        self._ranks, self._there = ranks, threading.Barrier(ranks, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def _every(self, tensor: Tensor) -> list[Tensor]:
        self._there.wait()
        self._given[self.own.rank] = tensor.clone()
        self._there.wait()
        return list(self._given)

    def all_reduce(self, tensor: Tensor, async_op: bool) -> None:
        tensor.copy_(torch.stack(self._every(tensor)).sum(0))

    def all_gather_single(self, every: Tensor, tensor: Tensor, async_op: bool) -> None:
        every.copy_(torch.cat(self._every(tensor)))


@torch.inference_mode()
def logits_of(decoder: Decoder) -> Tensor:
    """Logits of three rows with unequal prompts in two passes of three tokens. The second pass
    overwrites rejected tokens of the first."""
    runner = Runner(decoder, rows=3, span=12, pending=1)
    for row, prompt in enumerate(PROMPTS):
        runner.open(str(row), prompt)
    runner.follow(Change((), (), tuple(((row,), str(row)) for row in range(3))))
    lengths, found = torch.tensor([len(prompt) for prompt in PROMPTS]), []
    for step in range(2):
        positions = lengths[:, None] - 1 + 2 * step + torch.arange(3)
        ends = [int(end) + 1 for end in positions[:, -1]]
        tokens = (positions * 37 + 11 * torch.arange(3)[:, None]) % decoder.vocab
        found.append(
            runner.forward(tokens, positions, ends, last=None if step else 2).flatten(0, 1)
        )
    return torch.cat(found)


@pytest.mark.parametrize("family", SPLIT)
def test_split_model_gives_the_logits_of_the_whole(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is 301 ids, of which 300 are kept: parts of 151 are joined and cut."""
    fewer = {"num_attention_heads": 4, "num_key_value_heads": 1} if family == "qwen2" else {}
    write_checkpoint(family, tmp_path, shards=False, **fewer)
    checkpoint = open_checkpoint(tmp_path)
    exchanges = Exchanges(2)
    monkeypatch.setattr(module, "distributed", exchanges)

    def part(rank: int) -> Tensor:
        exchanges.own.rank, share = rank, Share(rank, 2)
        weights = load(checkpoint, dtype=torch.float32, device=CPU, share=share)
        spec = part_of(checkpoint.spec, 2)
        return logits_of(Decoder(spec, weights, vocab=300, ranks=Ranks(share)))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(part, range(2))
    weights = load(checkpoint, dtype=torch.float32, device=CPU)
    expected = logits_of(Decoder(checkpoint.spec, weights, vocab=300))
    assert torch.equal(first, second)
    assert first.shape == (15, 300)
    scale = expected.std()
    assert (first - expected).abs().max() < 1e-5 * scale
    assert first.argmax(-1).tolist() == expected.argmax(-1).tolist()
