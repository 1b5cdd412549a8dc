"""Draft length by goodput: the one that should end the job first, from what past rounds kept and took.

A first version of what arXiv 2406.14066 does with a profile: here the cost of a round is fitted while it runs. What a new
draft length costs once (on CUDA a captured graph) counts against what it should save in the rest of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from .lengths import NOTHING_KNOWN, Outlook, Round

_MEMORY = 0.05  # weight of the newest round in the moving estimate of what is kept, once there were many
_MEMORY_PROBE = 0.5  # the same for a probe after many plain rounds: what was known is old
_GUESS = 2.0  # rows of one round that the guess of what is kept counts as
_FORGET = 0.97  # what a round later an observation of cost still weighs
_OPENING = (4, 0, 6, 2)  # draft lengths of the first rounds, from which cost is learnt where that costs next to nothing
_PATIENCE = (16, 512)  # plain rounds before a probe: at first, and at most
_TRIAL = 0.02  # share of the time that may go into trying
_CAUTION = 2.0  # how many times what a length costs once must be saved: what is expected may not come true


class Goodput:
    """Chooses k to minimise the seconds until every row has the tokens that are left: what k costs once, and a round's
    predicted seconds for each 1 + expected drafts kept. 0 where drafting does not pay, with a short probe now and then,
    ever more rarely, so that it comes back after a bad stretch. It sees past rounds only."""

    def __init__(self, *, limit: int):
        self._limit = limit
        self._survival = [0.7**i for i in range(limit + 1)]  # chance that a row keeps at least i drafts
        self._seen = [_GUESS] * (limit + 1)  # rows that told of it
        self._first = True
        self._cost = _Cost()
        self._opening = [min(k, limit) for k in reversed(_OPENING)]
        self._plain, self._patience = 0, _PATIENCE[0]

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        plain = self._cost.predict(rows, 0) if self._cost.known else 0.0  # seconds a round
        if self._opening:
            if outlook.entry(self._opening[-1]) <= _TRIAL * (plain and plain * outlook.left):
                return self._opening[-1]
            self._opening = []
        if not plain:
            return 0
        if outlook.free:
            return self._limit
        best = self._best(rows, outlook)
        if best == 0 and self._plain >= self._patience:
            probe = min(range(min(1, self._limit), min(4, self._limit) + 1), key=lambda k: (outlook.entry(k), abs(k - 2)))
            if outlook.entry(probe) <= _TRIAL * plain * min(self._plain, outlook.left):
                return probe
        return best

    def trim(self, counts: Sequence[int], outlook: Outlook = NOTHING_KNOWN) -> int:
        """The length that pays, if only rows with so many drafts can keep them; now and then a short probe."""
        rows, most = len(counts), max(counts)
        if self._opening or not self._cost.known:
            return most
        best = self._best(rows, outlook, [sum(count >= k for count in counts) / rows for k in range(most + 1)])
        return min(most, 2) if best == 0 and self._plain >= self._patience else best

    def _best(self, rows: int, outlook: Outlook, shares: Sequence[float] | None = None) -> int:
        """The length with the fewest seconds a token that is left. shares: by length, of the rows that have such drafts."""
        best, least, expected = 0, 0.0, 1.0
        for k in range(self._limit + 1 if shares is None else len(shares)):
            expected += self._survival[k] * (1.0 if shares is None else shares[k]) if k else 0.0
            found = _CAUTION * outlook.entry(k) / outlook.left + self._cost.predict(rows, k) / expected
            if k == 0 or found * 1.02 < least:  # a longer draft must be worth it
                best, least = k, found
        return best

    def observe(self, done: Round) -> None:
        if self._opening:
            self._opening.pop()
        rows, width = len(done.accepted), done.width
        if done.steady:
            if not self._first:  # the first round is slower than any other: caches, libraries
                self._cost.learn(rows, width, done.seconds)
            self._first = False
        if width == 0:
            self._plain += 1
            return
        probing = self._plain >= self._patience
        meant = (width,) * rows if done.drafted is None else done.drafted
        self._learn_survival(done.accepted, meant, _MEMORY_PROBE if probing else _MEMORY)
        if sum(done.accepted) > sum(meant) / 2:
            self._patience = _PATIENCE[0]
        elif probing:
            self._patience = min(2 * self._patience, _PATIENCE[1])
        self._plain = 0

    def _learn_survival(self, accepted: tuple[int, ...], meant: tuple[int, ...], memory: float) -> None:
        """From the rows that were meant to draft so far: what only filled their place up tells nothing."""
        longest = max(meant)
        for i in range(1, longest + 1):
            told = [kept >= i for kept, count in zip(accepted, meant, strict=True) if count >= i]
            self._seen[i] += len(told)
            self._survival[i] += max(memory, len(told) / self._seen[i]) * (sum(told) / len(told) - self._survival[i])
        ratio = self._survival[longest] ** (1 / longest)
        for i in range(longest + 1, self._limit + 1):
            self._survival[i] = self._survival[i - 1] * ratio


_GUESSED = (1.0, 0.03, 0.8)  # of the cost's three weights, before anything was seen, in passes
_DOUBT = 1e4  # how little that guess weighs against what is seen


class _Cost:
    """Seconds a round = a + b rows (width + 1) + c width, fitted by recursive least squares with forgetting. Where only one
    width was seen, a guess says what others cost: a fifth of a pass for each draft, and next to nothing for a row."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._spread = [[_DOUBT if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._typical = 0.0

    @property
    def known(self) -> bool:
        """Whether any round was seen."""
        return self._typical > 0

    def predict(self, rows: int, width: int) -> float:
        """Never less than a tenth of a typical round: a fit may be wrong far from what it has seen."""
        found = sum(w * f for w, f in zip(self._weights, _features(rows, width), strict=True))
        return max(found, self._typical / 10, 1e-9)

    def learn(self, rows: int, width: int, seconds: float) -> None:
        if self._typical:
            seconds = min(seconds, 4 * self.predict(rows, width) + self._typical)  # a stumble of the machine
        x = _features(rows, width)
        if not self._typical:
            unit = seconds / sum(g * f for g, f in zip(_GUESSED, x, strict=True))
            self._weights = [unit * g for g in _GUESSED]
        self._typical += 0.1 * (seconds - self._typical) if self._typical else seconds
        ahead = [sum(row[j] * x[j] for j in range(3)) for row in self._spread]
        scale = _FORGET + sum(a * b for a, b in zip(x, ahead, strict=True))
        wrong = seconds - sum(w * f for w, f in zip(self._weights, x, strict=True))
        self._weights = [w + a / scale * wrong for w, a in zip(self._weights, ahead, strict=True)]
        forget = _FORGET if max(self._spread[i][i] for i in range(3)) < _DOUBT else 1.0
        self._spread = [[(self._spread[i][j] - ahead[i] * ahead[j] / scale) / forget for j in range(3)] for i in range(3)]


def _features(rows: int, width: int) -> tuple[float, float, float]:
    return 1.0, rows * (width + 1) / 8, width / 4
