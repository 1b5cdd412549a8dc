"""The options of the commands, each once: its flag, its BASS_ variable, its help. Values are checked by job.py.

Every default is None (or false): what is not given lets the pair's own value show through.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

MODELS, SAMPLING, DRAFTING = "Models", "Sampling", "Drafting (changes the speed, not what samples are worth)"
MACHINE, PROMPTS, OUTPUT = "Time and machine", "Prompts and data", "Output"
MEASURED, RANDOM, SCORING = "What is measured", "Random weights, without any download", "Scoring"


def _option(flag: str, text: str, group: str, *, takes: str | None = None, default: str | None = None,
            choices: tuple[str, ...] = ()) -> Any:
    """An option under a heading of the help. `takes`: what its value is called, None for a switch; `default`: shown, not
    set; `choices`: what shell completion offers beside the words in `takes`. Its variable is BASS_ and the flag."""
    offered = [*choices, *(word for word in (takes or "").split("|") if word.islower())]
    variable = "BASS_" + flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        flag, help=text if default is None else f"{text} [default: {default}]", metavar=takes, rich_help_panel=group,
        envvar=None if flag == "--stop" else variable,  # it may hold a JSON list: generation.py reads it
        autocompletion=(lambda incomplete: [one for one in offered if one.startswith(incomplete)]) if offered else None)


def _pairs(incomplete: str) -> list[str]:
    from bass_cli.job import packaged_pairs

    return [name for name in packaged_pairs() if name.startswith(incomplete)]


Prompts = Annotated[
    str,
    typer.Argument(metavar="PROMPTS", show_default=False,
                   help="A .jsonl, .json, .txt or .parquet file, - for standard input, or hf:NAME[:CONFIG][:SPLIT]. "
                        'A .jsonl line is like {"id": "a", "prompt": "a text"}.'),
]
Pair = Annotated[
    str | None,
    typer.Option("--pair", envvar="BASS_PAIR", metavar="NAME|FILE", rich_help_panel=MODELS, autocompletion=_pairs,
                 help="A pair that comes with bass, or a pair file (.yaml); flags and variables override what it says "
                      "[default: smollm2]"),
]
PairNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME|FILE]...", show_default=False, autocompletion=_pairs,
                   help="Pairs that come with bass, or pair files (.yaml); without any, all that come with bass."),
]
DoctorPair = Annotated[
    str | None,
    typer.Option("--pair", metavar="NAME|FILE", rich_help_panel=MODELS, autocompletion=_pairs,
                 help="Look at this pair too: whether it can run here, and how many rows there is memory for"),
]
DoctorModel = Annotated[
    str | None,
    typer.Option("--model", metavar="ID|FOLDER|FILE", rich_help_panel=MODELS, help="The same for a target alone"),
]
DoctorDraft = Annotated[
    str | None,
    typer.Option("--draft", metavar="MODEL|HOW", rich_help_panel=MODELS, help="With --pair or --model: what drafts"),
]
Model = Annotated[
    str | None,
    _option("--model", "The target itself, instead of a --pair: a Hugging Face hub id, a folder with safetensors, or a "
                       ".gguf file. Then --draft is lookup, if it is not given", MODELS, takes="ID|FOLDER|FILE"),
]
Draft = Annotated[
    str | None,
    _option("--draft", "What drafts: a model (like --model), lookup (in the text so far), lookup:SOURCES (of own, "
                       "siblings, prompt, reference), skip:LAYERS (the target without them), or none", MODELS,
            takes="MODEL|HOW", default="the pair's", choices=("lookup", "none")),
]
Samples = Annotated[int | None, _option("--n", "Samples of every prompt", SAMPLING, takes="N", default="8")]
Out = Annotated[str | None, _option("--out", "Where samples go; - is standard output", OUTPUT, takes="FILE", default="-")]
MaxNewTokens = Annotated[
    int | None, _option("--max-new-tokens", "The most tokens a sample may get", SAMPLING, takes="N", default="256")
]
Temperature = Annotated[
    float | None, _option("--temperature", "0 is greedy", SAMPLING, takes="NUMBER", default="the pair's, or 0.8")
]
TopP = Annotated[
    float | None,
    _option("--top-p", "Only the likeliest tokens, up to this probability together", SAMPLING, takes="NUMBER",
            default="the pair's, or 0.95"),
]
TopK = Annotated[
    int | None, _option("--top-k", "Only the N likeliest tokens; 0 is all", SAMPLING, takes="N", default="the pair's, or 0")
]
Seed = Annotated[int | None, _option("--seed", "Fixes the samples", SAMPLING, takes="N", default="0")]
Stop = Annotated[
    list[str] | None,
    _option("--stop", "End a sample before this text; may be repeated. \\n is a line end, \\t a tab, \\\\ a backslash. "
                      "BASS_STOP: a text or a JSON list", SAMPLING,
            takes="TEXT"),
]
Chat = Annotated[
    bool | None,
    _option("--chat/--no-chat", "Put prompts into the model's chat template", SAMPLING,
            default="where a prompt has messages"),
]
DraftLength = Annotated[
    str | None,
    _option("--draft-length", "Tokens drafted a round: auto (by what rounds cost here and keep), bass (Algorithm 1 of "
                              "the paper), table (by batch size, from bass profile), bass+table, or a number; 0 is plain "
                              "decoding",
            DRAFTING, takes="N|HOW", default="auto", choices=("auto", "bass", "table", "bass+table")),
]
Coupling = Annotated[
    str | None,
    _option("--coupling", "How drafts are checked; both kinds are exact", DRAFTING, takes="shared|maximal",
            default="shared"),
]
Budget = Annotated[
    str | None,
    _option("--budget", "Wall clock for each prompt, like 2s or 500ms; what is unfinished then is cut", MACHINE,
            takes="TIME", default="no end"),
]
BatchSize = Annotated[
    str | None, _option("--batch-size", "Rows decoded at once", MACHINE, takes="N|auto", default="auto")
]
Device = Annotated[
    str | None,
    _option("--device", "Where to compute", MACHINE, takes="auto|cuda|cpu", default="auto"),
]
Dtype = Annotated[
    str | None,
    _option("--dtype", "Number format of weights and computing", MACHINE, takes="auto|bf16|fp16|fp32",
            default="the pair's"),
]
Threads = Annotated[
    int | None,
    _option("--threads", "CPU threads to compute with", MACHINE, takes="N",
            default="OMP_NUM_THREADS, or as many as cores are free"),
]
Limit = Annotated[int | None, _option("--limit", "Take only the first N prompts", PROMPTS, takes="N", default="all")]
Resume = Annotated[bool, _option("--resume", "Insist that there is an output file to go on with", OUTPUT)]
Overwrite = Annotated[bool, _option("--overwrite", "Start the output file anew, whatever is there", OUTPUT)]
PromptColumn = Annotated[
    str | None, _option("--prompt-column", "The field that holds the prompt", PROMPTS, takes="NAME", default="prompt")
]
TokenIds = Annotated[bool | None, _option("--token-ids", "Add the generated token ids to every line", OUTPUT)]
Quiet = Annotated[bool, _option("--quiet", "Nothing on standard error but errors", OUTPUT)]
Summary = Annotated[bool, _option("--json", "A summary as JSON on standard output; needs --out FILE", OUTPUT)]
Json = Annotated[bool, _option("--json", "JSON instead of the table", OUTPUT)]

Shape = Annotated[
    str | None,
    _option("--shape", "A target of this model's shape with random weights, like qwen2.5-7b, instead of a pair", RANDOM,
            takes="NAME"),
]
DraftShape = Annotated[
    str | None, _option("--draft-shape", "The same as draft; with --acceptance", RANDOM, takes="NAME")
]
Acceptance = Annotated[
    list[str] | None,
    _option("--acceptance", "Accept each drafted token with this chance; 0.95,0.3: by row in turn. Repeat it for several "
                            "benches", RANDOM, takes="NUMBER,..."),
]
Controllers = Annotated[
    bool, _option("--controllers", "Every controller (auto, bass, table) against every fixed draft length", MEASURED)
]
Depth = Annotated[
    int | None, _option("--depth", "Draft with the first N layers of --shape; with --scale", RANDOM, takes="N")
]
Scale = Annotated[
    float | None,
    _option("--scale", "Scales what the other layers add: 0 accepts every draft", RANDOM, takes="NUMBER"),
]
BatchSizes = Annotated[
    str | None,
    _option("--batch-sizes", "Rows decoded at once", MEASURED, takes="N,...", default="1,2,4,8; on a GPU 16 too"),
]
Methods = Annotated[
    str | None,
    _option("--methods", "Out of plain, draft lengths, bass, table, bass+table, auto", MEASURED, takes="METHOD,...",
            default="plain,2,4,8,auto; on a GPU 6 and bass too"),
]
ProfileBatchSizes = Annotated[
    str | None,
    _option("--batch-sizes", "Numbers of rows to measure", MEASURED, takes="N,...", default="1,2,4,8; on a GPU to 64"),
]
PromptFile = Annotated[
    str | None, _option("--prompts", "Prompts to use as they are", MEASURED, takes="FILE", default="built-in ones")
]
PromptTokens = Annotated[
    int | None,
    _option("--prompt-tokens", "Built-in prompts have N to twice as many tokens", MEASURED, takes="N",
            default="64; on a GPU 300"),
]
NewTokens = Annotated[int | None, _option("--new-tokens", "Tokens every row gets", MEASURED, takes="N",
                                            default="128, fewer where time is limited")]
SamplesPerPrompt = Annotated[
    int | None, _option("--samples-per-prompt", "Rows that share a prompt", MEASURED, takes="N", default="1")
]
Repeats = Annotated[
    int | None,
    _option("--repeats", "Runs of every batch size and method", MEASURED, takes="N", default="5, as far as there is time"),
]
TimeLimit = Annotated[
    str | None,
    _option("--time-limit", "End after this time of measuring, like 5m, with what there is then", MEASURED, takes="TIME",
            default="80s on a CPU, if --repeats is not given; else none"),
]
Rivals = Annotated[
    str | None,
    _option("--rivals", "Other engines, measured too where installed: transformers, vllm", MEASURED, takes="NAME,..."),
]
AttentionSchedule = Annotated[
    str | None,
    _option("--attention", "How a GPU runs unequal rows", MEASURED, takes="ragged|pad|split", default="ragged"),
]
Document = Annotated[bool, _option("--json", "One JSON document instead of the table", OUTPUT)]
Plot = Annotated[str | None, _option("--plot", "Draw a chart; needs matplotlib", OUTPUT, takes="FILE.png")]

GenerationFile = Annotated[
    str,
    typer.Argument(metavar="FILE", show_default=False,
                   help="A generation file, .jsonl or .jsonl.gz: of bass, or with task_id and completion or solution."),
]
Task = Annotated[
    str | None,
    _option("--task", "What the file answers", SCORING, takes="humaneval|mbpp|xsum", default="as the file says"),
]
Data = Annotated[
    str | None, _option("--data", "The task's data set, where it is not packaged", PROMPTS, takes="FILE|hf:NAME")
]
Ks = Annotated[str | None, _option("--k", "Estimate pass@k for these k", SCORING, takes="K,...", default="1,10")]
AllowCodeExecution = Annotated[
    bool,
    _option("--allow-code-execution", "Run the programs that a model wrote, in a sandbox; nothing is run without", SCORING),
]
AllowWeakSandbox = Annotated[
    bool,
    _option("--allow-weak-sandbox", "Run them also where the system offers too little to keep them from files, network and "
                                    "processes (bass doctor says what)", SCORING),
]
Workers = Annotated[
    int | None, _option("--workers", "Programs run at once", SCORING, takes="N", default="the number of cores")
]
Timeout = Annotated[str | None, _option("--timeout", "Wall clock for each program", SCORING, takes="TIME", default="10s")]
Report = Annotated[str | None, _option("--report", "Write the report there as JSON", OUTPUT, takes="FILE")]
OverwriteReport = Annotated[
    bool, _option("--overwrite", "Let --report replace a file that is no earlier report on these samples", OUTPUT)
]
OverwriteChart = Annotated[bool, _option("--overwrite", "Let --plot replace a file that is no chart of bass", OUTPUT)]
Rejudge = Annotated[bool, _option("--rejudge", "Run all programs again, also those with a verdict", SCORING)]
ReportDocument = Annotated[bool, _option("--json", "The report as JSON instead of the table", OUTPUT)]

TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="humaneval, mbpp (programs) or xsum (summaries).", show_default=False)
]
Budgets = Annotated[
    str | None,
    _option("--budgets", "Compare plain decoding, one sample after the other and the batch under each of these, like "
                         "0.5s,1s,2s", MACHINE, takes="TIME,..."),
]
PromptFormat = Annotated[
    str | None,
    _option("--prompt-format", "The prompt as it is (raw), without blanks (strip) or line ends (strip-nl) around it, or as "
                               "a question (chat)", PROMPTS, takes="FORMAT", default="raw",
            choices=("raw", "strip", "strip-nl", "chat")),
]
EvaluationOut = Annotated[
    str | None, _option("--out", "Where samples go", OUTPUT, takes="FILE",
                        default="TASK-PAIR.jsonl, with --limit N TASK-PAIR-firstN.jsonl")
]
EvaluationReport = Annotated[
    str | None, _option("--report", "Where the report goes, as JSON", OUTPUT, takes="FILE", default="beside --out")
]
EvaluationTokens = Annotated[
    int | None,
    _option("--max-new-tokens", "The most tokens a sample may get", SAMPLING, takes="N", default="512, for xsum 128"),
]
EvaluationTemperature = Annotated[
    float | None, _option("--temperature", "0 is greedy", SAMPLING, takes="NUMBER", default="the pair's, or 0.2")
]
