"""What a round takes, by rows, draft length and context: a grid of points, interpolated, and how it
is written down.

Not here: how points are measured or where surfaces are kept (profiling/), what is learnt while a
job runs (costs.py).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bass_cli.io.reading import finite, parse_object, truth, whole

FORMAT = 1  # of what is written down; another one is not read
Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds on a grid of `rows` x `widths` (live rows, drafts a row), all rows about `context`
    tokens long.

    `verify`: the target's pass over width + 1 tokens a row, acceptance, commit and the host's
    part; `draft`: all draft steps of that width, 0 at width 0. `growth`: seconds that one more
    token of context adds for each row to the target's pass and to each draft step. `acceptance`:
    the chance that a draft whose turn came stood while this was measured; None if nobody knows.
    `measured`: by `bass profile`; what a job has learnt on the side is not.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    verify: Grid
    draft: Grid
    context: float = 0.0
    growth: tuple[float, float] = (0.0, 0.0)
    acceptance: float | None = None
    measured: bool = True

    def seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """A whole round's seconds: `width` drafts for each of `rows` rows of this context (None:
        the grid's own)."""
        return self.verify_seconds(rows, width, context) + self.draft_seconds(rows, width, context)

    def verify_seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """The part that is not drafting."""
        return self._value(self.verify, rows, width) + self._grown(rows, context) * self.growth[0]

    def draft_seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """All draft steps of a round."""
        return (
            self._value(self.draft, rows, width)
            + self._grown(rows, context) * self.growth[1] * width
        )

    def digest(self) -> str:
        """Tells this surface from every other."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    def _grown(self, rows: int, context: float | None) -> float:
        """Tokens of context beyond the grid's own, of all rows; fewer may not make a round
        shorter than half."""
        return 0.0 if context is None else rows * max(context - self.context, -self.context / 2)

    def _value(self, grid: Grid, rows: int, width: int) -> float:
        """Linear between the points and beyond the last ones; a surface with one line knows
        nothing of other rows."""
        at, share = _between(self.rows, rows)
        left, right = _between(self.widths, width)
        lines = [_blend(line, left, right) for line in grid[at : at + 2]]
        return max(_blend(lines, 0, share), 0.0)


def make_surface(
    rows: Sequence[int],
    widths: Sequence[int],
    *,
    verify: Sequence[Sequence[float]],
    draft: Sequence[Sequence[float]],
    context: float = 0.0,
    growth: tuple[float, float] = (0.0, 0.0),
    acceptance: float | None = None,
    measured: bool = True,
) -> Surface:
    """A Surface of what was measured: more rows or a longer draft never take less time, whatever
    noise said."""
    return Surface(
        tuple(rows),
        tuple(widths),
        _rising(verify),
        _rising(draft),
        context,
        growth,
        acceptance,
        measured,
    )


def read_surface(text: str | bytes) -> Surface:
    """The Surface that `to_json` wrote. ValueError for anything else."""
    found = parse_object(text)
    if found.pop("format", None) != FORMAT:
        raise ValueError("of another format")
    try:
        surface = _typed(found)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a cost surface: {error}") from None
    _check(surface)
    return surface


def _typed(found: Mapping[str, Any]) -> Surface:
    def grid(key: str) -> Grid:
        return tuple(tuple(finite(value) for value in line) for line in found[key])

    verify, draft = found["growth"]
    acceptance = found["acceptance"]
    return Surface(
        tuple(whole(n) for n in found["rows"]),
        tuple(whole(n) for n in found["widths"]),
        grid("verify"),
        grid("draft"),
        finite(found["context"]),
        (finite(verify), finite(draft)),
        None if acceptance is None else finite(acceptance),
        truth(found["measured"]),
    )


def _check(surface: Surface) -> None:
    for name, axis, least in (("rows", surface.rows, 1), ("widths", surface.widths, 0)):
        if not axis or axis[0] < least or any(b <= a for a, b in itertools.pairwise(axis)):
            raise ValueError(f"{name} {list(axis)} are not rising numbers from {least} on")
    for grid in (surface.verify, surface.draft):
        if len(grid) != len(surface.rows) or any(len(line) != len(surface.widths) for line in grid):
            raise ValueError("a grid that does not fit its rows and widths")
        if not all(math.isfinite(value) and value >= 0 for line in grid for value in line):
            raise ValueError("seconds below 0")
    if not all(map(math.isfinite, (surface.context, *surface.growth))) or min(surface.growth) < 0:
        raise ValueError("a context or a growth that cannot be")
    if surface.acceptance is not None and not 0 <= surface.acceptance <= 1:
        raise ValueError("an acceptance that is no chance")
    if surface.verify[0][0] <= 0:
        raise ValueError("a pass of no time")


def _between(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The index of the point at or below a value and the share of the way to the next; beyond
    the last point it goes on as between the last two; before the first one it stays."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    at = min(bisect.bisect_right(axis, value), len(axis) - 1) - 1
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def _blend(line: Sequence[float], at: int, share: float) -> float:
    return (
        line[at]
        if share == 0 or at + 1 == len(line)
        else line[at] + share * (line[at + 1] - line[at])
    )


def _rising(grid: Sequence[Sequence[float]]) -> Grid:
    """The grid with what falls along an axis evened out."""
    lines = [_even(line) for line in grid]
    return tuple(zip(*(_even(column) for column in zip(*lines, strict=True)), strict=True))


def _even(line: Sequence[float]) -> list[float]:
    """Halfway between the largest value so far and the smallest one to come, which rises."""
    ahead = reversed(list(itertools.accumulate(reversed(line), min)))
    return [
        (high + low) / 2 for high, low in zip(itertools.accumulate(line, max), ahead, strict=True)
    ]
