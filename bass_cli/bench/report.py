"""The document as tables for a person, on standard output, within 80 columns; then what they
come to. Figures are made in cells.py.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from bass_cli.io import terminal

WIDTH = 80
_SPEED = ("rows", "method", "ms/token", "least-most", "tokens/s", "speed-up", "length", "accepted")
_ROUND = ("rows", "method", "first", "last", "floor", "round", "draft", "verify", "accept", "host")
_FIXED = "plain"  # with the draft lengths, which are digits
_ABOUT_ROUND = (
    "First and last: ms per token of the row that ends first or last; floor: of the mean row, if "
    "the device were at its best. Then ms of a round, and of its parts, each timed alone."
)


def show(document: dict[str, Any]) -> None:
    """A heading, two tables with one line a cell, and in the end one sentence."""
    machine, settings, pair = document["machine"], document["settings"], document["pair"]
    threads = f", CPU threads: {machine['threads']}" if machine["device"] == "cpu" else ""
    _print(f"{pair['label']}; {pair['target']['dtype']} on {machine['name']}{threads}")
    _print(
        f"{settings['new_tokens']} tokens a row, temperature {settings['temperature']}, top-p "
        f"{settings['top_p']}, {pair['coupling']} coupling; medians of the repeats"
    )
    cells = document["cells"]
    _table(_SPEED, [speed_line(cell) for cell in cells])
    detailed = [round_line(cell) for cell in cells if cell["parts_ms"] is not None]
    if detailed:
        terminal.line("", stdout=True)
        _print(_ABOUT_ROUND)
        _table(_ROUND, detailed)
    terminal.line("", stdout=True)
    for line in closing(document):
        _print(line)


def speed_line(cell: dict[str, Any]) -> list[str]:
    """How fast a cell was, in the order of the columns."""
    least, most = cell["ms_per_token_spread"]["mean"]
    return [
        str(cell["batch"]),
        cell["method"],
        _number(cell["ms_per_token"]["mean"]),
        f"{_number(least)}-{_number(most)}",
        _number(cell["tokens_per_second"]),
        f"{cell['speedup']:.2f}x",
        _number(cell["draft_length"]),
        _number(cell["mean_accepted"]),
    ]


def round_line(cell: dict[str, Any]) -> list[str]:
    """Where a cell's time goes, in the order of the columns."""
    ms, parts = cell["ms_per_token"], cell["parts_ms"]
    values = (
        ms["first"],
        ms["last"],
        cell["floor_ms_per_token"]["mean"],
        *(parts[key] for key in ("round", "draft", "verify", "accept", "host")),
    )
    return [str(cell["batch"]), cell["method"], *map(_number, values)]


def closing(document: dict[str, Any]) -> Iterator[str]:
    """What the figures come to: controllers and captures if there are any, what more time would
    give, one sentence."""
    for entry in document["controllers"]:
        losses = ", ".join(f"{method} {loss:+.1%}" for method, loss in entry["loss"].items())
        slower = ", ".join(
            f"{method} {share:+.1%}" for method, share in entry["slower"].items() if share > 0
        )
        yield (
            f"batch {entry['batch']}: best fixed length {entry['best']}, "
            f"{entry['ms_per_token']:.3g} ms a token; "
            f"against it {losses}{slower and f'; slower than plain: {slower}'}"
        )
    for capture in document["captures"]:
        yield (
            f"batch {capture['batch']}, {capture['loop']}: {capture['graphs']} graphs captured in "
            f"{capture['seconds']:.1f} s"
        )
    if document["cells"]:
        yield _repeats(document)
        yield verdict(document["cells"])


def verdict(cells: Sequence[dict[str, Any]]) -> str:
    """One sentence: what `auto` won, or the best method that there is, and the best fixed
    length, by batch size."""
    auto, best = [], []
    for batch in sorted({cell["batch"] for cell in cells}):
        found = {cell["method"]: cell for cell in cells if cell["batch"] == batch}
        where = _rows(batch)
        if "auto" in found:
            auto.append(f"{found['auto']['speedup']:.2f}x plain {where}")
        fixed = [cell for method, cell in found.items() if method == _FIXED or method.isdigit()]
        top = min(fixed, key=lambda cell: cell["ms_per_token"]["mean"])
        best.append(
            f"0, plain, {where}"
            if top["method"] == _FIXED
            else f"{top['method']} ({top['speedup']:.2f}x) {where}"
        )
    if {cell["method"] for cell in cells} == {_FIXED}:
        return "; ".join(
            f"plain {cell['ms_per_token']['mean']:.3g} ms a token {_rows(cell['batch'])}"
            for cell in cells
        )
    return "; ".join(
        [*(["auto " + ", ".join(auto)] if auto else []), "best fixed length " + ", ".join(best)]
    )


def _rows(batch: int) -> str:
    return f"at {batch} {'row' if batch == 1 else 'rows'}"


def _repeats(document: dict[str, Any]) -> str:
    """How many repeats there are, how far they differ, and what more would take."""
    about = document["repeats"]
    done = [about["done"], about["repeats"]]
    text = f"{done[0]} of {done[1]} repeats" if about["limit_seconds"] else f"{done[1]} repeats"
    if about["widest_spread"] is None:
        text += "; from one nobody can tell how far the machine moves such figures"
    else:
        text += (
            f"; of one cell they differ by up to {about['widest_spread']:.0%}, and what "
            "differs by less may be chance"
        )
    if about["missing"]:
        text += "; not measured: " + ", ".join(
            f"{method} at {batch}" for batch, method in about["missing"]
        )
    if about["missing_seconds"]:
        minutes = math.ceil((about["seconds"] + about["missing_seconds"] * 1.3) / 60)
        text += f"; all of them, for a surer median: --time-limit {minutes}m"
    return text


def _print(text: str) -> None:
    for line in textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False):
        terminal.line(line, stdout=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Texts to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        line = "  ".join(
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        terminal.line(line, stdout=True)


def _number(value: float | None) -> str:
    """Three significant digits, and all digits before the point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
