"""GGUF files in several pieces, as llama.cpp splits large ones: read as one, and wrong or missing
pieces named."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import write_gguf

from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.weights import load

CPU = torch.device("cpu")


def write_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch, **words: Any) -> list[Path]:
    """Write a small model in pieces, as the gguf package splits it; their paths."""
    writer = functools.partial(gguf.GGUFWriter, split_max_tensors=13, **words)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", writer)
        write_gguf("qwen3_moe", folder / "a[1].gguf")
    return sorted(folder.glob("*-of-*.gguf"))


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_pieces_of_a_gguf_file_are_read_as_one(
    small_first_shard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece may have no tensors."""
    pieces = write_pieces(tmp_path, monkeypatch, small_first_shard=small_first_shard)
    assert len(pieces) > 2
    write_gguf("qwen3_moe", tmp_path / "whole.gguf")
    whole, found = (open_checkpoint(path) for path in (tmp_path / "whole.gguf", pieces[0]))
    assert (found.spec, found.vocabulary, found.size) == (whole.spec, whole.vocabulary, whole.size)
    words = {"dtype": torch.float32, "device": CPU}
    due, got = load(whole, **words), load(found, **words)
    assert got.keys() == due.keys()
    assert all(torch.equal(got[name], one) for name, one in due.items())


def test_wrong_or_missing_pieces_of_a_gguf_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, *_ = write_pieces(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"one of \d pieces; name the first, .*-00001-of-"):
        open_checkpoint(second)
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(UserError, match=r"-00003-of-.*: the file is missing; .* pieces of a model"):
        open_checkpoint(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match=r"-00003-of-.*1 do not fit its name; it is not a piece of"):
        open_checkpoint(first)
    third.write_bytes(kept)
    open_checkpoint(first)
    alone = first.rename(tmp_path / "b.gguf")
    with pytest.raises(UserError, match=r'"split.count": the file is one of \d pieces; give all'):
        open_checkpoint(alone)
