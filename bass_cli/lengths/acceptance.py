"""What rows keep of their drafts: one rate, what rows and places differ by, rounds a token.

Not here: what a round costs (costs.py), what is decided (goodput.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy
from numpy.typing import NDArray

from bass_cli.engine.contracts import SkippedDrafts

Array = NDArray[numpy.float64]

_UNKNOWN = (0.7, 3.0)  # the rate before any round, and the trials that this counts as
_LEAST, _MOST, _STRENGTH = 0.5, 0.85, 5.0  # a profile's is a guess within bounds; its trials
_FEW = 12.0  # trials below which the rate is hardly known: as many as four of such guesses
_MEMORY, _QUICK = 0.97, 0.6  # what a round weighs one round later: usually, and to notice a change
_CHANGED = 3.5  # standard deviations between the two that mean a change
_TELLING = 6  # quick trials that it takes to see one; fewer are luck
_AFTER = 0.15  # what is known of rows and places weighs so much after a change
_KIN = 0.2  # of what a batch of rows told, that the next one makes forgotten
_STALE = 8.0  # trials that plain rounds leave of what was known: a probe is to outweigh it
_FIRM = 6.0  # trials of a place that half believe what it differs by
_CHOSEN = 0.05  # of the newest round in what choosing drafts is worth: some twenty rounds count


class Acceptance:
    """A trial is a draft whose turn came: those a row kept, and the first that it did not.

    `limit`: the longest draft. `known`: the rate that a profile has, of other text.
    """

    def __init__(self, limit: int, known: float | None = None):
        self._guess, self._strength = _UNKNOWN
        if known is not None:
            self._guess, self._strength = min(max(known, _LEAST), _MOST), _STRENGTH
        self._pool = self._quick = (0.0, 0.0)  # kept, trials
        # What rows that have ended told, and what the rows of now did: kept, trials.
        self._past, self._told = numpy.zeros(2), numpy.zeros(2)
        self._recalled = False  # whether drafts tell that nobody verified
        self._samples: Sequence[Hashable] = ()
        self._rows = numpy.zeros((2, 0))  # by row: kept, trials
        # By place: kept beyond what the rows' rates say; trials.
        self._places = numpy.zeros((2, limit))
        # Tokens of a round whose drafts are the likeliest of more, over what the rates say of as
        # many of each row.
        self._gain = 1.0

    @property
    def trials(self) -> float:
        """How many have told of the rate, those of long ago for little."""
        return self._pool[1]

    @property
    def unsure(self) -> bool:
        """Whether the next trials may tell more than all before."""
        return self.trials < _FEW

    @property
    def rate(self) -> float:
        """The pool's: the chance that a draft whose turn comes is kept."""
        kept, trials = self._pool
        return (kept + self._strength * self._guess) / (trials + self._strength)

    def follow(self, samples: Sequence[Hashable]) -> None:
        """The rows of the next rounds, in order; a new one begins as those before became."""
        if samples == self._samples:
            return
        known = {sample: place for place, sample in enumerate(self._samples)}
        places = [known.get(sample, -1) for sample in samples]
        self._succeed(places.count(-1) / len(places))
        # The 0 at the end is at place -1.
        self._rows = numpy.append(self._rows, numpy.zeros((2, 1)), 1)[:, places]
        self._samples = samples

    def _succeed(self, new: float) -> None:
        """So much of the rows is new: to that part the pool is what all rows before came to, not
        only the last ones, which may have been of another text."""
        self._past *= 1 - _KIN * new
        self._past += new * self._told
        self._told *= 1 - new
        kept, trials = self._past
        if trials:
            became = self.trials * float(kept / trials)
            self._pool = (self._pool[0] + new * (became - self._pool[0]), self.trials)

    def recall(self, skipped: SkippedDrafts | None) -> None:
        """What has become of drafts that nobody verified.

        Where plain rounds tell of such drafts, what is known does not grow old in them.
        """
        if skipped is not None:
            self._recalled = True
            self.observe(*skipped, live=False)

    def observe(
        self, accepted: Sequence[int], num_drafts: Sequence[int], *, live: bool = True
    ) -> None:
        """A round in which rows kept so many of that many drafts (some row had one).

        Those beyond tell nothing. `live`: they are the rows that are followed, in order.
        """
        drafts = numpy.array(num_drafts, dtype=numpy.float64)
        kept = numpy.minimum(accepted, drafts)
        trials = numpy.minimum(kept + 1, drafts)
        now = float(kept.sum()), float(trials.sum())
        self._pool = _faded(self._pool, _MEMORY, now)
        self._quick = _faded(self._quick, _QUICK, now)
        self._told += now
        if live and len(kept) == self._rows.shape[1]:
            self._rows = _MEMORY * self._rows + numpy.stack((kept, trials))
        if self._has_changed():
            self._pool = self._quick
            self._rows, self._places = _AFTER * self._rows, _AFTER * self._places
        at = numpy.arange(min(int(drafts.max()), self._places.shape[1]))
        tried, stood = trials[:, None] > at, kept[:, None] > at
        due = tried * self.rates(len(kept))[:, None]
        self._places *= _MEMORY
        self._places[:, : len(at)] += (stood - due).sum(0), tried.sum(0)

    def choose(self, accepted: Sequence[int], width: int) -> None:
        """Before `observe`: these were kept of the likeliest drafts, `width` of a row on average,
        of more."""
        due = float(self.tokens((width,) * len(accepted))[width])
        self._gain += _CHOSEN * ((1 + sum(accepted) / len(accepted)) / due - self._gain)

    def idle(self) -> None:
        """A round without drafts: what is known grows old."""
        if self._recalled:
            return
        fade = max(_MEMORY, _STALE / max(self.trials, _STALE))
        self._pool = _faded(self._pool, fade)
        self._rows, self._places = fade * self._rows, fade * self._places

    def rounds(self, rows: int, rooms: Sequence[float] = ()) -> Array:
        """By draft length, [limit + 1]: rounds that a token takes, over the rows' tokens.

        `rooms`: what each row has left (all alike if not given). A row that keeps little takes most
        of the rounds, so the mean is of rounds a token, not of tokens a round.
        """
        weights = numpy.array(rooms if len(rooms) == rows else (1.0,) * rows)
        found: Array = weights / weights.sum() @ (1.0 / self._chances(rows).cumsum(1))
        found[1:] /= self._gain
        return found

    def tokens(self, counts: Sequence[int]) -> Array:
        """By draft length, [max(counts) + 1]: tokens of a round of rows with so many drafts each.

        Who has them changes from round to round, so here the mean is of tokens.
        """
        had = numpy.array(counts)[:, None] >= numpy.arange(max(counts) + 1)
        found: Array = (self._chances(len(counts))[:, : had.shape[1]] * had).mean(0).cumsum()
        return found

    def _has_changed(self) -> bool:
        kept, trials = self._quick
        if trials < _TELLING or self.trials < 2 * trials:
            return False
        rate = min(max(self.rate, 0.1), 0.9)  # with few trials, rare events are no change
        off = kept / trials - self.rate
        return off * off * trials > _CHANGED**2 * rate * (1 - rate)

    def _chances(self, rows: int) -> Array:
        """That a row keeps at least so many drafts, [rows, limit + 1]."""
        beyond, trials = self._places
        each = self.rates(rows)[:, None] + beyond / (trials + _FIRM)
        found = numpy.ones((rows, len(trials) + 1))
        found[:, 1:] = each.clip(0.0, 1.0).cumprod(1)
        return found

    def rates(self, rows: int) -> Array:
        """Each row's rate: its own, drawn to the pool's by as much as rows are alike."""
        rate, (kept, trials) = self.rate, self._rows
        between = self._between() if len(trials) == rows else 0.0
        if not between:
            return numpy.full(rows, rate)
        apart = (kept - rate * trials) * between / (trials * between + 1)
        found: Array = (rate + apart).clip(0.0, 1.0)
        return found

    def _between(self) -> float:
        """The variance between rows' rates in those of one trial; 0 where they may be alike.

        After DerSimonian and Laird, less a standard deviation.
        """
        (kept, trials), others = self._rows, self._rows.shape[1] - 1
        if others < 1:
            return 0.0
        total, noise = float(trials.sum()), self.rate * (1 - self.rate) + 1e-6
        apart = kept - self.rate * trials
        spread = float((apart * apart / (trials + 1e-9)).sum()) / noise
        spread -= others + (2 * others) ** 0.5
        return max(spread, 0.0) / (total - float(trials @ trials) / (total + 1e-9) + 1e-9)


def _faded(
    known: tuple[float, float], fade: float, now: Sequence[float] = (0.0, 0.0)
) -> tuple[float, float]:
    return fade * known[0] + now[0], fade * known[1] + now[1]
