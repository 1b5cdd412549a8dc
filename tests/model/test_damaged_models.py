"""Damaged or malicious checkpoints are refused by their headers alone, with the fault named, in short
time, with little memory, and without running code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_gguf

from bass_cli.errors import UserError
from bass_cli.formats import tensor_files as files
from bass_cli.formats.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in one file, in shards, and as GGUF."""
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint("llama3", folder / "whole", shards=False)
    write_checkpoint("llama3", folder / "shards")
    write_gguf("llama", folder / "model.gguf")
    for name in ("whole", "shards", "model.gguf"):
        open_checkpoint(folder / name)
    return folder


def refused(path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 500


def framed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


WHOLE = "a whole number from 0 on is needed, not "
HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "null shape": ({"shape": None}, "header is corrupt: tensor .* is not described as in "
                                    "safetensors"),
    "float shape": ({"shape": [301.0, 48]}, f'header is corrupt: tensor "lm.*": {WHOLE}301.0'),
    "negative shape": ({"shape": [-301, -48]}, f"{WHOLE}-301"),
    "true shape": ({"shape": [True, 48]}, f"{WHOLE}True"),
    "huge shape": ({"shape": [2**62, 2**62]}, "tensor .*: its size does not fit its shape"),
    "empty shape": ({"shape": [0, 48]}, "tensor .*: its size does not fit its shape"),
    "long shape": ({"shape": [1] * 10**5}, "tensor .*: its size does not fit its shape"),
    "larger shape": ({"shape": [2**70]}, f"{WHOLE}1180591620717411303424"),
    "listed dtype": ({"dtype": ["F32"]}, r"tensor .*: a text is needed, not \['F32'\]"),
    "odd dtype": ({"dtype": "F33"}, "unsupported type F33"),
    "dtype of a head": ({"dtype": "U32"}, "unsupported type U32"),
    "one offset": ({"data_offsets": [0]}, "header is corrupt: tensor"),
    "no offsets": ({"data_offsets": 3}, "header is corrupt: tensor .* is not described"),
    "float offsets": ({"data_offsets": [0.0, 57792.0]}, f"{WHOLE}0.0"),
    "negative offsets": ({"data_offsets": [-8, 57784]}, f"{WHOLE}-8"),
    "turned offsets": ({"data_offsets": [57792, 0]}, "its size does not fit its shape"),
    "far offsets": ({"data_offsets": [2**62, 2**62 + 57792]}, "the file is truncated"),
    "shared offsets": ({"data_offsets": [400, 58192]}, 'tensors ".*" and ".*" overlap'),
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADERS)
def test_damaged_safetensors_header_is_refused(fault: str, models: Path, tmp_path: Path) -> None:
    changes, message = HEADERS[fault]
    shutil.copytree(models / "whole", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    # a head of its own, whatever the config says
    header["lm_head.weight"] = header["model.embed_tokens.weight"] | changes
    if fault != "shared offsets":
        del header["model.embed_tokens.weight"]
        header["model.embed_tokens.weight"] = header.pop("lm_head.weight")
        message = message.replace('"lm', '"model.emb')
    path.write_bytes(framed(json.dumps(header).encode()) + content[end:])
    refused(tmp_path / "m", message)


def instead(path: Path, kind: str) -> None:
    """Something that is no file in place of a file; nothing writes to the pipe, and the device
    has no end."""
    path.unlink()
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
    }[kind]()


def listed(name: Any) -> Callable[[Path], Any]:
    """Make the index place all tensors in this file."""
    return lambda path: path.write_text(json.dumps({"weight_map": {"a": name}}))


BESIDE = 'key "weight_map": the name of a file in the same folder is needed, not '
NO_FILE = "cannot read the file: a file is needed, not a folder, a pipe or a device"
CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
SHARD = "model-00001-of-00007.safetensors"
FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "index that leaves": (INDEX, listed("../model.safetensors"), rf"index\.json: {BESIDE}'\.\./model"),
    "index with a root": (INDEX, listed("/etc/passwd"), rf"index\.json: {BESIDE}'/etc/passwd'"),
    "index of nothing": (INDEX, listed(""), f"{BESIDE}''"),
    "index of folders": (INDEX, listed(".."), rf"{BESIDE}'\.\.'"),
    "index of numbers": (INDEX, listed(3), f"{BESIDE}3"),
    "index of ghosts": (INDEX, listed("ghost.safetensors"), r"missing, such as ghost\.safetensors; download"),
    "index of lists": (INDEX, lambda p: p.write_text("[]"), r"index\.json: a JSON object is needed"),
    "huge header": (SHARD, lambda p: p.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "header does not fit into 10 bytes"),
    "deep header": (SHARD, lambda p: p.write_bytes(framed(b"[" * 10**5)), "header is corrupt: .* nested too deep"),
    "long number": (SHARD, lambda p: p.write_bytes(framed(b'{"a": ' + b"9" * 6000 + b"}")), "has too many digits"),
    "weights are a pipe": (SHARD, lambda p: instead(p, "pipe"), f"model-00001.*: {NO_FILE}"),
    "weights are a folder": (SHARD, lambda p: instead(p, "folder"), f"model-00001.*: {NO_FILE}"),
    "config is a pipe": (CONFIG, lambda p: instead(p, "pipe"), rf"config\.json: {NO_FILE}"),
    "config is endless": (CONFIG, lambda p: instead(p, "device"), rf"config\.json: {NO_FILE}"),
    "config is large": (CONFIG, lambda p: os.truncate(p, 2**40), r"config\.json: .*it has 1099511627776 bytes"),
    "deep config": (CONFIG, lambda p: p.write_text("[" * 10**5), r"config\.json: broken JSON: it is nested too deep"),
    "config in Latin": (CONFIG, lambda p: p.write_bytes(b'{"a": "\xe4"}'), "the text is not valid UTF-8"),
    "eos of words": (GENERATION, lambda p: p.write_text('{"eos_token_id": "a"}'),
                     r"generation_config\.json: key \"eos_token_id\": a token id or a list of them is needed, not 'a'"),
    "eos of lists": (GENERATION, lambda p: p.write_text('{"eos_token_id": '
                                                        '[[2]]}'), r"is needed, not \[\[2\]\]"),
    "generation is a "
    "list": (GENERATION, lambda p: p.write_text("[]"), r"generation_config\.json: a JSON object is needed"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FILES)
def test_damaged_model_folder_is_refused(fault: str, models: Path, tmp_path: Path) -> None:
    name, spoil, message = FILES[fault]
    shutil.copytree(models / "shards", tmp_path / "m")
    assert (tmp_path / "m" / name).exists()
    spoil(tmp_path / "m" / name)
    refused(tmp_path / "m", message)


class Intruder:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path.with_name("intruded")),)


def save_compressed(path: Path) -> None:
    """A compressed archive: a small file could hold any number of records."""
    torch.save({"a": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as whole:
        records = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


TORCH: dict[str, tuple[Callable[[Path], Any], str]] = {
    "numbered": (lambda p: torch.save({0: torch.ones(2), 1: torch.ones(2)}, p), "it holds no mapping of names to tensors"),
    "a list": (lambda p: torch.save([torch.ones(2)], p), "it holds no mapping of names to tensors"),
    "a tensor": (lambda p: torch.save(torch.ones(2), p), "it holds no mapping of names to tensors"),
    "numbers": (lambda p: torch.save({"a": 3}, p), "the file holds no tensors"),
    "a module": (lambda p: torch.save({"a": torch.nn.Linear(2, 2)}, p), "no code in it is run"),
    "an intruder": (lambda p: torch.save({"a": torch.ones(2), "b": Intruder(p)}, p), "no code in it is run"),
    "an old intruder": (lambda p: p.write_bytes(pickle.dumps(Intruder(p))), "torch cannot read the file"),
    "older": (lambda p: torch.save({"a": torch.ones(2)}, p, _use_new_zipfile_serialization=False), "torch before 1.6"),
    "sparse": (lambda p: torch.save({"a": torch.eye(2).to_sparse()}, p), "is not stored contiguously"),
    "turned": (lambda p: torch.save({"a": torch.ones(2, 3).T}, p), "is not stored contiguously"),
    "spread": (lambda p: torch.save({"a": torch.ones(1).expand(10**9)}, p), "is not stored contiguously"),
    "compressed": (save_compressed, "its records are compressed"),
    "a pipe": (os.mkfifo, NO_FILE),
}  # fmt: skip


@pytest.mark.parametrize("fault", TORCH)
def test_damaged_torch_file_is_refused(fault: str, tmp_path: Path) -> None:
    spoil, message = TORCH[fault]
    path = tmp_path / "pytorch_model.bin"
    spoil(path)
    with pytest.raises(UserError, match=message) as error:
        files.read_torch(path)
    assert str(error.value).startswith(f"{path}: ")
    assert not (tmp_path / "intruded").exists()


NORM, INT32, UINT32, FLOAT, TEXT, ARRAY = b"output_norm.weight", 5, 4, 6, 8, 9


def tensor(
    *,
    dimensions: tuple[int, ...] = (96,),
    count: int | None = None,
    kind: int = 0,
    offset: int | None = None,
) -> Callable[[bytes], bytes]:
    """Change the header of the output norm, which holds [96] numbers of type 0."""

    def change(raw: bytes) -> bytes:
        at = raw.index(NORM) + len(NORM)
        number, size, _, place = struct.unpack_from("<IQIQ", raw, at)
        assert (number, size) == (1, 96)
        said = struct.pack("<I", len(dimensions) if count is None else count)
        said += struct.pack(
            f"<{len(dimensions)}QIQ", *dimensions, kind, place if offset is None else offset
        )
        return raw[:at] + said + raw[at + 24 :]

    return change


def field(kind: int, value: bytes, name: bytes = b"a") -> Callable[[bytes], bytes]:
    """Insert a field of metadata before the others."""

    def change(raw: bytes) -> bytes:
        count = struct.pack("<Q", struct.unpack_from("<Q", raw, 16)[0] + 1)
        return (
            raw[:16]
            + count
            + struct.pack("<Q", len(name))
            + name
            + struct.pack("<I", kind)
            + value
            + raw[24:]
        )

    return change


def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw.replace(
        struct.pack("<Q", len(old)) + old, struct.pack("<Q", len(new)) + new
    )


def retyped(name: bytes, value: float) -> Callable[[bytes], bytes]:
    """Change an integer field to a float."""

    def change(raw: bytes) -> bytes:
        at = raw.index(name) + len(name)
        assert struct.unpack_from("<I", raw, at)[0] in (INT32, UINT32)
        return raw[:at] + struct.pack("<If", FLOAT, value) + raw[at + 8 :]

    return change


NEAR = "the header is truncated or corrupt near byte"
GGUF: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "many tensors": (lambda raw: raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "1152921504606846976 tensors and"),
    "many fields": (lambda raw: raw[:16] + struct.pack("<Q", 2**60) + raw[24:], "1152921504606846976 fields are too many"),
    "more fields": (lambda raw: raw[:16] + struct.pack("<Q", 10**4) + raw[24:], NEAR),
    "a field twice": (field(UINT32, b"abcd", b"llama.block_count"), "a field or a tensor occurs "
                                                                    "twice"),
    "a tensor twice": (renamed(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"), "a field or a tensor occurs twice"),
    "long array": (field(ARRAY, struct.pack("<IQ", 0, 2**60)), NEAR),
    "longer array than "
    "any": (field(ARRAY, struct.pack("<IQ", 0, 2**22 + 1) + bytes(2**22 + 1)), NEAR),
    "long array of texts": (field(ARRAY, struct.pack("<IQ", TEXT, 2**60)), NEAR),
    "array of arrays": (field(ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1)), NEAR),
    "unknown type": (field(77, b""), NEAR),
    "no text": (field(TEXT, struct.pack("<Q", 2) + b"\xff\xff"), NEAR),
    "text of 2^63 bytes": (field(TEXT, struct.pack("<Q", 2**63)), NEAR),
    "alignment in "
    "words": (field(TEXT, struct.pack("<Q", 2) + b"32", b"general.alignment"), "'32' is not valid"),
    "no alignment": (field(UINT32, struct.pack("<I", 0), b"general.alignment"), '"general.alignment": 0 is not valid'),
    "a shape of 0": (tensor(dimensions=(0,)), r"has shape \(0,\)"),
    "no shape": (tensor(dimensions=()), r"has shape \(\)"),
    "a huge shape": (tensor(dimensions=(2**63, 2**63)), r"has shape \(9223372036854775808, 9223372036854775808\)"),
    "many dimensions": (tensor(count=2**31), NEAR),
    "unknown quantisation": (tensor(kind=99), 'tensor "output_norm.weight" has type 99'),
    "quantised norm": (tensor(kind=12), r'tensor "output_norm.weight" of type Q4_K has shape \(96,\)'),
    "far away": (tensor(offset=2**63), "the file is truncated"),
    "on another": (tensor(offset=0), 'tensors ".*" and ".*" overlap'),
    "float eos": (retyped(b"tokenizer.ggml.eos_token_id", 2.0), "a token id or a list of them is "
                                                                "needed, not 2.0"),
    "float count": (retyped(b"llama.block_count", 3.5), '"llama.block_count": a whole number from '
                                                        '1 to 4096 is needed'),
    "infinite count": (retyped(b"llama.embedding_length", float("inf")), '"llama.embedding_length": a finite number'),
}  # fmt: skip


@pytest.mark.parametrize("fault", GGUF)
def test_damaged_gguf_header_is_refused(fault: str, models: Path, tmp_path: Path) -> None:
    spoil, message = GGUF[fault]
    raw = (models / "model.gguf").read_bytes()
    spoiled = spoil(raw)
    assert spoiled != raw
    (tmp_path / "model.gguf").write_bytes(spoiled)
    refused(tmp_path / "model.gguf", message)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_file_that_is_no_gguf_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    instead(path, kind)
    refused(
        path, {"folder": r"config\.json: cannot read the file: No such file"}.get(kind, NO_FILE)
    )
