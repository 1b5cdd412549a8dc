"""Declare the options of the commands about speed and about this machine: profile, bench, distill,
pairs and doctor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bass_cli.config.command_options import (
    ACTORS,
    PLOT,
    RAY,
    DecoderArgs,
    DistributionArgs,
    DocumentArgs,
    PairArgs,
    QuietArgs,
    args_of,
    of_job,
)
from bass_cli.config.options import (
    DRAFTING,
    MEASURED,
    MODELS,
    OUTPUT,
    RANDOM,
    SAMPLES,
    TRAINING,
    WHOLE_JOB,
    Option,
    flag,
    packaged_pairs,
    switch,
)
from bass_cli.config.speculation import CONTROLLERS

_BATCH_SIZES = Option(
    "Numbers of sequences decoded at once", MEASURED, "N,...", "1,2,4,8; on a GPU also 16"
)
_WholeJob: Any = args_of(
    *("n", "max_new_tokens", "stop", "chat", "draft_length", "batch_size", "limit"),
    "prompt_column",
    group=WHOLE_JOB,
    variable=False,
)


@dataclass(kw_only=True, eq=False)
class ProfileArgs(DecoderArgs, PairArgs, DocumentArgs, QuietArgs):
    batch_sizes: str | None = flag(
        _BATCH_SIZES, text="Batch sizes to measure", shown="1,2,4,8; on a GPU up to 64"
    )


@dataclass(kw_only=True, eq=False)
class BenchArgs(_WholeJob, DistributionArgs, PairArgs, DocumentArgs, QuietArgs):
    job: str | None = flag(
        "Instead of measuring rounds, run all prompts of this file like bass generate, and "
        "with the --rivals",
        WHOLE_JOB,
        "FILE",
    )
    ray: str | None = flag(
        RAY,
        text="Run the job once more with one process per GPU: on this machine (local), or as Ray "
        "actors on a cluster (auto, or HOST:PORT)",
        group=WHOLE_JOB,
        variable=False,
        rare=True,
    )
    actors: str | None = flag(ACTORS, group=WHOLE_JOB, variable=False)
    tensor_parallel: int | None = of_job("tensor_parallel")
    shape: str | None = flag(
        "Use a target with this model's shape and random weights, such as qwen2.5-7b, instead "
        "of a pair",
        RANDOM,
        "NAME",
    )
    draft_shape: str | None = flag(
        "The same for the draft, with --acceptance; pard-0.5b, dspark-8b and dflash-8b draft "
        "in one pass, eagle3-8b, mtp-27b and mtp-35b-a3b token by token",
        RANDOM,
        "NAME",
        rare=True,
    )
    acceptance: list[str] | None = flag(
        "Simulated acceptance rate of a drafted token. 0.93/0.9/0.87: by position in the "
        "draft, if all earlier tokens are accepted; 0.95,0.3: by sequence in turn. Repeat it "
        "for several benches",
        RANDOM,
        "NUMBER,...",
    )
    depth: int | None = flag(
        "Draft with the first N layers of --shape; needs --scale", RANDOM, rare=True
    )
    scale: float | None = flag(
        "Factor on the output of the other layers; with 0 every draft is accepted",
        RANDOM,
        rare=True,
    )
    batch_sizes: str | None = flag(_BATCH_SIZES)
    methods: str | None = flag(
        f"Methods to compare: plain, draft lengths, {', '.join(CONTROLLERS)}",
        MEASURED,
        "METHOD,...",
        shown="plain,2,4,8,auto; on a GPU also 6 and bass",
    )
    controllers: bool = switch(
        f"Compare every controller ({', '.join(CONTROLLERS)}) with all fixed lengths",
        MEASURED,
        rare=True,
    )
    prompts: str | None = flag(
        "Prompts, used unchanged", MEASURED, "FILE", shown="built-in prompts"
    )
    prompt_tokens: int | None = flag(
        "Length of the built-in prompts: N to 2N tokens",
        MEASURED,
        shown="64; on a GPU 300",
        rare=True,
    )
    new_tokens: int | None = flag(
        "Tokens generated per sequence", MEASURED, shown="128, or fewer under a time limit"
    )
    samples_per_prompt: int | None = flag("Sequences per prompt", MEASURED, shown="1", rare=True)
    repeats: int | None = flag(
        "Runs per batch size and method",
        MEASURED,
        shown="5, or fewer under a time limit",
        rare=True,
    )
    time_limit: str | None = flag(
        "Stop measuring after this time, such as 5m, and report what was measured",
        MEASURED,
        "TIME",
        shown="80s on a CPU without --repeats, else none",
        rare=True,
    )
    rivals: str | None = flag(
        "Also measure these engines, if installed: transformers, vllm", MEASURED, "NAME,..."
    )
    attention: str | None = flag(
        "How a GPU handles sequences of unequal length",
        MEASURED,
        "ragged|pad|split",
        shown="ragged",
        rare=True,
    )
    plot: str | None = flag(PLOT)
    overwrite: bool = switch("Let --plot replace a file that is not a chart from bass", OUTPUT)


@dataclass(kw_only=True, eq=False)
class DistillArgs(PairArgs, DocumentArgs, QuietArgs):
    draft: str | None = of_job(
        "draft",
        text="The pair's draft; if it is a model, the new draft starts from it (without --from and "
        "--layers)",
    )
    source: str | None = flag(
        "Start the draft from this small model of the target's family (like --model)",
        MODELS,
        "MODEL",
        shown="the pair's draft",
        flag="--from",
    )
    layers: int | None = flag(
        "Start the draft from the target's first N layers",
        MODELS,
        shown="a quarter of them, if there is no draft model",
    )
    dtype: str | None = of_job("dtype", takes="auto|bf16|fp32")
    prompts: str | None = flag(
        "Prompts for the samples (as bass generate reads them)",
        SAMPLES,
        "FILE",
        shown="none: bass generates its own prompts, half chats, half free text",
    )
    chat: bool | None = of_job(
        "chat",
        text="With --prompts: apply the model's chat template; without: only chats, or only free "
        "text",
        group=SAMPLES,
        shown="both; with --prompts: for prompts with messages",
    )
    prompt_column: str | None = of_job("prompt_column", group=SAMPLES)
    limit: int | None = of_job("limit", group=SAMPLES)
    tokens: int | None = flag(
        "Draw about N tokens of samples; the prompts of a file are repeated as needed",
        SAMPLES,
        shown="two passes over them are --steps; at most 50000 (GPU: 10000000)",
    )
    n: int | None = of_job(
        "n",
        text="Samples of each prompt; with --prompts and no --tokens, each is used once",
        group=SAMPLES,
        shown="4; fewer if --tokens is small",
    )
    max_new_tokens: int | None = of_job(
        "max_new_tokens", group=SAMPLES, shown="384, or a quarter of --tokens if less"
    )
    temperature: float | None = of_job(
        "temperature", text="Temperature of the samples", group=SAMPLES, shown="0.9"
    )
    seed: int | None = of_job("seed", text="Random seed of samples and training")
    batch_size: str | None = of_job("batch_size", text="Samples decoded at once")
    draft_length: int | None = flag(
        "Train for drafts of up to N tokens, 2 to 32", DRAFTING, shown="8"
    )
    minutes: float | None = flag(
        "Stop training after this many minutes (sampling comes before)", TRAINING, shown="no limit"
    )
    steps: int | None = flag(
        "Number of training steps", TRAINING, shown="two passes over the samples, or --minutes"
    )
    learning_rate: float | None = flag(
        "Peak learning rate (linear warm-up, cosine decay)", TRAINING, shown="0.0001"
    )
    windows: int | None = flag(
        "Windows of text in a training step", TRAINING, shown="16", flag="--train-batch"
    )
    window_tokens: int | None = flag("Tokens in a window, a multiple of 8", TRAINING, shown="512")
    ray: str | None = flag(
        RAY,
        text="Draw and train with one process for each GPU: on this machine (local), or as Ray "
        "actors on the cluster it belongs to (auto, or HOST:PORT; needs bass-cli[ray]), with --out "
        "in a folder that all nodes share",
    )
    actors: str | None = flag(ACTORS)
    out: str | None = flag(
        "Folder for samples, checkpoint, draft, pair file and report; the same command "
        "resumes an interrupted run there",
        OUTPUT,
        "DIR",
    )
    overwrite: bool = switch("Start again in a folder that bass distill made", OUTPUT)


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


# The options of a Job that bass doctor checks a model with
_CHECKED: Any = {"group": MODELS, "shown": "the pair's", "variable": False, "rare": False}


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
    dtype: str | None = of_job(
        "dtype", text="Check --pair or --model in this number format", **_CHECKED
    )
    draft_dtype: str | None = of_job(
        "draft_dtype", text="Check the draft of --pair or --model in this number format", **_CHECKED
    )
    kv_dtype: str | None = of_job(
        "kv_dtype",
        text="Check --pair or --model with stored keys and values in this number format",
        **_CHECKED,
    )
    decoder: str | None = of_job(
        "decoder", text="Check --pair or --model with these layers", **_CHECKED
    )
    threads: int | None = of_job("threads")
