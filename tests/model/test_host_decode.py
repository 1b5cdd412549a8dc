"""Decoding passes of a CPU in few calls: their logits are those of transformers, a token has the same
bits in every pass, and numbers that are not finite stay in their row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from test_parity import assert_same, decoder_of
from torch import Tensor

from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load
from bass_cli.models import decoder as decoder_file
from bass_cli.models.block_allocator import Change
from bass_cli.models.decoder import Decoder
from bass_cli.models.fused_decode import run_host
from bass_cli.models.runner import Runner
from bass_kernels import GROUP, Grouped, grouped_works

# With biases and a tied head, norms of heads, a half rotated, and scaled frequencies
FAMILIES = {"qwen2": {}, "qwen3": {"use_sliding_window": False}, "glm": {}, "ernie4_5": {}}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of run_host, whether its numbers were finite."""
    found: list[bool] = []

    def run(*arguments: Any) -> Tensor | None:
        result = run_host(*arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr(decoder_file, "run_host", run)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, tmp_path: Path, passes: list[bool]
) -> None:
    """Three rows of unequal length in passes of 1, 4 and 9 tokens, after rejected drafts."""
    model = write_checkpoint(family, tmp_path, **FAMILIES[family])
    assert_same(decoder_of(tmp_path), model)
    assert passes == [True] * 6


@torch.inference_mode()
def logits_of(
    decoder: Decoder, rows: list[tuple[list[int], list[int]]], width: int
) -> list[Tensor]:
    """Feed each row (its prompt, and tokens after it) `width` tokens at a time; the logits of each
    row, [tokens, V]."""
    runner = Runner(decoder, rows=len(rows), span=40, pending=1)
    for row, (prompt, _) in enumerate(rows):
        runner.open(str(row), prompt)
        runner.follow(Change((), (), (((row,), str(row)),)))
    found: list[Tensor] = []
    for first in range(0, len(rows[0][1]), width):
        tokens = torch.tensor([fed[first : first + width] for _, fed in rows])
        starts = torch.tensor([len(prompt) - 1 + first for prompt, _ in rows])
        positions = starts[:, None] + torch.arange(width)
        found.append(runner.forward(tokens, positions, (positions[:, -1] + 1).tolist()))
    return list(torch.cat(found, 1))


def grouped_decoder(folder: Path) -> Decoder:
    """A decoder whose matrices are random ones in groups of 4 bits, as in a GGUF file."""
    write_checkpoint("qwen2", folder, hidden_size=64, intermediate_size=96, head_dim=32)
    checkpoint = open_checkpoint(folder)
    weights = load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for name, tensor in weights.items():
        if tensor.ndim == 2 and name != "embed.weight":
            values = torch.randint(-8, 8, tensor.shape, generator=generator).to(torch.int8)
            scales = torch.rand(len(values), values.shape[1] // GROUP, generator=generator) / 30
            weights[name] = Grouped.of(values, scales, 0 * scales, 4)
    return Decoder(checkpoint.spec, weights)


@pytest.mark.skipif(not grouped_works(), reason="torch has no such product here")
def test_a_token_has_the_same_bits_alone_with_drafts_and_beside_rows(
    tmp_path: Path, passes: list[bool]
) -> None:
    decoder = grouped_decoder(tmp_path)
    row, other = ([5, 9, 2, 7], [7, 3, 8, 1, 1, 6]), ([8] * 19, [8, 2, 2, 9, 4, 4])
    alone = logits_of(decoder, [row], 1)[0]
    assert alone.isfinite().all()
    assert alone.std() > 0.1
    assert torch.equal(logits_of(decoder, [row], 3)[0], alone)
    assert torch.equal(logits_of(decoder, [other, row], 2)[1], alone)
    assert passes == [True] * 11


def test_numbers_that_are_not_finite_stay_in_their_row(tmp_path: Path, passes: list[bool]) -> None:
    """An embedding of NaN. The pass is then run op by op, so the others' bits may differ."""
    write_checkpoint("ernie4_5", tmp_path)
    decoder = decoder_of(tmp_path)
    rows = [([5, 9, 2, 7], [7, 3, 8, 1]), ([8] * 19, [8, 2, 299, 9])]
    clean = logits_of(decoder, rows, 2)
    with decoder.weights.writing("embed.weight") as embed:
        embed[299] = torch.nan
    passes.clear()
    found = logits_of(decoder, rows, 2)
    clean, found = ([one[:, :299] for one in both] for both in (clean, found))  # a tied head
    assert passes == [True, False]
    torch.testing.assert_close(found[0], clean[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1][:2], clean[1][:2], atol=1e-5, rtol=0)
    assert found[1][2:].isnan().all()
