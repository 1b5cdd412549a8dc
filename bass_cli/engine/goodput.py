"""Draft length by goodput: the one that should commit most tokens a second, from what past rounds kept and took.

A first version of what arXiv 2406.14066 does with a profile: here the cost of a round is fitted while it runs.
"""

from __future__ import annotations

from .lengths import NOTHING_KNOWN, Outlook, Round

_MEMORY = 0.05  # weight of the newest round in the moving estimate of what is kept, once there were many
_MEMORY_PROBE = 0.5  # the same for a probe after many plain rounds: what was known is old
_FORGET = 0.97  # what a round later an observation of cost still weighs
_OPENING = (4, 0, 6, 2)  # draft lengths of the first rounds, from which cost is learnt
_PATIENCE = (16, 512)  # plain rounds before a probe: at first, and at most


class Goodput:
    """Chooses k to maximise (1 + expected drafts kept) / predicted seconds; 0 where drafting does not pay, with a short
    probe now and then, ever more rarely, so that it comes back after a bad stretch. It sees past rounds only."""

    def __init__(self, *, limit: int):
        self._limit = limit
        self._survival = [0.7**i for i in range(limit + 1)]  # chance that a row keeps at least i drafts
        self._seen = [1] * (limit + 1)  # rounds that told of it, the guess above counted as one
        self._first = True
        self._cost = _Cost()
        self._opening = [min(k, limit) for k in reversed(_OPENING)]
        self._plain, self._patience = 0, _PATIENCE[0]

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        if self._opening:
            return self._opening[-1]
        best, value, expected = 0, 0.0, 1.0
        for k in range(self._limit + 1):
            expected += self._survival[k] if k else 0.0
            worth = expected / self._cost.predict(rows, k)
            if worth > value * (1.02 if k else 1.0):  # a longer draft must be worth it
                best, value = k, worth
        if best == 0 and self._plain >= self._patience:
            return min(2, self._limit)
        return best

    def observe(self, done: Round) -> None:
        if self._opening:
            self._opening.pop()
        rows, width = len(done.accepted), done.width
        if not self._first:  # the first round is slower than any other: caches, libraries
            self._cost.learn(rows, width, done.seconds)
        self._first = False
        if width == 0:
            self._plain += 1
            return
        probing = self._plain >= self._patience
        self._learn_survival(done.accepted, width, _MEMORY_PROBE if probing else _MEMORY)
        if sum(done.accepted) > rows * width / 2:
            self._patience = _PATIENCE[0]
        elif probing:
            self._patience = min(2 * self._patience, _PATIENCE[1])
        self._plain = 0

    def _learn_survival(self, accepted: tuple[int, ...], width: int, memory: float) -> None:
        for i in range(1, width + 1):
            kept = sum(a >= i for a in accepted) / len(accepted)
            self._seen[i] += 1
            self._survival[i] += max(memory, 1 / self._seen[i]) * (kept - self._survival[i])
        ratio = self._survival[width] ** (1 / width)
        for i in range(width + 1, self._limit + 1):
            self._survival[i] = self._survival[i - 1] * ratio


class _Cost:
    """Seconds a round = a + b rows (width + 1) + c width, fitted by recursive least squares with forgetting."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._spread = [[1e4 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._typical = 0.0

    def predict(self, rows: int, width: int) -> float:
        """Never less than a tenth of a typical round: a fit may be wrong far from what it has seen."""
        found = sum(w * f for w, f in zip(self._weights, _features(rows, width), strict=True))
        return max(found, self._typical / 10, 1e-9)

    def learn(self, rows: int, width: int, seconds: float) -> None:
        if self._typical:
            seconds = min(seconds, 4 * self.predict(rows, width) + self._typical)  # a stumble of the machine
        self._typical += 0.1 * (seconds - self._typical) if self._typical else seconds
        x = _features(rows, width)
        ahead = [sum(row[j] * x[j] for j in range(3)) for row in self._spread]
        scale = _FORGET + sum(a * b for a, b in zip(x, ahead, strict=True))
        wrong = seconds - sum(w * f for w, f in zip(self._weights, x, strict=True))
        self._weights = [w + a / scale * wrong for w, a in zip(self._weights, ahead, strict=True)]
        forget = _FORGET if max(self._spread[i][i] for i in range(3)) < 1e4 else 1.0
        self._spread = [[(self._spread[i][j] - ahead[i] * ahead[j] / scale) / forget for j in range(3)] for i in range(3)]


def _features(rows: int, width: int) -> tuple[float, float, float]:
    return 1.0, rows * (width + 1) / 8, width / 4
