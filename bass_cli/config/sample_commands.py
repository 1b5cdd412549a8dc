"""Declare the options of the commands that draw samples (generate, batch, logprobs), and of
those for files of samples (merge, filter, watch, publish). `bass eval` takes SampleArgs from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bass_cli.config.command_options import (
    ACTORS,
    PAIR,
    PUBLIC,
    RAY,
    DecoderArgs,
    DistributionArgs,
    DocumentArgs,
    PairArgs,
    QuietArgs,
    TargetArgs,
    args_of,
)
from bass_cli.config.options import KEPT, OUTPUT, PROMPTS, argument, flag, switch

_Samples: Any = args_of(
    *("n", "max_new_tokens", "stop", "stop_token_ids", "draft_length", "budget", "batch_size"),
    *("limit", "tensor_parallel", "token_ids", "token_drafted", "logprobs", "logprobs_of"),
    *("prompt_logprobs", "bad_words"),
    *("thinking", "max_thinking_tokens"),
)
_Texts: Any = args_of("chat", "prompt_column", "id_column", "strict_fields", "include_stop", "echo")
_Chats: Any = args_of("system", "template", "template_args", "tools")
_Defaults: Any = args_of("generation_config", "lora")
_Structure: Any = args_of("json_schema", "json_object", "regex", "grammar")
_Scored: Any = args_of("chat", "prompt_column", "limit", "logprobs")
_Requests: Any = args_of(
    *("max_new_tokens", "stop", "stop_token_ids", "include_stop", "draft_length", "budget"),
    *("batch_size", "limit", "tensor_parallel", "thinking", "max_thinking_tokens"),
    *("logprobs_of", "bad_words"),
)


@dataclass(kw_only=True, eq=False)
class _Run(QuietArgs):
    """The options of commands that draw or score samples with a model."""

    verbose: bool = switch(
        "Show speed, accepted drafts, busy rows and where the seconds went", OUTPUT, rare=True
    )
    log: str | None = flag(
        "Append what happens, with times, to this file: a JSON object a line",
        OUTPUT,
        "FILE",
        rare=True,
    )


@dataclass(kw_only=True, eq=False)
class SampleArgs(_Samples, DistributionArgs, DecoderArgs, PairArgs, _Run):
    """The options of how samples are drawn: shared by `generate` and `eval`."""

    shard: str | None = flag(
        "Draw one of several parts of the job, chosen by a hash of the prompt ids; bass merge "
        "joins the parts",
        PROMPTS,
        "2/8",
        shown="all",
        rare=True,
    )
    ray: str | None = flag(RAY)
    actors: str | None = flag(ACTORS)
    resume: bool = switch("Fail if there is no output file to continue", OUTPUT, rare=True)
    overwrite: bool = switch("Replace an existing output file", OUTPUT)
    publish: str | None = flag(
        "When the run is complete, upload --out, its manifest and a data card to the Hugging Face "
        "hub, as bass publish does",
        OUTPUT,
        "hf://USER/NAME",
        rare=True,
    )
    public: bool = flag(PUBLIC, default=False)


@dataclass(kw_only=True, eq=False)
class GenerateArgs(_Chats, _Defaults, _Structure, _Texts, SampleArgs):
    prompts: str = argument(
        "A .jsonl, .json, .csv, .tsv, .txt or .parquet file, - for standard input, or "
        "hf:NAME[:CONFIG][:SPLIT]. All but .parquet may end in .gz or .zst. A .jsonl line looks "
        'like {"id": "a", "prompt": "a text"}.',
        "PROMPTS",
    )
    separator: str | None = flag(
        "Text between the prompts of a .txt file, such as '\\n---\\n'; escapes as in --stop",
        PROMPTS,
        "TEXT",
        shown="one prompt per line",
        rare=True,
    )
    out: str | None = flag(
        "Output file for the samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet); - is standard "
        "output",
        OUTPUT,
        "FILE",
        shown="-",
    )
    columns: str | None = flag(
        "Write only these keys, in this order, such as id,text; the id and the sample's number are "
        "always written",
        OUTPUT,
        "KEY,...",
        shown="all",
        rare=True,
    )
    best_of: int | None = flag(
        "Draw n samples of each prompt and keep only the K best, with rank and scores",
        OUTPUT,
        "K",
        shown="all n",
    )
    rank_by: str | None = flag(
        "How --best-of ranks: log-probability, checks of the program, or the most frequent answer",
        OUTPUT,
        "logprob|static|majority",
        shown="logprob",
        rare=True,
    )
    group: bool = switch("Write one line for each prompt, with its n samples", OUTPUT)
    json_summary: bool = switch(
        "Print a summary as JSON to standard output; needs --out FILE", OUTPUT, flag="--json"
    )


@dataclass(kw_only=True, eq=False)
class BatchArgs(_Requests, _Chats, _Defaults, DistributionArgs, DecoderArgs, PairArgs, _Run):
    prompts: str = argument(
        "A .jsonl file of requests in OpenAI's batch format: custom_id, method, url, body.", "IN"
    )
    out: str = argument("Output file for the responses.", "OUT")
    errors: str | None = flag(
        "Output file for requests that failed", OUTPUT, "FILE", shown="OUT.errors"
    )
    ray: str | None = flag(RAY)
    actors: str | None = flag(ACTORS)
    resume: bool = switch("Fail if there is no output file to continue", OUTPUT, rare=True)
    overwrite: bool = switch("Replace existing output files", OUTPUT)
    json_summary: bool = switch("Print a summary as JSON to standard output", OUTPUT, flag="--json")


@dataclass(kw_only=True, eq=False)
class LogprobsArgs(_Scored, _Chats, TargetArgs, _Run):
    prompts: str = argument(
        "A file of prompts with completions, in any format that bass generate reads, such as "
        'lines {"id": "a", "prompt": "a text", "completion": " goes on"}.',
        "FILE",
    )
    completion_column: str | None = flag(
        "Field that holds the completion: a text, or a list of token ids",
        PROMPTS,
        "NAME",
        shown="completion",
    )
    pair: str | None = flag(PAIR)
    out: str | None = flag(
        "Output file for the log-probabilities; - is standard output", OUTPUT, "FILE", shown="-"
    )
    resume: bool = switch("Fail if there is no output file to continue", OUTPUT, rare=True)
    overwrite: bool = switch("Replace an existing output file", OUTPUT)


@dataclass(kw_only=True, eq=False)
class MergeArgs(QuietArgs):
    out: str = argument("Output file for the merged samples.", "OUT")
    parts: list[str] = argument("Files written with --shard.", "PART...")
    overwrite: bool = switch("Replace OUT if it exists", OUTPUT)


@dataclass(kw_only=True, eq=False)
class FilterArgs(DocumentArgs, QuietArgs):
    file: str = argument(
        "A file of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of bass or of another tool; "
        "- is standard input.",
        "FILE",
    )
    where: str | None = flag(
        """Keep samples for which this is true, such as 'finish_reason == "eos" and tokens > 9'""",
        KEPT,
        "EXPR",
    )
    unique: str | None = flag(
        "Keep the first of equal texts (exact), or of similar ones (near: Jaccard similarity of "
        "8-character shingles, by MinHash)",
        KEPT,
        "exact|near[:0.8]",
        choices=("exact", "near"),
    )
    within: str | None = flag(
        "Compare texts of the same prompt, or of the whole file", KEPT, "prompt|file", "prompt"
    )
    valid_json: bool = switch("Keep texts that are JSON", KEPT)
    schema: str | None = flag(
        "Keep texts that are JSON and match this JSON schema (needs bass-cli[filter])", KEPT, "FILE"
    )
    min_tokens: int | None = flag("Least number of tokens", KEPT)
    max_tokens: int | None = flag("Largest number of tokens", KEPT)
    min_chars: int | None = flag("Least number of characters", KEPT)
    max_chars: int | None = flag("Largest number of characters", KEPT)
    key: str | None = flag(
        "Key of the text that all options but --where read, such as meta.answer",
        KEPT,
        "KEY",
        "text",
    )
    missing: str | None = flag(
        "A sample without a key that is read, or with null there: stop with an error, or drop it",
        KEPT,
        "error|drop",
        "error",
    )
    out: str | None = flag(
        "Output file for the kept samples, with its manifest; - is standard output",
        OUTPUT,
        "FILE",
        shown="-",
    )
    json_document: bool = switch(
        "Print the counts as JSON to standard output; needs --out FILE", OUTPUT, flag="--json"
    )
    overwrite: bool = switch("Replace an existing output file", OUTPUT)


@dataclass(kw_only=True, eq=False)
class WatchArgs:
    names: list[str] = argument(
        "Files of samples that jobs write (their --out); several files of shards, too.", "FILE..."
    )
    once: bool = switch("Show the progress once, instead of until the jobs have ended", OUTPUT)
    json_document: bool = switch(
        "Print one JSON document when the jobs have ended; with --once now", OUTPUT, flag="--json"
    )


@dataclass(kw_only=True, eq=False)
class PublishArgs(QuietArgs):
    file: str = argument(
        "A finished file of samples of bass generate, eval, merge or filter.", "FILE"
    )
    target: str = argument(
        "The data set: it is created, or gets the files in place of those of the same names.",
        "hf://USER/NAME",
    )
    public: bool = flag(PUBLIC, rare=False, default=False)
