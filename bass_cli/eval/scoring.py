"""Score a generation file: `bass score`, and `bass eval` after generating.

This has the order of checks. Reading, judging and reporting are in samples.py, judging.py and
report.py.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli.config.args import EvaluateArgs, ScoreArgs
from bass_cli.errors import UserError
from bass_cli.eval import report, table
from bass_cli.eval.judging import (
    Executor,
    Key,
    Ruling,
    VerdictStore,
    isolation_of,
    judge,
    verdicts_path,
)
from bass_cli.eval.report import Outcome
from bass_cli.eval.samples import Generation, GenerationFile, by_problem, read_generations
from bass_cli.io.console import Screen
from bass_cli.io.reading import shown
from bass_cli.io.saving import check_format, check_place, descriptor_of, refuse_foreign, write_json

if TYPE_CHECKING:
    from bass_cli.eval.tasks import Task
    from bass_cli.sandbox.jail.job_spec import Program
    from bass_cli.sandbox.programs import Isolation, Limits

_REPORT = {"task", "file", "problems", "statuses", "by_problem"}  # keys that identify a report
_SWEEP = {"task", "pair", "n", "budgets", "reports"}
_MOST_WORKERS = 1024
Problems = Mapping[str, Sequence[Generation]]


def refuse_without_programs(task: Task, args: EvaluateArgs | ScoreArgs) -> None:
    """Raise UserError for an option about programs if the task runs none."""
    for key in ("k", "workers", "timeout", "rejudge") if not task.executes else ():
        if getattr(args, key):
            raise UserError(
                f"--{key} (or BASS_{key.upper()}): {task.name} has no programs to run; leave it out"
            )


def refuse_twice(args: EvaluateArgs | ScoreArgs) -> None:
    """Raise UserError if --report would print to standard output beside --json."""
    if args.json_document and args.report is not None and descriptor_of(args.report) == 1:
        raise UserError(
            f"--report {args.report}: --json prints the report there too; leave one of the two out"
        )


def check_report(path: str | None, samples: str, *, overwrite: bool, sweep: bool = False) -> None:
    """Raise UserError if a report cannot be written, or would replace another kind of file.

    An earlier report may be replaced: a document with a report's keys, on a file of that name.

    Args:
        path: where the report goes. None: nowhere.
        samples: the generation file.
        overwrite: allow to replace any file.
        sweep: the report is on the sweep's files beside `samples`.
    """
    if path == "-":
        raise UserError("--report -: give a file name; --json prints the report to standard output")
    if path is None or descriptor_of(path) is not None:
        return
    check_format("--report", path, suffix=".json", written="a report is one JSON document")
    check_place(f"--report {path}", path)
    if not overwrite:
        ours = functools.partial(_is_report, name=Path(samples).name, sweep=sweep)
        refuse_foreign(f"--report {path}", path, ours, kind=f"a report on {samples}")


def _is_report(content: bytes, *, name: str, sweep: bool) -> bool:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or not (_SWEEP if sweep else _REPORT) <= found.keys():
        return False
    if not sweep:
        return Path(str(found["file"])).name == name
    parts = found["reports"] if isinstance(found["reports"], list) else []
    return all(
        isinstance(one, dict) and Path(str(one.get("file"))).name.startswith(f"{Path(name).stem}.")
        for one in parts
    )


def score_file(
    path: str,
    task: Task,
    *,
    ks: Sequence[int] | None = None,
    consent: bool = False,
    announced: bool = False,
    workers: int | None = None,
    timeout: float | None = None,
    report_path: str | None = None,
    screen: Screen,
    rejudge: bool = False,
    verdicts: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Score the samples in a file and show the figures.

    Verdicts are kept in a file, so the same call continues after an interruption.

    Args:
        path: the generation file.
        task: the task that the file answers.
        ks: values of k for pass@k. Default: see `default_ks`.
        consent: run programs in a weak sandbox too.
        announced: `check_sandbox` has already said how programs are isolated.
        workers: programs at once. Default: the number of cores.
        timeout: seconds per program. Default: the sandbox's limit.
        report_path: write the report there too.
        screen: for progress and figures.
        rejudge: run all programs again.
        verdicts: file for the verdicts, which several calls may share. Default: beside `path`.
        overwrite: let the report replace any file.

    Returns:
        The report (docs/EVAL.md).

    Raises:
        UserError: the file has a fault, or a task_id that the task does not have.
        MachineError: the sandbox is weak and `consent` is False, or programs cannot run.
    """
    file = read_generations(path)
    return score(
        file,
        task,
        ks=ks,
        workers=workers,
        timeout=timeout,
        report_path=report_path,
        screen=screen,
        rejudge=rejudge,
        consent=consent,
        announced=announced,
        verdicts=verdicts,
        overwrite=overwrite,
    )


def score(
    file: GenerationFile,
    task: Task,
    *,
    ks: Sequence[int] | None,
    workers: int | None,
    timeout: float | None,
    report_path: str | None,
    screen: Screen,
    rejudge: bool,
    consent: bool,
    announced: bool = False,
    verdicts: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Score a file that has been read. See `score_file`."""
    check_report(report_path, file.path, overwrite=overwrite)
    problems = by_problem(file, task.problems)
    isolation = None
    if task.executes:
        rulings = _judge(
            file,
            task,
            problems,
            workers=workers,
            timeout=timeout,
            screen=screen,
            rejudge=rejudge,
            consent=consent,
            announced=announced,
            verdicts=verdicts or verdicts_path(file.path),
        )
        outcomes = {
            name: [_outcome(name, row, rulings) for row in rows] for name, rows in problems.items()
        }
        isolation = isolation_of(rulings.values())
    else:
        outcomes = _rate(task, problems, screen)
    document = report.build(
        file,
        outcomes,
        task=task.name,
        executes=task.executes,
        known=len(task.problems),
        ks=default_ks(_fewest(problems)) if ks is None else ks,
        isolation=isolation,
    )
    table.show(document, screen)
    if report_path is not None:
        # Check again, because judging may have taken hours.
        check_report(report_path, file.path, overwrite=overwrite)
        write_json(Path(report_path), document, f"--report {report_path}: cannot write the report")
    return document


def _outcome(task_id: str, row: Generation, rulings: Mapping[Key, Ruling]) -> Outcome:
    return (
        Outcome(row, rulings[task_id, row.sample].status) if row.finished else report.unjudged(row)
    )


def _programs(task: Task, problems: Problems) -> Iterator[tuple[Key, Program]]:
    """Yield the program of every finished sample. Unfinished and late samples are not run."""
    from bass_cli.eval.tasks import Answer

    for name, rows in problems.items():
        for row in rows:
            if row.finished:
                yield (
                    (name, row.sample),
                    task.program(task.problems[name], Answer(row.text, row.whole)),
                )


def _judge(
    file: GenerationFile,
    task: Task,
    problems: Problems,
    *,
    workers: int | None,
    timeout: float | None,
    screen: Screen,
    rejudge: bool,
    consent: bool,
    announced: bool,
    verdicts: str,
) -> dict[Key, Ruling]:
    """Return a verdict on every finished sample, from the verdict file or from the sandbox."""
    from bass_cli.sandbox.programs import Limits

    limits = Limits()
    if timeout is not None:
        # The limit on processor time grows with it, or a longer timeout would have no effect.
        cpu_seconds = max(limits.cpu_seconds, math.ceil(timeout / 2))
        limits = limits._replace(seconds=timeout, cpu_seconds=cpu_seconds)
    total = sum(row.finished for rows in problems.values() for row in rows)
    with (
        ExitStack() as stack,
        VerdictStore(verdicts, anew=rejudge) as store,
        screen.counting("verdicts", total) as progress,
    ):
        if store.rulings:
            screen.note(
                f"{store.path}: continuing, {len(store.rulings)} programs have a verdict already"
            )
        return judge(
            _programs(task, problems),
            store,
            limits._asdict(),
            progress=progress,
            open_executor=lambda: _open_sandbox(
                stack, workers, limits, consent, None if announced else screen
            ),
        )


def check_sandbox(screen: Screen, *, consent: bool) -> None:
    """Say how programs will be isolated.

    MachineError if they cannot run, or if the sandbox is weak and there is no consent.
    """
    from bass_cli.sandbox.programs import Sandbox

    with Sandbox(workers=1) as sandbox:
        _announce(sandbox.isolation, consent, screen)


def _announce(isolation: Isolation, consent: bool, screen: Screen | None) -> None:
    if not consent:
        isolation.refuse_weakness()
    if screen is None:
        return
    screen.note(f"programs run in a sandbox ({isolation})")
    for warning in isolation.warnings():
        screen.note(f"warning: {warning}")


def _open_sandbox(
    stack: ExitStack, workers: int | None, limits: Limits, consent: bool, screen: Screen | None
) -> Executor:
    from bass_cli.sandbox.programs import Sandbox

    sandbox = stack.enter_context(Sandbox(workers=workers, limits=limits))
    _announce(sandbox.isolation, consent, screen)
    return Executor(sandbox.run, dict(sandbox.isolation._asdict()))


def _rate(task: Task, problems: Problems, screen: Screen) -> dict[str, list[Outcome]]:
    """Rate every finished sample. Equal texts of one problem are rated once."""
    total = sum(len(rows) for rows in problems.values())
    outcomes: dict[str, list[Outcome]] = {}
    done = 0
    with screen.counting("samples rated", total) as progress:
        for name, rows in problems.items():
            rate = functools.lru_cache(maxsize=None)(
                functools.partial(task.rate, task.problems[name])
            )
            outcomes[name] = [
                Outcome(row, report.RATED, rate(row.text)) if row.finished else report.unjudged(row)
                for row in rows
            ]
            done += len(rows)
            progress(done, total)
    return outcomes


def default_ks(samples: int) -> list[int]:
    """Return the default k of pass@k: those of 1, 10 and 100 that have enough samples."""
    return [k for k in (1, 10, 100) if k <= samples] or [1]


def _fewest(problems: Problems) -> int:
    """Return the smallest number of samples of a problem.

    Prompts that could not be run are ignored, because they have one line whatever n is.
    """
    counts = [
        len(rows) for rows in problems.values() if any(row.finish_reason != "error" for row in rows)
    ]
    return min(counts, default=1)


def parse_ks(text: str) -> list[int]:
    """Parse a list like "1,10" to sorted, distinct numbers.

    UserError unless all are whole numbers above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    bad = next((part for part in parts if not re.fullmatch("0*[1-9][0-9]{0,5}", part)), None)
    if bad is not None:
        raise UserError(
            f'--k (or BASS_K): "{bad}" is not a whole number above 0; write it like 1,10'
        )
    return sorted({int(part) for part in parts})


def parse_workers(given: int | None) -> int | None:
    """Check a number of workers and return it. UserError unless it is from 1 to 1024.

    More would exceed a machine's limits on processes and files.
    """
    if given is not None and not 1 <= given <= _MOST_WORKERS:
        raise UserError(
            f"--workers (or BASS_WORKERS): it should be a whole number from 1 to {_MOST_WORKERS} "
            f"(got {shown(given)})"
        )
    return given
