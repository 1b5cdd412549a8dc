"""Draft length by goodput: the one with which the rows should have what is left to them first
(after arXiv 2406.14066).

From what a round costs (costs.py: a profile, or what was learnt so far) and what rows keep
(keeping.py). What a new draft length costs once (on CUDA a captured graph) counts against what
it should save in the rest of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

from bass_cli.engine.contracts import NOTHING_KNOWN, Outlook, Round
from bass_cli.lengths.costs import Array, Costs, Learned, Profiled, nearest
from bass_cli.lengths.keeping import Keeping
from bass_cli.lengths.looking import Looking
from bass_cli.lengths.losses import Losses
from bass_cli.lengths.probing import Probing
from bass_cli.lengths.round_cost import Surface

# those that graphs are made for, and two more
_CHOICES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
# what a profile saw of other text is a guess, within these bounds
_LEAST, _MOST, _STRENGTH = (0.5, 0.85, 5.0)
# draft lengths of the first rounds, from which cost is learnt where that costs next to nothing
_OPENING = (2, 0, 1)
# the longest draft to begin with; then twice what was tried: few rounds tell little of long drafts
_REACH = 8
_TRIAL = 0.02  # share of the time that the first use of a length may take when it is only tried
_CAUTION = (
    2.0  # how many times what a length costs once must be saved: what is expected may not come true
)
_EVIDENCE = 6.0  # trials before which a length is only tried
_WAITED_FOR = 12.0  # trials up to which a decision waits for what the last round tells
_SETTLED = 20.0  # trials from which on leaving drafts needs no more than the usual margin
_LONGER = 2  # how many times longer a draft may become that is stopped when it is unsure
_STAY = 0.01  # by which another length must be better than the last one
_LEAVE = (
    0.03  # the same for plain decoding, and more if few trials told of it: coming back may be dear
)
# plain rounds that must be there to lose before a drafter catches up, which is wasted if it must
# stop soon
_STRETCH = 1.0


class _Seen(NamedTuple):
    """A round that nothing was learnt from yet, and what was thought of it when it began."""

    done: Round
    outlook: Outlook
    probing: bool


class _Choice(NamedTuple):
    length: int
    probing: bool = False


class Goodput:
    """Chooses k to minimise seconds a round x rounds a token, over the tokens that the rows still
    need. 0 where drafting does not pay, with a short probe now and then, ever more rarely, so that
    it comes back after a bad stretch. What drafting has lost against plain decoding is counted, and
    bounds both probes and mistakes. It sees past rounds only; if a device would wait, it learns and
    decides a round later while that one runs, unless it hardly knows a thing yet.

    `surface`: of a profile, so that nothing has to be tried; if it is not `measured`, something
    to begin from. `frozen`: no time that is measured reaches the draft lengths, for maximal
    coupling; needs a profile. `at_once`: all drafts of a round take one pass of the draft model.
    """

    exact = False

    def __init__(
        self,
        *,
        limit: int,
        surface: Surface | None = None,
        frozen: bool = False,
        at_once: bool = False,
    ):
        assert surface is not None or not frozen
        self._choices = (*(k for k in _CHOICES if k < limit), limit)
        measured = surface is not None and (surface.measured or frozen)
        self._costs: Costs = (
            Profiled(surface, self._choices, frozen=frozen)
            if surface and measured
            else Learned(self._choices, surface, at_once=at_once)
        )
        self._places = numpy.array(self._choices)
        self._frozen = frozen
        self._keeping = Keeping(limit=limit)
        if surface is not None and surface.acceptance is not None:
            self._keeping = Keeping(
                limit=limit, guess=min(max(surface.acceptance, _LEAST), _MOST), strength=_STRENGTH
            )
        self._first = not measured
        self._opening = [] if self._costs.known else [min(k, limit) for k in reversed(_OPENING)]
        self._outlook, self._rows = NOTHING_KNOWN, 0
        self._unlearnt: _Seen | None = None
        self._ahead: _Choice | None = (
            None  # of the next round, if it was made while the last one ran
        )
        # seconds a token takes a row, by choice; the least of them
        self._paces, self._pace = (self._places / 1.0, 0.0)
        self._last = 0  # the place of the last choice that was made for its goodput
        self._within = self._reach(_REACH)  # the first so many choices are thought of
        self._line: Array | None = None  # seconds of a round of each choice, for the rows of now
        self._looking, self._worth, self._losses, self._probes, self._probing = (
            Looking(),
            False,
            Losses(),
            Probing(),
            False,
        )

    def needs(self, width: int) -> bool:
        """At first, after a probe, and after catching up, whose cost is that round's; a plain
        round tells of no drafts."""
        tells = self._probing or self._outlook.catch_up or self._keeping.trials < _WAITED_FOR
        return bool(self._opening or self._frozen or (width and tells))

    def next(self, rows: int, outlook: Outlook = NOTHING_KNOWN) -> int:
        before, self._outlook, same, self._rows = (
            self._outlook,
            self._seen(outlook),
            rows == self._rows,
            rows,
        )
        last, self._costs.free = self._unlearnt, outlook.free
        telling = (
            last is not None
            and last.done.width > 0
            and (last.probing or self._keeping.trials < _WAITED_FOR)
        )
        stale = (
            telling or not same or not outlook.hurried or self._outlook.catch_up != before.catch_up
        )
        if stale:
            self._digest()
        if self._line is not None and not outlook.free:  # what will be found nobody knows
            self._losses.expect(float(self._line[0]) / self._pace - 1)
        length, self._probing = (not stale and self._ahead) or self._choice(self._outlook)
        self._ahead = None
        return length

    def _choice(self, outlook: Outlook) -> _Choice:
        plain = 0.0 if self._line is None else float(self._line[0])  # seconds a round
        if self._opening:
            if outlook.entry(self._opening[-1]) <= _TRIAL * (plain and plain * outlook.left):
                return _Choice(self._opening[-1])
            self._opening = []
        if self._line is None:
            return _Choice(0)
        if outlook.free:
            return _Choice(
                self._unless_lost(self._choices[-1], plain, outlook) if self._looking.due else 0
            )
        found = self._unless_lost(self._best(self._line, outlook), plain, outlook)
        if found == 0 and self._probes.thinkable:
            short = (
                [k for k in self._choices if 1 <= k <= 4]
                if any(outlook.entries)
                else self._choices[1:2]
            )
            return self._probe(min(short, key=outlook.entry, default=0), self._line, outlook)
        return _Choice(found)

    def trim(self, counts: Sequence[int], outlook: Outlook = NOTHING_KNOWN) -> int:
        """The length that pays, if only rows with so many drafts can keep them; now and then a
        short probe."""
        # the host's drafts need no catching up
        most, outlook = (max(counts), self._seen(outlook)._replace(catch_up=0.0))
        if self._opening or not self._costs.known:
            return most
        choices = self._costs.line(len(counts), outlook.context)
        line = numpy.interp(numpy.arange(most + 1), self._choices, choices)
        found = line / self._keeping.tokens(counts)
        self._worth = bool(found.argmin())
        found += self._once(range(most + 1), line, outlook) / self._looking.share
        found = found[: self._choices[self._within - 1] + 1]
        best = self._unless_lost(
            int((found <= found.min() * (1 + _STAY)).argmax()), float(line[0]), outlook
        )
        if best == 0 and self._probes.thinkable:
            best, self._probing = self._probe(min(most, 2), choices, outlook)
        return best

    def _seen(self, outlook: Outlook) -> Outlook:
        """Of an outlook, what may decide."""
        return outlook._replace(entries=(), colds=(), catch_up=0.0) if self._frozen else outlook

    def _best(self, line: Array, outlook: Outlook) -> int:
        """The length with the fewest seconds a token that is left."""
        found = (self._paces + self._once(self._choices, line, outlook))[: self._within]
        best = int(found.argmin())
        margin = (
            _LEAVE * max(_SETTLED / max(self._keeping.trials, 1.0), 1.0) if best == 0 else _STAY
        )
        stays = self._last < self._within and found[self._last] <= found[best] * (1 + margin)
        self._last = self._last if stays else best
        return (
            min(_LONGER * self._choices[self._last], self._choices[-1])
            if outlook.stops
            else self._choices[self._last]
        )

    def _once(self, lengths: Sequence[int], line: Array, outlook: Outlook) -> Array:
        """What these lengths cost once, in seconds a token that is left; no end of them for one
        that is too dear to try. line: seconds of rounds, the first one plain."""
        found = numpy.zeros(len(lengths))
        found[1:] = outlook.catch_up * (_CAUTION / outlook.left)
        if any(outlook.entries):
            found = numpy.array([outlook.entry(k) for k in lengths]) * (_CAUTION / outlook.left)
        if (
            self._keeping.trials < _EVIDENCE and outlook.colds
        ):  # nobody knows yet whether drafts stand
            colds = numpy.array([outlook.colds[min(k, len(outlook.colds) - 1)] for k in lengths])
            found[1:][colds[1:] > _TRIAL * float(line[0]) * outlook.left] = numpy.inf
        return found

    def _unless_lost(self, length: int, plain: float, outlook: Outlook) -> int:
        """The length, or 0 where drafting has lost too much already, or could after it has
        caught up."""
        return (
            length
            if self._affords(
                outlook.catch_up + _STRETCH * plain if outlook.catch_up else 0.0, plain
            )
            else 0
        )

    def _affords(self, seconds: float, plain: float) -> bool:
        return self._losses.affords(seconds, plain=plain, left=self._outlook.left)

    def _probe(self, length: int, line: Array, outlook: Outlook) -> _Choice:
        """A short draft, if it is time for one and it can be had for what may still be lost;
        otherwise none. line: seconds of rounds by choice."""
        plain, dear = float(line[0]), outlook.entry(length) - outlook.catch_up
        loss = float(line[self._choices.index(length)]) + outlook.catch_up - plain
        if not self._probes.due(loss / plain):
            return _Choice(0)
        waited = min(self._probes.plain, outlook.left)
        if dear > _TRIAL * plain * waited or not self._affords(loss + _STRETCH * plain, plain):
            return _Choice(0)
        return _Choice(length, length > 0)

    def observe(self, done: Round) -> None:
        if self._opening:
            self._opening.pop()
        self._learn()
        self._unlearnt = _Seen(done, self._outlook, self._probing)
        self._account(done)
        if done.width == 0:
            self._probes.skip()
            return
        self._within = max(self._within, self._reach(2 * done.width))
        self._probes.observe(most=done.went_well, probe=self._probing)

    def reflect(self) -> None:
        self._digest()
        if self._outlook.hurried and not self._outlook.free and not self._opening:
            self._ahead = self._choice(self._outlook)

    def _digest(self) -> None:
        """What was seen, and what follows for the rows of now."""
        self._learn()
        rows, outlook = self._rows, self._outlook
        self._keeping.follow(outlook.samples or tuple(range(rows)))
        self._line = self._costs.line(rows, outlook.context) if self._costs.known else None
        expected = self._keeping.rounds(outlook.rooms)[self._places]  # rounds a token
        if self._line is not None:
            self._paces = self._line * expected
            self._pace = float(self._paces.min())

    def _learn(self) -> None:
        """What the last round taught about costs and rates."""
        if self._unlearnt is None:
            return
        (done, outlook, probing), self._unlearnt = self._unlearnt, None
        rows = len(done.accepted)
        if done.steady:
            if not self._first:  # the first round is slower than any other: caches, libraries
                self._costs.learn(rows, done.width, done.seconds - done.asking, outlook.context)
            self._first = False
        if done.width:
            if probing:
                self._keeping.doubt()
            self._keeping.follow(done.rows or outlook.samples or tuple(range(rows)))
            self._keeping.observe(done.accepted, done.meant)

    def least(self, drafted: int) -> float:
        """contracts.StopsDrafts: one more draft pays if the tokens it should bring take longer
        at the pace of now."""
        if self._line is None or not self._pace:
            return 0.0
        before, after = numpy.interp((drafted, drafted + 1), self._choices, self._line)
        return float((after - before) / (self._pace * self._keeping.rate))

    def _reach(self, width: int) -> int:
        return sum(k <= width for k in self._choices)

    def _account(self, done: Round) -> None:
        """What drafting, or looking for drafts, has cost in this round beyond plain decoding of
        the same tokens."""
        if self._line is None:
            return
        plain, rows, taken = float(self._line[0]), len(done.accepted), done.seconds
        if self._frozen or not done.steady:
            due = float(self._line[nearest(self._choices, done.width)])
            # A round of drafts that the host had, where a model usually drafts, takes less than
            # one of the model's.
            taken = due if self._frozen or done.drafted is None else min(due, taken)
        self._losses.spend(taken)
        if not done.asking or self._frozen:
            self._looking.skip()
        if done.width or (done.asking and not self._frozen):
            catch_up = self._outlook.catch_up if done.drafted is None else 0.0
            lost = taken + catch_up - plain * (1 + sum(done.accepted) / rows)
            self._losses.lose(lost, plain=plain)
            if done.asking and not self._frozen:
                self._looking.observe(-lost / plain, done.asking / plain, self._worth)
                self._worth = False

    def learned(self) -> Surface | None:
        """What later jobs may begin from; None if costs came from a profile, or hardly anything
        was seen."""
        self._learn()
        if not isinstance(self._costs, Learned):
            return None
        return self._costs.surface(acceptance=self._keeping.rate)
