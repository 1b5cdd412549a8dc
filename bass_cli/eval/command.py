"""`bass eval`: its options, to evaluation.py or sweep.py. Light to import, since the command line needs it for its help."""

from __future__ import annotations

import json

import typer

from bass_cli import options
from bass_cli.exits import exit_codes
from bass_cli.screen import Screen


def evaluate(
    context: typer.Context,
    task: options.TaskName,
    pair: options.Pair = None,
    model: options.Model = None,
    n: options.Samples = None,
    budget: options.Budget = None,
    budgets: options.Budgets = None,
    k: options.Ks = None,
    prompt_format: options.PromptFormat = None,
    data: options.Data = None,
    allow_code_execution: options.AllowCodeExecution = False,
    allow_weak_sandbox: options.AllowWeakSandbox = False,
    out: options.EvaluationOut = None,
    report: options.EvaluationReport = None,
    max_new_tokens: options.EvaluationTokens = None,
    temperature: options.EvaluationTemperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    draft: options.Draft = None,
    draft_length: options.DraftLength = None,
    coupling: options.Coupling = None,
    batch_size: options.BatchSize = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    limit: options.Limit = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    token_ids: options.TokenIds = None,
    workers: options.Workers = None,
    timeout: options.Timeout = None,
    rejudge: options.Rejudge = False,
    plot: options.Plot = None,
    json_document: options.ReportDocument = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw samples for humaneval, mbpp or xsum and score them, with a wall-clock budget for each prompt if one is set.

    \b
    Example:
      bass eval humaneval --n 8 --budget 5s --allow-code-execution

    Samples and verdicts are kept: given again, the same command goes on.
    """
    screen = Screen(quiet, document=json_document)
    with exit_codes(screen, "interrupted; samples and verdicts so far are kept, and the same command goes on from here"):
        from bass_cli.eval.evaluation import Evaluation
        from bass_cli.eval.sweep import sweep

        given = context.params
        document, complete = Evaluation(given, screen).run() if budgets is None else sweep(given, screen)
        if json_document:
            print(json.dumps(document, allow_nan=False))
        if not complete:
            raise typer.Exit(1)
