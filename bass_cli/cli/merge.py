"""`bass merge`: its options and its end. Not here: what is done (io/merging.py), which prompts a
shard has (io/shards.py)."""

from __future__ import annotations

import typer

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.flags import OUTPUT, Flag
from bass_cli.cli.options import takes
from bass_cli.config.args import MergeArgs
from bass_cli.io.console import Screen

_FLAGS = {
    "out": Flag("Where the merged samples go.", "", "OUT"),
    "parts": Flag("Files that were written with --shard.", "", "PART..."),
    "overwrite": Flag("Let OUT replace a file that is there", OUTPUT),
}


@takes(MergeArgs, _FLAGS)
def merge(args: MergeArgs) -> None:
    """Make one file of the parts of a job that were drawn with --shard, and say what is missing.

    \b
    Example:
      bass merge samples.jsonl part-1.jsonl part-2.jsonl

    What is missing, the command that wrote the parts draws with --out OUT and no --shard.
    """
    screen = Screen(args.quiet)
    with exit_codes(screen, "interrupted; the parts are as they were"):
        from bass_cli.io.merging import merge as merge_parts

        if not merge_parts(args.out, args.parts, overwrite=args.overwrite, note=screen.note):
            raise typer.Exit(1)
