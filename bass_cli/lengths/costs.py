"""The cost of a round by rows, draft length and context: a measured grid with interpolation, its
file format, and a filter that corrects it by observed rounds.

Profiles are stored surfaces: one JSON file for each device, pair, dtype and version, in the user's
cache folder. One that cannot be read or written is never an error: without a profile everything
works, only a little slower at first. Not here: how points are measured (run/profile.py), what
follows from the cost of a round (controllers.py).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from numpy.typing import NDArray

from bass_cli import __version__
from bass_cli.engine.contracts import DraftLength
from bass_cli.engine.graphs import ARITHMETIC, STEP
from bass_cli.io.cache import cache_folder, read_cached, write_cached
from bass_cli.reading import finite, parse_object, shown, truth, whole
from bass_cli.system.threads import most_threads

FORMAT = 1  # of the file; another one is not read
Grid = tuple[tuple[float, ...], ...]
Array = NDArray[numpy.float64]
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
        """Return the seconds of all draft steps of a round.

        A shorter context saves less in a shorter draft, so the result is the largest value of all
        widths up to this one. The value is linear between grid points, so these are enough.
        """
        shorter = (w for w in self.widths if w < width) if context is not None else ()
        return max(
            self._grown(self._value(self.draft, rows, w), rows, context, self.growth[1] * w)
            for w in (*shorter, width)
        )

    def digest(self) -> str:
        """Return a hash that identifies this surface."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the JSON text that `read_surface` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

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
    )


def read_surface(text: str | bytes) -> Surface:
    """Return the Surface that `to_json` wrote. ValueError, with the key, for anything else."""
    found = parse_object(text)
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
    made = asdict(make_surface(**asdict(surface)))
    for key, value in asdict(surface).items():
        if value != made[key]:
            raise ValueError(f"{key}: values are out of bounds, or fall with more rows or drafts")
    return surface


# Prior standard deviations (of logarithms) by whether the surface was measured: of each part, and
# of all parts together (a busy or throttled device).
_SPREAD = {True: (0.0, 0.15, 0.15), False: (0.0, 0.5, 1.0)}
_TOGETHER = {True: 0.1, False: 0.5}
_ANYTHING = 100.0  # prior variance if nothing was ever measured
_EXACT = 1e-9  # least variance of a choice's offset where lines are evened out
_STEPS = 0.05  # prior standard deviation of a choice's cost around the sum of its parts
_NOISE = 0.03  # relative noise of one round's seconds
# Process noise: each part, and all of them together, drift by 0.4 % a round.
_DRIFTED = 0.004**2 * (numpy.eye(3) + 1)
# An innovation above this many standard deviations means that an estimate is wrong or has changed.
_SURPRISE = 3.0
# Share of the squared innovation that is then added to the variance of all parts, and as much to
# the noise, because one slow round may be chance.
_SHARE = 0.25
_STUMBLE = math.log(2)  # a round counts as at most twice, or at least half, its predicted time
_ITERATED = 4  # linearisations of an update; a fifth would move the parts by less than 1 %
_ENOUGH = 8  # rounds of a row count that make its costs worth storing for another job
# The same as ARITHMETIC on a CPU. Measured with SmolLM2-135M on 2 cores: 3 tokens with the numbers
# of a GGUF file, 20 to 30 in float32. Jobs take the same time with any value between these.
_ON_CPU = 10.0


def arithmetic_of(device: torch.device) -> float:
    """Return about how many tokens' arithmetic in a pass takes as long as reading the weights."""
    return _ON_CPU if device.type == "cpu" else ARITHMETIC


class RoundCost:
    """Seconds of rounds for the draft lengths `choices` (rising, from 0).

    A round's cost is the sum of three parts: a plain pass, the pass over the drafts, and drafting.
    A Kalman filter tracks the logarithms of a correction factor for each part, so that observed
    sums correct the parts. Each choice's cost also has an offset from the sum by number of rows,
    because passes take steps (tiles of products) that three parts cannot follow.

    Args:
        surface: the first estimate. None: nothing is known before the first round.
        frozen: learn nothing, for maximal coupling. It needs a surface.
        at_once: one pass makes all drafts of a round.
        arithmetic: see arithmetic_of; for the estimate without a surface.
    """

    def __init__(
        self,
        choices: Sequence[int],
        surface: Surface | None,
        *,
        frozen: bool = False,
        at_once: bool = False,
        arithmetic: float = ARITHMETIC,
    ):
        assert surface is not None or not frozen
        self._choices, self._frozen = numpy.array(choices), frozen
        self.known = surface is not None
        self._surface = surface or _guess(at_once, arithmetic)
        self._factors, trust = numpy.ones(3), _SPREAD[self._surface.measured]
        # Covariance of their logarithms. The plain pass varies only together with the others.
        self._covariance: Array = numpy.diag(trust) ** 2 + _TOGETHER[self._surface.measured] ** 2
        if not self.known:
            self._covariance += _ANYTHING
        # By rows: offsets of the logarithms of costs, and their variances, [2, choices].
        self._offsets: dict[int, Array] = {}
        # By rows: seconds at the surface's context, and seconds for one more token of context.
        self._parts: dict[int, tuple[Array, Array]] = {}
        self._met: Counter[int] = Counter()  # rounds by rows
        self._checked = 0.0  # logarithm of the plain factor by plain rounds; the newest counts half
        # The first round is slower than all others (caches, libraries), so an unmeasured estimate
        # ignores it.
        self._first = not self._surface.measured

    def line(self, rows: int, context: float | None = None, *, free: bool = False) -> Array:
        """Return the seconds of rounds with each choice's drafts in `rows` rows of this context,
        [choices].

        It is called before every round and takes some microseconds.

        Args:
            free: the host has the drafts; the round makes none.
        """
        offset, variance = self._offset(rows)
        line = self._scaled(rows, context, free).sum(0) * numpy.exp(offset)
        return _evened(line, 1 / (variance + _EXACT))

    def learn(
        self,
        rows: int,
        width: int,
        seconds: float,
        context: float | None,
        *,
        free: bool = False,
        warm: bool = False,
    ) -> None:
        """Learn from a round that took `seconds`. Ignore times that are not above 0 and finite:
        the system clock was set or stood still.

        Args:
            warm: the round replayed a graph, so it was no slower than later ones, even if it is
                the first.
        """
        first, self._first = self._first and not warm, False
        if self._frozen or first or not 0 < seconds < math.inf:
            return
        self._met[rows] += 1
        place = int(abs(self._choices - width).argmin())
        parts = self._scaled(rows, context, free)[:, place]
        offset, own = self._offset(rows)[:, place]
        ratio = math.log(seconds) - math.log(float(parts.sum())) - offset
        most = _STUMBLE if self.known else _FURTHEST
        ratio = min(max(ratio, -most), most)
        if place == 0 or not self.known:
            factor = math.log(self._factors[0]) + ratio
            self._checked = (self._checked + factor) / 2 if self.known else factor
        moved, shares, off, noise = self._moved(parts, ratio, _NOISE**2 + own)
        if self.known and off * off > _SURPRISE**2 * (shares @ self._covariance @ shares + noise):
            noise = _SHARE * off * off + own
            self._covariance = self._covariance + noise
            moved, shares, off, noise = self._moved(parts, ratio, noise)
        seen = self._covariance @ shares
        gain = seen / (shares @ seen + noise)
        share = own / (shares @ seen + noise)
        self._offset(rows)[:, place] += share * off, -share * own
        moved = numpy.log(self._factors) + moved
        self._factors = numpy.exp(moved.clip(-_FURTHEST, _FURTHEST))
        self._covariance = self._covariance - numpy.outer(gain, seen) + _DRIFTED
        self.known = True

    def _moved(self, parts: Array, ratio: float, noise: float) -> tuple[Array, Array, float, float]:
        """Compute one update of the filter.

        A sum of exponentials is not linear: a part of which little is known may become most of a
        round, and is then a smaller surprise. So the sum is linearised again where each step leads
        (iterated extended Kalman filter).

        Args:
            parts: seconds of the parts of the round, as predicted.
            ratio: logarithm of measured over predicted seconds.

        Returns: the change of the factors' logarithms; the parts' shares of the round after it; the
            innovation there; the noise.
        """
        predicted, moved = math.log(float(parts.sum())), numpy.zeros(3)
        for _ in range(_ITERATED):
            there = parts * numpy.exp(moved)
            shares = there / there.sum()
            off = predicted + ratio - math.log(float(there.sum())) + float(shares @ moved)
            seen = self._covariance @ shares
            moved = seen / (shares @ seen + noise) * off
        return moved, shares, off, noise

    @property
    def unchecked(self) -> float:
        """Logarithm of the estimate of plain rounds over those measured. Rounds with drafts that
        take longer than predicted raise the estimate too."""
        return math.log(self._factors[0]) - self._checked

    def uncertainty(self, rows: int, place: int, context: float | None = None) -> float:
        """Return how much a plain round would reduce the uncertainty of this choice's cost relative
        to its own, as a standard deviation; at least `unchecked`. 0 if frozen."""
        if self._frozen:
            return 0.0
        parts = self._scaled(rows, context, False)[:, place]
        apart = parts / parts.sum() - (1.0, 0.0, 0.0)
        plain = self._covariance[0]
        gain = abs(float(apart @ plain)) / float(plain[0] + _NOISE**2) ** 0.5
        return max(abs(self.unchecked), gain)

    def spread(self, rows: int, place: int, context: float | None = None) -> Array:
        """Return how uncertain each choice's cost is relative to that of the choice at `place`,
        [choices]: standard deviations of logarithms. 0 if frozen."""
        if self._frozen:
            return numpy.zeros(len(self._choices))
        parts, (_, own) = self._scaled(rows, context, False), self._offset(rows)
        shares = parts / parts.sum(0)
        apart = shares - shares[:, place : place + 1]
        variance = (apart * (self._covariance @ apart)).sum(0) + own + own[place]
        variance[place] = 0.0
        found: Array = variance.clip(0.0) ** 0.5
        return found

    def surface(self, *, acceptance: float) -> Surface | None:
        """Return what was learnt for row counts that occurred often, and the estimates for fewer
        rows. None if the surface is a measured one, or no row count occurred often."""
        often = {rows for rows, times in self._met.items() if times >= _ENOUGH}
        if self._surface.measured or not often:
            return None
        most = max(often)
        rows = sorted(often | {2**power for power in range(most.bit_length()) if 2**power < most})
        drafts = [self._scaled(count, None, False)[2] for count in rows]
        lines = [self.line(count) for count in rows]
        return make_surface(
            rows,
            self._choices.tolist(),
            verify=[(line - draft).tolist() for line, draft in zip(lines, drafts, strict=True)],
            draft=[draft.tolist() for draft in drafts],
            acceptance=acceptance,
            measured=False,
        )

    def _offset(self, rows: int) -> Array:
        if rows not in self._offsets:
            spread = numpy.where(self._choices, 0.0 if self._frozen else _STEPS, 0.0)
            self._offsets[rows] = numpy.stack((0 * spread, spread**2))
        return self._offsets[rows]

    def _scaled(self, rows: int, context: float | None, free: bool) -> Array:
        """Return the seconds of the three parts, [3, choices]."""
        if rows not in self._parts:
            here, there = (self._at(rows, self._surface.context + more) for more in (0, 1))
            self._parts[rows] = here, there - here
        here, slope = self._parts[rows]
        if context is not None:
            here = numpy.maximum(here + slope * self._surface.further(context), here / 2)
            # A shorter context saves more in a longer draft, which still never costs less.
            here = numpy.maximum.accumulate(here, axis=1)
        return here * (self._factors * (1.0, 1.0, 0.0 if free else 1.0))[:, None]

    def _at(self, rows: int, context: float) -> Array:
        widths, surface = self._choices.tolist(), self._surface
        verify = numpy.array([surface.verify_seconds(rows, k, context) for k in widths])
        draft = numpy.array([surface.draft_seconds(rows, k, context) for k in widths])
        return numpy.stack((0 * verify + verify[0], (verify - verify[0]).clip(0.0), draft))


def _guess(at_once: bool, arithmetic: float) -> Surface:
    """Return costs in plain passes, for use before anything is measured."""
    return make_surface(
        (1, 2),
        (0, 1, 2),
        verify=[[1 + rows * tokens / arithmetic for tokens in (1, 2, 3)] for rows in (1, 2)],
        draft=[[0.0, STEP, STEP if at_once else 2 * STEP]] * 2,
        measured=False,
    )


# Bounds of plausible values: seconds of a round, seconds of a further token of context, tokens of
# context, rows and drafts. Sums of larger ones would lose precision.
_LEAST, _MOST, _MOST_GROWTH, _MOST_CONTEXT, _MOST_ROWS = 1e-7, 1e5, 1.0, 1e9, 1 << 20
_FURTHEST = 25.0  # the largest logarithm of a factor: a guess of 1 s may be off by 1e10


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

    return Surface(
        of("rows", lambda all_: tuple(whole(n, least=1, most=_MOST_ROWS) for n in all_)),
        of("widths", lambda all_: tuple(whole(n, most=_MOST_ROWS) for n in all_)),
        of("verify", grid),
        of("draft", grid),
        of("context", finite),
        of("growth", pair),
        of("acceptance", lambda value: None if value is None else _rate(value)),
        of("measured", truth),
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


def _evened(line: Array, weights: Array) -> Array:
    """Return the rising line that is closest to this one by weighted squares (isotonic regression,
    pooling adjacent violators)."""
    if (line[1:] >= line[:-1]).all():
        return line
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(line.tolist(), weights.tolist(), strict=True):
        block = value, weight, 1
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, length = blocks.pop()
            both = heavy + block[1]
            mean += (block[0] - mean) * block[1] / both
            block = mean, both, length + block[2]
        blocks.append(block)
    return numpy.repeat([mean for mean, _, _ in blocks], [length for *_, length in blocks])


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
    """Return the stored surface. None if there is none, or, after a note, if the file is not a
    valid one."""
    try:
        return read_surface(read_cached(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        note(f"{path}: this profile is ignored: {getattr(error, 'strerror', None) or error}")
        return None


def save_surface(path: Path, surface: Surface, note: Note) -> bool:
    """Store a surface, whole or not at all. Return False, after a note, if that fails."""
    try:
        write_cached(path, f"{surface.to_json()}\n".encode())
    except OSError as error:
        note(f"{path}: the profile could not be saved: {error.strerror}")
        return False
    return True


def keep_learnt(path: Path | None, lengths: DraftLength) -> None:
    """Store what a controller has learnt in a job, for the next job to begin from. A measured
    profile stays unchanged."""
    learnt = lengths.learned()
    if isinstance(learnt, Surface) and path is not None:
        save_surface(path, learnt, lambda note: None)


def _device_name(device: torch.device, threads: int | None) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {most_threads(threads)} threads"
