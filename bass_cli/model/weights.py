"""Checkpoints: opened by their headers alone, then loaded into the decoder's fused tensors, piece by piece.

Everything that can be wrong with the files is found by `open_checkpoint`. Loading reads a few megabytes at a time, so the
host never holds more than the model and one piece. Not here: finding the files (sources.py), file formats (headers.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from bass_cli.job import UserError

from . import families, gguf_families
from .decoder import Spec, parameters
from .families import CODEGEN_BLOCKS, FAMILIES, Slot
from .gguf_families import ARCHITECTURES, ROPE_FACTORS, spec_of_gguf
from .headers import Entry, read_gguf, read_safetensors, read_torch
from .sources import locate
from .specs import spec_of_config

__all__ = ["Checkpoint", "load", "locate", "open_checkpoint"]

_PIECE = 1 << 22  # elements read or dequantised at once
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
_NAMED = 5  # tensors that an error names
# The index and the single file of each format, in order of preference; Mistral's consolidated file has other names.
_FORMATS: tuple[tuple[str, str, Callable[[Path], dict[str, Entry]]], ...] = (
    ("model.safetensors.index.json", "*.safetensors", read_safetensors),
    ("pytorch_model.bin.index.json", "pytorch_model*.bin", read_torch),
)


class Piece(NamedTuple):
    """A stored tensor and where it goes."""

    entry: Entry
    slot: Slot


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose headers are in order. `metadata` is that of a GGUF file, else empty."""

    path: Path
    spec: Spec
    eos_ids: tuple[int, ...]
    metadata: Mapping[str, Any]
    pieces: tuple[Piece, ...]

    def fingerprint(self) -> str:
        """A digest of the spec, the layout of the files and samples of their content; not of their place on disk."""
        digest = hashlib.sha256(repr((self.spec, self.eos_ids)).encode())
        for path in sorted({piece.entry.file for piece in self.pieces}):
            with path.open("rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{path.name} {size}".encode())
                for place in range(0, size, max(size // 16, 1)):
                    file.seek(place)
                    digest.update(file.read(4096))
        return digest.hexdigest()[:32]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check a folder (config.json and weights) or a .gguf file by headers alone; UserError names the fault."""
    if path.is_dir():
        return _open_folder(path)
    if path.suffix != ".gguf":
        raise UserError(f"{path}: a model is a folder with config.json, or a .gguf file")
    metadata, entries = read_gguf(path)
    factors = None
    if ROPE_FACTORS in entries:
        with path.open("rb", buffering=0) as file:
            factors = tuple(torch.cat([part for _, part in _parts(file, entries[ROPE_FACTORS])]).tolist())
    shapes = {name: entry.shape for name, entry in entries.items()}
    spec = spec_of_gguf(metadata, shapes, place=str(path), rope_factors=factors)
    tensors = ARCHITECTURES[metadata["general.architecture"]].tensors
    pieces = _assign(spec, families.slots(spec, tensors), entries, path, gguf_families.IGNORED)
    eos = _ids([metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")])
    return Checkpoint(path, spec, eos, metadata, pieces)


def _open_folder(path: Path) -> Checkpoint:
    config = _read_json(path / "config.json")
    spec = spec_of_config(config, place=str(path / "config.json"))
    family = FAMILIES[spec.family]
    entries = {name.removeprefix(family.prefix): entry for name, entry in _entries(path).items()}
    if spec.tied and _differs(entries):
        spec = _untied(spec)
    pieces = _assign(spec, families.slots(spec, family.tensors), entries, path, families.IGNORED)
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return Checkpoint(path, spec, _ids(config.get("eos_token_id") if eos is None else eos), {}, pieces)


def _untied(spec: Spec) -> Spec:
    from dataclasses import replace

    return replace(spec, tied=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: broken JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object is needed")
    return content


def _ids(value: Any) -> tuple[int, ...]:
    """The ids in an integer, a list, or nothing; in order, each once."""
    listed = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in listed if type(item) is int))


def _entries(folder: Path) -> dict[str, Entry]:
    """All tensors of a folder's weight files."""
    for index, pattern, read in _FORMATS:
        listed: dict[str, str] = {}
        if (folder / index).exists():
            listed = _read_json(folder / index).get("weight_map") or {}
            files = [folder / name for name in sorted(set(listed.values()))]
        else:
            files = [file for file in sorted(folder.glob(pattern)) if not file.name.startswith("consolidated")]
        entries = {name: entry for file in files for name, entry in read(file).items()}
        if missing := [name for name in listed if name not in entries]:
            raise UserError(f"{folder / index}: {_few(missing)} not in the files that it names")
        if files:
            return entries
    raise UserError(f"{folder}: there are no weights; files like model.safetensors are needed")


def _differs(entries: Mapping[str, Entry]) -> bool:
    """Whether there is a head beside the embedding with other content than it: then it is not tied, whatever is said."""
    head, embed = entries.get("lm_head.weight"), next((e for n, e in entries.items() if n in _EMBEDDINGS), None)
    if head is None or embed is None or head[0::3] == embed[0::3]:
        return False
    if head[1:3] != embed[1:3]:
        return True
    with head.file.open("rb") as one, embed.file.open("rb") as other:
        pairs = zip(_parts(one, head), _parts(other, embed), strict=True)
        return not all(torch.equal(a, b) for (_, a), (_, b) in pairs)


_EMBEDDINGS = {theirs + ".weight" for family in FAMILIES.values() for theirs, ours, _ in family.tensors if ours == "embed"}


def _assign(spec: Spec, slots: Mapping[str, Slot], entries: Mapping[str, Entry], path: Path,
            ignored: tuple[str, ...]) -> tuple[Piece, ...]:
    """Pair every stored tensor with its slot, both ways in full, shapes and types checked."""
    wanted = {name: slot for name, slot in slots.items() if not (spec.tied and slot.name == "head.weight")}
    if missing := [name for name in wanted if name not in entries]:
        raise UserError(f"{path}: {_few(missing)} missing")
    known = {name: entry for name, entry in entries.items() if not any(re.search(p, name) for p in ignored)}
    if extra := [name for name in known if name not in slots]:
        raise UserError(f"{path}: {_few(extra)} unknown for the family {spec.family}")
    shapes = parameters(spec)
    for name, slot in wanted.items():
        entry, shape = entries[name], _stored_shape(slot, shapes[slot.name])
        if entry.shape != shape:
            raise UserError(f'{entry.file}: tensor "{name}" has shape {list(entry.shape)}, not {list(shape)}')
        if entry.dtype not in _DTYPES and entry.dtype not in _QUANTISED:
            raise UserError(f'{entry.file}: tensor "{name}" has the unsupported type {entry.dtype}; '
                            f"known: {', '.join((*_DTYPES, *_QUANTISED))}")
    return tuple(Piece(entries[name], slot) for name, slot in wanted.items())


def _stored_shape(slot: Slot, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, columns = slot.rows + 2 * (slot.how == "skip_two"), shape[1:]
    return (*columns, rows) if slot.how == "transpose" else (rows, *columns)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    quoted = ", ".join(f'"{name}"' for name in names[:_NAMED])
    return f"tensors {quoted}{more} are" if len(names) > 1 else f"tensor {quoted} is"


def load(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All of `parameters(spec)` on the device; a tied head is the embedding itself."""
    spec = checkpoint.spec
    weights = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in parameters(spec).items()
               if not (spec.tied and name == "head.weight")}
    unfilled = {name: len(weight) for name, weight in weights.items()}
    for path in sorted({piece.entry.file for piece in checkpoint.pieces}):
        with path.open("rb", buffering=0) as file:
            here = (piece for piece in checkpoint.pieces if piece.entry.file == path)
            for entry, slot in sorted(here, key=lambda piece: piece.entry.start):
                _fill(weights[slot.name][slot.first : slot.first + slot.rows], slot.how, file, entry, spec)
                unfilled[slot.name] -= slot.rows
    assert not any(unfilled.values()), unfilled
    if spec.tied:
        weights["head.weight"] = weights["embed.weight"]
    return weights


def _fill(target: Tensor, how: str, file: BinaryIO, entry: Entry, spec: Spec) -> None:
    """Write a stored tensor into its rows, transformed."""
    order = _ORDERS[how](spec, entry.shape[0]).to(target.device) if how in _ORDERS else None
    for first, part in _parts(file, entry):
        last = first + len(part)
        if how == "transpose" and part.dim() == 2:
            target[:, first:last] = part.T
        elif how == "skip_two":
            target[max(first - 2, 0) : last - 2] = part[max(2 - first, 0) :]
        elif order is not None:
            target.index_copy_(0, order[first:last], part.to(target.device, target.dtype))
        else:
            target[first:last] = part.float() + 1 if how == "plus_one" else part
