"""The cost of a round by rows, draft length and context: a measured grid with interpolation, and
its file format.

Profiles are stored surfaces: one JSON file for each device, pair, dtype and version, in the user's
cache folder. One that cannot be read or written is never an error: without a profile everything
works, only a little slower at first. Not here: how points are measured (run/profile.py), how
observed rounds correct them (costs.py).
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

from bass_cli import __version__
from bass_cli.engine.contracts import DraftLength
from bass_cli.io.cache import cache_folder, read_cached, write_cached
from bass_cli.reading import finite, parse_object, shown, truth, whole
from bass_cli.system.threads import most_threads

FORMAT = 1  # of the file; another one is not read
# See is_plausible. Of 89 profiles that jobs had learnt on 2 cores, 86 had at most 1.23. Three, of
# jobs beside much other work, had 10 to 44.
_MOST_PLAIN_PASSES = 2.0
Grid = tuple[tuple[float, ...], ...]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds of rounds on a grid of `rows` x `widths` (live rows, drafts of each row), with all
    rows about `context` tokens long.

    verify: seconds of the target's pass over width + 1 tokens of each row, acceptance, commit and
        the host's work.
    draft: seconds of all draft steps; 0 at width 0.
    growth: seconds that one more token of context adds for each row, to the target's pass and to
        each draft step.
    acceptance: the acceptance rate during the measurement; None if unknown.
    measured: whether `bass profile` measured it; False if a job has learnt it.
    tried: by row count, the widths that jobs have measured; empty if unknown.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    verify: Grid
    draft: Grid
    context: float = 0.0
    growth: tuple[float, float] = (0.0, 0.0)
    acceptance: float | None = None
    measured: bool = True
    tried: tuple[tuple[int, ...], ...] = ()

    def seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """Return the seconds of a round with `width` drafts for each of `rows` rows.

        More rows, longer drafts and a longer context never cost less. A shorter context never costs
        less than half.

        Args:
            context: tokens of each row. None: the grid's own.
        """
        return self.verify_seconds(rows, width, context) + self.draft_seconds(rows, width, context)

    def verify_seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """Return the seconds of a round without drafting."""
        return self._grown(self._value(self.verify, rows, width), rows, context, self.growth[0])

    def draft_seconds(self, rows: int, width: int, context: float | None = None) -> float:
        """Return the seconds of all draft steps of a round."""
        return self.draft_line(rows, (width,), context)[0]

    def draft_line(
        self, rows: int, widths: Sequence[int], context: float | None = None
    ) -> list[float]:
        """Return the seconds of all draft steps of rounds of these widths, which rise.

        A shorter context saves less in a shorter draft, so a result is the largest value of all
        widths up to it. The value is linear between grid points, so these are enough.
        """
        grid = self.widths if context is not None else ()
        found, most = dict[int, float](), 0.0
        for width in sorted({*widths, *(w for w in grid if w < widths[-1])}):
            value = self._value(self.draft, rows, width)
            most = max(most, self._grown(value, rows, context, self.growth[1] * width))
            found[width] = most
        return [found[width] for width in widths]

    def digest(self) -> str:
        """Return a hash that identifies this surface."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the JSON text that `read_surface` reads."""
        found = {"format": FORMAT, **asdict(self)}
        if not self.tried:  # a file of an older version keeps its digest
            del found["tried"]
        return json.dumps(found, sort_keys=True)

    def _grown(self, value: float, rows: int, context: float | None, growth: float) -> float:
        """Add what `rows` rows of another context cost, at `growth` seconds a token."""
        if context is None:
            return value
        return max(value + rows * self.further(context) * growth, value / 2)

    def further(self, context: float) -> float:
        """Return by how many tokens a context exceeds the grid's own; at the least minus half of
        it."""
        return max(context - self.context, -self.context / 2)

    def _value(self, grid: Grid, rows: int, width: int) -> float:
        """Interpolate a grid: linear between its points and beyond the last ones.

        What one more draft adds is extrapolated, not the sum: each part is at least 0 and never
        falls beyond the last row. A plane through the last points could fall below 0 there. Before
        the first points, and where there is one line only, the value stays as it is.
        """
        at, share = _between(self.rows, rows)
        low, high = grid[at], grid[min(at + 1, len(grid) - 1)]
        found = _onward(low[0], high[0], share)
        for i, (left, right) in enumerate(itertools.pairwise(self.widths)):
            part = min(width - left, right - left) / (right - left)
            if part <= 0:
                break
            found += part * _onward(low[i + 1] - low[i], high[i + 1] - high[i], share)
        if width > self.widths[-1] and len(self.widths) > 1:
            # The steepest end of all lines up to these rows, so that more rows never cost less.
            ends = [line[-1] - line[-2] for line in grid[: at + 2]]
            further = (width - self.widths[-1]) / (self.widths[-1] - self.widths[-2])
            found += further * _onward(max(ends[: at + 1]), max(ends), share)
        return found


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
    tried: Sequence[Sequence[int]] = (),
) -> Surface:
    """Make a Surface of what was measured.

    More rows or a longer draft never take less time, whatever was measured, and all values are
    within the bounds that `read_surface` accepts. `widths` begin at 0, where drafting takes no
    time.
    """
    assert widths[0] == 0
    draft = [[0.0, *line[1:]] for line in draft]
    return Surface(
        tuple(rows),
        tuple(widths),
        _rising(_bounded(verify, _LEAST)),
        _rising(_bounded(draft, 0.0)),
        min(max(context, 0.0), _MOST_CONTEXT),
        (min(max(growth[0], 0.0), _MOST_GROWTH), min(max(growth[1], 0.0), _MOST_GROWTH)),
        acceptance,
        measured,
        tuple(tuple(line) for line in tried),
    )


def read_surface(text: str | bytes) -> Surface:
    """Return the Surface that `to_json` wrote. ValueError, with the key, for anything else."""
    found = {"tried": ()} | parse_object(text)  # files of older versions have none
    if found.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    surface = _typed(found)
    rows, widths = surface.rows, surface.widths
    if not rows:
        raise ValueError("rows: at least one number is needed")
    if widths[:1] != (0,):
        raise ValueError("widths: the first one must be 0")
    for key, axis in (("rows", rows), ("widths", widths)):
        if any(b <= a for a, b in itertools.pairwise(axis)):
            raise ValueError(f"{key}: the numbers do not increase")
    for key, grid in (("verify", surface.verify), ("draft", surface.draft)):
        if [len(line) for line in grid] != [len(widths)] * len(rows):
            raise ValueError(
                f"{key}: it needs a line for each number in rows, with a number for each width"
            )
    if surface.tried and len(surface.tried) != len(rows):
        raise ValueError("tried: it needs a list for each number in rows")
    made = asdict(make_surface(**asdict(surface)))
    for key, value in asdict(surface).items():
        if value != made[key]:
            raise ValueError(f"{key}: values are out of bounds, or fall with more rows or drafts")
    return surface


# Bounds of plausible values: seconds of a round, seconds of a further token of context, tokens of
# context, rows and drafts. Sums of larger ones would lose precision.
_LEAST, _MOST, _MOST_GROWTH, _MOST_CONTEXT, _MOST_ROWS = 1e-7, 1e5, 1.0, 1e9, 1 << 20


def _typed(found: Mapping[str, Any]) -> Surface:
    """Return the Surface of these values. ValueError if one is missing or has the wrong type."""

    def of(key: str, read: Callable[[Any], _Value]) -> _Value:
        if key not in found:
            raise ValueError(f"{key} is missing")
        try:
            return read(found[key])
        except TypeError:
            raise ValueError(
                f"{key}: lists of numbers are needed, not {shown(found[key])}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def grid(lines: Any) -> Grid:
        return tuple(tuple(finite(value) for value in line) for line in lines)

    def pair(values: Any) -> tuple[float, float]:
        numbers = [finite(value) for value in values]
        if len(numbers) != 2:
            raise ValueError(f"two numbers are needed, not {shown(values)}")
        return numbers[0], numbers[1]

    count = functools.partial(whole, most=_MOST_ROWS)
    return Surface(
        of("rows", lambda all_: tuple(count(n, least=1) for n in all_)),
        of("widths", lambda all_: tuple(map(count, all_))),
        of("verify", grid),
        of("draft", grid),
        of("context", finite),
        of("growth", pair),
        of("acceptance", lambda value: None if value is None else _rate(value)),
        of("measured", truth),
        of("tried", lambda lines: tuple(tuple(map(count, line)) for line in lines)),
    )


def _rate(value: Any) -> float:
    if finite(value, least=0.0) > 1:
        raise ValueError(f"a number from 0 to 1 is needed, not {shown(value)}")
    return float(value)


def _between(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Return the index of the point at or below a value, and the share of the way to the next.
    Beyond the last point the share exceeds 1; before the first one it is 0."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    at = min(bisect.bisect_right(axis, value), len(axis) - 1) - 1
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def _onward(low: float, high: float, share: float) -> float:
    """Go `share` of the way from one value to the next; beyond the next, never down."""
    if share == 0:
        return low
    return low + min(share, 1.0) * (high - low) + max(share - 1.0, 0.0) * max(high - low, 0.0)


def _bounded(grid: Sequence[Sequence[float]], least: float) -> list[list[float]]:
    """Replace values that are not numbers or outside the bounds by the nearest bound."""
    found = numpy.nan_to_num(numpy.array(grid, dtype=numpy.float64), nan=least)
    bounded: list[list[float]] = found.clip(least, _MOST).tolist()
    return bounded


def _rising(grid: Sequence[Sequence[float]]) -> Grid:
    """Return the grid with all falls along both axes evened out."""
    lines = [_even(line) for line in grid]
    return tuple(zip(*(_even(column) for column in zip(*lines, strict=True)), strict=True))


def _even(line: Sequence[float]) -> list[float]:
    """Return the mean of the largest value so far and the smallest one to come, which rises."""
    ahead = reversed(list(itertools.accumulate(reversed(line), min)))
    return [
        (high + low) / 2 for high, low in zip(itertools.accumulate(line, max), ahead, strict=True)
    ]


Note = Callable[[str], None]
_MOST_BYTES = 1 << 20  # a profile has a few thousand


def profile_folder() -> Path:
    """Return the folder `profiles` in the cache folder."""
    return cache_folder() / "profiles"


def profile_path(
    *,
    target: str,
    draft: str,
    device: torch.device,
    dtype: str,
    kv_dtype: str = "auto",
    threads: int | None = None,
    ranks: int = 1,
) -> Path:
    """Return the file for two models (their fingerprints), a device or `ranks` of them, a dtype and
    the present versions.

    Coupling and sampling are not part of it: their cost is nearly the same. Nor is other load on
    the machine.

    Args:
        kv_dtype: as in the job.
        threads: CPU threads as requested; None: the default.
    """
    identity = [_device_name(device, threads), target, draft, dtype, __version__, torch.__version__]
    if kv_dtype != "auto":  # files of older versions have none
        identity.append(f"keys and values in {kv_dtype}")
    if ranks > 1:
        identity.append(f"{ranks} ranks")
    return (
        profile_folder() / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"
    )


def load_surface(path: Path, note: Note) -> Surface | None:
    """Return the stored surface. None if there is none, if a job has learnt it beside other work
    (`is_plausible`), or, after a note, if the file is not a valid one."""
    try:
        surface = read_surface(read_cached(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        note(f"{path}: this profile is ignored: {getattr(error, 'strerror', None) or error}")
        return None
    return surface if surface.measured or is_plausible(surface) else None


def is_plausible(surface: Surface) -> bool:
    """Return whether no round takes more than _MOST_PLAIN_PASSES plain passes for each of its
    tokens and drafts.

    Otherwise most of it was learnt while the machine was busy, and plain passes while it was not.
    Drafts would then seem to cost so much that no later job tried them, and nothing would correct
    it.
    """
    passes = 1 + 2 * numpy.array(surface.widths)
    verify = numpy.array(surface.verify)
    rounds = verify + numpy.array(surface.draft)
    return bool((rounds <= _MOST_PLAIN_PASSES * passes * verify[:, :1]).all())


def save_surface(path: Path, surface: Surface, note: Note) -> bool:
    """Store a surface, whole or not at all. Return False, after a note, if that fails."""
    try:
        write_cached(path, f"{surface.to_json()}\n".encode())
    except OSError as error:
        note(f"{path}: the profile could not be saved: {error.strerror}")
        return False
    return True


def keep_learnt(path: Path | None, lengths: DraftLength) -> None:
    """Store what a controller has learnt in a job, for the next job to begin from, if it is
    plausible. A measured profile stays unchanged, also one that was made during the job."""
    learnt = lengths.learned()
    if not isinstance(learnt, Surface) or path is None or not is_plausible(learnt):
        return
    stored = load_surface(path, lambda note: None)
    if stored is None or not stored.measured:
        save_surface(path, learnt, lambda note: None)


def _device_name(device: torch.device, threads: int | None) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {most_threads(threads)} threads"
