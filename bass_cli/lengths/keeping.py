"""What rows keep of their drafts: a rate for each row, a correction for each position, and how many
rounds follow from it.

A row's rate is its own trials' drawn towards the pool's, by as much as rows are alike (the
variance between them after DerSimonian and Laird, less a standard deviation). Not here: what a
round costs (costs.py), what is decided (goodput.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]

_MEMORY, _QUICK = 0.97, 0.6  # what a round weighs one round later: usually, and to notice a change
_CHANGED = 3.5  # standard deviations between the two that mean a change
_AFTER_CHANGE = 0.15  # what all that was known before it weighs then
_STALE = 8.0  # trials that what was known counts as when a probe comes after many plain rounds
_FIRM = 6.0  # survivors that the correction of a position must have seen to be half believed
# rounds at first after each of which corrections are computed, and then how often
_EAGER, _EVERY = (8, 4)
# rates of which the powers are kept
_GRID = numpy.array(
    [
        0.0,
        0.05,
        0.1,
        0.15,
        0.2,
        0.25,
        0.3,
        0.35,
        0.4,
        0.45,
        0.5,
        0.55,
        0.6,
        0.65,
        0.7,
        0.74,
        0.78,
        0.82,
        0.85,
        0.88,
        0.9,
        0.92,
        0.94,
        0.96,
        0.98,
        1.0,
    ]
)
_EDGES = (_GRID[1:] + _GRID[:-1]) / 2


class Keeping:
    """A trial is a draft whose turn came: those a row kept, and the first that it did not.
    `guess`: the rate before any, which counts as `strength` trials. `limit`: the longest draft
    that is ever asked about."""

    def __init__(self, *, limit: int, guess: float = 0.7, strength: float = 3.0):
        self._guess, self._strength = guess, strength
        self._kept = self._trials = self._quick_kept = self._quick_trials = 0.0
        self._samples: Sequence[Hashable] = ()
        self._row_kept, self._row_trials = numpy.zeros(0), numpy.zeros(0)
        self._powers: Array = _GRID[:, None] ** numpy.arange(limit + 1)  # [rates, limit + 1]
        # survivors by position: so many, expected
        self._seen, self._due = (numpy.zeros(limit + 1), numpy.zeros(limit + 1))
        # by rate, that a row keeps at least so many drafts, corrected: [rates, limit + 1]
        self._chances = self._powers
        # rounds a token: one over what a round brings, the target's own too
        self._rounds = 1.0 / self._chances.cumsum(1)
        self._rates: Array | None = None  # the rows', while nothing has changed
        self._observed = 0

    @property
    def trials(self) -> float:
        """How many have told of the rate, those of long ago for little."""
        return self._trials

    @property
    def rate(self) -> float:
        """The pool's: the chance that a draft whose turn comes is kept."""
        return (self._kept + self._strength * self._guess) / (self._trials + self._strength)

    def follow(self, samples: Sequence[Hashable]) -> None:
        """The rows of the next rounds, in order; a new one begins as the pool."""
        if samples == self._samples:
            return
        known = {sample: place for place, sample in enumerate(self._samples)}
        places = [known.get(sample, -1) for sample in samples]
        self._row_kept = numpy.append(self._row_kept, 0.0)[places]  # -1 is the 0 at the end
        self._row_trials = numpy.append(self._row_trials, 0.0)[places]
        self._samples, self._rates = samples, None

    def observe(self, accepted: Sequence[int], meant: Sequence[int]) -> None:
        """A round in which rows kept so many of that many drafts (some row had one); those
        beyond tell nothing."""
        drafts = numpy.array(meant, dtype=numpy.float64)
        kept: Array = numpy.minimum(numpy.array(accepted, dtype=numpy.float64), drafts)
        trials = numpy.minimum(kept + 1, drafts)
        more, tried = float(kept.sum()), float(trials.sum())
        self._quick_kept, self._quick_trials = (
            _QUICK * self._quick_kept + more,
            _QUICK * self._quick_trials + tried,
        )
        self._kept, self._trials = _MEMORY * self._kept + more, _MEMORY * self._trials + tried
        if len(kept) == len(self._row_kept):
            self._row_kept, self._row_trials = (
                _MEMORY * self._row_kept + kept,
                _MEMORY * self._row_trials + trials,
            )
        if self._has_changed():
            self._forget(_AFTER_CHANGE)
            self._kept, self._trials = self._quick_kept, self._quick_trials
        self._rates = self._rates_now()
        self._count(kept, drafts)
        self._observed += 1
        if self._observed <= _EAGER or self._observed % _EVERY == 0:
            self._chances = self._powers * self._corrections()
            self._rounds = 1.0 / self._chances.cumsum(1)

    def doubt(self) -> None:
        """What is known is old: the next round is to count for more than it."""
        if self._trials > _STALE:
            self._forget(_STALE / self._trials)

    def rounds(self, rooms: Sequence[float] = ()) -> Array:
        """By draft length, [limit + 1]: rounds that a token takes, over the rows' tokens.
        `rooms`: what each row has left (all alike if not given). A row that keeps little takes
        most of the rounds, so the mean is of rounds for a token, not of tokens a round."""
        if not len(self._row_kept):
            alike: Array = self._rounds[_EDGES.searchsorted(self.rate)]
            return alike
        weights = numpy.array(rooms) if len(rooms) == len(self._row_kept) else None
        if self._rates is None:
            self._rates = self._rates_now()
        of_rates = numpy.bincount(
            _EDGES.searchsorted(self._rates), weights=weights, minlength=len(_GRID)
        )
        found: Array = of_rates @ self._rounds / max(float(of_rates.sum()), 1e-9)
        return found

    def tokens(self, counts: Sequence[int]) -> Array:
        """By draft length, [max(counts) + 1]: tokens that a round brings on average over rows
        that have so many drafts each. Who has them changes from round to round, so here the mean
        is of tokens."""
        most = max(counts)
        if len(counts) != len(self._row_kept):
            chances = self._chances[
                _EDGES.searchsorted(numpy.full(len(counts), self.rate)), : most + 1
            ]
        else:
            if self._rates is None:
                self._rates = self._rates_now()
            chances = self._chances[_EDGES.searchsorted(self._rates), : most + 1]
        found: Array = (
            (chances * (numpy.array(counts)[:, None] >= numpy.arange(most + 1))).mean(0).cumsum()
        )
        return found

    def _has_changed(self) -> bool:
        if self._quick_trials < 6 or self._trials < 2 * self._quick_trials:
            return False
        rate = min(max(self.rate, 0.1), 0.9)  # with few trials, rare events are no change
        off = self._quick_kept / self._quick_trials - self.rate
        return off * off * self._quick_trials > _CHANGED**2 * rate * (1 - rate)

    def _forget(self, share: float) -> None:
        self._kept, self._trials = share * self._kept, share * self._trials
        self._row_kept, self._row_trials = share * self._row_kept, share * self._row_trials
        self._seen, self._due = share * self._seen, share * self._due

    def _rates_now(self) -> Array:
        """Each row's rate."""
        rate, trials = self.rate, self._row_trials
        if len(trials) < 2:
            return numpy.full(len(trials), rate)
        total = float(trials.sum())
        # of each row, trials times its distance from the pool
        apart = self._row_kept - rate * trials
        noise = rate * (1 - rate) + 1e-6
        others = len(trials) - 1  # degrees of freedom
        spread = (
            float((apart * apart / (trials + 1e-9)).sum()) / noise - others - (2 * others) ** 0.5
        )
        if spread <= 0:
            return numpy.full(len(trials), rate)
        # in units of the noise of one trial
        between = spread / (total - float(trials @ trials) / total + 1e-9)
        return numpy.clip(rate + apart * between / (trials * between + 1), 0.0, 1.0)

    def _count(self, kept: Array, drafts: Array) -> None:
        """By position: how many rows got there, and how many of those that had a draft there
        their rates let expect."""
        width = int(drafts.max())
        got = numpy.bincount(kept.astype(numpy.int64), minlength=width + 1)[::-1].cumsum()[::-1]
        rates = self._rates
        if rates is None or len(rates) != len(kept):
            rates = numpy.full(len(kept), self.rate)
        had = drafts[:, None] >= numpy.arange(width + 1)
        due = (self._powers[_EDGES.searchsorted(rates), : width + 1] * had).sum(0)
        self._seen *= _MEMORY
        self._due *= _MEMORY
        self._seen[: width + 1] += got
        self._due[: width + 1] += due

    def _corrections(self) -> Array:
        """By position, what was seen over what was expected; as at the last one where nothing
        was seen."""
        found, last = [1.0], 1.0
        for seen, due in zip(self._seen[1:].tolist(), self._due[1:].tolist(), strict=True):
            last = (seen + _FIRM * last) / (due + _FIRM)
            found.append(last)
        return numpy.array(found)
