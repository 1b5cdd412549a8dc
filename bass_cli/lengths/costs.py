"""The cost of a round, learnt while a job runs: a filter that corrects a surface (surface.py) by
observed rounds.

Not here: what follows from the cost of a round (goodput.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray

from bass_cli.engine.graphs import ARITHMETIC, STEP
from bass_cli.lengths.surface import Surface, make_surface

Array = NDArray[numpy.float64]

# Prior standard deviations (of logarithms) of each part, and of all parts together (a busy or
# throttled device): of a measured surface, of one that an earlier job has learnt, and of a guess.
_MEASURED = ((0.0, 0.15, 0.15), 0.1)
_LEARNT = ((0.0, 0.2, 0.4), 0.2)
_GUESSED = ((0.0, 0.5, 1.0), 0.5)
_UNKNOWN_VARIANCE = 100.0  # prior variance if nothing was ever measured
_MIN_VARIANCE = 1e-9  # least variance of a choice's offset where lines are evened out
# Prior standard deviation of a choice's cost around the sum of its parts; less if an earlier job
# has learnt it.
_OFFSET_SPREAD, _LEARNT_OFFSET_SPREAD = 0.05, 0.025
_NOISE = 0.03  # relative noise of one round's seconds
# Process noise: each part, and all of them together, drift by 0.4 % a round.
_DRIFTED = 0.004**2 * (numpy.eye(3) + 1)
# An innovation above this many standard deviations means that an estimate is wrong or has changed.
_SURPRISE = 3.0
# Share of the squared innovation that is then added to the variance of all parts, and as much to
# the noise, because one slow round may be chance.
_SURPRISE_SHARE = 0.25
# A round counts as at most twice, or at least half, its predicted time.
_MAX_LOG_RATIO = math.log(2)
_LINEARISATIONS = 4  # linearisations of an update; a fifth would move the parts by less than 1 %
_MAX_LOG_FACTOR = 25.0  # the largest logarithm of a factor: a guess of 1 s may be off by 1e10
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
        self.known, self._guessed = surface is not None, surface is None
        self._surface = surface or _guess(at_once, arithmetic)
        learnt = _MEASURED if self._surface.measured else _LEARNT
        parts, together = learnt if self.known else _GUESSED
        self._offset_spread = (
            _LEARNT_OFFSET_SPREAD if self.known and learnt is _LEARNT else _OFFSET_SPREAD
        )
        self._factors = numpy.ones(3)
        # Covariance of their logarithms. The plain pass varies only together with the others.
        self._covariance: Array = numpy.diag(parts) ** 2 + together**2
        if not self.known:
            self._covariance += _UNKNOWN_VARIANCE
        # By rows: choices that earlier jobs have measured.
        self._tried = dict(zip(self._surface.rows, self._surface.tried, strict=False))
        # By rows: offsets of the logarithms of costs, and their variances, [2, choices].
        self._offsets: dict[int, Array] = {}
        # By rows: seconds at the surface's context, and seconds for one more token of context.
        self._surface_parts: dict[int, tuple[Array, Array]] = {}
        self._rounds_by_rows: Counter[int] = Counter()  # rounds by rows
        self._factors_by_rows: dict[int, Array] = {}  # the factors after the last round, by rows
        self._plain_by_rows: dict[int, float] = {}  # the same as `_plain_log_factor`, by rows
        # Logarithm of the plain factor by plain rounds, of which the newest counts half.
        self._plain_log_factor = 0.0
        # The first round is slower than all others (caches, libraries), so an unmeasured estimate
        # ignores it.
        self._first = not self._surface.measured

    def round_seconds(
        self, rows: int, context: float | None = None, *, free: bool = False
    ) -> Array:
        """Return the seconds of rounds with each choice's drafts in `rows` rows of this context,
        [choices].

        It is called before every round and takes some microseconds. A choice that was never
        measured with so many rows never costs less than a shorter one. Measured ones may: a pass
        of more tokens may have faster products.

        Args:
            free: the host has the drafts; the round makes none.
        """
        offset, variance = self._offset(rows)
        line: Array = self._part_seconds(rows, context, free).sum(0) * numpy.exp(offset)
        return numpy.where(
            self.measured(rows), line, _isotonic(line, 1 / (variance + _MIN_VARIANCE))
        )

    def measured(self, rows: int) -> NDArray[numpy.bool_]:
        """Return which choices but plain decoding were measured with so many rows, [choices]."""
        own = self._offset(rows)[1]
        return (own > 0) & (own < self._offset_spread**2)

    def tried(self, rows: int) -> NDArray[numpy.bool_]:
        """Return the same, [choices], those included that earlier jobs of the pair measured."""
        return self.measured(rows) | numpy.isin(self._choices, self._tried.get(rows, ()))

    def optimistic_seconds(
        self, rows: int, choice: int, line: Array, context: float | None
    ) -> Array:
        """Return the seconds of rounds if verifying more drafts than those of `choice` took no
        longer, [choices]. `line`: the estimates."""
        draft = self._part_seconds(rows, context, False)[2]
        return numpy.minimum(line, line[choice] + draft - draft[choice])

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
        self._rounds_by_rows[rows] += 1
        choice = int(abs(self._choices - width).argmin())
        parts = self._part_seconds(rows, context, free)[:, choice]
        offset, own = self._offset(rows)[:, choice]
        ratio = math.log(seconds) - math.log(float(parts.sum())) - offset
        most = _MAX_LOG_RATIO if self.known else _MAX_LOG_FACTOR
        ratio = min(max(ratio, -most), most)
        if choice == 0 or not self.known:
            factor = math.log(self._factors[0]) + ratio
            self._plain_log_factor = (self._plain_log_factor + factor) / 2 if self.known else factor
            if choice == 0:
                self._plain_by_rows[rows] = (self._plain_by_rows.get(rows, factor) + factor) / 2
        moved, shares, innovation, noise = self._update_of_factors(parts, ratio, _NOISE**2 + own)
        if self.known and innovation * innovation > _SURPRISE**2 * (
            shares @ self._covariance @ shares + noise
        ):
            noise = _SURPRISE_SHARE * innovation * innovation + own
            self._covariance = self._covariance + noise
            moved, shares, innovation, noise = self._update_of_factors(parts, ratio, noise)
        seen = self._covariance @ shares
        gain = seen / (shares @ seen + noise)
        share = own / (shares @ seen + noise)
        self._offset(rows)[:, choice] += share * innovation, -share * own
        moved = numpy.log(self._factors) + moved
        self._factors = numpy.exp(moved.clip(-_MAX_LOG_FACTOR, _MAX_LOG_FACTOR))
        self._covariance = self._covariance - numpy.outer(gain, seen) + _DRIFTED
        self.known, self._factors_by_rows[rows] = True, self._factors

    def _update_of_factors(
        self, parts: Array, ratio: float, noise: float
    ) -> tuple[Array, Array, float, float]:
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
        for _ in range(_LINEARISATIONS):
            there = parts * numpy.exp(moved)
            shares = there / there.sum()
            innovation = predicted + ratio - math.log(float(there.sum())) + float(shares @ moved)
            seen = self._covariance @ shares
            moved = seen / (shares @ seen + noise) * innovation
        return moved, shares, innovation, noise

    @property
    def unchecked(self) -> float:
        """Logarithm of the estimate of plain rounds over those measured. Rounds with drafts that
        take longer than predicted raise the estimate too."""
        return math.log(self._factors[0]) - self._plain_log_factor

    def uncertainty(self, rows: int, choice: int, context: float | None = None) -> float:
        """Return how much a plain round would reduce the uncertainty of this choice's cost relative
        to its own, as a standard deviation; at least `unchecked`. 0 if frozen."""
        if self._frozen:
            return 0.0
        parts = self._part_seconds(rows, context, False)[:, choice]
        apart = parts / parts.sum() - (1.0, 0.0, 0.0)
        plain = self._covariance[0]
        gain = abs(float(apart @ plain)) / float(plain[0] + _NOISE**2) ** 0.5
        return max(abs(self.unchecked), gain)

    def spread(self, rows: int, choice: int, context: float | None = None) -> Array:
        """Return how uncertain each choice's cost is relative to that of `choice`,
        [choices]: standard deviations of logarithms. 0 if frozen."""
        if self._frozen:
            return numpy.zeros(len(self._choices))
        parts, (_, own) = self._part_seconds(rows, context, False), self._offset(rows)
        shares = parts / parts.sum(0)
        apart = shares - shares[:, choice : choice + 1]
        variance = (apart * (self._covariance @ apart)).sum(0) + own + own[choice]
        variance[choice] = 0.0
        found: Array = variance.clip(0.0) ** 0.5
        return found

    def surface(self, *, acceptance: float) -> Surface | None:
        """Return what was learnt for row counts that occurred often, the estimates for fewer
        rows, and what earlier jobs have learnt for more rows. None if the surface is a measured
        one, or no row count occurred often."""
        often = {rows for rows, times in self._rounds_by_rows.items() if times >= _ENOUGH}
        if self._surface.measured or not often:
            return None
        most = max(often)
        fewer = {2**power for power in range(most.bit_length()) if 2**power < most}
        more = set() if self._guessed else {count for count in self._surface.rows if count > most}
        rows = sorted(often | fewer | more)
        drafts, lines, now = [], [], self._factors
        for count in rows:
            # Other numbers of rows, such as the few at the end of a job, have moved the factors.
            self._factors = self._factors_by_rows.get(count, now)
            drafts.append(self._part_seconds(count, None, False)[2])
            lines.append(self.round_seconds(count))
            # Rounds with drafts, and plain ones of other rows, say little about plain rounds.
            if count in self._plain_by_rows or not self._guessed:
                lines[-1][0] *= math.exp(self._plain_by_rows.get(count, 0.0)) / self._factors[0]
        self._factors = now
        return make_surface(
            rows,
            self._choices.tolist(),
            verify=[(line - draft).tolist() for line, draft in zip(lines, drafts, strict=True)],
            draft=[draft.tolist() for draft in drafts],
            acceptance=acceptance,
            measured=False,
            tried=[self._choices[self.tried(count)].tolist() for count in rows],
        )

    def _offset(self, rows: int) -> Array:
        if rows not in self._offsets:
            spread = numpy.where(self._choices, 0.0 if self._frozen else self._offset_spread, 0.0)
            self._offsets[rows] = numpy.stack((0 * spread, spread**2))
        return self._offsets[rows]

    def _part_seconds(self, rows: int, context: float | None, free: bool) -> Array:
        """Return the seconds of the three parts, [3, choices]."""
        if rows not in self._surface_parts:
            here, there = (self._at(rows, self._surface.context + more) for more in (0, 1))
            self._surface_parts[rows] = here, there - here
        here, slope = self._surface_parts[rows]
        if context is not None:
            here = numpy.maximum(here + slope * self._surface.further(context), here / 2)
            # A shorter context saves more in a longer draft, which still never costs less.
            here = numpy.maximum.accumulate(here, axis=1)
        return here * (self._factors * (1.0, 1.0, 0.0 if free else 1.0))[:, None]

    def _at(self, rows: int, context: float) -> Array:
        widths, surface = self._choices.tolist(), self._surface
        verify = numpy.array([surface.verify_seconds(rows, k, context) for k in widths])
        draft = numpy.array(surface.draft_line(rows, widths, context))
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


def _isotonic(line: Array, weights: Array) -> Array:
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
