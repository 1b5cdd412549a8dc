"""Define Job, Pair and Speculation, and read them from YAML and from options. See sampling.py.

All are frozen, and refuse unknown fields. Their fields are declared in config/options.py; rules
that no bound expresses are here. No model, prompt or torch is used. Command-line code imports this
module inside its commands, because pydantic is slow to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import InitVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError, field_validator, model_validator

from bass_cli.config.file_options import (
    is_template,
    merged,
    read_template,
    read_template_args,
    read_tools,
)
from bass_cli.config.options import (
    JOB,
    MOST_DRAFTS,
    MOST_ROWS,
    JobOptions,
    ModelOptions,
    PairOptions,
    SpeculationOptions,
    packaged_pairs,
)
from bass_cli.config.other_names import option_called
from bass_cli.config.sampling import Sampling
from bass_cli.config.speculation import CONTROLLERS, check_draft, check_target
from bass_cli.config.validation import Strict, first_fault, parse_model
from bass_cli.errors import UserError, nearest
from bass_cli.reading import MOST_YAML, is_unicode, os_errors_as, parse_duration, read_bytes, shown

if TYPE_CHECKING:
    from bass_cli.config.command_options import PairArgs
    from bass_cli.config.machine_commands import DoctorArgs

DEFAULT_PAIR = "smollm2"
MODEL_DRAFT = "mtp-or-lookup"  # the draft if only a target is given: it needs no other files
_PAIR_FILES = (".yaml", ".yml")
_WEIGHTS = (".gguf", ".safetensors", ".bin")

_OF_PAIR = (
    "sampling",
    "speculation",
    "dtype",
    "draft_dtype",
    "kv_dtype",
    *(one.name for one in dataclasses.fields(ModelOptions)),
)


class Speculation(Strict, SpeculationOptions, frozen=True):
    """How tokens are drafted and verified.

    `length`: the draft length, or the controller that chooses it. `coupling`: "shared" gives the
    tokens of plain decoding for a seed; "maximal" accepts more drafts, and samples depend on the
    drafts.
    """

    @field_validator("length", mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        return _number_or(value, tuple(CONTROLLERS), 0, MOST_DRAFTS)

    @model_validator(mode="after")
    def _within_max(self) -> Speculation:
        if self.length not in CONTROLLERS and int(self.length) > self.max:
            raise ValueError(
                f"the draft length {self.length} is above speculation.max, which is {self.max}; "
                f"a pair file may set up to {MOST_DRAFTS}"
            )
        return self


class _Chats(Strict, frozen=True):
    """Reads the values of ModelOptions. What was read may be validated again."""

    @field_validator(
        *("template", "template_args", "tools", "lora", "thinking"),
        mode="before",
        check_fields=False,
    )
    @classmethod
    def _read(cls, value: Any, info: Any) -> Any:
        return None if value is None else _READ[info.field_name](value)


def _adapters(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(listed, (list, tuple)):
        raise ValueError(f"an adapter or a list of them is needed, not {shown(value)}")
    named = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in listed]
    if not all(isinstance(one, str) and one for one in named):
        raise ValueError(f"names of folders or hub ids are needed, not {shown(value)}")
    return tuple(named)


_READ: dict[str, Callable[[Any], Any]] = {
    "template": read_template,
    "template_args": read_template_args,
    "tools": read_tools,
    "lora": _adapters,
    # YAML reads the word off as false
    "thinking": lambda value: "off" if value is False else value,
}


class Pair(_Chats, PairOptions, frozen=True):
    """A target and its draft.

    `folder` is the folder of the YAML file, for relative paths; None for a packaged pair. It is not
    a key of the file. load_pair chooses `fallback`.
    """

    speculation: Speculation = Speculation()
    sampling: Sampling = Sampling()
    folder: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _beside_the_file(cls, given: Any) -> Any:
        """Make the names of files that are relative to the pair file's folder absolute."""
        if not isinstance(given, dict) or given.get("folder") is None:
            return given
        files = {
            name: os.path.join(given["folder"], os.path.expanduser(given[name]))
            for name in ("template", "tools")
            if isinstance(given.get(name), str) and not is_template(given[name])
        }
        return given | files

    @field_validator("target", "fallback")
    @classmethod
    def _target(cls, value: str | None) -> str | None:
        return None if value is None else check_target(value)

    @field_validator("draft")
    @classmethod
    def _draft(cls, value: str) -> str:
        return check_draft(value)


if TYPE_CHECKING:

    class _PairField:
        """The type of `Job.pair`: set as a Pair, a name or a path, and read as a Pair."""

        def __get__(self, job: Any, kind: Any = None) -> Pair: ...
        def __set__(self, job: Any, given: Pair | str | os.PathLike[str]) -> None: ...


def _over(base: Any, given: Any) -> Any:
    """Merge a part of a job with the pair's: fields that are not set come from `base`."""
    if isinstance(base, Strict) and type(given) is type(base):
        given = _set_fields(given)
    both = isinstance(base, Strict) and isinstance(given, dict)
    return merged(_set_fields(base), given) if both else given


def _set_fields(part: Strict) -> dict[str, Any]:
    return {key: getattr(part, key) for key in part.model_fields_set}


def _with_pair(given: Any) -> Any:
    """Make a pair of the fields `model`, `draft` and `tokenizer` of a job."""
    short = ("model", "draft", "tokenizer", "decoder")
    own = given if isinstance(given, dict) else {}
    named = {name: own[name] for name in short if own.get(name) is not None}
    if not named:
        return given
    if (model := named.pop("model", None)) is None:
        name = next(iter(named))
        raise ValueError(f"`{name}` belongs to `model`; a pair has a {name} of its own")
    if given.get("pair") is not None:
        raise ValueError("`pair` and `model` exclude each other: a pair has a target already")
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f"`model`: a model's name or path is needed, not {shown(model)}")
    pair = pair_of_model(os.fspath(model), **named)
    return {"pair": pair} | {name: value for name, value in given.items() if name not in short}


class Job(_Chats, JobOptions, frozen=True):
    """A run: which samples are drawn, and how.

    Fields of sampling, speculation, dtype, draft_dtype and kv_dtype that are not set come from the
    pair.

    Args:
        pair: A Pair, the name of a packaged pair, or the path of a pair file.
        model: In place of `pair`, the target: a hub id, a folder or a .gguf file.
        draft, tokenizer, decoder: With `model`, the fields of its Pair. Default draft: mtp if the
            checkpoint has that layer, else lookup.
        budget: The time limit of each prompt, in seconds; None for none.
        batch_size: Rows of the batch, or "auto".
        threads: CPU threads; None for as many as are free.
        chat: Whether prompts use the chat template; None if prompts with messages do.
        limit: The most prompts; None for all.

    Raises:
        UserError: There is no such pair, its file is wrong, or `model` is not a model's name.
        ValueError: Another field has an invalid value.
    """

    if TYPE_CHECKING:
        model: InitVar[str | os.PathLike[str] | None] = None
        draft: InitVar[str | None] = None
        tokenizer: InitVar[str | None] = None
        decoder: InitVar[str | None] = None
        pair: _PairField = _PairField()
    else:
        pair: Pair
    sampling: Sampling = Sampling()
    speculation: Speculation = Speculation()

    @field_validator("batch_size", mode="before")
    @classmethod
    def _batch_size(cls, value: Any) -> Any:
        return _number_or(value, ("auto",), 1, MOST_ROWS)

    @model_validator(mode="before")
    @classmethod
    def _as_the_pair_has_it(cls, given: Any) -> Any:
        given = _with_pair(given)
        pair = given.get("pair") if isinstance(given, dict) else None
        if isinstance(pair, (str, os.PathLike)):
            pair = load_pair(pair)
            given = {**given, "pair": pair}
        if isinstance(pair, dict):
            with contextlib.suppress(ValidationError):  # Job's validation names the field
                pair = Pair(**pair)
        if not isinstance(pair, Pair):
            return given
        own = {key: getattr(pair, key) for key in _OF_PAIR}
        merged = {key: _over(own.get(key), value) for key, value in given.items()}
        return {**own, **merged}

    @model_validator(mode="after")
    def _chats(self) -> Job:
        for name in ("system", "tools"):
            if getattr(self, name) is not None and self.chat is False:
                raise ValueError(f"`{name}` and `chat=False` exclude each other")
        return self

    @model_validator(mode="after")
    def _drafted_tokens(self) -> Job:
        if self.token_drafted and not self.token_ids and self.sampling.logprobs is None:
            raise ValueError(
                "`token_drafted` needs the tokens; set `token_ids` or `sampling.logprobs` too"
            )
        return self

    @property
    def chats(self) -> bool | None:
        """Whether prompts use the chat template; None if only prompts with messages do."""
        return True if self.system is not None or self.tools is not None else self.chat

    @property
    def draws_one(self) -> bool:
        """Whether the samples of a prompt are equal, so that one is drawn and the others copied."""
        return self.n > 1 and self.sampling.temperature == 0

    @property
    def draws_together(self) -> bool:
        """Whether samples depend on the other rows of the batch, which affect their draft lengths.

        Such a job is resumed by drawing all of its samples again. Drawing only the unfinished ones
        again, beside others, would favour short samples.
        """
        return self.speculation.coupling == "maximal" and self.sampling.temperature > 0


def chosen_pair(args: PairArgs | DoctorArgs) -> Pair:
    """Return the pair of the option `pair`, or a pair with the target of `model`."""
    name, model = args.pair, args.model
    if model is None:
        return load_pair(DEFAULT_PAIR if name is None else name)
    if name is not None:
        raise UserError(
            "--pair (or BASS_PAIR) and --model (or BASS_MODEL) exclude each other: a pair has a "
            "target already"
        )
    return pair_of_model(model)


def pair_of_model(
    model: str,
    *,
    draft: str | None = None,
    tokenizer: str | None = None,
    decoder: Literal["auto", "native", "transformers"] = "auto",
) -> Pair:
    """Return the pair of a target. UserError if `model` is not a model's name.

    `draft`, `tokenizer`, `decoder`: See Pair. Default draft: mtp if the checkpoint has that layer,
    else lookup.
    """
    if not model:
        raise UserError("`pair.target`: it is empty; name a hub id, a folder or a .gguf file")
    if not is_unicode(model):
        raise UserError(f"`pair.target`: {shown(model)} is not valid UTF-8")
    is_pair = model in packaged_pairs() and not os.path.exists(model)
    if is_pair or model.endswith(_PAIR_FILES):
        raise UserError(f'`pair.target`: "{model}" is a pair; give it with `pair` {model}')
    try:
        return Pair(
            name=_model_name(model),
            target=model,
            draft=MODEL_DRAFT if draft is None else draft,
            tokenizer=tokenizer,
            decoder=decoder,
        )
    except ValidationError as error:
        path, reason = first_fault(error)
        raise UserError(f"`pair.{'.'.join(path) or 'target'}`: {reason}") from None


def _model_name(model: str) -> str:
    """Return the name of a target's pair: the last part of its path or hub id."""
    last = Path(os.path.abspath(Path(os.path.expanduser(model)))).name
    return last.removesuffix(".gguf") or "model"


def load_pair(name_or_file: str | os.PathLike[str]) -> Pair:
    """Load the packaged pair of this name, or the pair in a YAML file.

    Raises:
        UserError: The message names file, line, key and the nearest valid key.
    """
    if not isinstance(name_or_file, (str, os.PathLike)):
        raise UserError(f"a pair's name or file is needed, not {shown(name_or_file)}")
    name_or_file = os.fspath(name_or_file)
    if name_or_file in packaged_pairs():
        resource = importlib.resources.files("bass_cli.configs") / f"{name_or_file}.yaml"
        return _parse_pair(resource.read_bytes(), f"{name_or_file}.yaml", None)
    path = Path(os.path.expanduser(name_or_file))
    if not name_or_file.endswith(_PAIR_FILES):
        if _is_model(name_or_file):
            raise UserError(
                f'`pair`: "{name_or_file}" is a model, not a pair; give it with `pair.target` '
                f"{name_or_file}"
            )
        if not os.path.isfile(path):
            known = nearest(name_or_file, packaged_pairs())
            raise UserError(
                f'there is no pair "{name_or_file}"; {known} (a pair file ends in .yaml; a model '
                "is given as `pair.target`)"
            )
    with os_errors_as(UserError, f"{name_or_file}: cannot read the pair file"):
        content = read_bytes(path, MOST_YAML)
    return _parse_pair(content, name_or_file, path.parent.absolute())


def _is_model(text: str) -> bool:
    """Whether a text looks like a model: a hub id, a folder, a file of weights or of a package."""
    return (
        text.endswith(_WEIGHTS)
        or text.startswith("package:")
        or os.path.isdir(os.path.expanduser(text))
        or (
            text.count("/") == 1
            and not text.startswith((".", "~", "/"))
            and not os.path.exists(text)
        )
    )


def _parse_pair(content: bytes, place: str, folder: Path | None) -> Pair:
    pair, _ = parse_model(
        content,
        Pair,
        place,
        kind='a pair file is a mapping with at least the key "target"',
        folder=folder,
        elsewhere=_elsewhere,
    )
    if pair.fallback is None or _is_installed(pair.target):
        return pair
    return pair.model_copy(update={"target": pair.fallback})


def _elsewhere(name: str) -> str | None:
    """Return what a pair file has in place of an option by the name of its flag, or by another
    tool's name. None if the option is unknown."""
    called = option_called(name)
    if called is None:
        return None
    whole = JOB[called].path if called in JOB else called
    path = whole.removeprefix("pair.")
    if "." in whole or path in Pair.model_fields:
        return f'in a pair file it is "{path}"'
    return f"a pair has no such setting; give `{path}` to the command"


def _is_installed(target: str) -> bool:
    """Whether the package of a target like package:MODULE/FILE is installed; else True."""
    kind, _, rest = target.partition(":")
    module = rest.partition("/")[0]
    return (
        kind != "package"
        or not module.isidentifier()
        or importlib.util.find_spec(module) is not None
    )


def make_job(pair: Pair, **given: Any) -> Job:
    """Make a Job of a pair and options, by the names of their flags. None leaves the pair's value.

    Raises:
        UserError: An option has an invalid value.
    """
    parts: dict[str, dict[str, Any]] = {"": {}, "pair": {}, "sampling": {}, "speculation": {}}
    for name, value in given.items():
        part, _, key = JOB[name].path.rpartition(".")
        if value is not None:
            parts[part][key] = value
    own, speculation = parts.pop(""), parts["speculation"]
    if isinstance(own.get("budget"), str):
        own["budget"] = parse_duration(own["budget"], "`budget`")
    if parts["pair"].get("draft") == "none" and "length" not in speculation:
        speculation["length"] = "auto"  # the pair's own length was for its draft
    if "draft" in parts["pair"]:
        own.setdefault("draft_dtype", "auto")  # the pair's own was for its draft
    try:
        parts["pair"] = Pair.model_validate({**dict(pair), **parts["pair"]})  # type: ignore[assignment]
        return Job.model_validate(parts | own)
    except ValidationError as error:
        path, reason = first_fault(error)
        field = {"draft": "pair.draft", "speculation": "speculation.length"}.get(".".join(path))
        name = field or ".".join(path)
        if name in ("pair", "sampling"):  # a rule about several fields, as one about a job's
            name = ""
        raise UserError(f"`{name}`: {reason}" if name else reason) from None


def pair_schema() -> dict[str, Any]:
    """Return the JSON schema of pair files, for editors."""
    schema = Pair.model_json_schema()
    del schema["properties"]["folder"]
    schema["required"].remove("name")  # the file's name
    for kind in (Pair, Sampling, Speculation):
        properties = (schema if kind is Pair else schema["$defs"][kind.__name__])["properties"]
        for one in dataclasses.fields(kind):
            properties[one.name]["description"] = one.metadata["option"].text
    schema["properties"]["tools"]["anyOf"].append({"type": "string"})  # the name of a file
    return schema


def _number_or(value: Any, words: tuple[str, ...], least: int, most: int) -> Any:
    """Return the value if it is one of the words or a whole number in the bounds, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII):
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value in words or (whole and least <= value <= most):
        return value
    raise ValueError(
        f"{shown(value)} is not valid; use {', '.join(words)} or a whole number from {least} to "
        f"{most}"
    )
