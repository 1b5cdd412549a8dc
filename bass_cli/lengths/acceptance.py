"""Estimate the acceptance rate: one pooled rate, how rows and positions differ from it, and the
rounds that a token takes.

Not here: what a round costs (costs.py), choosing a draft length (goodput.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy
from numpy.typing import NDArray

from bass_cli.engine.contracts import SkippedDrafts

Array = NDArray[numpy.float64]

_UNKNOWN = (0.7, 3.0)  # prior rate and its weight in trials
# Bounds for a profile's rate as prior, and its weight.
_MIN_RATE, _MAX_RATE, _PROFILE_WEIGHT = 0.5, 0.85, 5.0
_FEW_TRIALS = 12.0  # below this many trials the rate is hardly known
_MEMORY, _FAST_MEMORY = 0.97, 0.6  # decay a round of the slow average, and of the fast one
_CHANGED = 3.5  # standard deviations between the two averages that mean a change
_MIN_TRIALS = 6  # trials in the fast average needed to detect a change
_CHANGE_WEIGHT = 0.15  # weight of what is known about rows and positions after a change
_RENEWED = 0.2  # share of the past that a whole new batch of rows replaces
# Plain rounds age knowledge down to this many trials, so that a probe outweighs it.
_STALE_TRIALS = 8.0
_POSITION_WEIGHT = 6.0  # trials at a position after which half of its deviation is used
_GAIN_MEMORY = 0.05  # moving average of the gain by choosing drafts: about twenty rounds count


class Acceptance:
    """The estimated acceptance rates. A trial is a draft that is compared with the target's token:
    the accepted drafts of a row, and its first rejected one.

    Args:
        limit: the longest draft.
        known: the rate in a profile, measured on other text.
    """

    def __init__(self, limit: int, known: float | None = None):
        self._prior_rate, self._prior_weight = _UNKNOWN
        if known is not None:
            self._prior_rate = min(max(known, _MIN_RATE), _MAX_RATE)
            self._prior_weight = _PROFILE_WEIGHT
        self._slow_average = self._fast_average = (0.0, 0.0)  # accepted, trials
        # Accepted and trials of rows that have ended, and of the live ones.
        self._past, self._current = numpy.zeros(2), numpy.zeros(2)
        self._recalled = False  # whether skipped drafts are reported
        self._samples: Sequence[Hashable] = ()
        self._rows = numpy.zeros((2, 0))  # by row: accepted, trials
        # By position: accepted beyond what the rows' rates predict; trials.
        self._by_position = numpy.zeros((2, limit))
        # Tokens of a round with chosen drafts, over what the rates predict for as many drafts of
        # each row.
        self._gain = 1.0

    @property
    def trials(self) -> float:
        """Effective number of trials behind the rate; old ones count less."""
        return self._slow_average[1]

    @property
    def unsure(self) -> bool:
        """Whether the next trials may say more than all before."""
        return self.trials < _FEW_TRIALS

    @property
    def rate(self) -> float:
        """The pooled rate: the probability that a draft is accepted if all before it are."""
        successes, trials = self._slow_average
        return (successes + self._prior_weight * self._prior_rate) / (trials + self._prior_weight)

    def follow(self, samples: Sequence[Hashable]) -> None:
        """Set the rows of the next rounds, in order. A new row starts from the average of
        earlier rows."""
        if samples == self._samples:
            return
        known = {sample: index for index, sample in enumerate(self._samples)}
        indices = [known.get(sample, -1) for sample in samples]
        self._renew(indices.count(-1) / len(indices))
        # The zeros appended at the end are index -1: new rows.
        self._rows = numpy.append(self._rows, numpy.zeros((2, 1)), 1)[:, indices]
        self._samples = samples

    def _renew(self, new: float) -> None:
        """Note that the share `new` of the rows is new. To that extent the pool is reset to the
        average of all earlier rows, because the latest ones may have had other text."""
        self._past *= 1 - _RENEWED * new
        self._past += new * self._current
        self._current *= 1 - new
        successes, trials = self._past
        if trials:
            became = self.trials * float(successes / trials)
            accepted = self._slow_average[0]
            self._slow_average = (accepted + new * (became - accepted), self.trials)

    def recall(self, skipped: SkippedDrafts | None) -> None:
        """Learn from drafts that verification skipped. If plain rounds report such drafts,
        knowledge does not age in them."""
        if skipped is not None:
            self._recalled = True
            self.observe(*skipped, live=False)

    def observe(
        self, accepted: Sequence[int], num_drafts: Sequence[int], *, live: bool = True
    ) -> None:
        """Learn from a round in which rows accepted these of their drafts. At least one row had a
        draft.

        Args:
            live: whether these are the rows set by `follow`, in order.
        """
        drafts = numpy.array(num_drafts, dtype=numpy.float64)
        successes = numpy.minimum(accepted, drafts)
        trials = numpy.minimum(successes + 1, drafts)
        now = float(successes.sum()), float(trials.sum())
        self._slow_average = _decayed(self._slow_average, _MEMORY, now)
        self._fast_average = _decayed(self._fast_average, _FAST_MEMORY, now)
        self._current += now
        if live and len(successes) == self._rows.shape[1]:
            self._rows = _MEMORY * self._rows + numpy.stack((successes, trials))
        if self._has_changed():
            self._slow_average = self._fast_average
            self._rows = _CHANGE_WEIGHT * self._rows
            self._by_position = _CHANGE_WEIGHT * self._by_position
        at = numpy.arange(min(int(drafts.max()), self._by_position.shape[1]))
        tried, hit = trials[:, None] > at, successes[:, None] > at
        expected = tried * self.rates(len(successes))[:, None]
        self._by_position *= _MEMORY
        self._by_position[:, : len(at)] += (hit - expected).sum(0), tried.sum(0)

    def choose(self, accepted: Sequence[int], width: int) -> None:
        """Learn, before `observe`, how much choosing the likeliest drafts gains. `width`:
        verified drafts of a row on average."""
        expected = float(self.tokens((width,) * len(accepted))[width])
        self._gain += _GAIN_MEMORY * ((1 + sum(accepted) / len(accepted)) / expected - self._gain)

    def idle(self) -> None:
        """Age the estimates by a round without drafts."""
        if self._recalled:
            return
        fade = max(_MEMORY, _STALE_TRIALS / max(self.trials, _STALE_TRIALS))
        self._slow_average = _decayed(self._slow_average, fade)
        self._rows, self._by_position = fade * self._rows, fade * self._by_position

    def rounds(self, rows: int, rooms: Sequence[float] = ()) -> Array:
        """Return, by draft length [limit + 1], the rounds that a token takes, as a mean over the
        tokens of all rows.

        It is a mean of rounds a token, not of tokens a round, because rows with a low rate take
        most of the rounds.

        Args:
            rooms: tokens that each row has left; equal if not given.
        """
        weights = numpy.array(rooms if len(rooms) == rows else (1.0,) * rows)
        found: Array = weights / weights.sum() @ (1.0 / self._prefix_probabilities(rows).cumsum(1))
        found[1:] /= self._gain
        return found

    def tokens(self, counts: Sequence[int]) -> Array:
        """Return, by draft length [max(counts) + 1], the expected tokens of a round, as a mean over
        rows with these numbers of drafts.

        Which rows have drafts changes from round to round, so this mean is of tokens a round.
        """
        had = numpy.array(counts)[:, None] >= numpy.arange(max(counts) + 1)
        found: Array = (
            (self._prefix_probabilities(len(counts))[:, : had.shape[1]] * had).mean(0).cumsum()
        )
        return found

    def _has_changed(self) -> bool:
        successes, trials = self._fast_average
        if trials < _MIN_TRIALS or self.trials < 2 * trials:
            return False
        rate = min(max(self.rate, 0.1), 0.9)  # with few trials, rare events are no change
        off = successes / trials - self.rate
        return off * off * trials > _CHANGED**2 * rate * (1 - rate)

    def _prefix_probabilities(self, rows: int) -> Array:
        """Return the probability that a row accepts at least k drafts, [rows, limit + 1]."""
        beyond, trials = self._by_position
        each = self.rates(rows)[:, None] + beyond / (trials + _POSITION_WEIGHT)
        found = numpy.ones((rows, len(trials) + 1))
        found[:, 1:] = each.clip(0.0, 1.0).cumprod(1)
        return found

    def rates(self, rows: int) -> Array:
        """Return each row's rate, shrunk towards the pooled rate (empirical Bayes)."""
        rate, (successes, trials) = self.rate, self._rows
        between = self._variance_between_rows() if len(trials) == rows else 0.0
        if not between:
            return numpy.full(rows, rate)
        apart = (successes - rate * trials) * between / (trials * between + 1)
        found: Array = (rate + apart).clip(0.0, 1.0)
        return found

    def _variance_between_rows(self) -> float:
        """Return the variance between rows' rates, in units of the variance of one trial; 0 if rows
        may be alike.

        The estimator of DerSimonian and Laird, less one standard deviation.
        """
        (successes, trials), others = self._rows, self._rows.shape[1] - 1
        if others < 1:
            return 0.0
        total, noise = float(trials.sum()), self.rate * (1 - self.rate) + 1e-6
        apart = successes - self.rate * trials
        spread = float((apart * apart / (trials + 1e-9)).sum()) / noise
        spread -= others + (2 * others) ** 0.5
        return max(spread, 0.0) / (total - float(trials @ trials) / (total + 1e-9) + 1e-9)


def _decayed(
    known: tuple[float, float], fade: float, now: Sequence[float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Multiply two totals by `fade` and add the new ones."""
    return fade * known[0] + now[0], fade * known[1] + now[1]
