"""The tensors of a checkpoint's folder, by the headers of its weight files.

Not here: the formats of files (tensor_files.py), the places of tensors (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bass_cli.errors import UserError
from bass_cli.formats.sources import read_json
from bass_cli.formats.tensor_files import Entry, read_safetensors, read_torch
from bass_cli.reading import shown

_NAMED = 5  # maximum tensors in an error
_OTHER_NAMES = "consolidated"  # Mistral's second copy, with other tensor names
# Weight formats in order of preference: the single file, a pattern of shards, the reader.
_FORMATS: tuple[tuple[str, str, Callable[[Path], dict[str, Entry]]], ...] = (
    ("model.safetensors", "*.safetensors", read_safetensors),
    ("pytorch_model.bin", "pytorch_model*.bin", read_torch),
)


def read_folder(folder: Path) -> dict[str, Entry]:
    """Return all tensors of a folder's weight files: the single file, else those of its index, else
    all that match the pattern of shards. The first format with files is used.

    Raises:
        UserError: there are none, or a file or tensor of the index is missing.
    """
    for single, pattern, read in _FORMATS:
        index, named = folder / f"{single}.index.json", {}
        if (folder / single).exists():
            files = [folder / single]
        elif index.exists():
            named = _weight_map(index)
            files = [folder / name for name in sorted(set(named.values()))]
        else:
            files = [
                file
                for file in sorted(folder.glob(pattern))
                if not file.name.startswith(_OTHER_NAMES)
            ]
        entries = {name: entry for file in files for name, entry in read(file).items()}
        if missing := [name for name in named if name not in entries]:
            raise UserError(f"{index}: {listed(missing)} not in the files that it lists")
        if files:
            return entries
    raise UserError(f"{folder}: no weights found; files like model.safetensors are needed")


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict):
        raise UserError(f'{index}: key "weight_map": a mapping of tensors to files is needed')
    for name in found.values():
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise UserError(
                f'{index}: key "weight_map": the name of a file in the same folder is needed, not '
                f"{shown(name)}"
            )
    return found


def listed(names: list[str]) -> str:
    """Return names of tensors as the subject of a sentence, with its verb."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    quoted = ", ".join(f'"{name}"' for name in names[:_NAMED])
    return f"tensors {quoted}{more} are" if len(names) > 1 else f"tensor {quoted} is"
