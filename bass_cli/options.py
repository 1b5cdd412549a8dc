"""The options of the commands, each once: its flag, its BASS_ variable, its help. Values are checked by job.py.

Every default is None (or false): what is not given lets the pair's own value show through.
"""

from __future__ import annotations

from typing import Annotated

import typer

_Option = typer.Option

Prompts = Annotated[
    str,
    typer.Argument(
        metavar="PROMPTS",
        help=".jsonl, .json, .txt or .parquet file, - for standard input, or hf:NAME[:CONFIG][:SPLIT].",
        show_default=False,
    ),
]
Pair = Annotated[str | None, _Option("--pair", envvar="BASS_PAIR", help="Known pair or YAML file [smollm2].")]
Draft = Annotated[
    str | None,
    _Option("--draft", envvar="BASS_DRAFT", help="Model, lookup[:SOURCES], skip:LAYERS, lookup+MODEL, none [the pair's]."),
]
Samples = Annotated[int | None, _Option("--n", envvar="BASS_N", help="Samples a prompt [8].")]
Out = Annotated[str | None, _Option("--out", envvar="BASS_OUT", help="Output file, or - [-].", metavar="FILE")]
MaxNewTokens = Annotated[
    int | None, _Option("--max-new-tokens", envvar="BASS_MAX_NEW_TOKENS", help="Most tokens a sample [256].")
]
Temperature = Annotated[
    float | None, _Option("--temperature", envvar="BASS_TEMPERATURE", help="0 is greedy [the pair's, or 0.8].")
]
TopP = Annotated[float | None, _Option("--top-p", envvar="BASS_TOP_P", help="Nucleus mass [the pair's, or 0.95].")]
TopK = Annotated[int | None, _Option("--top-k", envvar="BASS_TOP_K", help="Most likely tokens kept; 0 is all [0].")]
Seed = Annotated[int | None, _Option("--seed", envvar="BASS_SEED", help="Fixes the output [0].")]
Stop = Annotated[
    list[str] | None,
    _Option("--stop", help="End a sample before this text; may be repeated. BASS_STOP: a text or a JSON list."),
]
Chat = Annotated[
    bool | None,
    _Option("--chat/--no-chat", envvar="BASS_CHAT", help="Use the chat template [if the prompt has messages]."),
]
DraftLength = Annotated[
    str | None,
    _Option("--draft-length", envvar="BASS_DRAFT_LENGTH",
            help="auto (by what rounds cost and keep), bass (Algorithm 1), table (by batch size, from bass profile), "
                 "bass+table, or a number; 0 is plain decoding [auto]."),
]
Coupling = Annotated[
    str | None, _Option("--coupling", envvar="BASS_COUPLING", help="shared or maximal; both are exact [shared].")
]
Budget = Annotated[
    str | None, _Option("--budget", envvar="BASS_BUDGET", help="Wall clock a prompt, like 2s or 500ms [no end].")
]
BatchSize = Annotated[
    str | None, _Option("--batch-size", envvar="BASS_BATCH_SIZE", help="Rows decoded at once, or auto [auto].")
]
Device = Annotated[str | None, _Option("--device", envvar="BASS_DEVICE", help="auto, cuda or cpu [auto].")]
Dtype = Annotated[str | None, _Option("--dtype", envvar="BASS_DTYPE", help="auto, bf16, fp16 or fp32 [the pair's].")]
Limit = Annotated[int | None, _Option("--limit", envvar="BASS_LIMIT", help="Take only the first prompts.")]
Resume = Annotated[
    bool, _Option("--resume", envvar="BASS_RESUME", help="Insist that there is an output to go on with.")
]
Overwrite = Annotated[bool, _Option("--overwrite", envvar="BASS_OVERWRITE", help="Start the output file anew.")]
PromptColumn = Annotated[
    str | None, _Option("--prompt-column", envvar="BASS_PROMPT_COLUMN", help="Field with the prompt [prompt].")
]
TokenIds = Annotated[
    bool | None, _Option("--token-ids", envvar="BASS_TOKEN_IDS", help="Add the generated ids.", show_default=False)
]
Quiet = Annotated[bool, _Option("--quiet", envvar="BASS_QUIET", help="Nothing on stderr but errors.")]
Json = Annotated[bool, _Option("--json", envvar="BASS_JSON", help="A summary as JSON on standard output.")]

Shape = Annotated[
    str | None, _Option("--shape", envvar="BASS_SHAPE", help="Random weights of this model's shape, instead of a pair.")
]
DraftShape = Annotated[
    str | None, _Option("--draft-shape", envvar="BASS_DRAFT_SHAPE", help="The same as draft; with --acceptance.")
]
Acceptance = Annotated[
    list[str] | None,
    _Option("--acceptance", envvar="BASS_ACCEPTANCE",
            help="Accept each draft with this chance; 0.95,0.3: by row in turn. Repeat it for several benches."),
]
Controllers = Annotated[
    bool,
    _Option("--controllers", envvar="BASS_CONTROLLERS", help="Every controller against every fixed draft length."),
]
Depth = Annotated[
    int | None, _Option("--depth", envvar="BASS_DEPTH", help="Draft with the first layers of --shape; with --scale.")
]
Scale = Annotated[
    float | None, _Option("--scale", envvar="BASS_SCALE", help="Scales what the other layers add: 0 accepts every draft.")
]
BatchSizes = Annotated[
    str | None, _Option("--batch-sizes", envvar="BASS_BATCH_SIZES", help="Rows decoded at once [1,2,4,8,16].")
]
Methods = Annotated[
    str | None,
    _Option("--methods", envvar="BASS_METHODS",
            help="plain, draft lengths, bass, table, bass+table, auto [plain,2,4,6,8,bass,auto]."),
]
ProfileBatchSizes = Annotated[
    str | None, _Option("--batch-sizes", envvar="BASS_BATCH_SIZES", help="Rows to measure [1,2,4,8; on a GPU to 64].")
]
Skip = Annotated[bool, _Option("--skip", envvar="BASS_SKIP", help="Propose layers that the target could skip as draft.")]
PromptFile = Annotated[
    str | None, _Option("--prompts", envvar="BASS_PROMPTS", help="Prompts to use as they are [built-in].", metavar="FILE")
]
PromptTokens = Annotated[
    int | None,
    _Option("--prompt-tokens", envvar="BASS_PROMPT_TOKENS", help="Built-in prompts have this many to twice as many [300]."),
]
NewTokens = Annotated[int | None, _Option("--new-tokens", envvar="BASS_NEW_TOKENS", help="Tokens every row gets [128].")]
SamplesPerPrompt = Annotated[
    int | None, _Option("--samples-per-prompt", envvar="BASS_SAMPLES_PER_PROMPT", help="Rows that share a prompt [1].")
]
Repeats = Annotated[int | None, _Option("--repeats", envvar="BASS_REPEATS", help="Runs of every cell [5].")]
Rivals = Annotated[
    str | None, _Option("--rivals", envvar="BASS_RIVALS", help="transformers, vllm: measured too where installed.")
]
AttentionSchedule = Annotated[
    str | None,
    _Option("--attention", envvar="BASS_ATTENTION", help="How a GPU runs unequal rows: ragged, pad or split [ragged]."),
]
Document = Annotated[bool, _Option("--json", envvar="BASS_JSON", help="One JSON document instead of the table.")]
Plot = Annotated[str | None, _Option("--plot", envvar="BASS_PLOT", help="Charts, as .png too.", metavar="FILE")]

GenerationFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Generation file, .jsonl or .jsonl.gz: of bass, or task_id with completion or solution.",
        show_default=False,
    ),
]
Task = Annotated[
    str | None, _Option("--task", envvar="BASS_TASK", help="humaneval, mbpp or xsum [from the manifest or task_ids].")
]
Data = Annotated[
    str | None, _Option("--data", envvar="BASS_DATA", help="The data set, where it is not packaged.", metavar="FILE")
]
Ks = Annotated[str | None, _Option("--k", envvar="BASS_K", help="Estimate pass@k for these k [1,10].")]
AllowCodeExecution = Annotated[
    bool,
    _Option("--allow-code-execution", envvar="BASS_ALLOW_CODE_EXECUTION", help="Run the programs, in a sandbox."),
]
Workers = Annotated[int | None, _Option("--workers", envvar="BASS_WORKERS", help="Programs run at once [the cores].")]
Timeout = Annotated[
    str | None, _Option("--timeout", envvar="BASS_TIMEOUT", help="Wall clock a program, like 10s [10s].")
]
Report = Annotated[
    str | None, _Option("--report", envvar="BASS_REPORT", help="Write the report there as JSON.", metavar="FILE")
]
Rejudge = Annotated[
    bool, _Option("--rejudge", envvar="BASS_REJUDGE", help="Run all programs again, also those with a verdict.")
]
ReportDocument = Annotated[bool, _Option("--json", envvar="BASS_JSON", help="The report as JSON on standard output.")]

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="humaneval, mbpp or xsum.", show_default=False)]
Budgets = Annotated[
    str | None,
    _Option("--budgets", envvar="BASS_BUDGETS", help="Sweep: 0.5s,1s,2s for plain, single-sequence and batched."),
]
PromptFormat = Annotated[
    str | None,
    _Option("--prompt-format", envvar="BASS_PROMPT_FORMAT", help="raw, strip or strip-nl (cut off the ends), chat [raw]."),
]
EvaluationOut = Annotated[
    str | None, _Option("--out", envvar="BASS_OUT", help="Samples' file [TASK-PAIR.jsonl].", metavar="FILE")
]
EvaluationReport = Annotated[
    str | None, _Option("--report", envvar="BASS_REPORT", help="The report's file [beside --out].", metavar="FILE")
]
EvaluationTokens = Annotated[
    int | None, _Option("--max-new-tokens", envvar="BASS_MAX_NEW_TOKENS", help="Most tokens a sample [512, xsum 128].")
]
EvaluationTemperature = Annotated[
    float | None, _Option("--temperature", envvar="BASS_TEMPERATURE", help="0 is greedy [the pair's, or 0.2].")
]
