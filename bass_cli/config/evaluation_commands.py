"""Declare the options of the commands that judge samples: eval, score, compare, report, rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bass_cli.config.command_options import PAIR, PLOT, DocumentArgs, QuietArgs, TargetArgs, of_job
from bass_cli.config.options import (
    KEPT,
    MACHINE,
    OUTPUT,
    PROMPTS,
    SCORING,
    Option,
    argument,
    flag,
    switch,
)
from bass_cli.config.sample_commands import SampleArgs

_DATA = Option("The task's data set, if it is not packaged", PROMPTS, "FILE|hf:NAME")
_TASK = Option(
    "Task of the samples",
    SCORING,
    "humaneval|humaneval+|mbpp|mbpp+|gsm8k|ifeval|xsum|FILE.yaml",
    shown="from the file",
)


@dataclass(kw_only=True, eq=False)
class JudgeArgs(DocumentArgs):
    """The options of scoring, shared by `eval` and `score`."""

    format: str | None = flag(
        "Print the figures as table, md, latex, csv or json",
        OUTPUT,
        "FORMAT",
        shown="table",
        choices=("table", "md", "latex", "csv", "json"),
    )
    data: str | None = flag(_DATA)
    k: str | None = flag(
        "Estimate pass@k for these k", SCORING, "K,...", shown="1, 10 and 100, up to --n"
    )
    rank_by: str | None = flag(
        "Rankers: static, majority, reverse, tests, reward:MODEL",
        SCORING,
        "NAME,...",
        shown="logprob",
    )
    allow_code_execution: bool = switch(
        "Run generated programs even if the sandbox is weak (bass doctor shows what is missing)",
        SCORING,
        rare=True,
    )
    allow_weak_sandbox: bool = switch("Same as --allow-code-execution", SCORING, rare=True)
    workers: int | None = flag(
        "Programs that run at the same time", SCORING, shown="the number of cores", rare=True
    )
    timeout: str | None = flag(
        "Time limit per program", SCORING, "TIME", shown="10s, or as EvalPlus", rare=True
    )
    rejudge: bool = switch(
        "Run all programs again, even those that have a verdict", SCORING, rare=True
    )


@dataclass(kw_only=True, eq=False)
class EvaluateArgs(SampleArgs, JudgeArgs):
    task: str = argument(
        "humaneval, humaneval+, mbpp, mbpp+ (programs), gsm8k (numbers), ifeval (instructions), "
        "xsum (summaries), or a file (.yaml).",
        "TASK|FILE",
        choices=("humaneval", "humaneval+", "mbpp", "mbpp+", "gsm8k", "ifeval", "xsum"),
    )
    lora: Sequence[str] | None = of_job("lora")
    max_new_tokens: int | None = of_job(
        "max_new_tokens", shown="512, for xsum 128, for ifeval 1280"
    )
    temperature: float | None = of_job("temperature", shown="the pair's, or 0.2")
    budgets: str | None = flag(
        "Compare plain decoding, one sample at a time and the batch under each of these time "
        "limits, such as 0.5s,1s,2s",
        MACHINE,
        "TIME,...",
    )
    prompt_format: str | None = flag(
        "Ask the task's question in a chat (chat), or continue its prompt as it is (raw), without "
        "outer newlines (strip-nl) or whitespace (strip). auto: chat for instruct models, else raw",
        PROMPTS,
        "FORMAT",
        shown="the file's, or auto",
        choices=("auto", "raw", "strip", "strip-nl", "chat"),
    )
    out: str | None = flag(
        "Output file for the samples", OUTPUT, "FILE", shown="named after task, pair and options"
    )
    report: str | None = flag(
        "Write the report to this file, as JSON", OUTPUT, "FILE", shown="beside --out"
    )
    plot: str | None = flag(PLOT)


@dataclass(kw_only=True, eq=False)
class ScoreArgs(JudgeArgs, QuietArgs):
    files: list[str] = argument(
        "Files of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet): from bass, or with the "
        "fields task_id and completion or solution. Several files make one table.",
        "FILE...",
    )
    task: str | None = flag(_TASK)
    report: str | None = flag("Write the report to this file as JSON; for one FILE", OUTPUT, "FILE")
    overwrite: bool = switch(
        "Let --report replace a file that is not an earlier report on these samples", OUTPUT
    )


@dataclass(kw_only=True, eq=False)
class CompareArgs(JudgeArgs, QuietArgs):
    a: str = argument("A file of samples as bass score takes it, or a report (.json) on one.", "A")
    b: str = argument("Another one, on the same problems.", "B")
    task: str | None = flag(_TASK)


@dataclass(kw_only=True, eq=False)
class ReportArgs(QuietArgs):
    runs: list[str] = argument(
        "Files of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of any tool, with the fields "
        "id and text, or task_id and completion or solution; also reports (.json) on them.",
        "RUN...",
    )
    out: str | None = flag("Output file for the page", OUTPUT, "FILE.html", shown="beside RUN")
    serve: bool = switch(
        "Instead of writing a file, serve the page on 127.0.0.1 and follow running jobs", OUTPUT
    )
    port: int | None = flag("Port for --serve", OUTPUT, shown="a free one")
    task: str | None = flag(_TASK, takes="TASK")
    data: str | None = flag(_DATA, group=SCORING, shown="packaged")
    model: str | None = of_job(
        "model",
        text="The target, if it is not where it was: its tokenizer places log-probabilities",
        shown="from the file",
        variable=False,
    )
    timeout: str | None = flag(
        "Time limit per program that the verdicts were made with",
        SCORING,
        "TIME",
        shown="10s",
        rare=True,
    )
    overwrite: bool = switch("Let --out replace a file that is not a page of bass report", OUTPUT)


@dataclass(kw_only=True, eq=False)
class RankArgs(TargetArgs, DocumentArgs, QuietArgs):
    file: str = argument(
        "A file of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of bass or of another tool.",
        "FILE",
    )
    by: str | None = flag(
        "Rankers: logprob, static, majority; with a model: reverse, tests, reward:MODEL. Ranks "
        "are those of the first; scores are written for all",
        SCORING,
        "NAME,...",
        shown="logprob",
    )
    pair: str | None = flag(
        PAIR, text="The pair of the target, for reverse and tests", shown="none"
    )
    seed: int | None = of_job("seed", text="Seed of the generated tests")
    reward_batch: int | None = flag(
        "Texts that a reward model reads at once", MACHINE, shown="8", rare=True
    )
    allow_code_execution: bool = switch(
        "For tests: run programs even if the sandbox is weak", SCORING, rare=True
    )
    workers: int | None = flag(
        "For tests: programs that run at the same time",
        SCORING,
        shown="the number of cores",
        rare=True,
    )
    best: int | None = flag(
        "Keep only the K best samples of each prompt", KEPT, "K", shown="all samples"
    )
    task: str | None = flag(
        _TASK,
        text="Task of the samples, which says how their text is read",
        shown="from the manifest",
    )
    data: str | None = flag(_DATA)
    prompts: str | None = flag(
        "The prompts of the samples, for samples of no task that were drawn without --echo",
        PROMPTS,
        "FILE",
    )
    prompt_column: str | None = of_job("prompt_column")
    answer: str | None = flag(
        "Regular expression for majority: the answer is its last match in the text, or the group "
        "in it",
        SCORING,
        "REGEX",
    )
    out: str | None = flag(
        "Output file for the ranked samples, with its manifest", OUTPUT, "FILE", shown="FILE itself"
    )
    json_document: bool = switch(
        "Print the counts as JSON to standard output", OUTPUT, flag="--json"
    )
    overwrite: bool = switch("Replace an existing output file", OUTPUT)
