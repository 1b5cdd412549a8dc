"""Declare the options of the commands that show what can run here: pairs and doctor."""

from __future__ import annotations

from dataclasses import dataclass

from bass_cli.config.command_options import DocumentArgs, of_job
from bass_cli.config.options import MODELS, OUTPUT, flag, packaged_pairs, switch


@dataclass(kw_only=True, eq=False)
class PairsArgs(DocumentArgs):
    names: list[str] | None = flag(
        "Packaged pairs or pair files (.yaml) to show; without any, all packaged pairs.",
        "",
        "[NAME|FILE]...",
        choices=packaged_pairs,
    )
    schema: bool = switch("Print the JSON schema of pair files, for editors", OUTPUT)
    models: bool = switch(
        "Print which architectures run natively, through transformers, or not, and why", OUTPUT
    )


@dataclass(kw_only=True, eq=False)
class DoctorArgs(DocumentArgs):
    pair: str | None = flag(
        "Also check this pair: whether it can run here, and how many sequences fit in memory",
        MODELS,
        "NAME|FILE",
        choices=packaged_pairs,
        variable=False,
    )
    model: str | None = flag("Also check this target", MODELS, "ID|FOLDER|FILE", variable=False)
    draft: str | None = flag("The draft for --pair or --model", MODELS, "MODEL|HOW", variable=False)
    tensor_parallel: int | None = flag(
        "Check --pair or --model split over K GPUs", MODELS, "K", variable=False
    )
    dtype: str | None = flag(
        "Check --pair or --model in this number format",
        MODELS,
        "auto|bf16|fp16|fp32|fp8|int8|file",
        shown="the pair's",
        variable=False,
    )
    kv_dtype: str | None = flag(
        "Check --pair or --model with stored keys and values in this number format",
        MODELS,
        "auto|fp8",
        shown="the pair's",
        variable=False,
    )
    decoder: str | None = flag(
        "Check --pair or --model with these layers",
        MODELS,
        "auto|native|transformers",
        shown="the pair's",
        variable=False,
    )
    threads: int | None = of_job("threads")
