"""Score a generation file: `bass score`, and `bass eval` after generating.

This has the options and the order of checks. samples.py reads the file, judging.py gets verdicts on
programs, and report.py builds the report.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.config.evaluation_commands import CompareArgs, EvaluateArgs, ScoreArgs
from bass_cli.errors import UserError
from bass_cli.eval import report
from bass_cli.eval.judging import Key, check_answers, content_digest, digest, isolation_of, judge
from bass_cli.eval.ranking import first_by_ranker, read_rankers
from bass_cli.eval.report import PASSED, Outcome
from bass_cli.eval.samples import (
    Generation,
    GenerationFile,
    by_problem,
    guess_task,
    read_generations,
)
from bass_cli.eval.setting import SettingCheck
from bass_cli.eval.stores import Verdict, VerdictStore, verdicts_path
from bass_cli.eval.tables import read_format, table_of
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import Check, Problem, Task
from bass_cli.io.console import Screen
from bass_cli.io.resume import manifest_path
from bass_cli.io.saving import (
    check_format,
    check_place,
    descriptor_of,
    refuse_foreign,
    refuse_shared_files,
    write_json,
)
from bass_cli.reading import parse_duration, shown
from bass_cli.sandbox.programs import Isolation, Limits, Sandbox

_REPORT = {"task", "file", "problems", "statuses", "by_problem"}  # keys that identify a report
_SWEEP = {"task", "pair", "n", "budgets", "reports"}
_MOST_WORKERS = 1024
Problems = Mapping[str, Sequence[Generation]]


class ScoringOptions(NamedTuple):
    """Options of scoring.

    Attributes:
        ks: values of k for pass@k. Default: see report.build.
        workers: programs at once. Default: the number of cores.
        timeout: seconds for each program. Default: the task's.
        consent: run programs in a weak sandbox too.
        rejudge: run all programs again.
        overwrite: let the report replace any file.
        rankers: names of rankers, for Pass@First by each.
    """

    ks: list[int] | None
    workers: int | None
    timeout: float | None
    consent: bool
    rejudge: bool
    overwrite: bool
    rankers: Sequence[str] = ()


def read_options(args: CompareArgs | EvaluateArgs | ScoreArgs) -> ScoringOptions:
    """Check the options of scoring. UserError if one is invalid."""
    timeout = read_timeout(args.timeout)
    if args.workers is not None and not 1 <= args.workers <= _MOST_WORKERS:
        # More would exceed a machine's limits on processes and files.
        raise UserError(
            f"`workers`: it should be a whole number from 1 to {_MOST_WORKERS} "
            f"(got {shown(args.workers)})"
        )
    form = read_format(args.format, json_document=args.json_document)
    report = None if isinstance(args, CompareArgs) else args.report
    if form != "table" and report is not None and descriptor_of(report) == 1:
        option = "`json_document` prints the report" if args.json_document else "`format` prints"
        raise UserError(f"`report` {report}: {option} there too; leave one of the two out")
    return ScoringOptions(
        ks=None if args.k is None else parse_ks(args.k),
        workers=args.workers,
        timeout=timeout,
        consent=args.allow_code_execution or args.allow_weak_sandbox,
        rejudge=args.rejudge,
        overwrite=not isinstance(args, CompareArgs) and args.overwrite,
        rankers=read_rankers(args.rank_by),
    )


def read_timeout(timeout: str | None) -> float | None:
    """Return the time limit of a program in seconds. UserError if it is invalid."""
    return None if timeout is None else parse_duration(timeout, "`timeout`")


def limits_of(task: Task, timeout: float | None) -> Limits:
    """Return the limits of a program of the task. `timeout`: see Scoring."""
    if timeout is None:
        return task.limits
    # The limit on processor time grows with it, or a longer timeout would have no effect.
    cpu_seconds = max(task.limits.cpu_seconds, math.ceil(timeout / 2))
    return task.limits._replace(seconds=timeout, cpu_seconds=cpu_seconds)


def parse_ks(text: str) -> list[int]:
    """Parse a list like "1,10" to sorted, distinct numbers.

    UserError unless all are whole numbers above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    bad = next((part for part in parts if not re.fullmatch("0*[1-9][0-9]{0,5}", part)), None)
    if bad is not None:
        raise UserError(f'`k`: "{bad}" is not a whole number above 0; write it like 1,10')
    return sorted({int(part) for part in parts})


def refuse_without_programs(task: Task, args: CompareArgs | EvaluateArgs | ScoreArgs) -> None:
    """Raise UserError for an option about programs or verdicts if the task has none."""
    of_programs = () if task.executes else ("workers", "timeout")
    of_verdicts = ("k", "rejudge", "rank_by") if task.rates else ()
    for key in (*of_verdicts, *of_programs):
        if getattr(args, key):
            what = "verdicts" if key in of_verdicts else "programs to run"
            raise UserError(f"`{key}`: {task.name} has no {what}; leave it out")


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
        raise UserError(
            "`report` -: give a file name; `json_document` prints the report to standard output"
        )
    if path is None or descriptor_of(path) is not None:
        return
    check_format("`report`", path, suffixes=(".json",), written="a report is one JSON document")
    check_place(f"`report` {path}", path)
    if not overwrite:
        ours = functools.partial(_is_report, name=Path(samples).name, sweep=sweep)
        refuse_foreign(f"`report` {path}", path, ours, kind=f"a report on {samples}")


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


def score_samples(args: ScoreArgs, screen: Screen) -> list[dict[str, Any]]:
    """Run `bass score`: check the options and all lines, then score. Returns a report a file."""
    options = read_options(args)
    if args.overwrite and args.report is None:
        raise UserError("`overwrite`: it needs `report` FILE; add that or leave `overwrite` out")
    several = len(args.files) > 1
    if several and args.report is not None:
        raise UserError("`report`: it is for one file; `format` json prints all reports")
    read = read_files(args.files, args, screen, report=args.report)
    check_report(args.report, args.files[0], overwrite=args.overwrite)
    documents = [
        score(file, task, options, report_path=args.report, screen=screen, show_figures=not several)
        for file, task in read
    ]
    if several:
        table = table_of(documents)
        screen.table(table.columns, [table.texts(row) for row in table.rows])
        screen.say(table.caption)
        for one in documents:
            for note in one["notes"]:
                screen.say(f"note: {one['file']}: {note}")
    return documents


def read_files(
    paths: Sequence[str],
    args: ScoreArgs | CompareArgs,
    screen: Screen,
    *,
    report: str | None = None,
) -> list[tuple[GenerationFile, Task]]:
    """Read files of samples with their tasks. UserError for every mistake in them.

    Args:
        paths: the files.
        args: `task` and `data`, and options that a task without programs refuses.
        screen: for the phase.
        report: a file that will be written, which must be none of those that are read.
    """
    for path in (path for path in paths if path.endswith(verdicts_path(""))):
        raise UserError(f"{path}: it holds verdicts, not samples; leave it out")
    verdicts = [("the verdicts", verdicts_path(path)) for path in paths]
    refuse_shared_files(
        [*verdicts, ("`report`", report)],
        [
            *(("the generation file", path) for path in paths),
            *(("its manifest", manifest_path(path)) for path in paths),
            ("the data", args.data),
            ("the task file", args.task),
        ],
    )
    screen.phase("reading the files and the task's data", live=False)
    load = functools.cache(functools.partial(load_task, data=args.data))
    found = []
    for file in map(read_checked, paths):
        task = load(args.task or guess_task(file))
        refuse_without_programs(task, args)
        by_problem(file, task.problems)  # an unknown problem is an error before anything is run
        found.append((file, task))
    return found


def read_checked(path: str) -> GenerationFile:
    """Read a file of samples. UserError if it is broken or mixes settings."""
    check = SettingCheck()
    file = read_generations(path, on_sample=check)
    return dataclasses.replace(file, notes=(*file.notes, *check.refuse_mix(file)))


def score(
    file: GenerationFile,
    task: Task,
    options: ScoringOptions,
    *,
    report_path: str | None,
    screen: Screen,
    verdicts: str | None = None,
    sandbox_announced: bool = False,
    show_figures: bool = True,
) -> dict[str, Any]:
    """Score the samples of a file and show the figures.

    Verdicts are kept in a file, so the same call continues after an interruption.

    Args:
        file: the samples.
        task: the task that the file answers.
        options: see ScoringOptions.
        report_path: write the report there too.
        screen: for progress and figures.
        verdicts: file for the verdicts, which several calls may share. Default: beside `file`.
        sandbox_announced: `check_sandbox` has already said how programs are isolated.
        show_figures: show the figures; otherwise the caller shows those of several files.

    Returns:
        The report (docs/EVAL.md).

    Raises:
        UserError: the file has a task_id that the task does not have.
        MachineError: the sandbox is weak without consent, or programs cannot run.
    """
    check_report(report_path, file.path, overwrite=options.overwrite)
    problems = by_problem(file, task.problems)
    firsts = first_by_ranker(options.rankers, task, file, problems)  # before any program is run
    if not task.rates:
        path = verdicts or verdicts_path(file.path)
        outcomes, isolation = _judge_samples(
            task, problems, options, path, screen, sandbox_announced=sandbox_announced
        )
    else:
        outcomes, isolation = _rate_samples(task, problems, screen), None
    document = report.build(file, outcomes, task, ks=options.ks, isolation=isolation, firsts=firsts)
    if show_figures:
        report.show(document, screen)
    if report_path is not None:
        # Check again, because judging may have taken hours.
        check_report(report_path, file.path, overwrite=options.overwrite)
        write_json(Path(report_path), document, f"`report` {report_path}: cannot write the report")
    return document


def _judge_samples(
    task: Task,
    problems: Problems,
    options: ScoringOptions,
    path: str,
    screen: Screen,
    *,
    sandbox_announced: bool,
) -> tuple[dict[str, list[Outcome]], dict[str, str] | None]:
    """Get a verdict on every finished sample, from the verdict file or from the sandbox.

    A task without programs compares the answers in this process.

    Returns:
        The outcomes by problem, and how the programs were isolated.
    """

    with VerdictStore(path, ignore_existing=options.rejudge) as store:
        if store.verdicts:
            screen.note(
                f"{store.path}: continuing, {len(store.verdicts)} "
                f"{'programs' if task.executes else 'answers'} have a verdict already"
            )
        if task.executes:
            verdicts, base = _judge_programs(
                task, problems, options, store, screen, sandbox_announced=sandbox_announced
            )
        else:
            total = sum(row.finished for rows in problems.values() for row in rows)
            with screen.counting("verdicts", total) as progress:
                cases = _answer_checks(task, problems)
                verdicts = check_answers(cases, store, progress=progress, total=total)
            base = {}
    for note in task.notes_on(verdict.detail for verdict in verdicts.values()):
        screen.note(note)
    outcomes = {
        name: [
            Outcome(
                row,
                verdicts[name, row.sample].status,
                base=base[name, row.sample].status if base else None,
            )
            if row.finished
            else report.unjudged(row)
            for row in rows
        ]
        for name, rows in problems.items()
    }
    return outcomes, isolation_of([*verdicts.values(), *base.values()])


def _judge_programs(
    task: Task,
    problems: Problems,
    options: ScoringOptions,
    store: VerdictStore,
    screen: Screen,
    *,
    sandbox_announced: bool,
) -> tuple[dict[Key, Verdict], dict[Key, Verdict]]:
    """Run the program of every finished sample. Unfinished and late samples are not run.

    If the task has base tests, they run first. A sample that fails them has failed, and its other
    tests do not run.

    Returns:
        The verdicts, and those of the base tests, which are empty if the task has none.
    """
    limits = limits_of(task, options.timeout)

    def open_sandbox() -> Sandbox:
        nonlocal sandbox_announced
        sandbox = Sandbox(workers=options.workers, limits=limits)
        if not sandbox_announced:
            _announce(sandbox.isolation, options.consent, screen)
            _run_trial(sandbox, task)
        sandbox_announced = True
        return sandbox

    waiting = [(name, row) for name, rows in problems.items() for row in rows if row.finished]
    verdicts: dict[Key, Verdict] = {}
    base: dict[Key, Verdict] = {}
    for tests in ("base", "plus") if task.has_base else ("",):
        make = task.base_program if tests == "base" else task.program
        with screen.counting(f"{tests} verdicts".strip(), len(waiting)) as progress:
            verdicts |= judge(
                (
                    ((name, row.sample), make(task.problems[name], row.text, whole=row.whole))
                    for name, row in waiting
                ),
                store,
                limits._asdict(),
                tests=tests,
                progress=progress,
                open_sandbox=open_sandbox,
            )
        if tests == "base":
            base = dict(verdicts)
            waiting = [
                (name, row) for name, row in waiting if base[name, row.sample].status == PASSED
            ]
    return verdicts, base


def _answer_checks(
    task: Task, problems: Problems
) -> Iterator[tuple[Key, str, Callable[[], Check]]]:
    """Yield the check of every finished sample, and everything that it depends on."""
    for name, rows in problems.items():
        problem = task.problems[name]
        key = task.check_key(problem)
        for row in rows:
            if row.finished:
                check = functools.partial(task.check, problem, row.text)
                yield (name, row.sample), _check_content(key, row), check


def verdict_digests(
    task: Task, problem: Problem, row: Generation, timeout: float | None
) -> tuple[str, ...]:
    """Return the digests by which a verdict file has the verdicts on a sample.

    Args:
        task: a task that gives verdicts.
        problem: the sample's problem.
        row: the sample.
        timeout: see ScoringOptions.

    Returns:
        One digest, or those of the base tests and of the plus tests.
    """
    if not task.executes:
        return (content_digest(_check_content(task.check_key(problem), row)),)
    limits = limits_of(task, timeout)._asdict()
    makes = [task.base_program, task.program] if task.has_base else [task.program]
    return tuple(digest(make(problem, row.text, whole=row.whole), limits) for make in makes)


def find_verdict(
    digests: Sequence[str], known: Mapping[str, Verdict]
) -> tuple[Verdict | None, str | None]:
    """Return the verdict on a sample and the status by its base tests. None for what is unknown.

    Args:
        digests: see verdict_digests.
        known: verdicts by digest.
    """
    *before, last = (known.get(one) for one in digests)
    base = before[0] if before else None
    if before and (base is None or base.status != PASSED):
        return base, base and base.status
    return last, base and base.status


def _check_content(key: str, row: Generation) -> str:
    """Return everything that the check of an answer depends on."""
    return f"{key}\0{row.text}"


def check_sandbox(task: Task, screen: Screen, *, consent: bool) -> None:
    """Say how programs will be isolated, and run the task's trial.

    Raises:
        MachineError: programs cannot run, or the sandbox is weak and there is no consent.
        UserError: the trial failed.
    """
    with Sandbox(workers=1) as sandbox:
        _announce(sandbox.isolation, consent, screen)
        _run_trial(sandbox, task)


def _run_trial(sandbox: Sandbox, task: Task) -> None:
    if task.trial is None:
        return
    for place, ending in sandbox.run([task.trial]):
        if not ending.passed:
            raise UserError(f"{place}: it cannot be loaded in the sandbox: {ending.detail}")


def _announce(isolation: Isolation, consent: bool, screen: Screen) -> None:
    if not consent:
        isolation.refuse_weakness()
    screen.note(f"programs run in a sandbox ({isolation})")
    for warning in isolation.warnings():
        screen.note(f"warning: {warning}")


def _rate_samples(task: Task, problems: Problems, screen: Screen) -> dict[str, list[Outcome]]:
    """Rate every finished sample. Equal texts of one problem are rated once."""
    total = sum(len(rows) for rows in problems.values())
    outcomes: dict[str, list[Outcome]] = {}
    done = 0
    with screen.counting("samples rated", total) as progress:
        for name, rows in problems.items():
            rate = functools.cache(functools.partial(task.rate, task.problems[name]))
            outcomes[name] = [
                Outcome(row, "rated", rate(row.text)) if row.finished else report.unjudged(row)
                for row in rows
            ]
            done += len(rows)
            progress(done, total)
    return outcomes
