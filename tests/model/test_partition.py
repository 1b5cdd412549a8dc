"""The part of a checkpoint that each of several processes holds and reads: all parts together are the
whole, for every family. Sizes that cannot be split are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, SPLIT, write_checkpoint, write_gguf

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.weights import load, size_of
from bass_cli.models.partition import Share, check_divisible, held_part, part_of
from bass_cli.models.spec import parameters

CPU = torch.device("cpu")
FEWER = {"num_attention_heads": 4, "num_key_value_heads": 1}  # one key/value head for two processes


def check_parts(checkpoint: Checkpoint, ranks: int) -> list[int]:
    """Every part's tensors are those rows or columns of the whole, and every number of the whole is
    in one of them; the bytes that each has read."""
    spec, read = checkpoint.spec, []
    whole = load(checkpoint, dtype=torch.float32, device=CPU)
    covered = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for rank in range(ranks):
        share, sizes = Share(rank, ranks), list[int]()
        weights = load(
            checkpoint, dtype=torch.float32, device=CPU, share=share, on_read=sizes.append
        )
        assert {name: tuple(one.shape) for name, one in weights.items()} == parameters(
            part_of(spec, ranks)
        )
        for name, tensor in weights.items():
            found = held_part(spec, name, share)
            if found is None:
                assert torch.equal(tensor, whole[name]), name
                covered[name] += 1
                continue
            index = torch.cat([torch.arange(run.start, run.stop) for run in found.runs])
            expected = whole[name].index_select(found.dim, index)
            covered[name].index_add_(found.dim, index, torch.ones_like(expected))
            assert torch.equal(tensor[: len(expected)], expected), name
            assert not tensor[len(expected) :].any(), name  # beyond the vocabulary
        assert sum(sizes) == size_of(checkpoint, share)
        read.append(sum(sizes))
    assert all(count.min() > 0 for count in covered.values())
    return read


@pytest.mark.parametrize("family", SPLIT)
def test_parts_of_a_checkpoint_add_up_to_the_whole(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path, shards=False, **(FEWER if family == "qwen2" else {}))
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.spec
    shared = sum(
        piece.entry.size
        for piece in checkpoint.pieces
        if held_part(spec, piece.slot.name, Share(0, 2)) is None
    )
    if family == "qwen2":  # the one key/value head
        shared += 4 * spec.layers * 2 * spec.head_size * (spec.width + 1)
    assert sum(check_parts(checkpoint, 2)) == checkpoint.size + shared
    assert shared < checkpoint.size / 5  # nearly all is split


def test_quantised_columns_are_cut_at_block_ends(tmp_path: Path) -> None:
    """Halves of 64 columns end with a block of 32, halves of 48 do not: such rows are read whole."""
    path = tmp_path / "tiny.gguf"
    write_gguf("llama", path, kind="Q8_0", intermediate_size=128, num_attention_heads=6,
               num_key_value_heads=2, head_dim=16, hidden_size=96)  # fmt: skip
    checkpoint = open_checkpoint(path)
    entries = {piece.slot.name: piece.entry for piece in checkpoint.pieces}
    assert {entries[f"layers.0.{name}.weight"].dtype for name in ("o", "down", "qkv")} == {"Q8_0"}
    whole = sum(
        piece.entry.size
        for piece in checkpoint.pieces
        if piece.slot.name.endswith(".o.weight")
        or held_part(checkpoint.spec, piece.slot.name, Share(0, 2)) is None
    )
    assert sum(check_parts(checkpoint, 2)) == checkpoint.size + whole


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe"])
def test_parts_of_a_gguf_file_add_up_to_the_whole(family: str, tmp_path: Path) -> None:
    """Value heads in llama.cpp's order and experts in one tensor are split by head and inner size."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if "5" in family else {}
    write_gguf(family, tmp_path / "tiny.gguf", kind="Q8_0", **sizes)
    check_parts(open_checkpoint(tmp_path / "tiny.gguf"), 2)


def test_three_parts_of_an_odd_vocabulary(tmp_path: Path) -> None:
    write_checkpoint("llama3", tmp_path, vocab_size=7, num_attention_heads=6, num_key_value_heads=3,
                     intermediate_size=81)  # fmt: skip
    check_parts(open_checkpoint(tmp_path), 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": 9, "kv_heads": 3}, "attention heads 9"),
        ({"inner": 81}, "feed-forward size 81"),
        ({"heads": 12, "kv_heads": 3}, "key/value heads 3"),
    ],
)
def test_sizes_that_cannot_be_split_are_refused(
    change: dict[str, int], reason: str, tmp_path: Path
) -> None:
    write_checkpoint("llama", tmp_path)
    spec = open_checkpoint(tmp_path).spec
    check_divisible(spec, 2, model="tiny")
    with pytest.raises(UserError, match=f"`tensor_parallel` 2: tiny has {reason}, "):
        check_divisible(replace(spec, **change), 2, model="tiny")


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*SPLIT}))
def test_models_that_cannot_be_split_are_refused(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path, shards=False)
    spec = open_checkpoint(tmp_path).spec
    check_divisible(spec, 1, model="m")
    with pytest.raises(
        UserError,
        match=r"`tensor_parallel` 2: m (norms all its attention heads|has attention sinks)",
    ):
        check_divisible(spec, 2, model="m")
