"""The document as a table for a person, on standard output. The figures are made in cells.py."""

from __future__ import annotations

import sys
from typing import Any

_COLUMNS = ("batch", "method", "ms/token: mean", "least-most", "first", "last", "floor", "tokens/s", "speed-up",
            "accepted", "a round", "rounds", "draft", "verify", "accept", "host", "bandwidth", "FLOPs")


def show(document: dict[str, Any]) -> None:
    """A heading and one line a cell."""
    from rich.console import Console
    from rich.table import Table

    machine, settings = document["machine"], document["settings"]
    table = Table(*_COLUMNS, box=None, pad_edge=False, header_style="bold")
    for cell in document["cells"]:
        table.add_row(*line(cell))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 180)
    heading = (f"{document['pair']['label']}; {document['pair']['target']['dtype']} on {machine['name']}\n"
               f"{settings['new_tokens']} tokens a row, temperature {settings['temperature']}, top-p {settings['top_p']}, "
               f"{document['pair']['coupling']} coupling, medians of {settings['repeats']} repeats")
    console.print(heading, markup=False, highlight=False)
    console.print(table)
    for entry in document["controllers"]:
        losses = ", ".join(f"{method} {loss:+.1%}" for method, loss in entry["loss"].items())
        slower = ", ".join(f"{method} {share:+.1%}" for method, share in entry["slower"].items() if share > 0)
        console.print(f"batch {entry['batch']}: best fixed length {entry['best']}, {entry['ms_per_token']:.3g} ms a token; "
                      f"against it {losses}{slower and f'; slower than plain: {slower}'}", markup=False, highlight=False)
    for capture in document["captures"]:
        console.print(f"batch {capture['batch']}, {capture['loop']}: {capture['graphs']} graphs captured in "
                      f"{capture['seconds']:.1f} s", markup=False, highlight=False)


def line(cell: dict[str, Any]) -> list[str]:
    """A cell's texts, in the order of the columns."""
    ms, floor, shares = cell["ms_per_token"], cell["floor_ms_per_token"] or {}, cell["shares"] or {}
    least, most = cell["ms_per_token_spread"]["mean"]
    texts = [str(cell["batch"]), cell["method"], _number(ms["mean"]), f"{_number(least)}-{_number(most)}",
             _number(ms["first"]), _number(ms["last"]), _number(floor.get("mean")), _number(cell["tokens_per_second"]),
             f"{cell['speedup']:.2f}x"]
    texts += [_percent(cell["acceptance_rate"]), _number(cell["mean_accepted"]), _number(cell["rounds"])]
    texts += [_percent(shares.get(part)) for part in ("draft", "verify", "accept", "host")]
    return [*texts, _percent(cell["bandwidth_utilisation"]), _percent(cell["flop_utilisation"])]


def _number(value: float | None) -> str:
    """Three significant digits, and all digits before the point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"
