"""Define Job, Pair, Sampling and Speculation, and read them from YAML and command-line flags.

All are frozen, and refuse unknown fields. No model, prompt or torch is used here. Command-line code
imports this module inside its commands, because pydantic is slow to import.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bass_cli.config.fields import (
    CONTROLLERS,
    MOST_ROWS,
    BatchSize,
    Count,
    Draft,
    Dtype,
    Length,
    Name,
    Natural,
    Real,
    Stops,
    Target,
    parse_duration,
    reason_of,
)
from bass_cli.errors import UserError, nearest
from bass_cli.io.reading import (
    MOST_YAML,
    BrokenYamlError,
    is_unicode,
    parse_yaml,
    read_bytes,
    shown,
)

if TYPE_CHECKING:
    from bass_cli.config.args import DoctorArgs, JobArgs, PairArgs

DEFAULT_PAIR = "smollm2"
MODEL_DRAFT = "lookup"  # the draft for --model, because it needs no other files
SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "seed", "stop", "max_new_tokens")
SPECULATION_FLAGS = {"length": "draft_length", "coupling": "coupling"}
_PAIR_FILES = (".yaml", ".yml")
_WEIGHTS = (".gguf", ".safetensors", ".bin")
JOB_FLAGS = {
    *SAMPLING_FLAGS,
    *SPECULATION_FLAGS.values(),
    "n",
    "draft",
    "budget",
    "batch_size",
    "tensor_parallel",
    "device",
    "dtype",
    "chat",
    "threads",
    "limit",
    "prompt_column",
    "token_ids",
}


class Strict(BaseModel):
    """The base of all parts of a job: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(Strict):
    """How tokens are sampled. Temperature 0 is greedy; top_k 0 means no limit.

    Args:
        temperature: Divides the logits.
        top_p: Keeps the most likely tokens with at least this probability in all.
        top_k: Keeps so many of the most likely tokens.
        seed: The seed of all samples.
        stop: A text or texts that end a sample.
        max_new_tokens: The most tokens of a sample.
    """

    temperature: Annotated[Real, Field(ge=0)] = 0.8
    top_p: Annotated[Real, Field(gt=0, le=1)] = 0.95
    top_k: Natural = 0
    seed: Natural = 0
    stop: Stops = ()
    max_new_tokens: Count = 256


class Speculation(Strict):
    """How tokens are drafted and verified.

    Args:
        length: The draft length, or the controller that chooses it.
        max: The longest draft that a controller may choose.
        coupling: "shared" gives the tokens of plain decoding for a seed; "maximal" accepts more
            drafts, and samples depend on the drafts.
        draft_temperature: The draft's temperature; None for the drafter's own choice.
    """

    length: Length = "auto"
    max: Annotated[Count, Field(le=64)] = 32
    coupling: Literal["shared", "maximal"] = "shared"
    draft_temperature: Annotated[Real, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _within_max(self) -> Speculation:
        if self.length not in CONTROLLERS and int(self.length) > self.max:
            raise ValueError(
                f"the draft length {self.length} is above speculation.max, which is {self.max}; "
                "a pair file may set up to 64"
            )
        return self


class Pair(Strict):
    """A target and its draft.

    Args:
        fallback: The target to use if `target` is in a package that is not installed; load_pair
            makes the choice.
        folder: The folder of the YAML file, for relative paths; None for a packaged pair. It is
            not a key of the YAML file.
    """

    name: Name
    target: Target
    draft: Draft = "none"
    dtype: Dtype = "auto"
    tokenizer: Name | None = None
    fallback: Target | None = None
    speculation: Speculation = Speculation()
    sampling: Sampling = Sampling()
    folder: Path | None = None


if TYPE_CHECKING:

    class _PairField:
        """The type of `Job.pair`: set as a Pair, a name or a path, and read as a Pair."""

        def __get__(self, job: Any, kind: Any = None) -> Pair: ...
        def __set__(self, job: Any, given: Pair | str | os.PathLike[str]) -> None: ...
else:
    _PairField = Pair


def _over(base: Any, given: Any) -> Any:
    """Merge a part of a job with the pair's: fields that are not set come from `base`."""
    if isinstance(base, Strict) and type(given) is type(base):
        given = {key: getattr(given, key) for key in given.model_fields_set}
    return dict(base) | given if isinstance(base, Strict) and isinstance(given, dict) else given


class Job(Strict):
    """A run: which samples are drawn, and how.

    Fields of sampling, speculation and dtype that are not set come from the pair.

    Args:
        pair: A Pair, the name of a packaged pair, or the path of a pair file.
        n: Samples of a prompt.
        budget: The time limit of each prompt, in seconds; None for none.
        batch_size: Rows of the batch, or "auto".
        threads: CPU threads; None for as many as are free.
        chat: Whether prompts use the chat template; None if prompts with messages do.
        limit: The most prompts; None for all.
        prompt_column: The field of a prompt with its text.
        token_ids: Whether Completions have token ids.

    Raises:
        UserError: There is no such pair, or its file is wrong.
        ValueError: Another field has an invalid value.
    """

    pair: _PairField
    n: Annotated[Count, Field(le=MOST_ROWS)] = 8
    sampling: Sampling = Sampling()
    speculation: Speculation = Speculation()
    budget: Annotated[Real, Field(gt=0)] | None = None
    batch_size: BatchSize = "auto"
    tensor_parallel: Count = 1
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Dtype = "auto"
    threads: Count | None = None
    chat: bool | None = None
    limit: Count | None = None
    prompt_column: Name = "prompt"
    token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_the_pair_has_it(cls, given: Any) -> Any:
        pair = given.get("pair") if isinstance(given, dict) else None
        if isinstance(pair, (str, os.PathLike)):
            pair = load_pair(pair)
            given = {**given, "pair": pair}
        if isinstance(pair, dict):
            with contextlib.suppress(ValidationError):  # Job's validation names the field
                pair = Pair(**pair)
        if not isinstance(pair, Pair):
            return given
        own = {key: getattr(pair, key) for key in ("sampling", "speculation", "dtype")}
        merged = {key: _over(own.get(key), value) for key, value in given.items()}
        return {**own, **merged}

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


def packaged_pairs() -> list[str]:
    """Return the sorted names of the pairs that are installed with bass."""
    files = importlib.resources.files("bass_cli.configs").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def chosen_pair(args: PairArgs | DoctorArgs) -> Pair:
    """Return the pair of the option `pair`, or a pair with the target of `model`."""
    name, model = args.pair, args.model
    if model is None:
        return load_pair(DEFAULT_PAIR if name is None else name)
    if name is not None:
        raise UserError("`pair` and `pair.target` exclude each other: a pair has a target already")
    if not model:
        raise UserError("`pair.target`: it is empty; name a hub id, a folder or a .gguf file")
    if not is_unicode(model):
        raise UserError(f"`pair.target`: {shown(model)} is not valid UTF-8")
    is_pair = model in packaged_pairs() and not os.path.exists(model)
    if is_pair or model.endswith(_PAIR_FILES):
        raise UserError(f'`pair.target`: "{model}" is a pair; give it with `pair` {model}')
    try:
        return Pair(name=_model_name(model), target=model, draft=MODEL_DRAFT)
    except ValidationError as error:
        raise UserError(f"`pair.target`: {_first_fault(error)[1]}") from None


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
    try:
        content = read_bytes(path, MOST_YAML)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name_or_file}: cannot read the pair file: {reason}") from None
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
    try:
        node, data = parse_yaml(content)
    except BrokenYamlError as error:
        raise UserError(f"{place}:{error.line}: {error}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f'{place}:1: a pair file is a mapping with at least the key "target"')
    lines = _check_keys(node, Pair, place, ())
    try:
        pair = Pair.model_validate({"name": Path(place).stem, **data, "folder": folder})
    except ValidationError as error:
        path, reason = _first_fault(error)
        line = next(
            (lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1
        )
        raise UserError(f'{place}:{line}: key "{".".join(path)}": {reason}') from None
    if pair.fallback is None or _is_installed(pair.target):
        return pair
    return pair.model_copy(update={"target": pair.fallback})


def _is_installed(target: str) -> bool:
    """Whether the package of a target like package:MODULE/FILE is installed; else True."""
    kind, _, rest = target.partition(":")
    module = rest.partition("/")[0]
    return (
        kind != "package"
        or not module.isidentifier()
        or importlib.util.find_spec(module) is not None
    )


def _check_keys(
    node: yaml.MappingNode, model: type[Strict], place: str, path: tuple[str, ...]
) -> dict[Any, int]:
    """Return the line of every key, at any depth; UserError at an unknown or duplicate key."""
    lines: dict[Any, int] = {}
    known = {
        name: field.annotation for name, field in model.model_fields.items() if name != "folder"
    }
    for key, value in node.value:
        word = str(key.value)
        here, line = (*path, word), key.start_mark.line + 1
        if word not in known or not key.tag.endswith(":str"):
            raise UserError(
                f'{place}:{line}: unknown key "{shown(".".join(here))[1:-1]}"; '
                f"{nearest(word, known)}"
            )
        if here in lines:
            raise UserError(
                f'{place}:{line}: key "{".".join(here)}" is given twice, first in line '
                f"{lines[here]}"
            )
        lines[here] = line
        inner = known[word]
        if (
            isinstance(value, yaml.MappingNode)
            and isinstance(inner, type)
            and issubclass(inner, Strict)
        ):
            lines |= _check_keys(value, inner, place, here)
    return lines


def _first_fault(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """Return the key path of the first fault, without pydantic's union steps, and a reason."""
    fault = error.errors(include_url=False)[0]
    own_steps = re.compile(r"literal\[|int$|function-")
    path = tuple(
        str(step)
        for step in fault["loc"]
        if not own_steps.match(str(step)) and not isinstance(step, int)
    )
    return path, reason_of(fault)


def make_job(pair: Pair, args: JobArgs) -> Job:
    """Make a Job of a pair and flags. A flag that is None leaves the pair's value."""
    given = {key: value for key in JOB_FLAGS if (value := getattr(args, key)) is not None}
    if args.budget is not None:
        given["budget"] = parse_duration(args.budget, "`budget`")
    sampling = {key: given.pop(key) for key in SAMPLING_FLAGS if key in given}
    speculation = {key: given.pop(flag) for key, flag in SPECULATION_FLAGS.items() if flag in given}
    if given.get("draft") == "none" and "length" not in speculation:
        speculation["length"] = "auto"  # the pair's own length was for its draft
    try:
        chosen = Pair.model_validate({**dict(pair), "draft": given.pop("draft", pair.draft)})
        merged = {"pair": chosen, "sampling": sampling, "speculation": speculation}
        return Job.model_validate(merged | given)
    except ValidationError as error:
        path, reason = _first_fault(error)
        field = {"draft": "pair.draft", "speculation": "speculation.length"}.get(".".join(path))
        raise UserError(f"`{field or '.'.join(path)}`: {reason}") from None
