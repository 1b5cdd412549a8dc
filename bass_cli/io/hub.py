"""Stream datasets of the Hugging Face hub and of its package's folders, and explain its errors.

`refusal` explains errors of the hub's client, also for models (formats/sources.py). Records of
files are read in io/readers.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bass_cli.errors import MachineError, UserError, first_line, nearest

_SPLITS = ("train", "validation", "test", "dev")
_PATIENCE = 20.0  # seconds to wait for the hub's first answer


def hub_records(source: str) -> Iterator[tuple[int, Any]]:
    """Stream the rows of the dataset hf:NAME[:CONFIG][:SPLIT], numbered from 1."""
    parts = source.removeprefix("hf:").split(":")
    begin = len(f"hf:{parts[0]}") if Path(parts[0]).exists() else 0  # a folder may have any name
    if (at := source.find("[", begin)) >= 0:
        raise UserError(
            f"{source}: a part of a split cannot be named; write {source[:at]}, and `limit` N for "
            "its first N rows"
        )
    if not parts[0] or len(parts) > 3:
        raise UserError(f"{source}: write a dataset as hf:NAME[:CONFIG][:SPLIT]")
    if len(parts) == 2 and parts[1] in _SPLITS:
        parts.insert(1, "")
    name, config, split = (part or None for part in [*parts, "", ""][:3])
    for number, row in enumerate(_stream_dataset(source, str(name), config, split), 1):
        yield number, plain(dict(row))


def _stream_dataset(source: str, name: str, config: str | None, split: str | None) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    _reach_hub(source, name)
    if _was_saved(Path(name)):
        return _saved_dataset(source, name, config, split)
    try:
        # Versions before 4 would run a dataset's own script after a question on standard input;
        # later versions raise a RuntimeError that names the script.
        found = datasets.load_dataset(
            name, config, split=split, streaming=True, trust_remote_code=False
        )
    except (
        datasets.exceptions.DatasetsError,
        ValueError,
        FileNotFoundError,
        RuntimeError,
    ) as error:
        remedy = f'; if "{config}" is a split, write hf:{name}::{config}'
        raise UserError(
            f"{source}: cannot open the dataset: {first_line(error)}"
            f"{remedy if config is not None and split is None else ''}"
        ) from None
    except (OSError, ImportError) as error:
        raise refusal(source, error, remedy=_remedy(name)) from None
    return found if split is not None else _only_split(source, found)


def _only_split(source: str, found: Mapping[str, Any]) -> Any:
    if not found:
        raise UserError(f"{source}: the data set has no splits; save it again")
    if len(found) > 1:
        first = next(iter(found))
        is_second = first in _SPLITS or ":" in source.removeprefix("hf:")
        example = f"{source}{':' if is_second else '::'}{first}"
        raise UserError(f"{source}: choose a split, as in {example}; {nearest('', found)}")
    return next(iter(found.values()))


def _was_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote the folder, as that package decides."""
    one = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return one or (folder / "dataset_dict.json").is_file()


def _saved_dataset(source: str, name: str, config: str | None, split: str | None) -> Any:
    """Open a folder that `save_to_disk` of the package datasets wrote: one data set, or splits."""
    import datasets

    if config is not None and split is not None:
        raise UserError(f'{source}: a saved data set has no configurations; leave "{config}" out')
    split = split or config  # hf:FOLDER:NAME
    try:
        found = datasets.load_from_disk(name)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{source}: cannot open the dataset: {first_line(error)}") from None
    if not isinstance(found, Mapping):
        only = found.split and str(found.split)
        if split not in (None, only):
            how = "without splits" if only is None else f'as the split "{only}"'
            raise UserError(f'{source}: the data set was saved {how}; leave "{split}" out')
        return found
    if split is None:
        return _only_split(source, found)
    if split not in found:
        raise UserError(f'{source}: there is no split "{split}"; {nearest(split, found)}')
    return found[split]


def _reach_hub(source: str, name: str) -> None:
    """Raise MachineError if the hub cannot be reached.

    Without this check the hub's client retries for half a minute and reports each attempt.
    """
    import huggingface_hub

    if Path(name).is_file():
        raise UserError(f"{source}: {name} is a file; name it without hf:")
    if Path(name).exists():
        return
    try:
        huggingface_hub.dataset_info(name, timeout=_PATIENCE)
    except (
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.OfflineModeIsEnabled,
        ValueError,
    ):
        pass  # the hub answers, or a cache must do; loading reports what is wrong
    except Exception as error:  # its type depends on the HTTP client of the hub's package
        raise refusal(source, ConnectionError(str(error)), remedy=_remedy(name)) from None


def _remedy(name: str) -> str:
    return (
        f"on a machine with a network: hf download --repo-type dataset {name} --local-dir FOLDER; "
        "then name a .parquet, .jsonl or .json file of that folder in place of hf:... (with `data` "
        "in bass eval and bass score)"
    )


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with values that JSON cannot hold (dates, bytes) as text."""
    return json.loads(json.dumps(row, default=str))


def refusal(source: str, error: Exception, *, remedy: str) -> UserError:
    """Make the error to raise for an error of the hub's client.

    It is a MachineError if the hub could not be reached. `remedy` says how to work without the
    network; it becomes a line of its own.
    """
    from huggingface_hub import constants, errors

    chain = list(_chain(error))
    login = "log in there (hf auth login, or HF_TOKEN)"
    kind: type[UserError] = UserError
    if constants.HF_HUB_OFFLINE:
        kind, remedy = MachineError, f"unset HF_HUB_OFFLINE; or {remedy}"
        cause = f"it is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    elif _any(chain, errors.GatedRepoError):
        cause, remedy = (
            "the Hugging Face hub does not give it to everybody",
            f"accept its terms and {login}; or {remedy}",
        )
    elif _any(chain, errors.RepositoryNotFoundError):
        cause = "neither a path that exists nor known to the Hugging Face hub"
        remedy = f"check the name, or {login} if it is private; or {remedy}"
    elif _any(chain, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError):
        kind, reason = MachineError, first_line(chain[-1])
        cause = f"it is not on this machine, and the hub cannot be reached ({reason})"
    else:
        reason = first_line(error)
        cause = f"neither a path that exists nor to be had from the Hugging Face hub: {reason}"
    return kind(f'"{source}": {cause}', remedy)


def _any(chain: list[BaseException], *kinds: type) -> bool:
    return any(isinstance(one, kinds) for one in chain)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
