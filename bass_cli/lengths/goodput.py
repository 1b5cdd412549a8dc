"""Draft length by goodput: what gives rows the rest of their tokens first (arXiv 2406.14066).

From one model of what rounds cost (costs.py), what rows keep of their drafts (acceptance.py), and
what may still be lost (backoff.py). What a length costs once (on CUDA a captured graph) counts
against what it should save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from bass_cli.engine.contracts import NOTHING_KNOWN, Outlook, Round
from bass_cli.lengths.acceptance import Acceptance
from bass_cli.lengths.backoff import Budget, Looks, Tries
from bass_cli.lengths.costs import Array, RoundCost
from bass_cli.lengths.round_cost import Surface

_CHOICES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)  # those of graphs, and two more
_UNKNOWN = (0.7, 3.0)  # acceptance before any round, and the trials that this counts as
_LEAST, _MOST, _STRENGTH = 0.5, 0.85, 5.0  # a profile's, of other text, is a guess within bounds
_OPENING = 2  # drafts of the first rounds where nobody knows what they cost
_PROBE = 4  # the longest probe, where one that is captured is better than a shorter one
_CAUTION = 2.0  # how many times what a length costs once must be saved: hopes may not come true
_TRIAL = 0.02  # share of the time left that a first use may take while nobody knows what is kept
_EVIDENCE = 6.0  # trials until which that is so
_WAITED_FOR = 12.0  # trials until which a decision waits for what the last round tells
_STAY = 0.01  # by which another length must be better than the last one, or noise would choose
_LEAVE, _SETTLED = (
    0.03,
    20.0,
)  # the same for plain: coming back may be dear; more below so many trials
_UNSURE = 0.15  # share by which a plain round must correct the costs of drafting to be worth one


class Goodput:
    """The k of the fewest seconds a round x rounds a token, over the tokens that rows still need.

    0 where drafting does not pay, with a probe now and then, ever more rarely. What drafts, probes
    and looks for drafts have lost against plain decoding is one budget. If a device would wait, it
    learns and decides a round later while that one runs, unless it hardly knows a thing yet.

    `surface`: what rounds cost; if it is not `measured`, something to begin from. `frozen`: no time
    that is measured reaches the draft lengths, for maximal coupling; needs a profile.
    """

    exact = False

    def __init__(self, *, limit: int, surface: Surface | None = None, frozen: bool = False):
        assert surface is not None or not frozen
        self._choices = (*(k for k in _CHOICES if k < limit), limit)
        self._places = numpy.array(self._choices)
        self._costs, self._frozen = RoundCost(self._choices, surface, frozen=frozen), frozen
        guess, strength = _UNKNOWN
        if surface is not None and surface.acceptance is not None:
            guess, strength = min(max(surface.acceptance, _LEAST), _MOST), _STRENGTH
        self._acceptance = Acceptance(limit, guess=guess, strength=strength)
        # A first round is slower than any other (caches, libraries): a guess is not to follow it.
        self._first = surface is None or not surface.measured
        self._outlook, self._rows = NOTHING_KNOWN, 0
        self._line: Array | None = None  # seconds of a round of each choice, for the rows of now
        self._pace = 0.0  # the least seconds a token of a row
        self._last = 0  # the place of the last choice that was made for its goodput
        self._unlearnt: tuple[Round, Outlook] | None = None
        self._now = self._next = (
            0,
            False,
        )  # length, whether it is a probe: of this round, of the next one
        self._decided = False  # whether the latter knows of all that it should
        self._probes, self._looks, self._budget = Tries(), Looks(), Budget()

    def needs(self, width: int) -> bool:
        """At first, after a probe or catching up; a plain round tells of no drafts."""
        tells = self._now[1] or self._outlook.catch_up or self._hardly_knows
        return bool(self._frozen or not self._costs.known or (width and tells))

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        before, self._outlook = self._outlook, self._seen(outlook)
        same = rows == self._rows and before.catch_up == self._outlook.catch_up
        self._rows = rows
        if not (self._decided and same and outlook.hurried):
            self._decide()
        self._now, self._decided = self._next, False
        return self._now[0]

    def reflect(self) -> None:
        if self._outlook.hurried and not self._outlook.free:
            self._decide()
            self._decided = True
        else:
            self._learn()

    def trim(self, counts: Sequence[int], outlook: Outlook = NOTHING_KNOWN) -> int:
        """The length that pays where rows have so many drafts, or now and then a short probe."""
        most, outlook = (
            max(counts),
            self._seen(outlook)._replace(catch_up=0.0),
        )  # the host's need none
        if self._line is None:
            return most
        choices = self._costs.line(len(counts), outlook.context, free=outlook.free)
        line = numpy.interp(range(most + 1), self._choices, choices)
        tokens, plain = self._acceptance.tokens(counts), float(line[0])
        likely = self._looks.find(float((plain * tokens - line).max()) / plain)
        once = self._once(range(most + 1), outlook)
        once[once > max(plain * likely, 0.0)] = (
            numpy.inf
        )  # such drafts are not found in every round
        paces = line / tokens + once
        best = int((paces <= paces.min() * (1 + _STAY)).argmax())
        if best == 0 or not self._affords(0.0):
            self._now = self._probe(min(most, _OPENING), choices, outlook)
            best = self._now[0]
        return best

    def observe(self, done: Round) -> None:
        self._learn()
        self._unlearnt = done, self._outlook
        self._account(done)
        if done.width == 0:
            self._probes.idle += 1
            return
        probing, paid = self._now[1], done.went_well
        self._decided = self._decided and not (probing or self._hardly_knows)
        if probing or paid:
            self._probes.observe(paid=paid, again=probing and paid)  # a probe that succeeds goes on
        else:
            self._probes.idle = 0

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

    @property
    def _hardly_knows(self) -> bool:
        return self._acceptance.trials < _WAITED_FOR

    def _seen(self, outlook: Outlook) -> Outlook:
        """Of an outlook, what may decide."""
        return outlook._replace(entries=(), colds=(), catch_up=0.0) if self._frozen else outlook

    def _decide(self) -> None:
        """Learn from the last round; then choose for the rows of now."""
        self._learn()
        outlook, first = self._outlook, min(_OPENING, self._choices[-1])
        self._acceptance.follow(outlook.samples or tuple(range(self._rows)))
        if self._costs.known:
            self._line = self._costs.line(self._rows, outlook.context, free=outlook.free)
        if self._line is None:
            self._next = 0 if outlook.free or outlook.entry(first) else first, False
        elif outlook.free:
            looks = self._looks.due and self._affords(self._looks.cost * float(self._line[0]))
            self._next = self._choices[-1] if looks else 0, False
        else:
            self._next = self._choice(self._line, outlook)

    def _choice(self, line: Array, outlook: Outlook) -> tuple[int, bool]:
        """The length with the fewest seconds a token that is left, or a probe."""
        paces = line * self._acceptance.rounds(self._rows, outlook.rooms)[self._places]
        self._pace = float(paces.min())
        self._budget.expect(float(line[0]) / self._pace - 1)
        paces += self._once(self._choices, outlook)
        best = int(paces.argmin())
        margin = _STAY if best else _LEAVE * max(_SETTLED / max(self._acceptance.trials, 1.0), 1.0)
        self._last = self._last if paces[self._last] <= paces[best] * (1 + margin) else best
        length = self._choices[self._last]
        if length and self._affords(outlook.catch_up and outlook.catch_up + float(line[0])):
            if (
                self._now[0]
                and self._costs.tells(self._rows, self._last, outlook.context) > _UNSURE
            ):
                return 0, False
            return min(2 * length, self._choices[-1]) if outlook.stops else length, False
        short = [k for k in self._choices if 1 <= k <= (_PROBE if any(outlook.entries) else 1)]
        return self._probe(min(short, key=outlook.entry, default=0), line, outlook)

    def _probe(self, length: int, line: Array, outlook: Outlook) -> tuple[int, bool]:
        """A short draft, if it is time for one and it can be afforded; otherwise none."""
        plain, tries = float(line[0]), self._probes
        loss = float(numpy.interp(length, self._choices, line)) + outlook.catch_up - plain
        waited = plain * min(tries.idle, outlook.left)
        dear = outlook.entry(length) - outlook.catch_up > _TRIAL * waited
        due = length > 0 and tries.thinkable and tries.due(loss / plain) and not dear
        due = due and self._affords(loss + (plain if outlook.catch_up else 0.0))
        return (length, True) if due else (0, False)

    def _once(self, lengths: Sequence[int], outlook: Outlook) -> Array:
        """What these lengths cost once, in seconds a token left; too dear to try: no end."""
        once = numpy.array([outlook.entry(k) for k in lengths])
        if self._acceptance.trials < _EVIDENCE and outlook.colds and self._line is not None:
            last = len(outlook.colds) - 1
            colds = numpy.array([outlook.colds[min(k, last)] for k in lengths[1:]])
            once[1:][colds > _TRIAL * float(self._line[0]) * outlook.left] = numpy.inf
        found: Array = once * (_CAUTION / outlook.left)
        return found

    def _affords(self, seconds: float) -> bool:
        plain = 0.0 if self._line is None else float(self._line[0])
        return self._budget.affords(seconds, plain=plain, left=self._outlook.left)

    def _learn(self) -> None:
        """What the last round taught about costs and rates."""
        if self._unlearnt is None:
            return
        (done, outlook), self._unlearnt = self._unlearnt, None
        rows, took = len(done.accepted), done.seconds - done.asking
        if done.steady and not self._first:
            self._costs.learn(rows, done.width, took, outlook.context, free=outlook.free)
        self._first = self._first and not done.steady
        if done.width:
            self._acceptance.follow(done.rows or outlook.samples or tuple(range(rows)))
            self._acceptance.observe(done.accepted, done.meant)
        else:
            self._acceptance.idle()

    def _account(self, done: Round) -> None:
        """What drafting or looking has won in this round against plain decoding."""
        if self._line is None:
            return
        plain, taken = float(self._line[0]), done.seconds
        if self._frozen or not done.steady:
            due = float(numpy.interp(done.width, self._choices, self._line))
            # Drafts of the host's, where a model usually drafts, take less than the model's.
            taken = due if self._frozen or done.drafted is None else min(due, taken)
        asked, won = done.asking > 0 and not self._frozen, 0.0
        if done.width or asked:
            won = plain * (1 + sum(done.accepted) / len(done.accepted)) - taken
            won -= self._outlook.catch_up if done.drafted is None else 0.0
        self._budget.spend(taken, won=won, plain=plain)
        if asked:
            self._looks.observe(cost=done.asking / plain, gain=won / plain)
        else:
            self._looks.skip()
