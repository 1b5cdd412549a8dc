"""The command line: `bass` and its commands. Heavy imports happen inside a command.

Exit codes: 0 done (also if a budget truncated samples), 1 some prompts failed, 2 wrong input or
configuration, 3 the machine lacks something, 130 interrupted. Standard output carries results only.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bass_cli import __version__
from bass_cli.cli.help import EPILOG, Command, Group
from bass_cli.cli.options import takes
from bass_cli.cli.running import running
from bass_cli.config.commands import COMMANDS
from bass_cli.config.evaluation_commands import (
    CompareArgs,
    EvaluateArgs,
    RankArgs,
    ReportArgs,
    ScoreArgs,
)
from bass_cli.config.machine_commands import (
    BenchArgs,
    DistillArgs,
    DoctorArgs,
    PairsArgs,
    ProfileArgs,
)
from bass_cli.config.sample_commands import (
    BatchArgs,
    FilterArgs,
    GenerateArgs,
    LogprobsArgs,
    MergeArgs,
    PublishArgs,
    SampleArgs,
    WatchArgs,
)
from bass_cli.errors import UserError
from bass_cli.io import terminal
from bass_cli.io.console import Screen
from bass_cli.system.host import expect, expect_gpus, is_refused_memory
from bass_cli.system.threads import begin

if TYPE_CHECKING:
    from bass_cli.eval.tables import Table

app = typer.Typer(
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


Args = TypeVar("Args")
# What a command returns: False if something failed, or a document for --json
Result = bool | dict[str, Any] | None
_AGAIN = "interrupted; run the same command again to continue"
_VERDICTS_KEPT = "interrupted; the verdicts so far are kept; run the same command to continue"


def _command(
    kind: type[Args],
    interrupted: str | Callable[[Args], str] = "interrupted",
    *,
    computes: bool = False,
    epilog: str | None = EPILOG,
) -> Callable[[Callable[[Args, Screen], Result]], Callable[[Args, Screen], Result]]:
    """Return a decorator that makes a function of options and a screen the command of `kind`.

    If the function returns False, the exit code is 1. A document is printed with --json.

    Args:
        kind: A class of COMMANDS.
        interrupted: The message after Ctrl-C, or a function of the options that returns it.
        computes: Prepare torch at once, or CUDA's driver if actors on this machine compute.
    """
    name = next(name for name, options in COMMANDS.items() if options is kind)

    def command_of(body: Callable[[Args, Screen], Result]) -> Callable[[Args, Screen], Result]:
        @functools.wraps(body)
        def run(args: Any) -> None:
            message = interrupted if isinstance(interrupted, str) else interrupted(args)
            with running(args, message) as screen:
                ray = getattr(args, "ray", None)
                if computes and ray is None:
                    begin(args.threads)
                    expect(args.device)
                elif computes and ray == "local":
                    expect_gpus(args.device)
                result = body(args, screen)
                if result is False:
                    raise typer.Exit(1)
                if isinstance(result, dict) and args.json_document:
                    terminal.document(result)

        app.command(name, cls=Command, epilog=epilog)(takes(kind)(run))
        return body

    return command_of


# Why writing to a standard stream can fail. Errors of other files carry a file name.
_FULL_OR_CLOSED = (errno.EBADF, errno.ENOSPC, errno.EIO)


def main() -> None:
    """Run the command line, and exit with its code."""
    terminal.guard()
    code: object = 0
    try:
        try:
            app()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except Exception as error:
        if is_refused_memory(error):  # before a command could explain it; see __main__.py
            raise
        full = isinstance(error, OSError) and error.errno in _FULL_OR_CLOSED
        if not full or getattr(error, "filename", None) is not None:
            terminal.crash(error)
            sys.exit(1)
        # Send the buffered rest to /dev/null: a second attempt to write it would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not code:  # otherwise an error has been shown
            terminal.error(f"standard output: cannot write: {getattr(error, 'strerror', '')}")
            code = 3
    sys.exit(code)  # type: ignore[arg-type]


def _version(wanted: bool) -> None:
    if wanted:
        terminal.line(f"bass {__version__}", stdout=True)
        raise typer.Exit


@app.callback()
def _bass(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Draw many samples per prompt from a language model, fast and from the model's exact
    distribution.

    \b
    Examples:
      bass generate prompts.txt --n 8 --out samples.jsonl
      bass generate --help
    """


def _interrupted_drawing(args: GenerateArgs) -> str:
    return "interrupted" if args.out in (None, "-") else _AGAIN


@_command(GenerateArgs, _interrupted_drawing, computes=True)
def generate(args: GenerateArgs, screen: Screen) -> bool:
    """Draw n samples per prompt and write them as JSON lines.

    \b
    Examples:
      bass generate prompts.jsonl --n 8 --out samples.jsonl
      bass generate prompts.txt --model Qwen/Qwen2.5-0.5B-Instruct --budget 2s

    After an interruption, run the same command again: it continues its output file.
    """
    upload = _publication(args, screen, args.out or "-")
    from bass_cli.generation import generate_samples

    if not generate_samples(args, screen):
        return False
    upload(args.out)
    return True


@_command(BatchArgs, _AGAIN, computes=True)
def batch(args: BatchArgs, screen: Screen) -> bool:
    """Answer the requests of a file in OpenAI's batch format.

    \b
    Example:
      bass batch requests.jsonl responses.jsonl --model Qwen/Qwen2.5-0.5B-Instruct

    After an interruption, run the same command again: it continues its output files.
    """
    from bass_cli.batch.command import run

    return run(args, screen)


@_command(ProfileArgs)
def profile(args: ProfileArgs, screen: Screen) -> dict[str, Any]:
    """Time this pair on this machine so that --draft-length auto and table choose well. Takes less
    than a minute.

    \b
    Example:
      bass profile --pair smollm2
    """
    from bass_cli.cli.profile import run

    return run(args, screen)


@_command(DistillArgs, "interrupted; the same command resumes from here")
def distill(args: DistillArgs, screen: Screen) -> dict[str, Any]:
    """Train a draft that proposes several tokens in one pass (parallel:MODEL), on the target's own
    samples.

    \b
    Examples:
      bass distill --pair mine.yaml --out drafts --minutes 10
      bass distill --model big.gguf --from small.gguf --out drafts
      bass distill --pair mine.yaml --out drafts --ray local --actors 8

    The folder gets a pair file for bass generate --pair. After an interruption, the same command
    resumes the run.
    """
    if not args.out:
        raise UserError("--out (or BASS_OUT): name a folder for the samples and the draft")
    from bass_cli.formats.sources import check_sources
    from bass_cli.generation import read_job

    if args.ray is None:  # importing torch takes seconds
        check_sources(read_job(args, draft="none").pair)
    from bass_cli.distill.command import run

    return run(args, screen)


@_command(BenchArgs)
def bench(args: BenchArgs, screen: Screen) -> bool:
    """Measure speed against plain decoding, by batch size and method, with a pair or with random
    weights.

    \b
    Examples:
      bass bench --pair smollm2 --batch-sizes 1,2
      bass bench --shape qwen2.5-7b --draft-shape qwen2.5-0.5b --acceptance 0.85
      bass bench --job prompts.jsonl --n 16 --pair smollm2 --rivals transformers
    """
    from bass_cli.cli.bench import run

    return run(args, screen)


@_command(LogprobsArgs, _AGAIN, computes=True)
def logprobs(args: LogprobsArgs, screen: Screen) -> bool:
    """Write the target's log-probabilities of given completions, with their mean and perplexity.

    \b
    Example:
      bass logprobs answers.jsonl --pair smollm2 --out scored.jsonl

    After an interruption, run the same command again: it continues its output file.
    """
    from bass_cli.logprobs import score_file

    return score_file(args, screen)


@_command(MergeArgs, "interrupted; the parts are unchanged")
def merge(args: MergeArgs, screen: Screen) -> bool:
    """Merge the parts of a job that were drawn with --shard, and report missing samples.

    \b
    Example:
      bass merge samples.jsonl part-1.jsonl part-2.jsonl

    To fill the gaps, run the original command with --out OUT and without --shard.
    """
    from bass_cli.io.merging import merge as merge_parts

    return merge_parts(args.out, args.parts, overwrite=args.overwrite, note=screen.note)


@_command(WatchArgs, "no longer watching; the jobs go on")
def watch(args: WatchArgs, screen: Screen) -> bool:
    """Show the progress of jobs from their files, until they have ended: samples, speed, time left,
    the last text.

    \b
    Examples:
      bass watch samples.jsonl
      bass watch part-1.jsonl part-2.jsonl --once

    The jobs are not disturbed. The exit code is 1 if one has stopped before its end.
    """
    from bass_cli.data.watching import watch as watch_files

    found, whole = watch_files(args.names, screen, once=args.once, document=args.json_document)
    if args.json_document:
        terminal.document(found)
    return whole


@_command(FilterArgs, "interrupted; the output file was not written")
def filter_samples(args: FilterArgs, screen: Screen) -> dict[str, Any]:
    """Copy the samples of a file that meet all criteria, and count what was dropped and why.

    \b
    Examples:
      bass filter samples.jsonl --where 'finish_reason == "eos"' --out good.jsonl
      bass filter samples.jsonl --unique near --min-tokens 20 --out new.parquet
    """
    from bass_cli.data.filtering import filter_file

    return filter_file(args, screen)


@_command(PublishArgs, "interrupted; nothing was published")
def publish(args: PublishArgs, screen: Screen) -> None:
    """Upload a file of samples with its manifest and a data card to the Hugging Face hub, as a
    private data set.

    \b
    Example:
      bass publish samples.jsonl hf://me/my-samples

    The card says which model generated the samples and how. It needs a token with write access
    (hf auth login, or HF_TOKEN).
    """
    from bass_cli.data.publishing import Publication, check_samples

    check_samples(args.file)
    screen.phase("publishing")
    place = Publication(args.target, public=args.public)
    screen.say(place.upload(args.file, note=screen.note))


def _publication(args: SampleArgs, screen: Screen, out: str) -> Callable[..., None]:
    """Check --publish; return a function that uploads a file of samples and reports on it.

    `out`: The output, which must be a file.
    """
    if args.publish is None:
        if args.public:
            raise UserError("`public` needs `publish`")
        return lambda *files: None
    from bass_cli.io.saving import is_stream

    if is_stream(out):
        raise UserError("`publish` needs `out` FILE, which is uploaded")
    if args.shard is not None:
        raise UserError("`publish`: a shard is a part of a job; use bass publish after bass merge")
    from bass_cli.data.publishing import Publication

    place = Publication(args.publish, public=args.public)

    def upload(samples: str, *reports: Path) -> None:
        screen.phase("publishing")
        screen.note(f"published: {place.upload(samples, reports=reports, note=screen.note)}")

    return upload


@_command(
    EvaluateArgs,
    "interrupted; samples and verdicts so far are kept; run the same command to continue",
    computes=True,
)
def evaluate(args: EvaluateArgs, screen: Screen) -> bool:
    """Draw samples for a task and score them. --budget sets a time limit
    for each prompt.

    \b
    Example:
      bass eval humaneval --n 8 --budget 5s

    Samples and verdicts are kept. Run the same command again to continue.
    """
    from bass_cli.eval.evaluation import Evaluation
    from bass_cli.eval.sweep import sweep

    if args.budgets is not None:
        if args.publish is not None:
            raise UserError("`publish`: a sweep has several files; use bass publish for each")
        document, complete = sweep(args, screen)
    else:
        evaluation = Evaluation(args, screen)
        upload = _publication(args, screen, evaluation.out)
        document, complete = evaluation.run()
    _print_figures(args, document)
    if complete and args.budgets is None:
        upload(evaluation.out, Path(evaluation.report_path(evaluation.out)))
    return complete


@_command(ScoreArgs, _VERDICTS_KEPT)
def score(args: ScoreArgs, screen: Screen) -> None:
    """Score a generation file of bass or of another tool: Pass@First, Pass@All, pass@k or ROUGE,
    and times.

    \b
    Example:
      bass score samples.jsonl > figures.txt
    """
    from bass_cli.eval.scoring import score_samples

    reports = score_samples(args, screen)
    _print_figures(args, reports[0] if len(reports) == 1 else {"reports": reports})


@_command(CompareArgs, _VERDICTS_KEPT)
def compare(args: CompareArgs, screen: Screen) -> None:
    """Compare two runs on the same problems: paired differences with their intervals, and the
    problems that differ.

    \b
    Example:
      bass compare a.jsonl b.jsonl
    """
    from bass_cli.eval import comparing

    document = comparing.compare(args, screen)
    _print_table(args, document, lambda: comparing.table_of(document))


def _print_figures(args: EvaluateArgs | ScoreArgs, document: dict[str, Any]) -> None:
    """Print a report, or a document with "reports", in the format for programs and papers."""
    from bass_cli.eval.tables import table_of

    _print_table(args, document, lambda: table_of(document.get("reports", [document])))


def _print_table(
    args: CompareArgs | EvaluateArgs | ScoreArgs,
    document: dict[str, Any],
    table: Callable[[], Table],
) -> None:
    """Print a document or its table in the format that the options name."""
    from bass_cli.eval.tables import read_format, render

    form = read_format(args.format, json_document=args.json_document)
    if form == "json":
        terminal.document(document, allow_nan=False)
    elif form != "table":
        for line in render(table(), form):
            terminal.line(line, stdout=True)


@_command(ReportArgs, lambda args: "the server has ended" if args.serve else "interrupted")
def report(args: ReportArgs, screen: Screen) -> None:
    """Make one HTML page of samples: figures, charts, and every text with its verdict.

    \b
    Examples:
      bass report samples.jsonl
      bass report a.jsonl b.jsonl --out page.html
      bass report samples.jsonl --serve

    The page needs no network and no server. With --serve it follows a running job.
    """
    from bass_cli.report.command import run

    run(args, screen)


@_command(RankArgs, "interrupted; the file was not changed")
def rank(args: RankArgs, screen: Screen) -> dict[str, Any]:
    """Rank the samples of each prompt, and write rank and scores into their lines.

    \b
    Examples:
      bass rank samples.jsonl --by static
      bass rank samples.jsonl --by majority --best 1 --out best.jsonl
    """
    from bass_cli.eval.rank_command import rank_samples

    return rank_samples(args, screen)


@_command(PairsArgs, epilog=None)
def pairs(args: PairsArgs, screen: Screen) -> None:
    """List the packaged pairs, or the given ones, and whether they can run here.

    \b
    Examples:
      bass pairs | grep ready
      bass pairs mine.yaml
      bass pairs --schema > pair.schema.json
    """
    if args.schema:
        from bass_cli.config.job import pair_schema

        terminal.document(pair_schema(), indent=2)
        return
    if args.models:
        if args.names:
            raise UserError("--models prints all architectures; leave out the names of pairs")
        _print_architectures(args, screen)
        return
    from bass_cli.cli.doctor import describe_pairs, pair_lines

    rows = describe_pairs(args.names or ())
    if args.json_document:
        terminal.document(rows, indent=2)
        return
    for line in pair_lines(rows):
        screen.say(line)


def _print_architectures(args: PairsArgs, screen: Screen) -> None:
    from bass_cli.models.support import architectures

    table = architectures()
    if args.json_document:
        terminal.document([one._asdict() for one in table], indent=2)
        return
    width = max(len(one.name) for one in table)
    for one in table:
        screen.say(f"{one.name:{width}}  {one.how:12}  {one.reason}".rstrip())


@_command(DoctorArgs, epilog=None)
def doctor(args: DoctorArgs, screen: Screen) -> None:
    """Show what this machine offers: device, versions, memory, disk, sandbox, hub access, and
    the pairs that fit.

    \b
    Examples:
      bass doctor
      bass doctor --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from bass_cli.cli.doctor import describe_machine

    facts = describe_machine(args)
    if args.json_document:
        terminal.document(facts, indent=2)
        return
    shown = [
        [key.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value)]
        for key, value in facts.items()
        if not key.endswith(("_bytes", "_ready"))
    ]
    screen.table(("what", "here"), shown)


if __name__ == "__main__":
    main()
