"""Run the same evaluation under several budgets, to compare quality against time.

The methods are plain decoding, single-sequence speculation and batched speculation. Models are
loaded once. This is the comparison under deadlines of BASS (arXiv 2404.15778).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli.config.evaluation_commands import EvaluateArgs
from bass_cli.errors import UserError
from bass_cli.eval.evaluation import Evaluation
from bass_cli.eval.report import seconds
from bass_cli.eval.scoring import check_report
from bass_cli.io.console import Screen
from bass_cli.io.linefile import name_beside, stem_of
from bass_cli.io.saving import check_chart, two_panels, write_json
from bass_cli.reading import parse_duration
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.engine.loop import Loop
    from bass_cli.run.build import Models
    from bass_cli.run.plan import Plan

METHODS = {
    "plain": "plain decoding",
    "single": "single-sequence speculation",
    "batched": "batched speculation",
}


def sweep(args: EvaluateArgs, screen: Screen) -> tuple[dict[str, Any], bool]:
    """Run every method under every budget, each to its own file beside --out, and score them all.

    Returns:
        A document {"task", "pair", "n", "budgets", "reports": [{"method", ...a report without
        by_problem}]}, and whether all prompts could be run.
    """
    budgets = _budgets(args)
    evaluation = Evaluation(args, screen)
    evaluation.report = None  # --report names the document; each file's report has its own name
    document_path, chart = _outputs(evaluation, args, budgets, screen)
    if evaluation.choose_format():
        document_path, chart = _outputs(evaluation, args, budgets, screen)
    configure_threads(evaluation.job.threads, screen.detail)
    plan = evaluation.plan()
    files = _generate(evaluation, plan, budgets, screen)
    reports = []
    for (method, budget), out in files.items():
        report = evaluation.score(out)
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
    write_json(Path(document_path), document, f"`report` {document_path}: cannot write the report")
    _show(document, screen)
    if chart is not None:
        _draw(document, chart)
        screen.note(f"drawn: {chart}")
    return document, not evaluation.failed


def _outputs(
    evaluation: Evaluation, args: EvaluateArgs, budgets: list[float], screen: Screen
) -> tuple[str, str | None]:
    """Check that all outputs can be written. Returns the document's path and the chart's."""
    out = evaluation.out
    document_path = args.report or name_beside(out, ".sweep.json")
    chart = _chart(args.plot, out, screen)
    samples = [_file(out, method, budget) for method in METHODS for budget in budgets]
    evaluation.check_outputs(samples, ("`report`", document_path), ("`plot`", chart))
    if chart is not None:
        check_chart(chart, overwrite=args.overwrite)
    check_report(document_path, out, overwrite=args.overwrite, sweep=True)
    return document_path, chart


def _budgets(args: EvaluateArgs) -> list[float]:
    if args.budget is not None:
        raise UserError("`budget` and `budgets` cannot be used together; give one of the two")
    if args.batch_size is not None:
        raise UserError(
            "`batch_size` cannot be used with `budgets`, because each method sets it; leave it out"
        )
    found = [parse_duration(part, "`budgets`") for part in (args.budgets or "").split(",")]
    return sorted(set(found))


def _chart(plot: str | None, out: str, screen: Screen) -> str | None:
    """Return the chart's path. None without matplotlib."""
    if plot is not None or importlib.util.find_spec("matplotlib") is not None:
        return plot or name_beside(out, ".sweep.png")
    screen.note("no chart will be drawn: it needs matplotlib (pip install 'bass-cli[plot]')")
    return None


def _file(out: str, method: str, budget: float) -> str:
    """Return the file for the samples of one method under one budget."""
    stem = stem_of(out)
    return f"{stem}.{method}-{budget:g}s{out[len(stem) :]}"


def _generate(
    evaluation: Evaluation, plan: Plan, budgets: list[float], screen: Screen
) -> dict[tuple[str, float], str]:
    """Draw the samples of every method and budget. Returns their files.

    The seed fixes the samples, so they are the same for all methods, except for rounding.
    """
    from bass_cli.run.build import load_models

    @functools.cache  # loaded when the first missing sample is drawn
    def models() -> Models:
        screen.phase("loading the weights")
        return load_models(plan)

    files = {}
    for method in METHODS:
        if method == "single" and plan.job.pair.draft == "none":
            screen.note("the pair has no draft: plain decoding only")
            break
        loop = _loop_of(_plan_of(plan, method, budgets[0]), models, screen, method)
        for budget in budgets:
            chosen = _plan_of(plan, method, budget)
            files[method, budget] = name = _file(evaluation.out, method, budget)
            screen.note(f"{method}, {budget:g} s per prompt")
            backend = evaluation.local_backend(chosen, functools.partial(loop, chosen))
            evaluation.generate(backend, name)
    return files


def _loop_of(
    plan: Plan, models: Callable[[], Models], screen: Screen, method: str
) -> Callable[[Plan], Loop]:
    """Return a function that gives the method's loop to the plan of a budget.

    The loop is built and warmed up once. Each budget gets a fresh controller, which has learnt
    nothing from other budgets. MachineError if memory runs out.
    """
    from bass_cli.run.build import WARMING, build, lengths_for, warm_up

    @functools.cache
    def warm_loop() -> Loop:
        loop = build(plan, models())
        screen.phase(f"{method}: {WARMING[plan.device.type]}")
        warm_up(loop, plan)
        return loop

    def loop_for(chosen: Plan) -> Loop:
        with chosen.memory_need.explained():
            loop = warm_loop()
        loop.use(lengths_for(chosen))
        return loop

    return loop_for


def _plan_of(plan: Plan, method: str, budget: float) -> Plan:
    """Return the plan of one method under one budget.

    Plain decoding has no draft. Single-sequence speculation has batch size 1.
    """
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
    """Show one line for each budget and method."""
    rouge = "rouge" in document["reports"][0]
    unit = "" if rouge else " %"
    rows = []
    for report in sorted(document["reports"], key=lambda one: one["budget"]):
        first, late = report["seconds_to_first"], report["overshoot"]
        rows.append(
            [
                f"{report['budget']:g} s",
                report["method"],
                f"{report['finished']} of {report['samples']}",
                str(report["late"]),
                *(f"{100 * value:.1f}{unit}" for value in _quality(report)),
                seconds(first and first["median"]),
                seconds(late and late["max"]),
            ]
        )
    names = ("ROUGE-L first", "best") if rouge else ("Pass@First", "Pass@All")
    screen.table(
        ("budget", "method", "finished", "late", *names, "first sample, median", "overshoot, most"),
        rows,
    )


def _draw(document: dict[str, Any], file: str) -> None:
    """Draw quality against budget to a PNG: of the sample ranked first, and of the best one."""
    code = "pass_first" in document["reports"][0]
    titles = ("Pass@First", "Pass@All") if code else ("ROUGE-L of the first", "ROUGE-L of the best")
    whole = f"{document['task']}, {document['pair']}, n = {document['n']}"
    with two_panels(file, whole, size=(11, 4.2)) as axes:
        for axis, title, which in zip(axes, titles, (0, 1), strict=True):
            for method, name in METHODS.items():
                points = sorted(
                    (one["budget"], _quality(one)[which])
                    for one in document["reports"]
                    if one["method"] == method
                )
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set_xscale("log")
            axis.set_xticks(document["budgets"], [f"{budget:g}" for budget in document["budgets"]])
            axis.minorticks_off()
            axis.set_xlabel("budget per prompt, seconds")
            axis.set_title(title)
            axis.grid(alpha=0.3)
            axis.set_ylim(0, 1.05 * max(max(_quality(one)) for one in document["reports"]) or 1)


def _quality(report: dict[str, Any]) -> tuple[float, float]:
    """Return the quality of the sample ranked first and of the best, as fractions of 1."""
    if "rouge" in report:
        return report["rouge"]["first"]["rougeL"], report["rouge"]["best"]["rougeL"]
    return report["pass_first"], report["pass_all"]
