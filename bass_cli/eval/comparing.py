"""Compare two runs on the same problems: `bass compare`.

The differences are paired by problem, so what makes a problem hard for both runs cancels (Miller
2024, arXiv 2411.00640). report.py has the figures of each run, tables.py makes the table.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bass_cli.config.evaluation_commands import CompareArgs
from bass_cli.errors import UserError, first_of
from bass_cli.eval import scoring, statistics
from bass_cli.eval.report import NO_WIDTH, SHOWN, TOO_NARROW, value_of
from bass_cli.eval.samples import GenerationFile, by_problem
from bass_cli.eval.setting import differing, setting_of
from bass_cli.eval.tables import Cell, Figure, Table, figure_of, name_of
from bass_cli.eval.tasks.task import Task
from bass_cli.io.console import Screen
from bass_cli.reading import parse_object, read_bytes

_TIMES = ("seconds_to_first", "seconds_to_last")
_NAMES = {"seconds_to_first": "first sample", "seconds_to_last": "last sample"}
_NAMED = 3  # the most problems that a message names
_REPORT_BYTES = 1 << 30  # the report of 100,000 problems has about 30 MB


class Pairs(NamedTuple):
    """Values of a figure by problem, in the same order for both runs."""

    a: list[float]
    b: list[float]


def compare(args: CompareArgs, screen: Screen) -> dict[str, Any]:
    """Run `bass compare`: score both runs if they have no report, and show the differences.

    Returns:
        The document that docs/guide/figures.md describes.

    Raises:
        UserError: the runs are of different tasks, problems or prompts.
    """
    if os.path.realpath(args.a) == os.path.realpath(args.b):
        raise UserError(f"{args.b}: A and B are the same file; give two runs")
    one, other = _reports(args, screen)
    document = differences(one, other)
    _show(document, screen)
    return document


def _reports(args: CompareArgs, screen: Screen) -> list[dict[str, Any]]:
    """Return the reports of both runs. A file of samples is scored, a report is read."""
    paths = [args.a, args.b]
    given = {path: _read_report(path) for path in paths if path.endswith(".json")}
    samples = [path for path in paths if path not in given]
    if not samples:
        unused = ("task", "data", "k", "rank_by", "workers", "timeout", "rejudge")
        for key in (key for key in unused if getattr(args, key)):
            raise UserError(f"`{key}`: both runs are reports already; leave it out")
    options = scoring.read_options(args)
    read = scoring.read_files(samples, args, screen) if samples else []
    runs = {path: _Run.of_report(report) for path, report in given.items()}
    runs |= {file.path: _Run.of_samples(file, task) for file, task in read}
    _refuse_other_runs(args.a, args.b, runs)
    for file, task in read:
        given[file.path] = scoring.score(
            file, task, options, report_path=None, screen=screen, show_figures=False
        )
    return [given[path] for path in paths]


def _read_report(path: str) -> dict[str, Any]:
    """Read a report on samples. UserError if it is something else or of an older version."""
    try:
        found = parse_object(read_bytes(path, _REPORT_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot read the report: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: this is not a report: {error}") from None
    missing = {"task", "file", "by_problem", "estimates", "setting"} - found.keys()
    if missing:
        raise UserError(
            f'{path}: it has no "{min(missing)}": it is no report on samples, or one of an older '
            "version; name the file of samples instead"
        )
    try:
        _check_report(found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: the report is damaged ({type(error).__name__}: {error}); name the file of "
            "samples instead"
        ) from None
    return found


def _check_report(report: dict[str, Any]) -> None:
    """Compare a report with itself, which reads all that a comparison needs.

    Raises an exception of any kind if something is missing or of another type.
    """
    _Run.of_report(report)
    report["setting"]["prompt_format"], report["setting"]["prompts"]
    document = differences(report, report)
    table_of(document)
    for one in report["by_problem"][:1]:
        names = ("pass_first",) if "passed" in one else ("first.rougeL", "best.rougeL")
        for name in names:
            document["figures"][name]
    json.dumps(document, allow_nan=False)


class _Run(NamedTuple):
    """What two runs must share, in part: task, problems, and the setting of the prompts."""

    task: str
    problems: list[str]
    setting: Mapping[str, Any]

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> _Run:
        names = [row["task_id"] for row in report["by_problem"]]
        return cls(report["task"], names, report["setting"])

    @classmethod
    def of_samples(cls, file: GenerationFile, task: Task) -> _Run:
        return cls(task.name, list(by_problem(file, task.problems)), setting_of(file))


def _refuse_other_runs(a: str, b: str, runs: Mapping[str, _Run]) -> None:
    """Raise UserError if two runs are of different tasks, problems or prompts."""
    one, other = runs[a], runs[b]
    if one.task != other.task:
        raise UserError(f"{b}: its task is {other.task}, and that of {a} is {one.task}")
    for path, have, need in ((b, other, one), (a, one, other)):
        known = set(have.problems)
        if lost := [name for name in need.problems if name not in known]:
            named = first_of((f'"{name[:80]}"' for name in lost), _NAMED)
            raise UserError(
                f"{path}: it has no samples of {named}; draw the same problems for both runs"
            )
    form, prompts = one.setting["prompt_format"], one.setting["prompts"]
    comparable = isinstance(prompts, str) and isinstance(other.setting["prompts"], str)
    same_format = form == other.setting["prompt_format"]
    if comparable and same_format and prompts != other.setting["prompts"]:
        raise UserError(
            f"{b}: its prompts differ from those of {a}, and the prompt format is {form} in both; "
            "the data of the task has changed"
        )


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document on two reports of the same problems."""
    rows = _paired_rows(a, b)
    shared = [name for name in a["estimates"] if name in b["estimates"]]
    names = [name for name in shared if not name.endswith("pass_first_of_finished")]
    figures = {name: _figure(name, _pairs(rows, name)) for name in (*names, *_TIMES)}
    settings = differing(a["setting"], b["setting"])
    return {
        "task": a["task"],
        "problems": len(rows),
        "a": {key: a[key] for key in ("file", "samples", "finished", "setting")},
        "b": {key: b[key] for key in ("file", "samples", "finished", "setting")},
        "settings": {key: {"a": one, "b": other} for key, (one, other) in settings.items()},
        "figures": {name: found for name, found in figures.items() if found is not None},
        "differing": _differing(names, rows),
        "notes": _notes(a, b, rows, settings),
    }


def _paired_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    other = {row["task_id"]: row for row in b["by_problem"]}
    return [(row, other[row["task_id"]]) for row in a["by_problem"]]


def _pairs(rows: Sequence[tuple[Any, Any]], name: str) -> Pairs:
    """Return the values of the problems for which both runs have one."""
    values = [(value_of(one, name), value_of(other, name)) for one, other in rows]
    known = [(x, y) for x, y in values if x is not None and y is not None]
    return Pairs([x for x, _ in known], [y for _, y in known])


def _figure(name: str, pairs: Pairs) -> dict[str, Any] | None:
    """Return both means, the difference with its error, and for how many problems A is better.

    The error is that of the mean difference over problems (Miller 2024, paired analysis). It is
    less than that of two independent runs if both find the same problems hard.
    """
    if not pairs.a:
        return None
    differences = [x - y for x, y in zip(*pairs, strict=True)]
    if "pass_first" in name:
        difference = statistics.bootstrap(differences)
    else:
        most = math.inf if name in _TIMES else 1.0
        difference = statistics.over_problems(differences, least=-most, most=most)
    assert difference is not None
    sign = -1 if name in _TIMES else 1  # less time is better
    signs = [sign * one for one in differences]
    found = {
        "a": statistics.mean(pairs.a),
        "b": statistics.mean(pairs.b),
        "difference": difference.document(),
        "a_better": sum(one > 0 for one in signs),
        "b_better": sum(one < 0 for one in signs),
        "equal": sum(one == 0 for one in signs),
    }
    if set(pairs.a) | set(pairs.b) <= {0.0, 1.0} and name not in _TIMES:
        found["both"] = sum(x == y == 1 for x, y in zip(*pairs, strict=True))
        found["neither"] = sum(x == y == 0 for x, y in zip(*pairs, strict=True))
    return found


def _differing(
    names: Sequence[str], rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the problems in which the runs differ, those with the largest differences first.

    A problem has the two values of every figure, first those of A. Its difference is the sum over
    figures.
    """
    found = []
    for one, other in rows:
        values = {name: (value_of(one, name), value_of(other, name)) for name in names}
        if all(x == y for x, y in values.values()):
            continue
        size = sum(abs(x - y) for x, y in values.values() if x is not None and y is not None)
        counts = {key: [one[key], other[key]] for key in ("samples", "passed") if key in one}
        found.append((size, {"task_id": one["task_id"], **counts, "figures": values}))
    found.sort(key=lambda one: -one[0])  # stable: else in the order of the data
    return [problem for _, problem in found]


def _notes(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    settings: Mapping[str, Any],
) -> list[str]:
    own = (TOO_NARROW, NO_WIDTH)  # of one run's intervals, not of the differences
    notes = [f"{one['file']}: {note}" for one in (a, b) for note in one["notes"] if note not in own]
    notes += [TOO_NARROW] if len(rows) < statistics.FEW else []
    if uneven := sum(one["samples"] != other["samples"] for one, other in rows):
        kept = "the means" if "rouge" in a else "pass@k"
        notes.append(
            f"{uneven} problems have different numbers of samples in A and B, which changes all "
            f"figures of quality except {kept}"
        )
    machines = [one["setting"]["machine"]["device"] for one in (a, b)]
    if machines[0] != machines[1]:
        notes.append(f"times are of different machines: {machines[0]} and {machines[1]}")
    if "batch_size" in settings or "n" in settings:
        notes.append("times are of different batches")
    return notes


def table_of(document: Mapping[str, Any]) -> Table:
    """Return the table of a comparison: a row for each figure."""
    columns = ("figure", "A", "B", "A − B", "95 % interval", "A better", "B better", "equal")
    binary = any("both" in one for one in document["figures"].values())
    rows: list[tuple[Cell, ...]] = []
    for name, one in document["figures"].items():
        unit: Literal["%", "s"] = "s" if name in _TIMES else "%"
        difference = figure_of(one["difference"], unit)
        row: list[Cell] = [
            f"{_NAMES.get(name) or name_of(name)} ({unit})",
            Figure(one["a"], unit=unit),
            Figure(one["b"], unit=unit),
            difference,
            _interval(difference),
            *(Figure(one[key], unit="") for key in ("a_better", "b_better", "equal")),
        ]
        if binary:
            row += [Figure(one.get(key), unit="") for key in ("both", "neither")]
        rows.append(tuple(row))
    a, b = (document[key]["file"] for key in ("a", "b"))
    caption = (
        f"{document['task']}, {document['problems']} problems. A is {a}, B is {b}. ± is one "
        "standard error of the differences by problem."
    )
    more = ("both", "neither") if binary else ()
    return Table(caption, (*columns, *more), tuple(rows), frozenset({"A − B"}))


def _interval(figure: Figure) -> str:
    """Return an interval like "-3.0 to +1.2". "" if unknown."""
    ends = (
        Figure(end, unit=figure.unit).shown(signed=True)[0] for end in (figure.low, figure.high)
    )
    return " to ".join(ends) if figure.low is not None else ""


def _show(document: Mapping[str, Any], screen: Screen) -> None:
    """Show the figures, the settings that differ, and the problems that differ, if few."""
    table = table_of(document)
    screen.table(table.columns, [table.texts(row) for row in table.rows])
    screen.say(table.caption)
    if settings := document["settings"]:
        rows = [[key, _word(one["a"]), _word(one["b"])] for key, one in settings.items()]
        screen.table(("setting", "A", "B"), rows)
    else:
        screen.say("no recorded setting differs")
    _show_problems(document["differing"], screen)
    for note in document["notes"]:
        screen.say(f"note: {note}")


def _show_problems(problems: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """Show the problems with the largest differences, at most SHOWN."""
    if not problems:
        screen.say("no problem differs")
        return
    rows = []
    for one in problems[:SHOWN]:
        if "passed" in one:
            cells = [f"{one['passed'][at]} of {one['samples'][at]}" for at in (0, 1)]
            cells += ["passes" if first else "fails" for first in one["figures"]["pass_first"]]
        else:
            pairs = (one["figures"][f"{kind}.rougeL"] for kind in ("best", "first"))
            cells = [f"{100 * value:.1f}" for pair in pairs for value in pair]
        rows.append([one["task_id"], *cells])
    what = "passed" if "passed" in problems[0] else "best ROUGE-L"
    screen.table(("problem", f"{what} A", f"{what} B", "first A", "first B"), rows)
    if len(problems) > SHOWN:
        screen.say(f"{SHOWN} of {len(problems)} problems that differ; the JSON document has all")


def _word(value: Any) -> str:
    """Return a setting as text of at most 40 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
