"""The command line: `bass` and its commands. Heavy imports happen inside a command.

Exit codes: 0 done (also if a budget truncated samples), 1 some prompts failed, 2 wrong input or
configuration, 3 the machine lacks something, 130 interrupted. Standard output carries results only.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from bass_cli import __version__
from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.help import EPILOG, Command, Group
from bass_cli.cli.options import in_flags, takes
from bass_cli.cli.profile import profile
from bass_cli.config.commands import (
    BenchArgs,
    DistillArgs,
    DoctorArgs,
    EvaluateArgs,
    GenerateArgs,
    MergeArgs,
    PairsArgs,
    ScoreArgs,
)
from bass_cli.io import terminal
from bass_cli.io.console import Screen
from bass_cli.system.host import expect, is_refused_memory
from bass_cli.system.threads import begin

app = typer.Typer(
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


@app.command(cls=Command, epilog=EPILOG)
@takes(GenerateArgs)
def generate(args: GenerateArgs) -> None:
    """Draw n samples per prompt and write them as JSON lines.

    \b
    Examples:
      bass generate prompts.jsonl --n 8 --out samples.jsonl
      bass generate prompts.txt --model Qwen/Qwen2.5-0.5B-Instruct --budget 2s

    After an interruption, run the same command again: it continues its output file.
    """
    screen = Screen(args.quiet, render=in_flags)
    if args.ray is None:
        begin(args.threads)
        expect(args.device)
    remedy = "" if args.out in (None, "-") else "; run the same command again to continue"
    with exit_codes(screen, f"interrupted{remedy}"):
        from bass_cli.generation import generate_samples

        if not generate_samples(args, screen):
            raise typer.Exit(1)


app.command(cls=Command, epilog=EPILOG)(profile)


@app.command(cls=Command, epilog=EPILOG)
@takes(DistillArgs)
def distill(args: DistillArgs) -> None:
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
    screen = Screen(args.quiet, document=args.json_document, render=in_flags)
    with exit_codes(screen, "interrupted; the same command resumes from here"):
        if not args.out:
            from bass_cli.errors import UserError

            raise UserError("--out (or BASS_OUT): name a folder for the samples and the draft")
        from bass_cli.distill.command import run

        document = run(args, screen)
        if args.json_document:
            terminal.line(document, stdout=True)


@app.command(cls=Command, epilog=EPILOG)
@takes(BenchArgs)
def bench(args: BenchArgs) -> None:
    """Measure speed against plain decoding, by batch size and method, with a pair or with random
    weights.

    \b
    Examples:
      bass bench --pair smollm2 --batch-sizes 1,2
      bass bench --shape qwen2.5-7b --draft-shape qwen2.5-0.5b --acceptance 0.85
      bass bench --job prompts.jsonl --n 16 --pair smollm2 --rivals transformers
    """
    screen = Screen(args.quiet, render=in_flags)
    with exit_codes(screen, "interrupted"):
        from bass_cli.cli.bench import run

        if not run(args, screen):
            raise typer.Exit(1)


@app.command(cls=Command, epilog=EPILOG)
@takes(MergeArgs)
def merge(args: MergeArgs) -> None:
    """Merge the parts of a job that were drawn with --shard, and report missing samples.

    \b
    Example:
      bass merge samples.jsonl part-1.jsonl part-2.jsonl

    To fill the gaps, run the original command with --out OUT and without --shard.
    """
    screen = Screen(args.quiet, render=in_flags)
    with exit_codes(screen, "interrupted; the parts are unchanged"):
        from bass_cli.io.merging import merge as merge_parts

        if not merge_parts(args.out, args.parts, overwrite=args.overwrite, note=screen.note):
            raise typer.Exit(1)


@app.command("eval", cls=Command, epilog=EPILOG)
@takes(EvaluateArgs)
def evaluate(args: EvaluateArgs) -> None:
    """Draw samples for humaneval, mbpp or xsum and score them. --budget sets a time limit
    for each prompt.

    \b
    Example:
      bass eval humaneval --n 8 --budget 5s

    Samples and verdicts are kept. Run the same command again to continue.
    """
    screen = Screen(args.quiet, document=args.json_document, render=in_flags)
    if args.ray is None:
        begin(args.threads)
        expect(args.device)
    with exit_codes(
        screen,
        "interrupted; samples and verdicts so far are kept; run the same command to continue",
    ):
        from bass_cli.eval.evaluation import Evaluation
        from bass_cli.eval.sweep import sweep

        document, complete = (
            Evaluation(args, screen).run() if args.budgets is None else sweep(args, screen)
        )
        if args.json_document:
            terminal.document(document, allow_nan=False)
        if not complete:
            raise typer.Exit(1)


@app.command(cls=Command, epilog=EPILOG)
@takes(ScoreArgs)
def score(args: ScoreArgs) -> None:
    """Score a generation file of bass or of another tool: Pass@First, Pass@All, pass@k or ROUGE,
    and times.

    \b
    Example:
      bass score samples.jsonl > figures.txt
    """
    screen = Screen(args.quiet, document=args.json_document, render=in_flags)
    interrupted = "interrupted; the verdicts so far are kept; run the same command to continue"
    with exit_codes(screen, interrupted):
        from bass_cli.eval.scoring import score_samples

        document = score_samples(args, screen)
        if args.json_document:
            terminal.document(document, allow_nan=False)


@app.command(cls=Command)
@takes(PairsArgs)
def pairs(args: PairsArgs) -> None:
    """List the packaged pairs, or the given ones, and whether they can run here.

    \b
    Examples:
      bass pairs | grep ready
      bass pairs mine.yaml
      bass pairs --schema > pair.schema.json
    """
    screen = Screen(document=args.json_table, render=in_flags)
    with exit_codes(screen, "interrupted"):
        if args.schema:
            from bass_cli.config.job import pair_schema

            terminal.document(pair_schema(), indent=2)
            return
        from bass_cli.cli.doctor import describe_pairs, pair_lines

        rows = describe_pairs(args.names or ())
        if args.json_table:
            terminal.document(rows, indent=2)
            return
        for line in pair_lines(rows):
            screen.say(line)


@app.command(cls=Command)
@takes(DoctorArgs)
def doctor(args: DoctorArgs) -> None:
    """Show what this machine offers: device, versions, memory, disk, sandbox, hub access, and
    the pairs that fit.

    \b
    Examples:
      bass doctor
      bass doctor --model Qwen/Qwen2.5-0.5B-Instruct
    """
    screen = Screen(document=args.json_table, render=in_flags)
    with exit_codes(screen, "interrupted"):
        from bass_cli.cli.doctor import describe_machine

        facts = describe_machine(args)
        if args.json_table:
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
