"""`bass score`: its options, checked, to scoring.py. Light to import, since the command line needs it for its help."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from bass_cli import options
from bass_cli.exits import exit_codes
from bass_cli.screen import Screen


def score(
    context: typer.Context,
    file: options.GenerationFile,
    task: options.Task = None,
    data: options.Data = None,
    k: options.Ks = None,
    allow_code_execution: options.AllowCodeExecution = False,
    allow_weak_sandbox: options.AllowWeakSandbox = False,
    workers: options.Workers = None,
    timeout: options.Timeout = None,
    report: options.Report = None,
    overwrite: options.OverwriteReport = False,
    rejudge: options.Rejudge = False,
    json_document: options.ReportDocument = False,
    quiet: options.Quiet = False,
) -> None:
    """Score a generation file, of bass or of another tool: Pass@First, Pass@All, pass@k or ROUGE, and the times.

    \b
    Example:
      bass score samples.jsonl --allow-code-execution > figures.txt
    """
    screen = Screen(quiet, document=json_document)
    kept = "interrupted; the verdicts so far are kept, and the same command goes on from here"
    with exit_codes(screen, kept):
        document = run(context.params, screen)
        if json_document:
            print(json.dumps(document, allow_nan=False))


def run(given: Mapping[str, Any], screen: Screen) -> dict[str, Any]:
    """Check the options and the file's lines, then the permission, then score; the report."""
    from bass_cli.eval import scoring
    from bass_cli.eval.judging import verdicts_path
    from bass_cli.eval.samples import guess_task, read_generations
    from bass_cli.eval.tasks import load_task
    from bass_cli.job import UserError, parse_duration
    from bass_cli.outputs import refuse_shared_files
    from bass_cli.resume import manifest_path

    ks = scoring.parse_ks(given["k"] or "1,10")
    workers = scoring.parse_workers(given["workers"])
    timeout = None if given["timeout"] is None else parse_duration(given["timeout"], "--timeout (or BASS_TIMEOUT)")
    path = given["file"]
    if given["overwrite"] and given["report"] is None:
        raise UserError("--overwrite (or BASS_OVERWRITE): it is for a --report FILE, and none was given; leave it out")
    refuse_shared_files([("the verdicts", verdicts_path(path)), ("--report", given["report"])],
                        [("the generation file", path), ("its manifest", manifest_path(path)), ("the data", given["data"])])
    scoring.check_report(given["report"], path, overwrite=given["overwrite"])
    screen.phase("reading the file and the task's data", live=False)
    file = read_generations(path)
    task = load_task(given["task"] or guess_task(file), given["data"])
    scoring.refuse_without_programs(task, given)
    scoring.refuse(task, allow_execution=given["allow_code_execution"])
    return scoring.score(file, task, ks=ks, workers=workers, timeout=timeout, report_path=given["report"],
                         screen=screen, rejudge=given["rejudge"], overwrite=given["overwrite"],
                         allow_weak=given["allow_weak_sandbox"])
