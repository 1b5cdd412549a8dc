"""Draft length by goodput: what gives rows the rest of their tokens first (arXiv 2406.14066).

It weighs the cost of a round (costs.py) against the acceptance rate (acceptance.py), within a
budget of what drafting may lose against plain decoding (exponential back-off). One-time costs of a
length, such as a graph capture, count too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.lengths.acceptance import Acceptance
from bass_cli.lengths.costs import Array, RoundCost, Surface

_CAUTION = 2.0  # how many times what a length costs once must be saved: hopes may not come true
_TRIAL = 0.02  # share of the time left that a first use may take while nobody knows what is kept
_PATIENCE = 4  # rounds before the next try, at least
# Of the time since the last try, what one may lose: at first, and after some that failed. With
# less, waiting would save nothing worth having, and a change is missed.
_SHARES = (0.08, 0.005)
_LOOKS = (4, 24)  # looks that what is thought at first counts as, and that are remembered
_HOPE = 0.1  # what a look is thought to win at first, in plain rounds: a tenth more tokens
_REGRET = 0.012  # share of the time that drafting may have lost
_AHEAD = 256.0  # rounds that are still to come, at most, of which that share may be lost already
_GRACE = 1.5  # plain rounds that it may lose besides
_KEPT = 0.2  # share of all that it has won that it keeps in any case, and may lose the rest


def trial(plain: float, rounds: float) -> float:
    """Seconds that a first use may take on trial, of so many rounds of `plain` seconds."""
    return _TRIAL * plain * rounds


def first_use(
    lengths: Sequence[int], inputs: ControllerInput, line: Array, most: float, unsure: bool
) -> Array:
    """What these lengths cost once, in seconds a round left; no end: too dear to try.

    `line`: seconds of a round of each, the first of plain ones. `most`: seconds that may still be
    lost, by a round of which nothing stands and by catching up for it. `unsure`: nobody knows yet
    what rows keep of a draft.
    """
    one_time_costs, warmup_costs = (
        numpy.array([of(k) for k in lengths]) for of in (inputs.one_time_cost, inputs.warmup_cost)
    )
    once: Array = one_time_costs * (_CAUTION / inputs.left)
    dear = (line - line[0] + inputs.catch_up > most) & (numpy.array(lengths) > 0)
    once[dear | (unsure & (warmup_costs > trial(float(line[0]), inputs.left)))] = numpy.inf
    return once


class Tries:
    """Of something that may not pay: each failure halves what tries may lose."""

    def __init__(self) -> None:
        self.idle = 0.0  # rounds without it
        self._share = _SHARES[0]

    @property
    def thinkable(self) -> bool:
        """Whether there were enough rounds without for the most frequent tries."""
        return self.idle >= _PATIENCE

    def due(self, loss: float) -> bool:
        """Whether a try that would lose so many plain rounds is due.

        What the budget could pay for in every round is never given up.
        """
        return loss <= max(_REGRET, self._share * self.idle)

    def observe(self, *, paid: bool, probe: bool = True) -> None:
        """It was done, as a `probe` or not. A probe that paid goes on."""
        if paid or probe:
            self._share = _SHARES[0] if paid else max(self._share / 2, _SHARES[1])
        self.idle = math.inf if paid and probe else 0.0


class Looks:
    """Looking for drafts that the host may have, in plain rounds: what a look takes and wins."""

    def __init__(self) -> None:
        self._tries, self._count = Tries(), _LOOKS[0]
        self.cost, self._gain, self._hope = 0.0, _HOPE, _HOPE
        self._found = 0.0  # what the drafts of the look under way may win

    @property
    def due(self) -> bool:
        """Whether this is a round to look in: it wins, or there was none for long enough."""
        return self._gain >= 0 or self._tries.due(self.cost)

    def begin(self) -> None:
        """One is under way: what it brings will not be known when the next round is decided."""
        self._tries.idle = 0.0

    def find(self, win: float) -> float:
        """What looks are likely to win once all is captured; these drafts may win so much then."""
        self._found = win
        return self._mean(self._hope, win) - self.cost

    def observe(self, *, cost: float, gain: float) -> None:
        """A look took `cost` (0: there was none), and won `gain` with what it brought."""
        if not cost:
            self._tries.idle += 1
            return
        self.cost, self._gain = cost, self._mean(self._gain, gain)
        self._hope, self._found = self._mean(self._hope, self._found), 0.0
        self._count = min(self._count + 1, _LOOKS[1])
        self._tries.observe(paid=self._gain >= 0)

    def _mean(self, before: float, now: float) -> float:
        return before + (now - before) / (self._count + 1)


class Budget:
    """Seconds that drafting has won or lost against plain decoding of the same tokens."""

    def __init__(self) -> None:
        self._spent = 0.0  # of rounds
        self._won = self._most = 0.0  # in all, below 0: lost; the most that it ever was

    def spend(self, seconds: float, *, won: float = 0.0) -> None:
        """A round took so long, and has won so much."""
        self._spent, self._won = self._spent + seconds, self._won + won
        self._most = max(self._most, self._won)

    def left(self, *, plain: float, rounds: float) -> float:
        """Seconds that may still be lost. `rounds`: of `plain` seconds, may still come."""
        may = _REGRET * (self._spent + min(rounds, _AHEAD) * plain) + _GRACE * plain
        return may + self._won - _KEPT * self._most


_CHOICES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)  # those of graphs, and two more
_FOUND = 2  # the longest probe of drafts that the host has
_PROBE = 4  # and of others, where one that is captured is better than a shorter one
_STAY = 0.01  # by which another length must be better than the last one, or noise would choose
_LEAVE = 0.03  # the same for plain decoding: coming back may be dear
# A plain round is worth it where costs may be wrong by what drafting wins; these are the least
_UNSURE = 0.04, 0.25  # (costs drift, and plain rounds cost) and the most that may not be known


class Goodput(DraftLength):
    """The k of the fewest seconds a round x rounds a token, over the tokens that rows still need.

    0 where drafting does not pay, with a probe now and then, ever more rarely; no round may lose
    more than is left of one budget. If a device would wait, it learns and decides a round later
    while that one runs, unless it hardly knows a thing yet.
    `surface`: what rounds cost; if not `measured`, something to begin from. `frozen`: no time that
    is measured reaches the lengths (maximal coupling). `at_once`: one pass makes all drafts.
    """

    foresees = trims = stops = True

    def __init__(
        self,
        *,
        limit: int,
        surface: Surface | None = None,
        frozen: bool = False,
        at_once: bool = False,
    ):
        self._choices = (*(k for k in _CHOICES if k < limit), limit)
        self._costs = RoundCost(self._choices, surface, frozen=frozen, at_once=at_once)
        self._acceptance = Acceptance(limit, surface.acceptance if surface is not None else None)
        self._inputs, self._rows, self._frozen = DEFAULT_INPUT, 0, frozen
        self._line: Array | None = None  # seconds of a round of each choice, for the rows of now
        self._plain = self._pace = 0.0  # the first of them; the least seconds a token of a row
        self._last = 0  # the place of the last choice that was made for its goodput
        self._unlearnt: tuple[RoundResult, ControllerInput] | None = None
        self._now = self._next = (0, False)  # of this round, the next: length, whether a probe
        self._decided = False  # whether the latter knows of all that it should
        self._probes, self._looks, self._budget = Tries(), Looks(), Budget()

    @property
    def drafts(self) -> bool:
        return not self._decided or self._next[0] > 0

    def needs_result(self, width: int) -> bool:
        """At first, after a probe or catching up; a plain round tells of no drafts."""
        tells = self._now[1] or self._inputs.catch_up or self._acceptance.unsure
        return bool(self._frozen or not self._costs.known or (width and tells))

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        before, self._inputs = self._inputs, inputs
        if self._frozen:
            self._inputs = inputs._replace(
                one_time_costs=(), warmup_costs=(), catch_up=0.0, padded=0
            )
        self._acceptance.recall(inputs.skipped)
        same = rows == self._rows and before.catch_up == self._inputs.catch_up
        self._rows = rows
        if not (self._decided and same):
            self._decide()
        self._now, self._decided = self._next, False
        return self._now[0]

    def reflect(self) -> None:
        self._learn()
        if not self._frozen:
            if self._inputs.free and self._next[0]:
                self._looks.begin()
            self._decide()
            self._decided = True

    def trim(self, num_drafts: Sequence[int]) -> int:
        """The length that pays where rows have so many drafts, or now and then a short probe."""
        most, inputs = max(num_drafts), self._inputs
        if self._line is None:
            return most
        line = numpy.interp(range(most + 1), self._choices, self._line)
        tokens, plain = self._acceptance.tokens(num_drafts), self._plain
        likely = self._looks.find(float((plain * tokens - line).max()) / plain)
        once = first_use(range(most + 1), inputs, line, self._most, self._acceptance.unsure)
        once[once > max(plain * likely, 0.0)] = numpy.inf  # they are not found in every round
        paces = line / tokens + once
        best = int((paces <= paces.min() * (1 + _STAY)).argmax())
        if best == 0:
            self._now = self._probe(min(most, _FOUND), self._line)
        return best or self._now[0]

    def observe(self, done: RoundResult) -> None:
        self._learn()
        self._unlearnt = done, self._inputs
        if self._line is not None:
            self._account(done, self._line)
        self._decided = (
            self._decided and not done.lookup_seconds
        )  # what a look found decides on the next
        if done.width == 0:
            self._probes.idle += 1
            return
        self._decided = self._decided and not (self._now[1] or self._acceptance.unsure)
        self._probes.observe(paid=done.mostly_accepted, probe=self._now[1])

    def least(self, drafted: int) -> float:
        """One more draft pays if the tokens it should bring take longer at the pace of now."""
        if self._line is None or not self._pace:
            return 0.0
        before, after = numpy.interp((drafted, drafted + 1), self._choices, self._line)
        return float((after - before) / (self._pace * self._acceptance.rate))

    def learned(self) -> Surface | None:
        """What later jobs may begin from; None if a profile is there, or little was seen."""
        self._learn()
        return self._costs.surface(acceptance=self._acceptance.rate)

    def _decide(self) -> None:
        """Learn from the last round; then choose for the rows of now."""
        self._learn()
        inputs = self._inputs
        self._acceptance.follow(inputs.samples or tuple(range(self._rows)))
        if self._costs.known:
            rows = inputs.padded or self._rows
            self._line = self._costs.line(rows, inputs.context, free=inputs.free)
            self._plain = float(self._line[0])
        if self._line is not None and not inputs.free:
            self._next = self._choice(self._line, inputs)
        else:  # nobody knows what plain rounds take, or it has to be looked first
            looks = self._looks.due and self._looks.cost * self._plain <= self._most
            self._next = self._choices[-1] if self._line is not None and looks else 0, False

    def _choice(self, line: Array, inputs: ControllerInput) -> tuple[int, bool]:
        """The length with the fewest seconds a token that is left, or a probe."""
        paces = line * self._acceptance.rounds(self._rows, inputs.rooms)[[*self._choices]]
        self._pace, unsure = float(paces.min()), self._acceptance.unsure
        paces += first_use(self._choices, inputs, line, self._most, unsure)
        best = int(paces.argmin())
        stays = paces[self._last] <= paces[best] * (1 + (_STAY if best else _LEAVE))
        self._last = self._last if stays else best
        length = self._choices[self._last]
        if length:
            tells = self._costs.tells(inputs.padded or self._rows, self._last, inputs.context)
            if self._now[0] and tells > numpy.clip(self._plain / self._pace - 1, *_UNSURE):
                return 0, False
            return min(2 * length, self._choices[-1]) if inputs.stops else length, False
        short = [
            k for k in self._choices if 1 <= k <= (_PROBE if any(inputs.one_time_costs) else 1)
        ]
        return self._probe(min(short, key=inputs.one_time_cost, default=0), line)

    def _probe(self, length: int, line: Array) -> tuple[int, bool]:
        """A short draft, if it is time for one and it can be afforded; otherwise none."""
        inputs, plain, tries = self._inputs, self._plain, self._probes
        loss = float(numpy.interp(length, self._choices, line)) + inputs.catch_up - plain
        due = tries.thinkable and tries.due(loss / plain) and loss <= self._most
        most = trial(plain, min(tries.idle, inputs.left))  # for what the length costs once
        due = due and inputs.one_time_cost(length) - inputs.catch_up <= most
        return length if due else 0, due and length > 0

    @property
    def _most(self) -> float:
        """Seconds that may still be lost."""
        return self._budget.left(plain=self._plain, rounds=self._inputs.left)

    def _learn(self) -> None:
        """What the last round taught about costs and rates."""
        if self._unlearnt is None:
            return
        (done, inputs), self._unlearnt = self._unlearnt, None
        rows, took = len(done.accepted), done.seconds - done.lookup_seconds
        if done.steady:
            padded = inputs.padded or rows
            self._costs.learn(padded, done.width, took, inputs.context, free=inputs.free)
        if done.width:
            self._acceptance.follow(done.rows or inputs.samples or tuple(range(rows)))
            if done.drafted is not None and not inputs.free:
                self._acceptance.choose(done.accepted, done.width)
            self._acceptance.observe(done.accepted, done.num_drafts)
        else:
            self._acceptance.idle()

    def _account(self, done: RoundResult, line: Array) -> None:
        """What drafting or looking has won in this round against plain decoding."""
        plain, taken, asked = (
            self._plain,
            done.seconds,
            done.lookup_seconds > 0 and not self._frozen,
        )
        if self._frozen or not done.steady:
            taken = float(numpy.interp(done.width, self._choices, line))
        taken += self._inputs.catch_up if done.width else 0.0
        waited = 0.0 if self._frozen else done.waiting
        won = plain * (1 + sum(done.accepted) / len(done.accepted)) - taken - waited
        self._budget.spend(taken, won=won if done.width or asked else -waited)
        self._looks.observe(cost=done.lookup_seconds / plain if asked else 0.0, gain=won / plain)
