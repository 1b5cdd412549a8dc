"""`bass score`: pass its options to eval/scoring.py.

It is light to import, because `bass --help` imports it.
"""

from __future__ import annotations

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.flags import OUTPUT, SCORING, Flag
from bass_cli.cli.options import in_flags, takes
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
    screen = Screen(args.quiet, document=args.json_document, render=in_flags)
    interrupted = "interrupted; the verdicts so far are kept; run the same command to continue"
    with exit_codes(screen, interrupted):
        from bass_cli.eval.scoring import score_samples

        document = score_samples(args, screen)
        if args.json_document:
            terminal.document(document, allow_nan=False)
