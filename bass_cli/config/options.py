"""Declare every option of a job once: its name, type, bounds, default, help text and flag.

config/job.py makes the models of a job from these classes, with validation and the schema of pair
files; cli/options.py makes flags, environment variables and help pages. The options of single
commands are in the classes that config/commands.py lists. Nothing heavy is imported, because
`bass --help` needs this.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen

from bass_cli.config.speculation import (
    CONTROLLERS,
    DRAFT_HELP,
    DRAFT_WORDS,
    LENGTH_HELP,
    Controller,
)

# Headings of the help pages
MODELS, WHOLE_JOB, SAMPLES, SAMPLING = "Models", "A whole job", "The target's samples", "Sampling"
DRAFTING, TRAINING = "Drafting (changes the speed, not the distribution)", "Training"
MACHINE, PROMPTS, OUTPUT = "Time and machine", "Prompts and data", "Output"
CHAT, STRUCTURE = "Chats and thinking", "Structured output (needs bass-cli[structure])"
RANDOM, MEASURED = "Random weights, without any download", "What is measured"
SCORING, KEPT = "Scoring", "What is kept"
HEADINGS = (KEPT, MODELS, WHOLE_JOB, SAMPLES, SAMPLING, CHAT, STRUCTURE, DRAFTING, TRAINING,
            MACHINE, PROMPTS, OUTPUT, RANDOM, MEASURED, SCORING)  # fmt: skip

LARGEST = 2**63 - 1  # the largest whole number
MOST_ROWS = 1_000_000  # the most samples of a prompt, and rows; no device holds as many
MOST_DRAFTS = 64  # the longest draft length
MOST_LOGPROBS = 64  # the most likeliest tokens of a place


def packaged_pairs() -> list[str]:
    """Return the sorted names of the pairs that are installed with bass."""
    files = importlib.resources.files("bass_cli.configs").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


class Option(NamedTuple):
    """What an option is for, and how the command line shows it.

    Attributes:
        text: The sentence on the help page and in the schema of pair files.
        group: The heading on the help page; "" for an argument; None for no flag.
        takes: The name of its value on the help page; None for a switch. Default: by the type.
        shown: The default on the help page; {} is the field's default.
        choices: Words for shell completion, in addition to those in `takes`.
        flag: The option's name, if it differs from the field's.
        variable: Whether an environment variable BASS_NAME sets the option too. "own": The command
            reads the variable itself, because its value has another format.
        kind: The type of its value on the command line. Default: by the field's type.
        path: The field in messages, such as "sampling.seed".
        rare: Whether a help page that would fill more than two screens shows it only under
            `--help-all`.
        bare: The value of a flag that is given without one; None if it needs one.
        line: Whether a prompt's line may set it for the prompt's own samples. The options of
            sampling are always such options.
    """

    text: str
    group: str | None = None
    takes: str | None = None
    shown: str | None = None
    choices: tuple[str, ...] | Callable[[], Sequence[str]] = ()
    flag: str | None = None
    variable: bool | Literal["own"] = True
    kind: Any = None
    path: str = ""
    rare: bool = False
    bare: str | None = None
    line: bool = False


def flag(text: str | Option, /, *rest: Any, default: Any = None, **more: Any) -> Any:
    """Declare a field as an option. The arguments are those of Option, or an Option."""
    option = text._replace(**more) if isinstance(text, Option) else Option(text, *rest, **more)
    return field(default=default, metadata={"option": option})


def argument(text: str, takes: str, /, **more: Any) -> Any:
    """Declare a field as an argument of a command: it has no flag, and must be given."""
    return flag(text, "", takes, default=MISSING, **more)


def switch(text: str, group: str, **more: Any) -> Any:
    """Declare a field as an option without a value, which is False if it is not given."""
    return flag(text, group, default=False, **more)


Natural = Annotated[int, Ge(0), Le(LARGEST)]
Count = Annotated[int, Ge(1), Le(LARGEST)]
Penalty = Annotated[float, Ge(-1000), Le(1000)]
TopK = Annotated[int, Ge(0), Le(MOST_LOGPROBS)]
Name = Annotated[str, MinLen(1)]
Dtype = Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8", "file"]
DraftDtype = Literal["auto", "target", "bf16", "fp16", "fp32", "fp8", "int8"]
KvDtype = Literal["auto", "fp8"]
_DTYPE = (
    "Number format of weights and computation; fp8 and int8 store matrices in 8 bits; file keeps "
    "the numbers of a GGUF file (CPU only)"
)
_DRAFT_DTYPE = (
    "Number format of the draft: that of the target's activations, for mtp fp8 on a GPU that has "
    "it (auto), that of the target (target), or another; fp8 and int8 store its head in 8 bits too"
)
_KV_DTYPE = (
    "Number format of stored keys and values: that of computation (auto), or 8-bit floats, in half "
    "the memory (fp8)"
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is used: its chats and its own defaults.

    A pair file has the same keys; those of a job come first.
    """

    generation_config: Literal["auto", "none"] = flag(
        "Where sampling settings come from that are not set: auto (the model's "
        "generation_config.json, then bass), or none (bass)",
        SAMPLING,
        default="auto",
        rare=True,
    )

    # a tuple, as stop
    lora: Sequence[str] = flag(
        "LoRA adapter in PEFT's layout, merged into the target while it is loaded; :WEIGHT scales "
        "it; may be repeated. BASS_LORA holds adapters with spaces between them",
        MODELS,
        "ID|FOLDER[:WEIGHT]",
        default=(),
        rare=True,
    )
    system: Name | None = flag(
        "System message of prompts that have none; plain prompts become chats",
        CHAT,
        "TEXT",
        rare=True,
    )
    template: Name | None = flag(
        "Chat template (Jinja) to use instead of the model's; in a Job also the template itself",
        CHAT,
        "FILE",
        shown="the model's",
        rare=True,
    )
    template_args: Mapping[str, Any] | None = flag(
        'Values of the template\'s own variables, such as {"enable_thinking": false}',
        CHAT,
        "JSON",
        rare=True,
    )
    thinking: Literal["auto", "off", "keep"] = flag(
        "A thinking part goes to a field of its own (auto) or stays in the text (keep); off: the "
        "answer begins at once",
        CHAT,
        default="auto",
        rare=True,
    )
    tools: Sequence[Any] | None = flag(
        "Tools that the model may call: a JSON list of their schemas",
        CHAT,
        "FILE",
        kind=str,
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class PairOptions(ModelOptions):
    """The keys of a pair file, besides `sampling` and `speculation`."""

    name: Name = flag("Name of the pair; default: the file's name", default=MISSING)
    target: Name = flag(
        "The target, instead of --pair: a hub id, a folder with safetensors, or a .gguf file. "
        "Default draft: mtp if it has that layer, else lookup",
        MODELS,
        "ID|FOLDER|FILE",
        flag="--model",
        default=MISSING,
    )
    draft: Name = flag(
        DRAFT_HELP,
        MODELS,
        "MODEL|HOW",
        shown="the pair's",
        choices=DRAFT_WORDS,
        default="mtp-or-none",
    )
    dtype: Dtype = flag(_DTYPE, default="auto")
    draft_dtype: DraftDtype = flag(_DRAFT_DTYPE, default="auto")
    kv_dtype: KvDtype = flag(_KV_DTYPE, default="auto")
    decoder: Literal["auto", "native", "transformers"] = flag(
        "Whose layers run models: bass's own (native), those of transformers, or native where the "
        "architecture has a native decoder (auto)",
        MODELS,
        default="auto",
        rare=True,
    )
    tokenizer: Name | None = flag("Model whose tokenizer is used; default: the target's")
    fallback: Name | None = flag("Target to use if `target` is in a package that is not installed")


@dataclass(frozen=True, kw_only=True)
class JobOptions(ModelOptions):
    """The options of a job that are not part of a pair, and those that both have."""

    n: Annotated[int, Ge(1), Le(MOST_ROWS)] = flag(
        "Samples per prompt", SAMPLING, line=True, default=8
    )
    chat: bool | None = flag(
        "Format prompts with the model's chat template",
        SAMPLING,
        shown="for prompts with messages",
        flag="--chat/--no-chat",
    )
    budget: Annotated[float | None, Gt(0)] = flag(
        "Time limit per prompt, such as 2s or 500ms; unfinished samples are truncated, with "
        "exit code 0",
        MACHINE,
        "TIME",
        shown="none",
        kind=str,
    )
    batch_size: Literal["auto"] | Annotated[int, Ge(1), Le(MOST_ROWS)] = flag(
        "Sequences decoded at once", MACHINE, "N|auto", default="auto"
    )
    tensor_parallel: Count = flag(
        "Split the target over K GPUs of this machine: heads, feed-forward, vocabulary",
        MACHINE,
        "K",
        default=1,
        rare=True,
    )
    device: Literal["auto", "cuda", "cpu"] = flag("Device to compute on", MACHINE, default="auto")
    dtype: Dtype = flag(_DTYPE, MACHINE, shown="the pair's", rare=True, default="auto")
    draft_dtype: DraftDtype = flag(
        _DRAFT_DTYPE, DRAFTING, shown="the pair's", rare=True, default="auto"
    )
    kv_dtype: KvDtype = flag(_KV_DTYPE, MACHINE, shown="the pair's", rare=True, default="auto")
    threads: Count | None = flag(
        "CPU threads", MACHINE, shown="OMP_NUM_THREADS, or the number of free cores", rare=True
    )
    limit: Count | None = flag("Use only the first N prompts", PROMPTS, shown="all")
    prompt_column: Name = flag("Field that holds the prompt", PROMPTS, "NAME", default="prompt")
    strict_fields: bool = switch(
        "Refuse fields of a prompt that are unknown, instead of copying them to the results as "
        "meta",
        PROMPTS,
        rare=True,
    )
    id_column: Name | None = flag(
        "Field that holds the id of each prompt",
        PROMPTS,
        "NAME",
        shown="id, or the prompt's number",
        rare=True,
    )
    echo: bool = switch("Add the prompt, and the messages of a chat, to each line", OUTPUT)
    token_ids: bool = switch("Add the generated token ids to each line", OUTPUT)
    token_drafted: bool = switch(
        "Add to each line which tokens were accepted drafts; with token ids or log-probabilities",
        OUTPUT,
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class StructureOptions:
    """The options of what the text of a sample must match."""

    json_schema: Mapping[str, Any] | str | None = flag(
        "Sample only JSON that matches this schema: a file, or the schema itself",
        STRUCTURE,
        "FILE",
        kind=str,
    )
    json_object: bool = switch("Sample only JSON objects", STRUCTURE, rare=True)
    regex: Name | None = flag(
        "Sample only texts that match this regex as a whole", STRUCTURE, "TEXT"
    )
    grammar: Name | None = flag(
        "Sample only texts of this grammar: a file in Lark or GBNF, or the grammar itself",
        STRUCTURE,
        "FILE",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(StructureOptions):
    """The options of sampling."""

    temperature: Annotated[float, Ge(0)] = flag(
        "Sampling temperature; 0 is greedy decoding",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=0.8,
    )
    top_p: Annotated[float, Gt(0), Le(1)] = flag(
        "Sample from the most likely tokens that reach this total probability",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=0.95,
    )
    top_k: Natural = flag(
        "Sample from the N most likely tokens; 0 means all",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=0,
    )
    min_p: Annotated[float, Ge(0), Le(1)] = flag(
        "Drop tokens with less than this share of the largest probability, after top-k and top-p",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=0.0,
        rare=True,
    )
    repetition_penalty: Annotated[float, Ge(0.001), Le(1000)] = flag(
        "Divide the logits of tokens in the prompt or the sample by this; 1 changes nothing",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=1.0,
        rare=True,
    )
    presence_penalty: Penalty = flag(
        "Subtract this from the logits of tokens in the sample",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=0.0,
        rare=True,
    )
    frequency_penalty: Penalty = flag(
        "Subtract this from the logits of tokens in the sample, for each time they occur",
        SAMPLING,
        shown="the pair's, the model's, or {}",
        default=0.0,
        rare=True,
    )
    logit_bias: Mapping[int, float] | None = flag(
        "Add a number to the logit of a token id; may be repeated. A mapping in files",
        SAMPLING,
        "ID=NUMBER",
        shown="none",
        kind=list[str],
        rare=True,
    )
    # a tuple, as stop
    bad_words: Sequence[str] = flag(
        "Never write this text; may be repeated, with escapes as in --stop. BASS_BAD_WORDS holds "
        "one text or a JSON list",
        SAMPLING,
        "TEXT",
        variable="own",
        default=(),
        rare=True,
    )
    allowed_token_ids: Sequence[int] | None = flag(
        "Draw only these token ids", SAMPLING, "ID,...", shown="all", kind=str, rare=True
    )
    seed: Natural = flag("Random seed; the same seed gives the same samples", SAMPLING, default=0)
    # a tuple; its type is Sequence, so that type checkers accept lists
    stop: Sequence[str] = flag(
        "End a sample before this text or at this special token; may be repeated. \\n is a "
        "newline, \\t a tab, \\\\ a backslash. BASS_STOP holds one text or a JSON list",
        SAMPLING,
        "TEXT",
        variable="own",
        default=(),
    )
    # a tuple, as stop
    stop_token_ids: Sequence[int] = flag(
        "End a sample at these token ids, besides the model's own end-of-sequence ids",
        SAMPLING,
        "ID,...",
        shown="none",
        kind=str,
        default=(),
        rare=True,
    )
    include_stop: bool = switch(
        "Keep the stop text that ended a sample in its text", SAMPLING, rare=True
    )
    max_new_tokens: Count = flag("Maximum number of tokens per sample", SAMPLING, default=256)
    max_thinking_tokens: Natural | None = flag(
        "Close the thinking part of a sample after N tokens", CHAT, shown="none", rare=True
    )
    logprobs: TopK | None = flag(
        "Add token ids and the log-probability of each to the line; with K also of the K likeliest "
        "tokens in each place",
        OUTPUT,
        "[K]",
        bare="0",
    )
    logprobs_of: Literal["model", "processed"] = flag(
        "Distribution of --logprobs: the model's own at temperature 1, or the processed one that "
        "tokens are sampled from",
        OUTPUT,
        default="model",
        rare=True,
    )
    prompt_logprobs: TopK | None = flag(
        "The same as --logprobs for the tokens of the prompt, under the model's own distribution",
        OUTPUT,
        "[K]",
        bare="0",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """The options of drafting and verification."""

    length: Controller | Annotated[int, Ge(0), Le(MOST_DRAFTS)] = flag(
        f"Tokens drafted per round: {LENGTH_HELP}, or a number; 0 is plain decoding",
        DRAFTING,
        "N|HOW",
        choices=tuple(CONTROLLERS),
        flag="--draft-length",
        default="auto",
    )
    max: Annotated[int, Ge(1), Le(MOST_DRAFTS)] = flag(
        "Longest draft that a controller may choose", default=32
    )
    coupling: Literal["shared", "maximal"] = flag(
        "How the target verifies drafts; both kinds are exact",
        DRAFTING,
        default="shared",
        rare=True,
    )
    draft_temperature: Annotated[float | None, Ge(0)] = flag(
        "Temperature of the draft; default: the drafter's own choice"
    )


def declared(options: type, part: str | None = None) -> dict[str, Option]:
    """Return the options of a class that have a flag, with all attributes, in the class's order.

    `part`: The beginning of their paths in a Job. Then they are listed by the names of their flags,
    else by the names of the fields. A command without `generation_config` reads no settings of a
    model's own, so the defaults that it shows do not mention them.
    """
    found, hints = {}, get_type_hints(options, include_extras=True)
    own = part is not None or "generation_config" in hints
    for one in fields(options):
        option: Option | None = one.metadata.get("option")
        if option is None or option.group is None:
            continue
        shown = option.shown
        if isinstance(one.default, (int, float, str)) and not isinstance(one.default, bool):
            shown = (shown or "{}").replace("{}", str(one.default))
        if shown is not None and not own:
            shown = shown.replace("the model's, ", "")
        words = hints[one.name] if option.kind is None else option.kind
        kind = kind_of(words)
        name = one.name
        if part is not None and option.flag is not None:
            name = option.flag.split("/")[0].removeprefix("--").replace("-", "_")
        found[name] = option._replace(
            kind=kind,
            takes=option.takes or _metavar(words, kind),
            shown=shown,
            path=option.path or f"{part or ''}{one.name}",
        )
    return found


def kind_of(hint: Any) -> Any:
    """Return the type of a value on the command line: a text if it is no number and no switch."""
    if get_origin(hint) is Annotated:
        return kind_of(get_args(hint)[0])
    if get_origin(hint) in (Sequence, list):
        return list[str]
    parts = [one for one in get_args(hint) if one is not type(None)]
    if len(parts) == 1 and get_origin(hint) is not Literal:
        return kind_of(parts[0])
    return hint if hint in (int, float, bool) else str


def _metavar(hint: Any, kind: Any) -> str | None:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return {int: "N", float: "NUMBER"}.get(kind)


# The options of a Job by the names of their flags
JOB = {
    **declared(PairOptions, "pair."),
    **declared(JobOptions, ""),
    **declared(SamplingOptions, "sampling."),
    **declared(SpeculationOptions, "speculation."),
}

# The options that a prompt may set for its own samples, by field, with their paths in a Job
LINE = {
    **{one.name: one.name for one in fields(JobOptions) if one.metadata["option"].line},
    **{one.name: f"sampling.{one.name}" for one in fields(SamplingOptions)},
}
