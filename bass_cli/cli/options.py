"""The options of all commands: for each field of config/args.py its flag, variable and help text.

config/job.py and the commands check the values. An option that is not given is None or false, so
that the pair's value is used.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from bass_cli.cli.flags import (
    DRAFTING,
    JOB,
    MACHINE,
    MEASURED,
    MODELS,
    OUTPUT,
    PROMPTS,
    RANDOM,
    SAMPLING,
    SCORING,
    Flag,
)
from bass_cli.config import args
from bass_cli.config.args import BenchArgs, DoctorArgs, EvaluateArgs, ProfileArgs


def _pairs(incomplete: str) -> list[str]:
    from bass_cli.config.job import packaged_pairs

    return [name for name in packaged_pairs() if name.startswith(incomplete)]


def _controllers(incomplete: str) -> list[str]:
    from bass_cli.config.fields import CONTROLLERS

    return [name for name in CONTROLLERS if name.startswith(incomplete)]


OPTIONS: dict[str, Flag] = {  # by field, in the order of a help page
    "prompts": Flag(
        "A .jsonl, .json, .txt or .parquet file, - for standard input, or "
        'hf:NAME[:CONFIG][:SPLIT]. A .jsonl line looks like {"id": "a", "prompt": "a text"}.',
        "",
        "PROMPTS",
    ),
    "task": Flag(
        "humaneval or mbpp (programs), or xsum (summaries).",
        "",
        "TASK",
        choices=("humaneval", "mbpp", "xsum"),
    ),
    "file": Flag(
        "A .jsonl or .jsonl.gz file of samples: from bass, or with the fields task_id and "
        "completion or solution.",
        "",
        "FILE",
    ),
    "names": Flag(
        "Packaged pairs or pair files (.yaml) to show; without any, all packaged pairs.",
        "",
        "[NAME|FILE]...",
        choices=_pairs,
    ),
    "pair": Flag(
        "A packaged pair or a pair file (.yaml); flags and variables override its settings",
        MODELS,
        "NAME|FILE",
        "smollm2",
        choices=_pairs,
    ),
    "model": Flag(
        "The target, instead of --pair: a Hugging Face hub id, a folder with safetensors, or a "
        ".gguf file. Default draft: lookup",
        MODELS,
        "ID|FOLDER|FILE",
    ),
    "draft": Flag(
        "The draft: a model (like --model), parallel:MODEL (drafts all tokens in one pass), "
        "heads:PATH (reads the target's hidden states), lookup[:SOURCES] (copies from earlier "
        "text; sources: own, siblings, prompt, reference), skip:LAYERS (the target without these "
        "layers), or none",
        MODELS,
        "MODEL|HOW",
        "the pair's",
        choices=("lookup", "none"),
    ),
    "job": Flag(
        "Instead of measuring rounds, run all prompts of this file like bass generate, and with "
        "the --rivals",
        JOB,
        "FILE",
    ),
    "n": Flag("Samples per prompt", SAMPLING, "N", "8"),
    "max_new_tokens": Flag("Maximum number of tokens per sample", SAMPLING, "N", "256"),
    "temperature": Flag(
        "Sampling temperature; 0 is greedy decoding", SAMPLING, "NUMBER", "the pair's, or 0.8"
    ),
    "top_p": Flag(
        "Sample from the most likely tokens that reach this total probability",
        SAMPLING,
        "NUMBER",
        "the pair's, or 0.95",
    ),
    "top_k": Flag(
        "Sample from the N most likely tokens; 0 means all", SAMPLING, "N", "the pair's, or 0"
    ),
    "seed": Flag("Random seed; the same seed gives the same samples", SAMPLING, "N", "0"),
    "stop": Flag(
        "End a sample before this text or at this special token; may be repeated. \\n is a "
        "newline, \\t a tab, \\\\ a backslash. BASS_STOP holds one text or a JSON list",
        SAMPLING,
        "TEXT",
        variable=False,
    ),  # a list: generation.py reads the variable
    "chat": Flag(
        "Format prompts with the model's chat template",
        SAMPLING,
        default="for prompts with messages",
        flag="--chat/--no-chat",
    ),
    "draft_length": Flag(
        "Tokens drafted per round: auto (from the measured cost of a round and the acceptance "
        "rate), bass (Algorithm 1 of the paper), table (by batch size, from bass profile), "
        "bass+table, or a number; 0 is plain decoding",
        DRAFTING,
        "N|HOW",
        "auto",
        choices=_controllers,
    ),
    "coupling": Flag(
        "How the target verifies drafts; both kinds are exact", DRAFTING, "shared|maximal", "shared"
    ),
    "budget": Flag(
        "Time limit per prompt, such as 2s or 500ms; unfinished samples are truncated, with exit "
        "code 0",
        MACHINE,
        "TIME",
        "none",
    ),
    "budgets": Flag(
        "Compare plain decoding, one sample at a time and the batch under each of these time "
        "limits, such as 0.5s,1s,2s",
        MACHINE,
        "TIME,...",
    ),
    "batch_size": Flag("Sequences decoded at once", MACHINE, "N|auto", "auto"),
    "device": Flag("Device to compute on", MACHINE, "auto|cuda|cpu", "auto"),
    "dtype": Flag(
        "Number format of weights and computation", MACHINE, "auto|bf16|fp16|fp32", "the pair's"
    ),
    "threads": Flag("CPU threads", MACHINE, "N", "OMP_NUM_THREADS, or the number of free cores"),
    "limit": Flag("Use only the first N prompts", PROMPTS, "N", "all"),
    "shard": Flag(
        "Draw one of several parts of the job, chosen by a hash of the prompt ids; bass merge "
        "joins the parts",
        PROMPTS,
        "2/8",
        "all",
    ),
    "ray": Flag(
        "Draw with Ray actors, one per GPU: on this machine (local), or on the cluster that this "
        "machine is a node of (auto, or HOST:PORT); needs bass-cli[ray]",
        MACHINE,
        "local|ADDRESS",
    ),
    "actors": Flag(
        "Number of Ray actors; all means one per GPU, or one per node if there are no GPUs, and "
        "includes nodes that join later",
        MACHINE,
        "N|all",
        "all",
    ),
    "tensor_parallel": Flag(
        "Split the target over K GPUs of this machine: heads, feed-forward, vocabulary",
        MACHINE,
        "K",
        "1",
    ),
    "prompt_column": Flag("Field that holds the prompt", PROMPTS, "NAME", "prompt"),
    "prompt_format": Flag(
        "Use the task's prompt as it is (raw), as a question to a chat model (chat), without "
        "surrounding whitespace (strip), or without surrounding newlines (strip-nl)",
        PROMPTS,
        "FORMAT",
        "raw",
        choices=("raw", "strip", "strip-nl", "chat"),
    ),
    "data": Flag("The task's data set, if it is not packaged", PROMPTS, "FILE|hf:NAME"),
    "out": Flag("Output file for the samples; - is standard output", OUTPUT, "FILE", "-"),
    "report": Flag("Write the report to this file, as JSON", OUTPUT, "FILE", "beside --out"),
    "resume": Flag("Fail if there is no output file to continue", OUTPUT),
    "overwrite": Flag("Replace an existing output file", OUTPUT),
    "token_ids": Flag("Add the generated token ids to each line", OUTPUT),
    "shape": Flag(
        "Use a target with this model's shape and random weights, such as qwen2.5-7b, instead of "
        "a pair",
        RANDOM,
        "NAME",
    ),
    "draft_shape": Flag(
        "The same for the draft, with --acceptance; pard-0.5b, dspark-8b and dflash-8b draft in "
        "one pass, eagle3-8b drafts token by token",
        RANDOM,
        "NAME",
    ),
    "acceptance": Flag(
        "Simulated acceptance rate of a drafted token. 0.93/0.9/0.87: by position in the draft, if "
        "all earlier tokens are accepted; 0.95,0.3: by sequence in turn. Repeat it for several "
        "benches",
        RANDOM,
        "NUMBER,...",
    ),
    "depth": Flag("Draft with the first N layers of --shape; needs --scale", RANDOM, "N"),
    "scale": Flag(
        "Factor on the output of the other layers; with 0 every draft is accepted", RANDOM, "NUMBER"
    ),
    "batch_sizes": Flag(
        "Numbers of sequences decoded at once", MEASURED, "N,...", "1,2,4,8; on a GPU also 16"
    ),
    "methods": Flag(
        "Methods to compare: plain, draft lengths, bass, table, bass+table, auto",
        MEASURED,
        "METHOD,...",
        "plain,2,4,8,auto; on a GPU also 6 and bass",
    ),
    "controllers": Flag(
        "Compare every controller (auto, bass, table, bass+table) with all fixed lengths", MEASURED
    ),
    "prompt_tokens": Flag(
        "Length of the built-in prompts: N to 2N tokens", MEASURED, "N", "64; on a GPU 300"
    ),
    "new_tokens": Flag(
        "Tokens generated per sequence", MEASURED, "N", "128, or fewer under a time limit"
    ),
    "samples_per_prompt": Flag("Sequences per prompt", MEASURED, "N", "1"),
    "repeats": Flag(
        "Runs per batch size and method", MEASURED, "N", "5, or fewer under a time limit"
    ),
    "time_limit": Flag(
        "Stop measuring after this time, such as 5m, and report what was measured",
        MEASURED,
        "TIME",
        "80s on a CPU without --repeats, else none",
    ),
    "rivals": Flag(
        "Also measure these engines, if installed: transformers, vllm", MEASURED, "NAME,..."
    ),
    "attention": Flag(
        "How a GPU handles sequences of unequal length", MEASURED, "ragged|pad|split", "ragged"
    ),
    "k": Flag("Estimate pass@k for these k", SCORING, "K,...", "1, 10 and 100, up to --n"),
    "allow_code_execution": Flag(
        "Run generated programs even if the sandbox is weak (bass doctor shows what is missing)",
        SCORING,
    ),
    "allow_weak_sandbox": Flag("Same as --allow-code-execution", SCORING),
    "workers": Flag("Programs that run at the same time", SCORING, "N", "the number of cores"),
    "timeout": Flag("Time limit per program", SCORING, "TIME", "10s"),
    "rejudge": Flag("Run all programs again, even those that have a verdict", SCORING),
    "plot": Flag("Draw a chart to this file; needs matplotlib", OUTPUT, "FILE.png"),
    "quiet": Flag("Write only errors to standard error", OUTPUT),
    "json_summary": Flag(
        "Print a summary as JSON to standard output; needs --out FILE", OUTPUT, flag="--json"
    ),
    "json_document": Flag("Print one JSON document instead of the table", OUTPUT, flag="--json"),
    "json_table": Flag("Print JSON instead of the table", OUTPUT, flag="--json"),
}

# Options of bass bench that only --job uses. The first two run the job once more, on Ray.
ON_RAY = ("ray", "actors")
OF_A_JOB = ("n", "max_new_tokens", "stop", "chat", "draft_length", "batch_size", "limit",
            "prompt_column", *ON_RAY)  # fmt: skip
# Options that one command describes differently from the others.
OWN: dict[type, dict[str, Flag]] = {
    EvaluateArgs: {
        "max_new_tokens": OPTIONS["max_new_tokens"]._replace(default="512, for xsum 128"),
        "temperature": OPTIONS["temperature"]._replace(default="the pair's, or 0.2"),
        "out": Flag("Output file for the samples", OUTPUT, "FILE", "named after the task, the "
                                                                   "pair and the options"),
    },
    ProfileArgs: {
        "batch_sizes": Flag("Batch sizes to measure", MEASURED, "N,...",
                            "1,2,4,8; on a GPU up to 64"),
    },
    BenchArgs: {
        **{name: OPTIONS[name]._replace(group=JOB, variable=False) for name in OF_A_JOB},
        "ray": OPTIONS["ray"]._replace(
            text="Run the job once more with Ray actors: on this machine (local), or on a cluster "
            "(auto, or HOST:PORT)", group=JOB, variable=False,
        ),
        "prompts": Flag("Prompts, used unchanged", MEASURED, "FILE", "built-in prompts"),
        "overwrite": Flag("Let --plot replace a file that is not a chart from bass", OUTPUT),
    },
    DoctorArgs: {
        "pair": Flag("Also check this pair: whether it can run here, and how many sequences fit "
                     "in memory", MODELS,
                     "NAME|FILE", choices=_pairs, variable=False),
        "model": Flag("Also check this target", MODELS, "ID|FOLDER|FILE", variable=False),
        "draft": Flag("The draft for --pair or --model", MODELS, "MODEL|HOW", variable=False),
        "tensor_parallel": Flag("Check --pair or --model split over K GPUs", MODELS, "K",
                                variable=False),
    },
}  # fmt: skip

# The fields whose flag has another name, and the fields of a Job inside its parts
_FLAGS = {
    "source": "--from", "windows": "--train-batch", "json_document": "--json",
    "json_summary": "--json", "json_table": "--json", "speculation.length": "--draft-length",
    "pair.target": "--model", "chat=True": "--chat", "chat=False": "--no-chat",
}  # fmt: skip
_NAMED = re.compile(r"`([a-z_.]+(?:=True|=False)?)`")


def in_flags(message: str) -> str:
    """Replace the fields that a message names by flags: `n` by --n.

    Below the command line, messages name an option by its field, in backquotes. A message that
    begins with a field and a colon is about the value, which may come from the environment.
    """
    known = {
        field.name for kind in vars(args).values() if is_dataclass(kind) for field in fields(kind)
    }

    def flag(found: re.Match[str]) -> str:
        name = found[1]
        last = name.rpartition(".")[2]
        if name not in _FLAGS and last not in known:
            return found[0]
        shown = _FLAGS.get(name) or f"--{last.replace('_', '-')}"
        subject = found.start() == 0 and found.string.startswith(":", found.end())
        variable = shown.removeprefix("--").removeprefix("no-").replace("-", "_").upper()
        return f"{shown} (or BASS_{variable})" if subject else shown

    return _NAMED.sub(flag, message)


Args = TypeVar("Args")


def takes(
    kind: type[Args], own: Mapping[str, Flag] = {}
) -> Callable[[Callable[[Args], None]], Callable[..., None]]:
    """Return a decorator that turns a function of one `kind` object into a command.

    typer reads the options from the signature that is made here.

    Args:
        kind: A dataclass of config/args.py; each field is an option or an argument.
        own: Options that only this command has, or describes differently.
    """

    def command_of(body: Callable[[Args], None]) -> Callable[..., None]:
        @functools.wraps(body)
        def command(**values: Any) -> None:
            body(kind(**values))

        types, flags = get_type_hints(kind), {**OPTIONS, **OWN.get(kind, {}), **own}
        hints = {
            field: Annotated[types[field], flags[field].info(field)]
            for field in flags
            if field in types
        }
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    field,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hint,
                    default=getattr(kind, field, inspect.Parameter.empty),
                )
                for field, hint in hints.items()
            ]
        )
        command.__annotations__ = hints
        return command

    return command_of
