"""Publish a file of samples as a data set of the Hugging Face hub: samples, manifest, data card.

The name, the token and the right to write are checked before any sample is drawn. All files go
into one commit, so a reader never sees samples without their card. The card says that a model wrote
the texts; its head is YAML, as the hub reads it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from bass_cli import __version__
from bass_cli.errors import MachineError, UserError, first_line
from bass_cli.io.linefile import live_path
from bass_cli.io.resume import manifest_path, read_manifest
from bass_cli.io.saving import is_stream
from bass_cli.reading import os_errors_as, unquoted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MARK = "<!-- made by bass -->"  # in the cards that bass may replace
# The hub's words for the number of lines
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"),
          (10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"))  # fmt: skip
_LARGEST = "n>100M"
# Settings of a manifest that the card lists, in this order; others are in the manifest
_SETTINGS = (
    *("target", "dtype", "lora", "task", "n", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "max_new_tokens", "stop"),
    *("system", "thinking", "budget", "coupling", "filter", "best_of", "rank_by"),
)
_EMPTY: tuple[Any, ...] = (None, [], {}, "")


def card_of(name: str, file: str, manifest: Mapping[str, Any], licence: str | None) -> str:
    """Return the card.

    Args:
        name: USER/NAME.
        file: The name of the file of samples in the data set.
        manifest: The manifest of the file.
        licence: The hub's word for the target's licence; None if it is unknown.
    """
    results, totals = manifest["results"], manifest["totals"]
    head = {
        "pretty_name": name.split("/")[1],
        **({} if licence is None else {"license": licence}),
        "task_categories": ["text-generation"],
        "tags": ["synthetic", "bass"],
        "size_categories": [_size(totals.get("samples"))],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": file}]}],
    }
    target = str(results.get("target", "a model"))
    rows = [f"| {key} | {_cell(value)} |" for key, value in _facts(results, totals)]
    licensed = (
        f"The licence of the model is `{licence}`; it may bind users of its outputs."
        if licence is not None
        else "The licence of the model is unknown to this card; it may bind users of its outputs."
    )
    text = f"""\
{MARK}

# {name.split("/")[1]}

**A model generated these texts.** No person wrote or checked them. They may be wrong, biased, or \
copied from the model's training data.

{totals.get("samples", "Some")} samples of `{target}`, drawn with bass {__version__}.

| | |
|---|---|
{chr(10).join(rows)}

`{file}` has a line for each sample, or for each prompt with its "samples": "id" and "sample", \
"text", "finish_reason" (eos, stop, length or budget), "mean_logprob", and the fields of the \
prompt in "meta". `{file}.manifest.json` has all settings, versions and totals.

## Load

```python
from datasets import load_dataset

samples = load_dataset("{name}", split="train")
```

## Licence

{licensed} The prompts have a licence of their own.
"""
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n{text}"


def _facts(results: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of the table."""
    for key in _SETTINGS:
        if results.get(key) not in _EMPTY:
            yield key, results[key]
    prompts = results.get("prompts")
    if isinstance(prompts, dict) and isinstance(prompts.get("count"), int):
        yield "prompts", prompts["count"]
    for key in ("samples", "tokens", "finish_reasons"):
        if totals.get(key) not in _EMPTY:
            yield key.replace("_", " "), totals[key]


def _cell(value: Any) -> str:
    """Format a value for a cell of a table."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "`" + shown.replace("|", "\\|").replace("`", "'").replace("\n", "\\n") + "`"


def _size(samples: Any) -> str:
    count = samples if isinstance(samples, int) else 0
    return next((word for most, word in _SIZES if count < most), _LARGEST)


# The upload

_SCHEME = "hf://"
_ATTEMPTS = 5  # with waits of 1, 2, 4 and 8 s between them: the hub is often back after seconds
_PATIENCE = 20.0  # seconds to wait for the hub's first answer, as for data sets
_CARD = "README.md"
_CLIENTS = ("httpx", "httpcore", "requests", "urllib3")  # modules of network errors
# Keys of manifests and reports whose values may be paths of this machine; only their last part is
# published
_PATHS = ("target", "draft", "tokenizer", "folder", "source", "filtered_from", "template", "lora",
          "prompts", "model", "file")  # fmt: skip
_T = TypeVar("_T")


class Publication:
    """A data set of the hub that files are going to be published as.

    Args:
        target: hf://USER/NAME.
        public: Whether everybody may read it. A data set that exists stays as it is.

    Raises:
        UserError: The name is not valid, there is no token, or it does not give the right to
            write there; or the data set is public, and `public` is not set.
        MachineError: The hub cannot be reached.
    """

    def __init__(self, target: str, *, public: bool = False):
        self.name, self._public = _parsed(target), public
        self._api = self._check()

    def upload(
        self, samples: str, *, reports: Iterable[Path] = (), note: Callable[[str], None]
    ) -> str:
        """Upload a finished file of samples, its manifest and the card; return the address.

        Args:
            samples: The file.
            reports: JSON documents on the samples. Those that do not exist are left out.
            note: Called with notes for the user.

        Raises:
            UserError: The file is not complete, or the hub refuses it.
            MachineError: The hub could not be reached in _ATTEMPTS attempts.
        """
        from huggingface_hub import CommitOperationAdd

        manifest = check_samples(samples)
        own_card = self._has_own_card()
        if own_card:
            note(f"hf://{self.name}: its {_CARD} was not made by bass, so it is not replaced")
        card = card_of(self.name, Path(samples).name, _portable(manifest), self._licence(manifest))
        contents: dict[str, str | bytes] = {
            Path(samples).name: samples,
            manifest_path(samples).name: _encoded(_portable(manifest)),
            **{path.name: _report(path) for path in reports if path.is_file()},
            **({} if own_card else {_CARD: card.encode()}),
        }

        def commit() -> str:
            self._api.create_repo(
                self.name, repo_type="dataset", private=not self._public, exist_ok=True
            )
            operations = [CommitOperationAdd(name, value) for name, value in contents.items()]
            self._api.create_commit(
                self.name,
                operations,
                repo_type="dataset",
                commit_message=f"Publish {Path(samples).name} with bass",
            )
            return f"{self._api.endpoint}/datasets/{self.name}"

        return self._try(commit, f"{samples} is complete; publish it with bass publish")

    def _check(self) -> HfApi:
        """Check the token, the owner and the visibility; return the hub's client."""
        from huggingface_hub import HfApi, constants, errors, get_token
        from huggingface_hub.utils import disable_progress_bars

        login = "log in with hf auth login, or set HF_TOKEN to a token with write access"
        if constants.HF_HUB_OFFLINE:
            raise MachineError(
                f"hf://{self.name}: the hub cannot be reached, because HF_HUB_OFFLINE is set"
            )
        if get_token() is None:
            raise UserError(f"hf://{self.name}: there is no token of the hub; {login}")
        # It would print a line about each retry, and a bar for each file.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        disable_progress_bars()
        api = HfApi()
        user = self._try(api.whoami, login)
        owner, owners = self.name.split("/")[0], [str(user.get("name"))]
        owners += [str(one.get("name")) for one in user.get("orgs") or ()]
        if owner not in owners:
            raise UserError(
                f'hf://{self.name}: the token is of {owners[0]}, who cannot write to "{owner}"; '
                f"known: {', '.join(owners)}"
            )
        if _role(user) == "read":
            raise UserError(f"hf://{self.name}: the token may only read; {login}")
        existing = self._found(
            lambda: api.dataset_info(self.name, timeout=_PATIENCE), errors.RepositoryNotFoundError
        )
        if existing is not None and not existing.private and not self._public:
            raise UserError(
                f"hf://{self.name}: this data set exists and is public; add `public`, or give "
                "another name"
            )
        return api

    def _found(self, work: Callable[[], _T], *missing: type[Exception]) -> _T | None:
        """Do the work; None if it fails with one of these errors, because nothing is there."""
        try:
            return self._try(work, "")
        except UserError as error:
            if isinstance(error.__cause__, missing):
                return None
            raise

    def _has_own_card(self) -> bool:
        """Whether the data set has a card that bass did not write."""
        from huggingface_hub import errors

        def content() -> str:
            path = self._api.hf_hub_download(self.name, _CARD, repo_type="dataset")
            return Path(path).read_text(encoding="utf-8", errors="replace")

        card = self._found(content, errors.RepositoryNotFoundError, errors.EntryNotFoundError)
        return card is not None and MARK not in card

    def _licence(self, manifest: dict[str, Any]) -> str | None:
        """Return the licence of the target by its model card; None if it is unknown."""
        target = str(manifest.get("results", {}).get("target") or "")
        card: Any = None
        with contextlib.suppress(Exception):  # a card without it is better than no publication
            if Path(target).is_dir():
                from huggingface_hub import ModelCard

                card = ModelCard.load(Path(target, _CARD)).data
            elif re.fullmatch(r"[\w.-]+/[\w.-]+", target):
                card = self._api.model_info(target, timeout=_PATIENCE).card_data
        found = getattr(card, "license", None)
        return found if isinstance(found, str) else None

    def _try(self, work: Callable[[], _T], remedy: str) -> _T:
        """Do the work, again if the network or the hub fails for a moment.

        The error of a refusal has the client's error as its cause.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return work()
            except Exception as error:
                line = first_line(error)
                if not _is_passing(error):
                    if not _is_of_hub(error):
                        raise
                    raise UserError(
                        f"hf://{self.name}: the hub refuses it: {line}",
                        *([remedy] if remedy else []),
                    ) from error
                if attempt == _ATTEMPTS - 1:
                    raise MachineError(
                        f"hf://{self.name}: the hub cannot be reached ({line})",
                        *([remedy] if remedy else []),
                    ) from error
                time.sleep(2.0**attempt)
        raise AssertionError


def check_samples(samples: str) -> dict[str, Any]:
    """Return the manifest of a file that can be published; UserError if it is not complete."""
    if is_stream(samples):
        raise UserError("only a file of samples with its manifest can be published, not a stream")
    path = manifest_path(samples)
    with os_errors_as(UserError, f"{samples}: cannot read it"), open(live_path(samples), "rb"):
        pass
    try:
        manifest = read_manifest(samples)
        totals, results = manifest["totals"], manifest["results"]
        if not isinstance(totals, dict) or not isinstance(results, dict):
            raise ValueError
    except FileNotFoundError:
        raise UserError(
            f"{path}: this manifest is missing; only files that bass wrote can be published"
        ) from None
    except (OSError, ValueError, KeyError):
        raise UserError(f"{path}: the manifest cannot be read") from None
    if manifest.get("finished") is not True or live_path(samples) != samples:
        raise UserError(f"{samples}: the run has not finished; run its command again to continue")
    if results.get("shard") is not None:
        raise UserError(f"{samples}: it is a part of a job; join the parts with bass merge first")
    if failed := totals.get("finish_reasons", {}).get("error"):
        raise UserError(
            f"{samples}: {failed} prompts or samples failed; run its command again, or leave them "
            "out with bass filter"
        )
    return manifest


def _parsed(target: str) -> str:
    """Return USER/NAME of hf://USER/NAME; UserError if it is not a valid name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = target.removeprefix(_SCHEME).removeprefix("datasets/")
    fault = f'"{unquoted(target)}": write a data set as hf://USER/NAME'
    if not target.startswith(_SCHEME) or name.count("/") != 1:
        raise UserError(fault)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{fault}; {str(error).splitlines()[0]}") from None
    return name


def _role(user: dict[str, Any]) -> Any:
    """Return the role of the token: read, write or fineGrained; None if it is unknown."""
    auth = user.get("auth")
    token = auth.get("accessToken") if isinstance(auth, dict) else None
    return token.get("role") if isinstance(token, dict) else None


def _is_of_hub(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, (errors.HfHubHTTPError, errors.EntryNotFoundError, ValueError))


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):  # neither reached nor in the cache
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status == 429 or status >= 500
    if isinstance(error, errors.HfHubHTTPError):
        return False
    kinds = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(kinds & set(_CLIENTS))


def _report(path: Path) -> bytes:
    with os_errors_as(UserError, f"{path}: cannot read the report"):
        content = path.read_bytes()
    try:
        return _encoded(_portable(json.loads(content)))
    except ValueError:
        raise UserError(f"{path}: this is not a JSON document; make the report again") from None


def _portable(value: Any, key: str = "") -> Any:
    """Return a manifest or a report in which paths of this machine are names."""
    if isinstance(value, dict):
        return {one: _portable(inner, one) for one, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner, key) for inner in value]
    if isinstance(value, str) and key in _PATHS:
        begins = value.startswith(("/", "~", "./", "../"))
        return Path(value).name if begins or os.path.exists(value) else value
    return value


def _encoded(document: Any) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
