"""The command `bass merge`. The merging itself: io/merging.py. Which prompts a shard has:
io/prompts.py."""

from __future__ import annotations

import typer

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.flags import OUTPUT, Flag
from bass_cli.cli.options import in_flags, takes
from bass_cli.config.args import MergeArgs
from bass_cli.io.console import Screen

_FLAGS = {
    "out": Flag("Output file for the merged samples.", "", "OUT"),
    "parts": Flag("Files written with --shard.", "", "PART..."),
    "overwrite": Flag("Replace OUT if it exists", OUTPUT),
}


@takes(MergeArgs, _FLAGS)
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
