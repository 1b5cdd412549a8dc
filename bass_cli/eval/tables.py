"""Make tables of figures for papers, as Markdown, LaTeX, CSV or text, from reports.

A figure has its standard error. report.py makes reports, and comparing.py differences of two.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bass_cli.errors import UserError, nearest, spelled
from bass_cli.eval.setting import flat

FORMATS = ("table", "md", "latex", "csv", "json")
NAMES = {
    "pass_first": "Pass@First",
    "pass_first_of_finished": "Pass@First of finished",
    "pass_all": "Pass@All",
}
_ROUGE = re.compile(r"(first|best|mean)\.rouge(1|2|L)")
# Settings by which the rows of a table can differ, with their names; they come in this order.
_SETTINGS = {
    "lora": "LoRA",
    "dtype": "dtype",
    "kv_dtype": "KV dtype",
    "n": "n",
    "limit": "limit",
    "sampling.temperature": "T",
    "sampling.top_p": "top-p",
    "sampling.top_k": "top-k",
    "sampling.min_p": "min-p",
    "sampling.max_new_tokens": "tokens",
    "seed": "seed",
    "coupling": "coupling",
    "budget": "budget (s)",
    "prompt_format": "prompt",
    "draft": "draft",
    "draft_length": "draft length",
    "batch_size": "batch size",
    "commit": "commit",
    "machine.device": "device",
}
_OF_METHOD = ("draft", "draft_length", "batch_size")
# Of these the caption names the values that all rows share.
_CAPTION = ("n", "sampling.temperature", "sampling.top_p", "seed", "budget", "prompt_format")
_LATEX = {
    **{one: f"\\{one}" for one in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"[": "{[}", "*": "{*}"},  # after a line break they would be its argument
    **{"`": r"\textasciigrave{}", '"': "{''}", "±": r"$\pm$", "−": "$-$"},
}
# A text that spreadsheets would run as a formula. Intervals, which only look like one, are none.
_FORMULA = re.compile(r"[=@+\-](?![0-9.]+ to [-+][0-9.]+\Z)")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&#])")


class Figure(NamedTuple):
    """A number of a table, with its standard error and 95 % interval if they are known.

    `unit`: "%" (the value is a fraction of 1), "s" (seconds), or "" (a count).
    """

    value: float | None
    error: float | None = None
    low: float | None = None
    high: float | None = None
    unit: Literal["%", "s", ""] = "%"

    def shown(self, *, signed: bool = False) -> tuple[str, str]:
        """Return value and error as text, in percent or seconds. "" if unknown."""
        if self.value is None:
            return "", ""
        if self.unit == "":
            return f"{self.value:.0f}", ""
        scale, digits = (100.0, 1) if self.unit == "%" else (1.0, 3)
        sign = "+" if signed else ""
        error = "" if self.error is None else f"{scale * self.error:.{digits}f}"
        return f"{scale * self.value:{sign}.{digits}f}", error


Cell = str | Figure


class Table(NamedTuple):
    """A table: its caption, the names of its columns, and its rows.

    `signed`: columns of differences, which show a plus sign.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    signed: frozenset[str] = frozenset()

    def is_number(self, column: int) -> bool:
        """Whether the column has figures."""
        return any(isinstance(row[column], Figure) for row in self.rows)

    def texts(self, row: Sequence[Cell], unknown: str = "-") -> list[str]:
        """Return the cells of a row like "61.6 ± 3.8"."""
        return [
            one if isinstance(one, str) else _joined(one, name in self.signed, " ± ", unknown)
            for name, one in zip(self.columns, row, strict=True)
        ]


def read_format(form: str | None, *, json_document: bool) -> str:
    """Return the format that the options name. UserError if there is none, or if they differ."""
    if form is not None and form not in FORMATS:
        raise UserError(f'`format`: there is no "{form}"; {nearest(form, FORMATS)}')
    if json_document and form not in (None, "json"):
        raise UserError(f"`format` {form}: `json_document` is another format; leave one out")
    return "json" if json_document else form or "table"


def table_of(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of one or several reports, a row for each.

    A column for each setting in which they differ comes before the figures. If rows are still
    equal, a column has the names of the files.
    """
    settings = [flat(one["setting"]) | _method(one) for one in reports]
    names = _SETTINGS
    if any("method" in one for one in settings):  # it says what the draft and the batch are
        names = {"method": "method", **_SETTINGS}
        names = {key: name for key, name in names.items() if key not in _OF_METHOD}
    varied = [key for key in names if len({str(one.get(key)) for one in settings}) > 1]
    heads: list[tuple[str, ...]] = [
        (_model(one), *(_word(setting.get(key)) for key in varied))
        for one, setting in zip(reports, settings, strict=True)
    ]
    columns = ["model", *(names[key] for key in varied)]
    tasks = list(dict.fromkeys(one["task"] for one in reports))
    if len(tasks) > 1:
        heads = [(one["task"], *head) for one, head in zip(reports, heads, strict=True)]
        columns.insert(0, "task")
    if len(set(heads)) < len(heads):
        heads = [(*head, one["file"]) for one, head in zip(reports, heads, strict=True)]
        columns.append("file")
    sizes = {(one["task"], one["problems"]) for one in reports}
    uneven = len(sizes) > len(tasks)  # rows on different problems cannot be compared
    figures = list(dict.fromkeys(name for one in reports for name in _figures(one)))
    unfinished = any(one["finished"] < one["samples"] for one in reports)
    rows: list[tuple[Cell, ...]] = [
        (
            *head,
            *([Figure(one["problems"], unit="")] if uneven else []),
            *([Figure(one["finished"] / one["samples"])] if unfinished else []),
            *(_estimate(one, name) for name in figures),
        )
        for one, head in zip(reports, heads, strict=True)
    ]
    columns += ["problems"] if uneven else []
    columns += ["finished (%)"] if unfinished else []
    columns += [f"{name_of(name)} (%)" for name in figures]
    return Table(_caption(reports, settings, tasks), tuple(columns), tuple(rows))


def _method(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"method": report["method"]} if "method" in report else {}


def _figures(report: Mapping[str, Any]) -> list[str]:
    """Return the figures of a report, without one that only repeats another."""
    found = report["estimates"]
    return [
        name
        for name in found
        if not name.endswith("pass_first_of_finished")
        or found[name] != found[name.removesuffix("_of_finished")]
    ]


def _estimate(report: Mapping[str, Any], name: str) -> Figure:
    found = report["estimates"].get(name)
    return Figure(None) if found is None else figure_of(found)


def figure_of(found: Mapping[str, Any], unit: Literal["%", "s"] = "%") -> Figure:
    """Return the figure of an estimate in a report."""
    low, high = found["interval"] or (None, None)
    return Figure(found["value"], found["standard_error"], low, high, unit)


def name_of(figure: str) -> str:
    """Return the name of a figure as papers print it."""
    if found := _ROUGE.fullmatch(figure):
        return f"ROUGE-{found[2]} {found[1]}"
    if figure.startswith("base."):
        return f"{name_of(figure.removeprefix('base.'))} base"
    if figure.startswith("pass_first_by."):
        return f"Pass@First by {figure.removeprefix('pass_first_by.')}"
    return NAMES.get(figure, figure)


def _model(report: Mapping[str, Any]) -> str:
    """Return the last part of the model's name. Without one it is the name of the file."""
    name = report["setting"]["model"]
    if not isinstance(name, str) or not name.strip("/"):
        return Path(report["file"]).name
    return name.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def _word(value: Any) -> str:
    """Return a setting as text. A commit is cut to 8 digits."""
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text[:8] if re.fullmatch("[0-9a-f]{40}(-dirty)?", text) else text


def _caption(
    reports: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]], tasks: list[str]
) -> str:
    """Return the tasks, what all rows share, and what the errors are."""
    problems = {one["problems"] for one in reports}
    parts = [", ".join(tasks), *([f"{problems.pop()} problems"] if len(problems) == 1 else [])]
    for key in _CAPTION:
        values = {str(one.get(key)): one.get(key) for one in settings}
        if len(values) == 1 and (value := next(iter(values.values()))) is not None:
            word = f"{value:g} s" if key == "budget" else _word(value)
            name = _SETTINGS[key].removesuffix(" (s)")
            parts.append(
                f"{name} {word}" if name[0].islower() and name != "n" else f"{name} = {word}"
            )
    by = ", of Pass@First by bootstrap" if any("pass_first" in one for one in reports) else ""
    return f"{', '.join(parts)}. ± is one standard error over problems{by}."


def render(table: Table, form: str) -> list[str]:
    """Return the lines of a table as "md", "latex" or "csv"."""
    return {"md": _markdown, "latex": _latex, "csv": _csv}[form](table)


def _joined(figure: Figure, signed: bool, between: str, unknown: str) -> str:
    value, error = figure.shown(signed=signed)
    return (f"{value}{between}{error}" if error else value) or unknown


def _markdown(table: Table) -> list[str]:
    """Return a table in GitHub's Markdown, with the caption below."""
    lines = [list(table.columns), *(table.texts(row) for row in table.rows)]
    cells = [[_MARKDOWN.sub(r"\\\1", spelled(cell)) for cell in line] for line in lines]
    rule = ["---:" if table.is_number(at) else "---" for at in range(len(table.columns))]
    shown = [f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:])]
    return [*shown, "", _MARKDOWN.sub(r"\\\1", spelled(table.caption))]


def _latex(table: Table) -> list[str]:
    """Return a LaTeX table with the rules of booktabs."""
    rows = []
    for row in table.rows:
        cells = [
            latex(one)
            if isinstance(one, str)
            else _mathematics(_joined(one, name in table.signed, r" \pm ", ""))
            for name, one in zip(table.columns, row, strict=True)
        ]
        rows.append(f"    {' & '.join(cells)} \\\\")
    sides = "".join("r" if table.is_number(at) else "l" for at in range(len(table.columns)))
    return [
        r"% needs \usepackage{booktabs} in the preamble",
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{latex(table.caption)}}}",
        f"  \\begin{{tabular}}{{{sides}}}",
        r"    \toprule",
        f"    {' & '.join(map(latex, table.columns))} \\\\",
        r"    \midrule",
        *rows,
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]


def _mathematics(text: str) -> str:
    return f"${text}$" if text else "--"


def latex(text: str) -> str:
    """Return a text for LaTeX, with special characters escaped.

    Letters of Latin-1 stay. Other characters, which pdflatex has no glyph for, become their number,
    such as U+4E2D.
    """
    shown = [
        one if one.isascii() or "À" <= one <= "ÿ" else f"U+{ord(one):04X}"
        for one in spelled(text).replace("±", "\0").replace("−", "\1")
    ]
    known = {"\0": _LATEX["±"], "\1": _LATEX["−"]}
    escaped = "".join(known.get(one) or _LATEX.get(one, one) for one in shown)
    return re.sub("-(?=-)", "-{}", escaped)  # LaTeX would make -- one dash


def _csv(table: Table) -> list[str]:
    """Return lines of CSV.

    A figure has four columns if it has errors: value, standard error, and both ends of the
    interval. Shares are fractions of 1. What is unknown is empty. A text that a spreadsheet would
    run as a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    wide = [
        any(isinstance(row[at], Figure) and row[at][1] is not None for row in table.rows)
        for at in range(len(table.columns))
    ]
    header: list[str] = []
    for name, has_errors in zip(table.columns, wide, strict=True):
        name = _plain(name.removesuffix(" (%)"))
        header.append(name)
        header += [f"{name} {more}" for more in ("standard error", "low", "high") if has_errors]
    writer.writerow(header)
    for row in table.rows:
        cells: list[Any] = []
        for one, has_errors in zip(row, wide, strict=True):
            found = one[:4] if isinstance(one, Figure) else (_plain(one), "", "", "")
            cells += found if has_errors else found[:1]
        writer.writerow(cells)
    return out.getvalue().splitlines()


def _plain(text: str) -> str:
    """Return a text for a cell of CSV."""
    text = spelled(text)
    return f"'{text}" if _FORMULA.match(text) else text
