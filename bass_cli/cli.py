"""The command line: flags to a Job, user errors to exit codes. Every heavy import happens inside a command.

0 done, 1 some prompts failed or stayed unfinished, 2 wrong input or configuration, 3 the machine lacks something,
130 interrupted. Standard output carries results only.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bass_cli import __version__, options
from bass_cli.exits import exit_codes
from bass_cli.profiling.command import profile
from bass_cli.screen import Screen

if TYPE_CHECKING:
    from bass_cli.engine.lengths import Round
    from bass_cli.job import Job
    from bass_cli.plan import Plan
    from bass_cli.prompts import Source

EPILOG = "Every option can be given as a variable too: BASS_N=4, BASS_TOP_P=0.9. Precedence: pair, variable, flag."
PROFILED = ("auto", "table", "bass+table")  # draft lengths that a profile decides
NOT_JOB = ("prompts", "pair", "out", "resume", "overwrite", "quiet", "json_summary")

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True, epilog=EPILOG
)


def main() -> None:
    """The console script."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bass {__version__}")
        raise typer.Exit


@app.callback()
def _bass(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Draw many exact samples per prompt from a language model, fast: batched speculative sampling."""


@app.command(epilog=EPILOG)
def generate(
    context: typer.Context,
    prompts: options.Prompts,
    pair: options.Pair = None,
    n: options.Samples = None,
    out: options.Out = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    chat: options.Chat = None,
    draft: options.Draft = None,
    draft_length: options.DraftLength = None,
    coupling: options.Coupling = None,
    budget: options.Budget = None,
    batch_size: options.BatchSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    limit: options.Limit = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    prompt_column: options.PromptColumn = None,
    token_ids: options.TokenIds = None,
    quiet: options.Quiet = False,
    json_summary: options.Json = False,
) -> None:
    """Draw n samples for every prompt and write them as JSON lines."""
    screen = Screen(quiet)
    goes_on = "" if out in (None, "-") else "; the same command goes on from here"
    with exit_codes(screen, f"interrupted{goes_on}"):
        _generate(context.params, screen)


def _generate(given: dict[str, Any], screen: Screen) -> None:
    from bass_cli.job import UserError
    from bass_cli.outputs import open_output
    from bass_cli.prompts import check_prompts, open_source, read_prompts

    out = given["out"] or "-"
    if given["json_summary"] and out == "-":
        raise UserError("--json needs --out FILE, because standard output carries the results")
    job = _read_job(given)
    source = open_source(given["prompts"])
    count = check_prompts(source, column=job.prompt_column, limit=job.limit)

    from bass_cli import run
    from bass_cli.plan import prepare

    plan = prepare(job)
    manifest = _manifest(job, source, plan)
    with open_output(out, manifest, resume=given["resume"], overwrite=given["overwrite"]) as writer:
        for note in (*plan.notes, *writer.notes):
            screen.note(note)
        prompts = read_prompts(source, column=job.prompt_column, limit=job.limit)
        screen.start(None if count is None else count * job.n - len(writer.done))
        done = set(writer.done)
        for completion in run.generate(plan, prompts, done=done, count=count,
                                       on_round=lambda it: _show_round(screen, it)):
            writer.write(completion)
            screen.advance(completion)
    summary = screen.summary(writer.name)
    screen.close(summary)
    if given["json_summary"]:
        print(json.dumps(summary | {"file": writer.totals}))
    if {"error", "budget"} & set(writer.totals["finish_reasons"]):
        raise typer.Exit(1)


def _show_round(screen: Screen, done: Round) -> None:
    screen.round(done.width, sum(done.accepted), len(done.accepted), done.seconds)


def _read_job(given: dict[str, Any]) -> Job:
    from bass_cli.job import DEFAULT_PAIR, load_pair, make_job, parse_duration

    flags = {key: value for key, value in given.items() if key not in NOT_JOB}
    flags["stop"] = flags["stop"] or _stops_of_environment()
    if flags["budget"] is not None:
        flags["budget"] = parse_duration(flags["budget"], "--budget (or BASS_BUDGET)")
    return make_job(load_pair(given["pair"] or DEFAULT_PAIR), flags)


def _stops_of_environment() -> list[str] | None:
    """BASS_STOP is one text, or a JSON list of texts; an ordinary list variable could hold no blank."""
    value = os.environ.get("BASS_STOP")
    with contextlib.suppress(ValueError):
        listed = json.loads(value or "")
        if isinstance(listed, list):
            return listed
    return None if value is None else [value]


def _manifest(job: Job, source: Source, plan: Plan) -> dict[str, Any]:
    """What the run is; "results" holds all that changes its lines, which a resumed run is held against."""
    identity = plan.identity()
    versions = identity.pop("versions")
    results: dict[str, Any] = {**identity, "prompts": source.digest() or source.name}
    results |= {"prompt_column": job.prompt_column, "n": job.n, "limit": job.limit, "chat": job.chat}
    results |= {**job.sampling.model_dump(mode="json"), "coupling": job.speculation.coupling, "budget": job.budget}
    results |= {"token_ids": job.token_ids, "bass": __version__.split(".")[0]}
    if job.speculation.coupling == "maximal":
        speculation = job.speculation.model_dump(mode="json")
        results |= {"draft": job.pair.draft, "batch_size": job.batch_size, "draft_length": speculation["length"]}
        results |= {"max": speculation["max"], "draft_temperature": speculation["draft_temperature"]}
        if plan.surface is not None and plan.surface.measured and speculation["length"] in PROFILED:
            results |= {"profile": plan.surface.digest()}  # the draft lengths come from it, and reach the samples
    return {"results": results, "job": job.model_dump(mode="json"), "source": source.name, "versions": versions}


app.command(epilog=EPILOG)(profile)


@app.command(epilog=EPILOG)
def bench(
    context: typer.Context,
    pair: options.Pair = None,
    shape: options.Shape = None,
    draft_shape: options.DraftShape = None,
    acceptance: options.Acceptance = None,
    depth: options.Depth = None,
    scale: options.Scale = None,
    batch_sizes: options.BatchSizes = None,
    methods: options.Methods = None,
    controllers: options.Controllers = False,
    prompts: options.PromptFile = None,
    prompt_tokens: options.PromptTokens = None,
    new_tokens: options.NewTokens = None,
    samples_per_prompt: options.SamplesPerPrompt = None,
    repeats: options.Repeats = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    coupling: options.Coupling = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    rivals: options.Rivals = None,
    attention: options.AttentionSchedule = None,
    json_document: options.Document = False,
    plot: options.Plot = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure speed: batch sizes x methods, on a pair or on random weights of a real model's shape."""
    screen = Screen(quiet)
    with exit_codes(screen, "interrupted"):
        from bass_cli.bench.command import run

        if not run(context.params, screen):
            raise typer.Exit(1)


@app.command()
def pairs(json_table: options.Json = False) -> None:
    """Show which pairs are known, and which can run here."""
    screen = Screen()
    with exit_codes(screen, "interrupted"):
        from bass_cli.machine import describe_pairs

        rows = describe_pairs()
        if json_table:
            print(json.dumps(rows, indent=2))
            return
        columns = ("pair", "target", "draft", "weights", "here")
        screen.table(columns, [[row["name"], row["target"], row["draft"], row["weights"], row["here"]] for row in rows])


@app.command()
def doctor(json_table: options.Json = False) -> None:
    """Show what this machine offers: device, versions, kernels, memory, what fits."""
    screen = Screen()
    with exit_codes(screen, "interrupted"):
        from bass_cli.machine import describe_machine

        facts = describe_machine()
        if json_table:
            print(json.dumps(facts, indent=2))
            return
        shown = [
            [key, ", ".join(value) if isinstance(value, list) else str(value)]
            for key, value in facts.items()
            if key != "memory_bytes"
        ]
        screen.table(("what", "here"), shown)


if __name__ == "__main__":
    main()
