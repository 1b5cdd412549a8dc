"""Declare the options of the commands for files of samples: merge, filter, watch and publish."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from bass_cli.config.command_options import PUBLIC, DocumentArgs, QuietArgs
from bass_cli.config.options import KEPT, OUTPUT, flag, switch


@dataclass(kw_only=True, eq=False)
class MergeArgs(QuietArgs):
    out: str = flag("Output file for the merged samples.", "", "OUT", default=MISSING)
    parts: list[str] = flag("Files written with --shard.", "", "PART...", default=MISSING)
    overwrite: bool = switch("Replace OUT if it exists", OUTPUT)


@dataclass(kw_only=True, eq=False)
class FilterArgs(DocumentArgs, QuietArgs):
    file: str = flag(
        "A file of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of bass or of another tool; "
        "- is standard input.",
        "",
        "FILE",
        default=MISSING,
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
    names: list[str] = flag(
        "Files of samples that jobs write (their --out); several files of shards, too.",
        "",
        "FILE...",
        default=MISSING,
    )
    once: bool = switch("Show the progress once, instead of until the jobs have ended", OUTPUT)
    json_document: bool = switch(
        "Print one JSON document when the jobs have ended; with --once now", OUTPUT, flag="--json"
    )


@dataclass(kw_only=True, eq=False)
class PublishArgs(QuietArgs):
    file: str = flag(
        "A finished file of samples of bass generate, eval, merge or filter.",
        "",
        "FILE",
        default=MISSING,
    )
    target: str = flag(
        "The data set: it is created, or gets the files in place of those of the same names.",
        "",
        "hf://USER/NAME",
        default=MISSING,
    )
    public: bool = flag(PUBLIC, rare=False, default=False)
