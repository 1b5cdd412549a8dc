"""Quality against time: the same evaluation under several budgets, for plain decoding,
single-sequence speculation and batched speculation, with models that are loaded once. The
comparison of BASS (arXiv 2404.15778), section on deadlines.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli.config.args import EvaluateArgs
from bass_cli.config.fields import parse_duration
from bass_cli.errors import UserError
from bass_cli.eval.chart import draw
from bass_cli.eval.evaluation import Evaluation
from bass_cli.eval.judging import verdicts_path
from bass_cli.eval.scoring import check_report
from bass_cli.io import charts
from bass_cli.io.console import Screen
from bass_cli.io.resume import write_json
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.engine.loop import Loop
    from bass_cli.run.build import Models
    from bass_cli.run.plan import Plan

METHODS = ("plain", "single", "batched")


def sweep(args: EvaluateArgs, screen: Screen) -> tuple[dict[str, Any], bool]:
    """Every method under every budget, each to a file of its own beside `--out`; then all are
    scored and drawn. One document, {"task", "pair", "n", "budgets", "reports": [{"method", ...a
    report without its problems}]}, and whether all prompts could be run."""
    budgets = _budgets(args)
    evaluation = Evaluation(args, screen)
    document_path = args.report or str(Path(evaluation.out).with_suffix(".sweep.json"))
    chart = _chart(args.plot, evaluation.out, screen)
    evaluation.report = None  # that of each file has a name of its own; --report is the document's
    samples = [_file(evaluation.out, method, budget) for method in METHODS for budget in budgets]
    evaluation.check_files(
        [
            ("--report", document_path),
            ("--plot", chart),
            ("the verdicts", verdicts_path(evaluation.out)),
            *(one for out in samples for one in evaluation.files_of(out)),
        ]
    )
    if chart is not None:
        charts.check(chart, overwrite=args.overwrite)
    check_report(document_path, evaluation.out, overwrite=args.overwrite, sweep=True)
    for out in samples:
        evaluation.check_places(out)
    configure_threads(evaluation.job.threads, screen.note)

    # the methods say how many of them are drawn at once
    plan = evaluation.plan(options=("--n", "--max-new-tokens"))
    for note in plan.notes:  # once, not before every file
        screen.note(note)
    plan = dataclasses.replace(plan, notes=())
    files = _generate(evaluation, plan, budgets, screen)
    reports = []
    for (method, budget), out in files.items():
        report = evaluation.score(out, verdicts_path(evaluation.out))
        reports.append(
            {"method": method, "budget": budget}
            | {k: v for k, v in report.items() if k != "by_problem"}
        )
    document = {
        "task": evaluation.task.name,
        "pair": evaluation.job.pair.name,
        "n": evaluation.job.n,
        "budgets": budgets,
        "reports": reports,
    }
    write_json(Path(document_path), document, f"--report {document_path}: cannot write the report")
    _show(document, screen)
    if chart is not None:
        draw(document, chart)
        screen.note(f"drawn: {chart}")
    return document, not evaluation.failed


def _budgets(args: EvaluateArgs) -> list[float]:
    if args.budget is not None:
        raise UserError("--budget and --budgets contradict each other; give one of the two")
    if args.batch_size is not None:
        raise UserError("--batch-size has no meaning with --budgets: the methods differ in it")
    found = [
        parse_duration(part, "--budgets (or BASS_BUDGETS)")
        for part in (args.budgets or "").split(",")
    ]
    return sorted(set(found))


def _chart(plot: str | None, out: str, screen: Screen) -> str | None:
    """Where the chart goes, if there can be one."""
    if plot is not None or importlib.util.find_spec("matplotlib") is not None:
        return plot or str(Path(out).with_suffix(".sweep.png"))
    screen.note("no chart will be drawn: that needs matplotlib (pip install 'bass-cli[plot]')")
    return None


def _file(out: str, method: str, budget: float) -> str:
    """Where the samples of one method under one budget go."""
    path = Path(out)
    return str(path.with_name(f"{path.stem}.{method}-{budget:g}s{path.suffix}"))


def _generate(
    evaluation: Evaluation, plan: Plan, budgets: list[float], screen: Screen
) -> dict[tuple[str, float], str]:
    """The file of every method and budget. Which samples there are is the same for all of them,
    but for rounding: the seed fixes them."""
    from bass_cli.run.build import load_models

    @functools.cache  # not before something is missing in a file
    def models() -> Models:
        screen.phase("loading the weights")
        return load_models(plan)

    files = {}
    for method in METHODS:
        if method == "single" and plan.job.pair.draft == "none":
            screen.note("the pair has no draft: plain decoding only")
            break
        loop = functools.cache(
            functools.partial(
                _warm_loop, _plan_of(plan, method, budgets[0]), models, screen, method
            )
        )
        for budget in budgets:
            chosen = _plan_of(plan, method, budget)
            files[method, budget] = name = _file(evaluation.out, method, budget)
            screen.note(f"{method}, {budget:g} s a prompt")
            begun = functools.partial(_begin_anew, loop, chosen)
            evaluation.generate(evaluation.drawing(chosen, begun), name, chosen.job.n)
    return files


def _warm_loop(plan: Plan, models: Callable[[], Models], screen: Screen, method: str) -> Loop:
    """A loop for all budgets of a method, as fast from the first prompt on as later."""
    from bass_cli.run.build import WARMING, build, warm_up

    loop = build(plan, models())
    screen.phase(f"{method}: {WARMING[plan.device.type]}")
    warm_up(loop, plan)
    return loop


def _begin_anew(loop: Callable[[], Loop], plan: Plan) -> Loop:
    """The loop, with a controller that has seen nothing of other budgets. MachineError where
    memory runs out."""
    from bass_cli.run.build import lengths_for

    with plan.need.explained():
        found = loop()
    found.use(lengths_for(plan))
    return found


def _plan_of(plan: Plan, method: str, budget: float) -> Plan:
    """The plan of one method: plain decoding has no draft, single-sequence speculation draws one
    sample after the other."""
    job = plan.job.model_copy(update={"budget": budget})
    if method == "single":
        job = job.model_copy(update={"batch_size": 1})
    if method == "plain":
        pair = job.pair.model_copy(update={"draft": "none"})
        speculation = job.speculation.model_copy(update={"length": 0})
        job = job.model_copy(update={"pair": pair, "speculation": speculation})
        files = plan.files._replace(draft=None, mask=None, skipped=frozenset())
        return dataclasses.replace(plan, job=job, files=files, profile=None, surface=None)
    return dataclasses.replace(plan, job=job)


def _show(document: dict[str, Any], screen: Screen) -> None:
    """One line for each budget and method."""
    rows = []
    for report in sorted(document["reports"], key=lambda one: one["budget"]):
        quality = (
            [f"{100 * report['rouge'][key]['rougeL']:.1f}" for key in ("first", "best")]
            if "rouge" in report
            else [f"{100 * report[key]:.1f} %" for key in ("pass_first", "pass_all")]
        )
        first, late = report["seconds_to_first"], report["overshoot"]
        rows.append(
            [
                f"{report['budget']:g} s",
                report["method"],
                f"{report['finished']} of {report['samples']}",
                str(report["late"]),
                *quality,
                "-" if first is None else f"{first['median']:.3g} s",
                "-" if late is None else f"{late['max']:.3g} s",
            ]
        )
    names = (
        ("ROUGE-L first", "best")
        if "rouge" in document["reports"][0]
        else ("Pass@First", "Pass@All")
    )
    screen.table(
        ("budget", "method", "finished", "late", *names, "first sample, median", "overshoot, most"),
        rows,
    )
