"""Print the document as tables within 80 columns, then a summary; or draw it as a PNG.

document.py makes the figures.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bass_cli.bench.figures import ENOUGH_TOKENS, FEWEST, NO_VERDICT
from bass_cli.io import terminal
from bass_cli.io.saving import two_panels

WIDTH = 80
_SPEED = ("rows", "method", "ms/token", "tokens/s", "speed-up", "95 %", "length", "accepted")
_ROUND = ("rows", "method", "first", "last", "floor", "round", "draft", "verify", "accept", "host")
_PLAIN = "plain"
_ABOUT_ROUND = (
    "First and last: ms per token of the first and last row to finish. Floor: of the mean row, at "
    "the device's peak rates. Then ms of a round and of its parts, each timed alone."
)


def show(document: dict[str, Any]) -> None:
    """Print a heading, two tables with one line for each cell, and a summary."""
    machine, settings, pair = document["machine"], document["settings"], document["pair"]
    threads = f", CPU threads: {machine['threads']}" if machine["device"] == "cpu" else ""
    _print(f"{pair['label']}; {pair['target']['dtype']} on {machine['name']}{threads}")
    _print(
        f"{settings['new_tokens']} tokens a row, temperature {settings['temperature']}, top-p "
        f"{settings['top_p']}, {pair['coupling']} coupling; medians of the repeats; speed-up over "
        "plain in the same repeat, with its 95 % confidence interval"
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
    """Print one table for each kind of text."""
    for kind in dict.fromkeys(cell["text"] for cell in cells):
        if kind is not None:
            terminal.line(f"{kind}:", stdout=True)
        _table(columns, [line(cell) for cell in cells if cell["text"] == kind])


def speed_line(cell: dict[str, Any]) -> list[str]:
    """Return the speed of a cell, in the order of the columns."""
    interval = cell["speedup_interval"]
    return [
        str(cell["batch"]),
        cell["method"],
        number(cell["ms_per_token"]["mean"]),
        number(cell["tokens_per_second"]),
        "-" if interval is None else f"{cell['speedup']:.2f}x",
        "-" if interval is None else "-".join(f"{one:.2f}" for one in interval),
        number(cell["draft_length"]),
        number(cell["mean_accepted"]),
    ]


def round_line(cell: dict[str, Any]) -> list[str]:
    """Return where the time of a cell goes, in the order of the columns."""
    ms, parts = cell["ms_per_token"], cell["parts_ms"]
    values = (
        ms["first"],
        ms["last"],
        cell["floor_ms_per_token"]["mean"],
        *(parts[key] for key in ("round", "draft", "verify", "accept", "host")),
    )
    return [str(cell["batch"]), cell["method"], *map(number, values)]


def closing(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the summary: controllers, captures, repeats and the verdict."""
    for entry in document["controllers"]:
        losses = ", ".join(f"{method} {loss:+.1%}" for method, loss in entry["loss"].items())
        slower = ", ".join(
            f"{method} {share:+.1%}" for method, share in entry["slower"].items() if share > 0
        )
        yield (
            f"batch {entry['batch']}: best fixed length {entry['best']}, "
            f"{number(entry['ms_per_token'])} ms a token; "
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
    if {cell["method"] for cell in cells} == {_PLAIN}:
        return "; ".join(
            f"plain {number(cell['ms_per_token']['mean'])} ms a token "
            f"{_where(cell['text'], cell['batch'])}"
            for cell in cells
        )
    auto, best = [], []
    for kind, batch in dict.fromkeys((cell["text"], cell["batch"]) for cell in cells):
        found = {
            cell["method"]: cell for cell in cells if (cell["text"], cell["batch"]) == (kind, batch)
        }
        where = _where(kind, batch)
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
    """Compare a cell with plain decoding, as far as its repeats allow."""
    interval = cell["speedup_interval"]
    if cell["verdict"] == NO_VERDICT:
        few = f"{FEWEST} repeats" if interval is None else f"{ENOUGH_TOKENS} tokens a row"
        return f"no verdict {where} (fewer than {few})"
    if cell["verdict"] == "within noise":
        return f"within noise of plain {where} ({interval[0]:.2f}-{interval[1]:.2f}x)"
    return f"{cell['speedup']:.2f}x plain {where}"


def _where(kind: str | None, batch: int) -> str:
    kinds = f"for {kind} " if kind else ""
    return f"{kinds}at {batch} {'row' if batch == 1 else 'rows'}"


def _repeats(document: dict[str, Any]) -> str:
    """Say how many repeats ran, how far they differ, and how much time the others need."""
    about = document["repeats"]
    done = [about["done"], about["repeats"]]
    text = f"{done[0]} of {done[1]} repeats" if about["limit_seconds"] else f"{done[1]} repeats"
    if about["widest_spread"] is None:
        text += "; one repeat cannot show how much the times vary"
    else:
        text += (
            f"; repeats of a cell differ by up to {about['widest_spread']:.0%}, so smaller "
            "differences may be chance"
        )
    if about["missing"]:
        text += "; not measured: " + ", ".join(
            " ".join([*kind, method, "at", str(batch)]) for batch, method, *kind in about["missing"]
        )
    if about["missing_seconds"]:
        minutes = math.ceil((about["seconds"] + about["missing_seconds"] * 1.3) / 60)
        text += f"; for all repeats, set the time limit to {minutes}m"
    return text


def _print(text: str) -> None:
    for line in textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False):
        terminal.line(line, stdout=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the second column, a text, is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        line = "  ".join(
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        terminal.line(line, stdout=True)


def number(value: float | None) -> str:
    """Format a number with three significant digits and all digits before the decimal point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def draw(document: dict[str, Any], file: str) -> None:
    """Draw both charts and save them."""
    title = f"{document['pair']['label']}; {document['machine']['name']}"
    with two_panels(file, title, size=(12, 4.5)) as axes:
        for method, cells in by_method(document).items():
            batches = [cell["batch"] for cell in cells]
            lows, highs = zip(*(cell["ms_per_token_spread"]["mean"] for cell in cells), strict=True)
            drawn = axes[0].plot(
                batches, [cell["ms_per_token"]["mean"] for cell in cells], marker="o", label=method
            )
            axes[0].fill_between(batches, lows, highs, alpha=0.15, color=drawn[0].get_color())
            axes[1].plot(batches, [cell["speedup"] for cell in cells], marker="o", label=method)
        _label(axes, document)


def by_method(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the cells by method, in the order of batch sizes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in sorted(document["cells"], key=lambda cell: cell["batch"]):
        found.setdefault(cell["method"], []).append(cell)
    return found


def _label(axes: Any, document: dict[str, Any]) -> None:
    batches = document["settings"]["batch_sizes"]
    for axis, title in zip(
        axes, ("ms per token of a sequence, mean row", "speed-up over plain decoding"), strict=True
    ):
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_xlabel("batch size")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[1].axhline(1.0, color="black", linewidth=0.8)
