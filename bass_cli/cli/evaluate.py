"""`bass eval`: pass its options to evaluation.py or sweep.py.

It is light to import, because `bass --help` imports it.
"""

from __future__ import annotations

import typer

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.options import in_flags, takes
from bass_cli.config.args import EvaluateArgs
from bass_cli.io import terminal
from bass_cli.io.console import Screen
from bass_cli.system.host import expect
from bass_cli.system.threads import begin


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
