"""What each controller loses against the best fixed draft length, chosen afterwards: from cells to
a few lines.

Not here: how cells are measured (grid.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_FIXED = "plain"  # with the draft lengths, which are digits


def compare(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a batch size: the `best` fixed length (0 is plain decoding), its `ms_per_token`
    of the mean row, by controller the `loss` against it and what is `slower` than plain, both as
    shares (below 0: it won)."""
    return [
        _compare(batch, [cell for cell in cells if cell["batch"] == batch])
        for batch in sorted({cell["batch"] for cell in cells})
    ]


def _compare(batch: int, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {cell["method"]: cell["ms_per_token"]["mean"] for cell in cells}
    fixed = {method: mean for method, mean in means.items() if method == _FIXED or method.isdigit()}
    best = min(fixed, key=fixed.__getitem__)
    others = {
        method: mean
        for method, mean in means.items()
        if "auto" in method or "bass" in method or "table" in method
    }
    return {
        "batch": batch,
        "best": 0 if best == _FIXED else int(best),
        "ms_per_token": fixed[best],
        "loss": {method: mean / fixed[best] - 1 for method, mean in others.items()},
        "slower": {method: mean / fixed[_FIXED] - 1 for method, mean in others.items()},
    }
