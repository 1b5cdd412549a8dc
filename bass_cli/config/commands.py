"""Declare the options of each command. None (or False) means that an option is not given.

Options of a Job are taken from config/options.py, where a command may change their help text. The
commands check the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, make_dataclass
from typing import Any

from bass_cli.config.options import (
    DRAFTING,
    JOB,
    KEPT,
    MACHINE,
    MEASURED,
    MODELS,
    OUTPUT,
    PROMPTS,
    RANDOM,
    SAMPLES,
    SCORING,
    TRAINING,
    WHOLE_JOB,
    Option,
    flag,
    packaged_pairs,
    switch,
)


def of_job(name: str, **changes: Any) -> Any:
    """Declare a field as this option of a Job, with changes."""
    return flag(JOB[name], **changes)


def args_of(*names: str, **changes: Any) -> Any:
    """Return a base class with these options of a Job as fields, with changes."""
    return make_dataclass(
        "Options",
        [(name, JOB[name].kind | None, of_job(name, **changes)) for name in names],
        namespace={"__doc__": "Some options of a Job."},
        eq=False,
        kw_only=True,
    )


def job_options(args: Any, **changes: Any) -> dict[str, Any]:
    """Return the options of a Job that a command was given, with changes.

    A command without the option `generation_config` uses bass's own settings, not a model's.
    """
    given = {"generation_config": "none"} if not hasattr(args, "generation_config") else {}
    given |= {name: value for name in JOB if (value := getattr(args, name, None)) is not None}
    given |= changes
    return {name: value for name, value in given.items() if value is not None}


# Options of several commands
_PAIR = Option(
    "A packaged pair or a pair file (.yaml); flags and variables override its settings",
    MODELS,
    "NAME|FILE",
    "smollm2",
    choices=packaged_pairs,
)
_RAY = Option(
    "Draw with one process per GPU: on this machine (local), or as Ray actors on the cluster that "
    "this machine is a node of (auto, or HOST:PORT; needs bass-cli[ray])",
    MACHINE,
    "local|ADDRESS",
)
_ACTORS = Option(
    "Number of Ray actors; all means one per GPU, or one per node if there are no GPUs, and "
    "includes nodes that join later",
    MACHINE,
    "N|all",
    "all",
    rare=True,
)
_BATCH_SIZES = Option(
    "Numbers of sequences decoded at once", MEASURED, "N,...", "1,2,4,8; on a GPU also 16"
)
_PUBLIC = Option("Let everybody read the published data set", OUTPUT, shown="private", rare=True)
_PLOT = Option("Draw a chart to this file; needs matplotlib", OUTPUT, "FILE.png")
# The options of a Job that bass bench takes with and without --job
MACHINE_AND_MODELS = ("model", "draft", "device", "dtype", "draft_dtype", "kv_dtype", "threads")
DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "allowed_token_ids", "seed", "coupling"),
)

_Pair: Any = args_of(*MACHINE_AND_MODELS)
_Distribution: Any = args_of(*DISTRIBUTION)
_Samples: Any = args_of(
    *("n", "max_new_tokens", "stop", "stop_token_ids", "draft_length", "budget", "batch_size"),
    *("limit", "tensor_parallel", "token_ids", "logprobs", "logprobs_of"),
    *("prompt_logprobs", "bad_words"),
    *("thinking", "max_thinking_tokens"),
)
_Texts: Any = args_of("chat", "prompt_column", "id_column", "strict_fields", "include_stop", "echo")
_Chats: Any = args_of("system", "template", "template_args", "tools")
_Defaults: Any = args_of("generation_config", "lora")
_Decoder: Any = args_of("decoder")
_Structure: Any = args_of("json_schema", "json_object", "regex", "grammar")
_Target: Any = args_of(
    *("model", "lora", "decoder", "device", "dtype", "kv_dtype", "threads", "tensor_parallel")
)
_Scored: Any = args_of("chat", "prompt_column", "limit", "logprobs")
_WholeJob: Any = args_of(
    *("n", "max_new_tokens", "stop", "chat", "draft_length", "batch_size", "limit"),
    "prompt_column",
    group=WHOLE_JOB,
    variable=False,
)
_Requests: Any = args_of(
    *("max_new_tokens", "stop", "stop_token_ids", "include_stop", "draft_length", "budget"),
    *("batch_size", "limit", "tensor_parallel", "thinking", "max_thinking_tokens"),
    *("logprobs_of", "bad_words"),
)


@dataclass(kw_only=True, eq=False)
class _Quiet:
    quiet: bool = switch("Write only errors to standard error", OUTPUT)


@dataclass(kw_only=True, eq=False)
class _Run(_Quiet):
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
class _Document:
    json_document: bool = switch(
        "Print one JSON document instead of the table", OUTPUT, flag="--json"
    )


@dataclass(kw_only=True, eq=False)
class PairArgs(_Pair):
    """The options of the models and the machine. None means not given, as in all classes below."""

    pair: str | None = flag(_PAIR)


@dataclass(kw_only=True, eq=False)
class SampleArgs(_Samples, _Distribution, _Decoder, PairArgs, _Run):
    """The options of how samples are drawn: shared by `generate` and `eval`."""

    shard: str | None = flag(
        "Draw one of several parts of the job, chosen by a hash of the prompt ids; bass merge "
        "joins the parts",
        PROMPTS,
        "2/8",
        shown="all",
        rare=True,
    )
    ray: str | None = flag(_RAY)
    actors: str | None = flag(_ACTORS)
    resume: bool = switch("Fail if there is no output file to continue", OUTPUT, rare=True)
    overwrite: bool = switch("Replace an existing output file", OUTPUT)
    publish: str | None = flag(
        "When the run is complete, upload --out, its manifest and a data card to the Hugging Face "
        "hub, as bass publish does",
        OUTPUT,
        "hf://USER/NAME",
        rare=True,
    )
    public: bool = flag(_PUBLIC, default=False)


@dataclass(kw_only=True, eq=False)
class GenerateArgs(_Chats, _Defaults, _Structure, _Texts, SampleArgs):
    prompts: str = flag(
        "A .jsonl, .json, .csv, .tsv, .txt or .parquet file, - for standard input, or "
        "hf:NAME[:CONFIG][:SPLIT]. All but .parquet may end in .gz or .zst. A .jsonl line looks "
        'like {"id": "a", "prompt": "a text"}.',
        "",
        "PROMPTS",
        default=MISSING,
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
class BatchArgs(_Requests, _Chats, _Defaults, _Distribution, _Decoder, PairArgs, _Run):
    prompts: str = flag(
        "A .jsonl file of requests in OpenAI's batch format: custom_id, method, url, body.",
        "",
        "IN",
        default=MISSING,
    )
    out: str = flag("Output file for the responses.", "", "OUT", default=MISSING)
    errors: str | None = flag(
        "Output file for requests that failed", OUTPUT, "FILE", shown="OUT.errors"
    )
    ray: str | None = flag(_RAY)
    actors: str | None = flag(_ACTORS)
    resume: bool = switch("Fail if there is no output file to continue", OUTPUT, rare=True)
    overwrite: bool = switch("Replace existing output files", OUTPUT)
    json_summary: bool = switch("Print a summary as JSON to standard output", OUTPUT, flag="--json")


@dataclass(kw_only=True, eq=False)
class LogprobsArgs(_Scored, _Chats, _Target, _Run):
    prompts: str = flag(
        "A file of prompts with completions, in any format that bass generate reads, such as "
        'lines {"id": "a", "prompt": "a text", "completion": " goes on"}.',
        "",
        "FILE",
        default=MISSING,
    )
    completion_column: str | None = flag(
        "Field that holds the completion: a text, or a list of token ids",
        PROMPTS,
        "NAME",
        shown="completion",
    )
    pair: str | None = flag(_PAIR)
    out: str | None = flag(
        "Output file for the log-probabilities; - is standard output", OUTPUT, "FILE", shown="-"
    )
    resume: bool = switch("Fail if there is no output file to continue", OUTPUT, rare=True)
    overwrite: bool = switch("Replace an existing output file", OUTPUT)


@dataclass(kw_only=True, eq=False)
class MergeArgs(_Quiet):
    out: str = flag("Output file for the merged samples.", "", "OUT", default=MISSING)
    parts: list[str] = flag("Files written with --shard.", "", "PART...", default=MISSING)
    overwrite: bool = switch("Replace OUT if it exists", OUTPUT)


@dataclass(kw_only=True, eq=False)
class FilterArgs(_Document, _Quiet):
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
class PublishArgs(_Quiet):
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
    public: bool = flag(_PUBLIC, rare=False, default=False)


@dataclass(kw_only=True, eq=False)
class RankArgs(_Target, _Document, _Quiet):
    file: str = flag(
        "A file of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of bass or of another tool.",
        "",
        "FILE",
        default=MISSING,
    )
    by: str | None = flag(
        "Rankers: logprob, static, majority; with a model: reverse, tests, reward:MODEL. Ranks "
        "are those of the first; scores are written for all",
        SCORING,
        "NAME,...",
        shown="logprob",
    )
    pair: str | None = flag(
        _PAIR, text="The pair of the target, for reverse and tests", shown="none"
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
        "Task of the samples, which says how their text is read",
        SCORING,
        "humaneval|humaneval+|mbpp|mbpp+|gsm8k|xsum|FILE.yaml",
        shown="from the manifest",
    )
    data: str | None = flag("The task's data set, if it is not packaged", PROMPTS, "FILE|hf:NAME")
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


@dataclass(kw_only=True, eq=False)
class JudgeArgs(_Document):
    """The options of scoring, shared by `eval` and `score`."""

    format: str | None = flag(
        "Print the figures as table, md, latex, csv or json",
        OUTPUT,
        "FORMAT",
        shown="table",
        choices=("table", "md", "latex", "csv", "json"),
    )
    data: str | None = flag("The task's data set, if it is not packaged", PROMPTS, "FILE|hf:NAME")
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
    task: str = flag(
        "humaneval, humaneval+, mbpp, mbpp+ (programs), gsm8k (numbers), ifeval (instructions), "
        "xsum (summaries), or a file (.yaml).",
        "",
        "TASK|FILE",
        choices=("humaneval", "humaneval+", "mbpp", "mbpp+", "gsm8k", "ifeval", "xsum"),
        default=MISSING,
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
    plot: str | None = flag(_PLOT)


@dataclass(kw_only=True, eq=False)
class ScoreArgs(JudgeArgs, _Quiet):
    files: list[str] = flag(
        "Files of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet): from bass, or with the "
        "fields task_id and completion or solution. Several files make one table.",
        "",
        "FILE...",
        default=MISSING,
    )
    task: str | None = flag(
        "Task of the samples",
        SCORING,
        "humaneval|humaneval+|mbpp|mbpp+|gsm8k|ifeval|xsum|FILE.yaml",
        shown="from the file",
    )
    report: str | None = flag("Write the report to this file as JSON; for one FILE", OUTPUT, "FILE")
    overwrite: bool = switch(
        "Let --report replace a file that is not an earlier report on these samples", OUTPUT
    )


@dataclass(kw_only=True, eq=False)
class CompareArgs(JudgeArgs, _Quiet):
    a: str = flag(
        "A file of samples as bass score takes it, or a report (.json) on one.",
        "",
        "A",
        default=MISSING,
    )
    b: str = flag("Another one, on the same problems.", "", "B", default=MISSING)
    task: str | None = flag(
        "Task of the samples",
        SCORING,
        "humaneval|humaneval+|mbpp|mbpp+|gsm8k|xsum|FILE.yaml",
        shown="from the file",
    )


@dataclass(kw_only=True, eq=False)
class ReportArgs(_Quiet):
    runs: list[str] = flag(
        "Files of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of any tool, with the fields "
        "id and text, or task_id and completion or solution; also reports (.json) on them.",
        "",
        "RUN...",
        default=MISSING,
    )
    out: str | None = flag("Output file for the page", OUTPUT, "FILE.html", shown="beside RUN")
    serve: bool = switch(
        "Instead of writing a file, serve the page on 127.0.0.1 and follow running jobs", OUTPUT
    )
    port: int | None = flag("Port for --serve", OUTPUT, shown="a free one")
    task: str | None = flag("Task of the samples", SCORING, "TASK", shown="from the file")
    data: str | None = flag(
        "The task's data set, if it is not packaged", SCORING, "FILE|hf:NAME", shown="packaged"
    )
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
class ProfileArgs(_Decoder, PairArgs, _Document, _Quiet):
    batch_sizes: str | None = flag(
        _BATCH_SIZES, text="Batch sizes to measure", shown="1,2,4,8; on a GPU up to 64"
    )


@dataclass(kw_only=True, eq=False)
class BenchArgs(_WholeJob, _Distribution, PairArgs, _Document, _Quiet):
    job: str | None = flag(
        "Instead of measuring rounds, run all prompts of this file like bass generate, and "
        "with the --rivals",
        WHOLE_JOB,
        "FILE",
    )
    ray: str | None = flag(
        _RAY,
        text="Run the job once more with one process per GPU: on this machine (local), or as Ray "
        "actors on a cluster (auto, or HOST:PORT)",
        group=WHOLE_JOB,
        variable=False,
        rare=True,
    )
    actors: str | None = flag(_ACTORS, group=WHOLE_JOB, variable=False)
    tensor_parallel: int | None = of_job("tensor_parallel")
    shape: str | None = flag(
        "Use a target with this model's shape and random weights, such as qwen2.5-7b, instead "
        "of a pair",
        RANDOM,
        "NAME",
    )
    draft_shape: str | None = flag(
        "The same for the draft, with --acceptance; pard-0.5b, dspark-8b and dflash-8b draft "
        "in one pass, eagle3-8b drafts token by token",
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
        "Methods to compare: plain, draft lengths, bass, table, bass+table, auto",
        MEASURED,
        "METHOD,...",
        shown="plain,2,4,8,auto; on a GPU also 6 and bass",
    )
    controllers: bool = switch(
        "Compare every controller (auto, bass, table, bass+table) with all fixed lengths",
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
    plot: str | None = flag(_PLOT)
    overwrite: bool = switch("Let --plot replace a file that is not a chart from bass", OUTPUT)


@dataclass(kw_only=True, eq=False)
class DistillArgs(PairArgs, _Document, _Quiet):
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
        _RAY,
        text="Draw and train with one process for each GPU: on this machine (local), or as Ray "
        "actors on the cluster it belongs to (auto, or HOST:PORT; needs bass-cli[ray]), with --out "
        "in a folder that all nodes share",
    )
    actors: str | None = flag(_ACTORS)
    out: str | None = flag(
        "Folder for samples, checkpoint, draft, pair file and report; the same command "
        "resumes an interrupted run there",
        OUTPUT,
        "DIR",
    )
    overwrite: bool = switch("Start again in a folder that bass distill made", OUTPUT)


@dataclass(kw_only=True, eq=False)
class PairsArgs(_Document):
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
class DoctorArgs(_Document):
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


COMMANDS: Mapping[str, type] = {
    "generate": GenerateArgs,
    "batch": BatchArgs,
    "profile": ProfileArgs,
    "distill": DistillArgs,
    "bench": BenchArgs,
    "logprobs": LogprobsArgs,
    "merge": MergeArgs,
    "watch": WatchArgs,
    "filter": FilterArgs,
    "publish": PublishArgs,
    "eval": EvaluateArgs,
    "rank": RankArgs,
    "score": ScoreArgs,
    "compare": CompareArgs,
    "report": ReportArgs,
    "pairs": PairsArgs,
    "doctor": DoctorArgs,
}
