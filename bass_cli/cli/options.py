"""What the fields of config/args.py are on the command line: flag, BASS_ variable, group and words
of the help, each once.

Values are checked by config/job.py and the commands. Not given is None (or false), so that the
pair's own value shows through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
        'hf:NAME[:CONFIG][:SPLIT]. A .jsonl line is like {"id": "a", "prompt": "a text"}.',
        "",
        "PROMPTS",
    ),
    "task": Flag(
        "humaneval, mbpp (programs) or xsum (summaries).",
        "",
        "TASK",
        choices=("humaneval", "mbpp", "xsum"),
    ),
    "file": Flag(
        "A generation file, .jsonl or .jsonl.gz: of bass, or with task_id and completion or "
        "solution.",
        "",
        "FILE",
    ),
    "names": Flag(
        "Pairs that come with bass, or pair files (.yaml); without any, all that come with bass.",
        "",
        "[NAME|FILE]...",
        choices=_pairs,
    ),
    "pair": Flag(
        "A pair that comes with bass, or a pair file (.yaml); flags and variables override what "
        "it says",
        MODELS,
        "NAME|FILE",
        "smollm2",
        choices=_pairs,
    ),
    "model": Flag(
        "The target itself, instead of a --pair: a Hugging Face hub id, a folder with safetensors, "
        "or a .gguf file. Then --draft is lookup, if it is not given",
        MODELS,
        "ID|FOLDER|FILE",
    ),
    "draft": Flag(
        "What drafts: a model (like --model), parallel:MODEL (trained to draft in one pass), "
        "heads:PATH (to read the target's hidden states), lookup[:SOURCES] (in the text: own, "
        "siblings, prompt, reference), skip:LAYERS (the target without them), or none",
        MODELS,
        "MODEL|HOW",
        "the pair's",
        choices=("lookup", "none"),
    ),
    "job": Flag(
        "Run all prompts of this file as bass generate would, in processes of their own, beside "
        "the --rivals, instead of measuring rounds",
        JOB,
        "FILE",
    ),
    "n": Flag("Samples of every prompt", SAMPLING, "N", "8"),
    "max_new_tokens": Flag("The most tokens a sample may get", SAMPLING, "N", "256"),
    "temperature": Flag("0 is greedy", SAMPLING, "NUMBER", "the pair's, or 0.8"),
    "top_p": Flag(
        "Only the likeliest tokens, up to this probability together",
        SAMPLING,
        "NUMBER",
        "the pair's, or 0.95",
    ),
    "top_k": Flag("Only the N likeliest tokens; 0 is all", SAMPLING, "N", "the pair's, or 0"),
    "seed": Flag("Fixes the samples", SAMPLING, "N", "0"),
    "stop": Flag(
        "End a sample before this text, or at this special token; may be repeated. \\n is a line "
        "end, \\t a tab, \\\\ a backslash. BASS_STOP: a text or a JSON list",
        SAMPLING,
        "TEXT",
        variable=False,
    ),  # a list: generation.py reads it
    "chat": Flag(
        "Put prompts into the model's chat template",
        SAMPLING,
        default="where a prompt has messages",
        flag="--chat/--no-chat",
    ),
    "draft_length": Flag(
        "Tokens drafted a round: auto (by what rounds cost here and keep), bass (Algorithm 1 of "
        "the paper), table (by batch size, from bass profile), bass+table, or a number; 0 is plain "
        "decoding",
        DRAFTING,
        "N|HOW",
        "auto",
        choices=_controllers,
    ),
    "coupling": Flag(
        "How drafts are checked; both kinds are exact", DRAFTING, "shared|maximal", "shared"
    ),
    "budget": Flag(
        "Wall clock for each prompt, like 2s or 500ms; samples that are unfinished then are cut, "
        "which is no failure",
        MACHINE,
        "TIME",
        "no end",
    ),
    "budgets": Flag(
        "Compare plain decoding, one sample after the other and the batch under each of these, "
        "like 0.5s,1s,2s",
        MACHINE,
        "TIME,...",
    ),
    "batch_size": Flag("Rows decoded at once", MACHINE, "N|auto", "auto"),
    "device": Flag("Where to compute", MACHINE, "auto|cuda|cpu", "auto"),
    "dtype": Flag(
        "Number format of weights and computing", MACHINE, "auto|bf16|fp16|fp32", "the pair's"
    ),
    "threads": Flag(
        "CPU threads to compute with", MACHINE, "N", "OMP_NUM_THREADS, or as many as cores are free"
    ),
    "limit": Flag("Take only the first N prompts", PROMPTS, "N", "all"),
    "shard": Flag(
        "Take one of several parts, by a hash of the ids; bass merge makes one file of them",
        PROMPTS,
        "2/8",
        "all",
    ),
    "ray": Flag(
        "Draw with actors on Ray, one a GPU: of this machine (local), or of a cluster that it is a "
        "node of (auto, or HOST:PORT); needs bass-cli[ray]",
        MACHINE,
        "local|ADDRESS",
    ),
    "actors": Flag(
        "How many, with --ray; all: one for every GPU, or node without any, also those that join",
        MACHINE,
        "N|all",
        "all",
    ),
    "tensor_parallel": Flag(
        "Split the target over K GPUs of this machine: heads, feed-forward and vocabulary",
        MACHINE,
        "K",
        "1",
    ),
    "prompt_column": Flag("The field that holds the prompt", PROMPTS, "NAME", "prompt"),
    "prompt_format": Flag(
        "The prompt as it is (raw), without blanks (strip) or line ends (strip-nl) around it, or "
        "as a question (chat)",
        PROMPTS,
        "FORMAT",
        "raw",
        choices=("raw", "strip", "strip-nl", "chat"),
    ),
    "data": Flag("The task's data set, where it is not packaged", PROMPTS, "FILE|hf:NAME"),
    "out": Flag("Where samples go; - is standard output", OUTPUT, "FILE", "-"),
    "report": Flag("Where the report goes, as JSON", OUTPUT, "FILE", "beside --out"),
    "resume": Flag("Insist that there is an output file to go on with", OUTPUT),
    "overwrite": Flag("Start the output file anew, whatever is there", OUTPUT),
    "token_ids": Flag("Add the generated token ids to every line", OUTPUT),
    "shape": Flag(
        "A target of this model's shape with random weights, like qwen2.5-7b, instead of a pair",
        RANDOM,
        "NAME",
    ),
    "draft_shape": Flag(
        "The same as draft, with --acceptance; pard-0.5b, dspark-8b, dflash-8b draft in one pass, "
        "eagle3-8b token by token",
        RANDOM,
        "NAME",
    ),
    "acceptance": Flag(
        "Accept each drafted token with this chance; 0.93/0.9/0.87: by place in the draft, those "
        "before it accepted; 0.95,0.3: by row in turn. Repeat it for several benches",
        RANDOM,
        "NUMBER,...",
    ),
    "depth": Flag("Draft with the first N layers of --shape; with --scale", RANDOM, "N"),
    "scale": Flag("Scales what the other layers add: 0 accepts every draft", RANDOM, "NUMBER"),
    "batch_sizes": Flag("Rows decoded at once", MEASURED, "N,...", "1,2,4,8; on a GPU 16 too"),
    "methods": Flag(
        "Out of plain, draft lengths, bass, table, bass+table, auto",
        MEASURED,
        "METHOD,...",
        "plain,2,4,8,auto; on a GPU 6 and bass too",
    ),
    "controllers": Flag(
        "Every controller (auto, bass, table, bass+table) against all fixed lengths", MEASURED
    ),
    "prompt_tokens": Flag(
        "Built-in prompts have N to twice as many tokens", MEASURED, "N", "64; on a GPU 300"
    ),
    "new_tokens": Flag("Tokens every row gets", MEASURED, "N", "128, fewer where time is limited"),
    "samples_per_prompt": Flag("Rows that share a prompt", MEASURED, "N", "1"),
    "repeats": Flag(
        "Runs of every batch size and method", MEASURED, "N", "5, as far as there is time"
    ),
    "time_limit": Flag(
        "End after this time of measuring, like 5m, with what there is then",
        MEASURED,
        "TIME",
        "80s on a CPU, if --repeats is not given; else none",
    ),
    "rivals": Flag(
        "Other engines, measured too where installed: transformers, vllm", MEASURED, "NAME,..."
    ),
    "attention": Flag("How a GPU runs unequal rows", MEASURED, "ragged|pad|split", "ragged"),
    "k": Flag(
        "Estimate pass@k for these k", SCORING, "K,...", "those of 1, 10, 100 that --n allows"
    ),
    "allow_code_execution": Flag(
        "Run the programs that a model wrote even where the sandbox is weak (bass doctor shows "
        "what is missing)",
        SCORING,
    ),
    "allow_weak_sandbox": Flag("The same as --allow-code-execution", SCORING),
    "workers": Flag("Programs run at once", SCORING, "N", "the number of cores"),
    "timeout": Flag("Wall clock for each program", SCORING, "TIME", "10s"),
    "rejudge": Flag("Run all programs again, also those with a verdict", SCORING),
    "plot": Flag("Draw a chart; needs matplotlib", OUTPUT, "FILE.png"),
    "quiet": Flag("Nothing on standard error but errors", OUTPUT),
    "json_summary": Flag(
        "A summary as JSON on standard output; needs --out FILE", OUTPUT, flag="--json"
    ),
    "json_document": Flag("One JSON document instead of the table", OUTPUT, flag="--json"),
    "json_table": Flag("JSON instead of the table", OUTPUT, flag="--json"),
}

# what bench takes of generate, for a --job; and what draws that a second time
ON_RAY = ("ray", "actors")
OF_A_JOB = ("n", "max_new_tokens", "stop", "chat", "draft_length", "batch_size", "limit",
            "prompt_column", *ON_RAY)  # fmt: skip
# what a command says otherwise of a field that others have too
OWN: dict[type, dict[str, Flag]] = {
    EvaluateArgs: {
        "max_new_tokens": OPTIONS["max_new_tokens"]._replace(default="512, for xsum 128"),
        "temperature": OPTIONS["temperature"]._replace(default="the pair's, or 0.2"),
        "out": Flag("Where samples go", OUTPUT, "FILE", "named after the task, the "
                                                        "pair and the options"),
    },
    ProfileArgs: {
        "batch_sizes": Flag("Numbers of rows to measure", MEASURED, "N,...",
                            "1,2,4,8; on a GPU to 64"),
    },
    BenchArgs: {
        **{name: OPTIONS[name]._replace(group=JOB, variable=False) for name in OF_A_JOB},
        "ray": OPTIONS["ray"]._replace(
            text="Run it once more with actors on Ray, beside it: of this machine (local), or of "
            "a cluster (auto, or HOST:PORT)", group=JOB, variable=False,
        ),
        "prompts": Flag("Prompts to use as they are", MEASURED, "FILE", "built-in ones"),
        "overwrite": Flag("Let --plot replace a file that is no chart of bass", OUTPUT),
    },
    DoctorArgs: {
        "pair": Flag("Look at this pair too: whether it can run here, and how many rows there is "
                     "memory for", MODELS,
                     "NAME|FILE", choices=_pairs, variable=False),
        "model": Flag("The same for a target alone", MODELS, "ID|FOLDER|FILE", variable=False),
        "draft": Flag("With --pair or --model: what drafts", MODELS, "MODEL|HOW", variable=False),
        "tensor_parallel": Flag("With --pair or --model: over so many GPUs", MODELS, "K",
                                variable=False),
    },
}  # fmt: skip

Args = TypeVar("Args")


def takes(
    kind: type[Args], own: Mapping[str, Flag] = {}
) -> Callable[[Callable[[Args], None]], Callable[..., None]]:
    """Makes a command of a function that takes one such object: typer reads the options off the
    signature made here. `own`: a command's options that stand in a file of their own."""

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
