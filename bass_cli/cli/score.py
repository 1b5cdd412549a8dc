"""`bass score`: check its options and call scoring.py.

It is light to import, because `bass --help` imports it.
"""

from __future__ import annotations

from typing import Any

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.flags import OUTPUT, SCORING, Flag
from bass_cli.cli.options import takes
from bass_cli.config.args import ScoreArgs
from bass_cli.io import terminal
from bass_cli.io.console import Screen

_FLAGS = {
    "task": Flag("Task of the samples", SCORING, "humaneval|mbpp|xsum", "from the file"),
    "report": Flag("Write the report to this file as JSON", OUTPUT, "FILE"),
    "overwrite": Flag(
        "Let --report replace a file that is not an earlier report on these samples", OUTPUT
    ),
}


@takes(ScoreArgs, _FLAGS)
def score(args: ScoreArgs) -> None:
    """Score a generation file of bass or of another tool: Pass@First, Pass@All, pass@k or ROUGE,
    and times.

    \b
    Example:
      bass score samples.jsonl > figures.txt
    """
    screen = Screen(args.quiet, document=args.json_document)
    interrupted = "interrupted; the verdicts so far are kept; run the same command to continue"
    with exit_codes(screen, interrupted):
        document = run(args, screen)
        if args.json_document:
            terminal.document(document, allow_nan=False)


def run(args: ScoreArgs, screen: Screen) -> dict[str, Any]:
    """Check the options and the file's lines, then score. Returns the report."""
    from bass_cli.config.fields import parse_duration
    from bass_cli.errors import UserError
    from bass_cli.eval import scoring
    from bass_cli.eval.judging import verdicts_path
    from bass_cli.eval.samples import guess_task, read_generations
    from bass_cli.eval.tasks import load_task
    from bass_cli.io.resume import manifest_path
    from bass_cli.io.saving import refuse_shared_files

    ks = None if args.k is None else scoring.parse_ks(args.k)
    workers = scoring.parse_workers(args.workers)
    timeout = (
        None
        if args.timeout is None
        else parse_duration(args.timeout, "--timeout (or BASS_TIMEOUT)")
    )
    path = args.file
    scoring.refuse_twice(args)
    if args.overwrite and args.report is None:
        raise UserError(
            "--overwrite (or BASS_OVERWRITE): it needs --report FILE; add that or leave "
            "--overwrite out"
        )
    refuse_shared_files(
        [("the verdicts", verdicts_path(path)), ("--report", args.report)],
        [
            ("the generation file", path),
            ("its manifest", manifest_path(path)),
            ("the data", args.data),
        ],
    )
    scoring.check_report(args.report, path, overwrite=args.overwrite)
    screen.phase("reading the file and the task's data", live=False)
    file = read_generations(path)
    task = load_task(args.task or guess_task(file), args.data)
    scoring.refuse_without_programs(task, args)
    return scoring.score(
        file,
        task,
        ks=ks,
        workers=workers,
        timeout=timeout,
        report_path=args.report,
        screen=screen,
        rejudge=args.rejudge,
        overwrite=args.overwrite,
        consent=args.allow_code_execution or args.allow_weak_sandbox,
    )
