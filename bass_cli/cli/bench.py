"""The body of `bass bench`: options to Settings, the document to standard output. Nothing heavy
before the checks."""

from __future__ import annotations

import json

from bass_cli.bench import plot, report
from bass_cli.config.args import BenchArgs
from bass_cli.errors import UserError
from bass_cli.generation import files_read
from bass_cli.io import charts
from bass_cli.io.console import Screen
from bass_cli.io.places import refuse_shared_files
from bass_cli.io.prompts import check_prompts, open_source
from bass_cli.system.threads import settle


def run(args: BenchArgs, screen: Screen) -> bool:
    """Measure and print, each document as soon as it is there; False if a gate failed or graphs
    were captured inside a measured run."""
    settle(args.threads, screen.note)  # before the shapes of models load torch

    from bass_cli.bench.settings import make_settings

    settings = make_settings(args)
    if args.plot is not None:
        if len(settings.acceptances) > 1:
            raise UserError(
                "--plot FILE draws one bench: leave it out, or all but one --acceptance"
            )
    elif args.overwrite:
        raise UserError(
            "--overwrite (or BASS_OVERWRITE): it is for a --plot FILE, and none was given; leave "
            "it out"
        )
    if settings.shape is None:
        refuse_shared_files(
            [("--plot", args.plot)],
            [("the prompt file", settings.prompts), *files_read(args.pair, settings.job)],
        )
    if args.plot is not None:
        charts.check(args.plot, overwrite=args.overwrite)
    if settings.prompts is not None:
        if settings.prompts == "-":
            raise UserError(
                "--prompts (or BASS_PROMPTS): a file is needed, which can be read more than once"
            )
        check_prompts(open_source(settings.prompts), column="prompt", limit=None)

    from bass_cli.bench.grid import measure

    failures: list[str] = []
    for document in measure(settings, screen.note, screen.phase):
        screen.close()
        if args.json_document:
            print(json.dumps(document), flush=True)
        else:
            report.show(document)
        if args.plot is not None and document["cells"]:
            plot.draw(document, args.plot)
        failures += document["failures"]
    for failure in failures:
        screen.error(failure)
    return not failures
