"""A generation file and a task to a report: what `bass score` does, and `bass eval` once it has
generated.

The order of refusals and checks is here; reading, judging and reporting are in files of their
own.
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
from bass_cli.io.places import check_format, check_place, descriptor_of, refuse_foreign
from bass_cli.io.reading import shown
from bass_cli.io.resume import write_json

if TYPE_CHECKING:
    from bass_cli.eval.tasks import Task
    from bass_cli.sandbox.jail.job_spec import Program
    from bass_cli.sandbox.programs import Isolation, Limits

_REPORT = {"task", "file", "problems", "statuses", "by_problem"}  # keys that a report is known by
_SWEEP = {"task", "pair", "n", "budgets", "reports"}
_MOST_WORKERS = 1024
Problems = Mapping[str, Sequence[Generation]]


def refuse_without_programs(task: Task, args: EvaluateArgs | ScoreArgs) -> None:
    """UserError for an option that says how programs are run or counted, where the task has
    none."""
    for key in ("k", "workers", "timeout", "rejudge") if not task.executes else ():
        if getattr(args, key):
            raise UserError(
                f"--{key} (or BASS_{key.upper()}): {task.name} has no programs to run; leave it out"
            )


def refuse_twice(args: EvaluateArgs | ScoreArgs) -> None:
    """UserError where the report would be printed beside the one that --json prints."""
    if args.json_document and args.report is not None and descriptor_of(args.report) == 1:
        raise UserError(f"--report {args.report}: --json prints it there too; leave one out")


def check_report(path: str | None, samples: str, *, overwrite: bool, sweep: bool = False) -> None:
    """UserError where a report on `samples` (a `sweep`: on the files beside it) could not be
    written, or would replace anything but an earlier one: a document with a report's keys, on a
    file of that name."""
    if path == "-":
        raise UserError("--report -: a file is needed; --json prints a report of one line")
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
    told: bool = False,
    workers: int | None = None,
    timeout: float | None = None,
    report_path: str | None = None,
    screen: Screen,
    rejudge: bool = False,
    verdicts: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Judge the samples in a file, show the figures and give the report (docs/EVAL.md), also
    written to `report_path`.

    `timeout`: seconds a program may take, the sandbox's own limit if None. Verdicts are kept
    beside the file: after an interruption the same call goes on (`verdicts` names another file
    for them, which several calls may share); `rejudge` runs all programs again; `overwrite` lets
    the report replace what is no report on this file; `consent` runs them also where the sandbox
    is weak, which else is a MachineError. `ks` None: see `default_ks`. `told`: `check_sandbox`
    has said how programs are kept in. UserError for any fault of the file, and for a task_id that
    the task does not have.
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
        told=told,
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
    told: bool = False,
    verdicts: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """`score_file` for a file that is read already."""
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
            told=told,
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
        check_report(
            report_path, file.path, overwrite=overwrite
        )  # again, for judging may have taken hours
        write_json(Path(report_path), document, f"--report {report_path}: cannot write the report")
    return document


def _outcome(task_id: str, row: Generation, rulings: Mapping[Key, Ruling]) -> Outcome:
    return (
        Outcome(row, rulings[task_id, row.sample].status) if row.finished else report.unjudged(row)
    )


def _programs(task: Task, problems: Problems) -> Iterator[tuple[Key, Program]]:
    """The program of every finished sample; one that was cut off or late is not run, it counts
    as failed."""
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
    told: bool,
    verdicts: str,
) -> dict[Key, Ruling]:
    """A verdict on every finished sample, through the verdict file and, for what is not in it,
    the sandbox."""
    from bass_cli.sandbox.programs import Limits

    limits = Limits()
    if (
        timeout is not None
    ):  # processor time has a limit of its own, which must not undo a longer wall clock
        cpu_seconds = max(limits.cpu_seconds, math.ceil(timeout / 2))
        limits = limits._replace(seconds=timeout, cpu_seconds=cpu_seconds)
    total = sum(row.finished for rows in problems.values() for row in rows)
    with (
        ExitStack() as stack,
        VerdictStore(verdicts, anew=rejudge) as ledger,
        screen.counting("verdicts", total) as progress,
    ):
        if ledger.rulings:
            screen.note(
                f"{ledger.path}: going on, {len(ledger.rulings)} programs are judged already"
            )
        return judge(
            _programs(task, problems),
            ledger,
            limits._asdict(),
            progress=progress,
            open_executor=lambda: _open_sandbox(
                stack, workers, limits, consent, None if told else screen
            ),
        )


def check_sandbox(screen: Screen, *, consent: bool) -> None:
    """Say how programs will be kept in. MachineError where they cannot be run, or only in a weak
    sandbox and without consent."""
    from bass_cli.sandbox.programs import Sandbox

    with Sandbox(workers=1) as sandbox:
        _tell(sandbox.isolation, consent, screen)


def _tell(isolation: Isolation, consent: bool, screen: Screen | None) -> None:
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
    _tell(sandbox.isolation, consent, screen)
    return Executor(sandbox.run, dict(sandbox.isolation._asdict()))


def _rate(task: Task, problems: Problems, screen: Screen) -> dict[str, list[Outcome]]:
    """A rating of every finished sample; the same text of one problem is rated once."""
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
    """The k of pass@k where none are given: 1, 10 and 100, as far as that many samples allow."""
    return [k for k in (1, 10, 100) if k <= samples] or [1]


def _fewest(problems: Problems) -> int:
    """The fewest samples of a problem. A prompt that could not be run has one line, however many
    samples it should have, and is left out."""
    counts = [
        len(rows) for rows in problems.values() if any(row.finish_reason != "error" for row in rows)
    ]
    return min(counts, default=1)


def parse_ks(text: str) -> list[int]:
    """The ks of "1,10", sorted, each once; UserError unless all are whole numbers above 0."""
    parts = [part.strip() for part in text.split(",")]
    bad = next((part for part in parts if not re.fullmatch("0*[1-9][0-9]{0,5}", part)), None)
    if bad is not None:
        raise UserError(
            f'--k (or BASS_K): "{bad}" is not a whole number above 0; write it like 1,10'
        )
    return sorted({int(part) for part in parts})


def parse_workers(given: int | None) -> int | None:
    """The number as it is; UserError below 1, and beyond what a machine's limits of processes
    and files allow."""
    if given is not None and not 1 <= given <= _MOST_WORKERS:
        raise UserError(
            f"--workers (or BASS_WORKERS): it should be a whole number from 1 to {_MOST_WORKERS} "
            f"(got {shown(given)})"
        )
    return given
