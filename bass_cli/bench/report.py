"""The document as tables for a person, on standard output, within 80 columns; then what they
come to. Figures are made in cells.py.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bass_cli.bench import figures
from bass_cli.bench.figures import FEWEST
from bass_cli.io import terminal

WIDTH = 80
_SPEED = ("rows", "method", "ms/token", "tokens/s", "speed-up", "95 %", "length", "accepted")
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
        f"{settings['top_p']}, {pair['coupling']} coupling; medians of the repeats, speed-up over "
        "plain in the same repeat with its 95 % interval"
    )
    cells = document["cells"]
    _tables(_SPEED, cells, speed_line)
    detailed = [cell for cell in cells if cell["parts_ms"] is not None]
    if detailed:
        terminal.line("", stdout=True)
        _print(_ABOUT_ROUND)
        _tables(_ROUND, detailed, round_line)
    terminal.line("", stdout=True)
    for line in closing(document):
        _print(line)


def _tables(
    columns: Sequence[str],
    cells: Sequence[dict[str, Any]],
    line: Callable[[dict[str, Any]], list[str]],
) -> None:
    """One table for each kind of text."""
    for kind in dict.fromkeys(cell["text"] for cell in cells):
        if kind is not None:
            _print(f"{kind}:")
        _table(columns, [line(cell) for cell in cells if cell["text"] == kind])


def speed_line(cell: dict[str, Any]) -> list[str]:
    """How fast a cell was, in the order of the columns."""
    sure = cell["speedup_interval"]
    return [
        str(cell["batch"]),
        cell["method"],
        _number(cell["ms_per_token"]["mean"]),
        _number(cell["tokens_per_second"]),
        "-" if sure is None else f"{cell['speedup']:.2f}x",
        "-" if sure is None else "-".join(f"{one:.2f}" for one in sure),
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
    """Return one sentence: how `auto` and the fastest fixed length compare with plain decoding, by
    kind of text and batch size. Without enough repeats, or within their noise, it says so."""
    if {cell["method"] for cell in cells} == {_FIXED}:
        return "; ".join(
            f"plain {cell['ms_per_token']['mean']:.3g} ms a token {_rows(cell['batch'])}"
            for cell in cells
        )
    auto, best = [], []
    for kind, batch in dict.fromkeys((cell.get("text"), cell["batch"]) for cell in cells):
        found = {
            cell["method"]: cell
            for cell in cells
            if (cell.get("text"), cell["batch"]) == (kind, batch)
        }
        where = f"{f'for {kind} ' if kind else ''}{_rows(batch)}"
        if "auto" in found:
            auto.append(_judged(found["auto"], where))
        lengths = [cell for method, cell in found.items() if method.isdigit()]
        if lengths:
            top = min(lengths, key=lambda cell: cell["ms_per_token"]["mean"])
            best.append(f"{top['method']}, {_judged(top, where)}")
    return "; ".join(
        [
            *(["auto: " + ", ".join(auto)] if auto else []),
            *(["fastest fixed length: " + ", ".join(best)] if best else []),
        ]
    )


def _judged(cell: dict[str, Any], where: str) -> str:
    """What the repeats of a cell carry."""
    sure = cell["speedup_interval"]
    if sure is None:
        return f"no verdict {where} (fewer than {FEWEST} repeats)"
    if figures.verdict(sure) == "within noise":
        return f"within noise of plain {where} ({sure[0]:.2f}-{sure[1]:.2f}x)"
    return f"{cell['speedup']:.2f}x plain {where}"


def _rows(batch: int) -> str:
    return f"at {batch} {'row' if batch == 1 else 'rows'}"


def _repeats(document: dict[str, Any]) -> str:
    """How many repeats there are, how far they differ, and what more would take."""
    about = document["repeats"]
    done = [about["done"], about["repeats"]]
    text = f"{done[0]} of {done[1]} repeats" if about["limit_seconds"] else f"{done[1]} repeats"
    if about["widest_spread"] is None:
        text += "; one does not tell how far the machine moves such figures"
    else:
        text += (
            f"; of one cell they differ by up to {about['widest_spread']:.0%}, and what "
            "differs by less may be chance"
        )
    if about["missing"]:
        text += "; not measured: " + ", ".join(
            " ".join([*kind, method, "at", str(batch)]) for batch, method, *kind in about["missing"]
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
