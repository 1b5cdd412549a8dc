"""The draft-length controller of "auto", which chooses by goodput (arXiv 2406.14066).

`Goodput` weighs the cost of a round (costs.py) against the acceptance rate (acceptance.py), within
a budget of what drafting may lose against plain decoding. Not here: other controllers
(controllers.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy

from bass_cli.engine.contracts import DEFAULT_INPUT, ControllerInput, DraftLength, RoundResult
from bass_cli.engine.graphs import ARITHMETIC
from bass_cli.engine.sizes import LONGEST, WIDTHS
from bass_cli.lengths.acceptance import Acceptance
from bass_cli.lengths.costs import Array, RoundCost
from bass_cli.lengths.surface import Surface

_CHOICES = (*WIDTHS, 48, LONGEST)  # the captured lengths and two more
_HOST_PROBE = 2  # the longest probe of drafts that the host found
_DEVICE_PROBE = 4  # the longest probe of other drafts, if a captured length beats a shorter one
_STAY = 0.01  # gain needed to leave the last length; below it noise would choose
_LEAVE = 0.03  # the same for going to plain decoding, because coming back may cost more
# A plain round is inserted if the relative uncertainty of the cost exceeds the gain of drafting,
# bounded by these: below the first, costs drift anyway; above the second, always.
_UNSURE = 0.04, 0.25


class Goodput(DraftLength):
    """Choose the k with the fewest seconds a round x rounds a token, over the tokens that the rows
    still need: the length that gives the rows the rest of their tokens soonest. One-time costs of
    a length, such as a graph capture, count too.

    It returns 0 if drafting does not pay, with a probe now and then, at growing intervals. No round
    may lose more than is left of one budget. If the device would have to wait, a result is used one
    round later, unless too little is known yet.

    Args:
        limit: the largest draft length.
        surface: the cost of rounds, a profile or a first estimate.
        frozen: never use measured times (maximal coupling); only acceptance is learnt.
        at_once: one pass makes all drafts.
        arithmetic: see RoundCost.
    """

    stops = True

    def __init__(
        self,
        *,
        limit: int,
        surface: Surface | None = None,
        frozen: bool = False,
        at_once: bool = False,
        arithmetic: float = ARITHMETIC,
    ):
        self._choices = (*(k for k in _CHOICES if k < limit), limit)
        self._costs = RoundCost(
            self._choices, surface, frozen=frozen, at_once=at_once, arithmetic=arithmetic
        )
        self._first_job = surface is None or surface.acceptance is None
        self._acceptance = Acceptance(limit, surface.acceptance if surface is not None else None)
        self._inputs, self._rows, self._frozen = DEFAULT_INPUT, 0, frozen
        # By choice: 0 if another length ran in its place.
        self._is_served = numpy.ones(len(self._choices))
        self._round_seconds: Array | None = None  # of a round with each choice, for the live rows
        self._plain = 0.0  # seconds of a plain round
        self._token_seconds = 0.0  # the fewest seconds for a token of a row
        self._last = 0  # index of the last choice made by goodput
        self._trial_losses = 0.0  # seconds that trials of lengths were expected to lose
        self._unlearnt: tuple[RoundResult, ControllerInput] | None = None
        # (length, whether a probe) of this round and the next.
        self._this_choice = self._next_choice = (0, False)
        self._next_is_chosen = False  # whether `_next_choice` is up to date
        self._probes, self._lookups, self._budget = Backoff(), Lookups(), Budget()

    @property
    def drafts(self) -> bool:
        return not self._next_is_chosen or self._next_choice[0] > 0

    @property
    def plain(self) -> float:
        return self._plain

    def needs_result(self, width: int) -> bool:
        """See DraftLength.needs_result. True at the beginning of a pair's first job, after a probe
        and after catching up; a plain round says nothing about drafts."""
        unsure = self._acceptance.unsure and self._first_job
        informative = self._this_choice[1] or self._inputs.catch_up or unsure
        return bool(self._frozen or not self._costs.known or (width and informative))

    def next(self, rows: int, inputs: ControllerInput = DEFAULT_INPUT) -> int:
        before, self._inputs = self._inputs, inputs
        if self._frozen:
            self._inputs = inputs._replace(
                one_time_costs=(), warmup_costs=(), catch_up=0.0, padded=0
            )
        self._acceptance.recall(inputs.skipped)
        same = rows == self._rows and before.catch_up == self._inputs.catch_up
        self._rows = rows
        if not (self._next_is_chosen and same):
            self._choose_next()
        self._this_choice, self._next_is_chosen = self._next_choice, False
        return self._this_choice[0]

    def reflect(self) -> None:
        self._learn()
        if not self._frozen:
            if self._inputs.free and self._next_choice[0]:
                self._lookups.begin()
            self._choose_next()
            self._next_is_chosen = True

    def trim(self, num_drafts: Sequence[int]) -> int:
        """Return the length that pays for these numbers of drafts, or now and then a short
        probe."""
        most, inputs = max(num_drafts), self._inputs
        if self._round_seconds is None:
            return most
        round_seconds = numpy.interp(range(most + 1), self._choices, self._round_seconds)
        tokens, plain = self._acceptance.tokens(num_drafts), self._plain
        likely = self._lookups.find(float((plain * tokens - round_seconds).max()) / plain)
        one_time = first_use(
            range(most + 1), inputs, round_seconds, 1.0, self._affordable, self._warmup
        )
        # Drafts are not found in every round, so a one-time cost must pay within the expected gain.
        # That gain is a mean over lookups, so it is not saved twice over.
        one_time[one_time > _CAUTION * max(plain * likely, 0.0)] = numpy.inf
        token_seconds = round_seconds / tokens + one_time
        best = int((token_seconds <= token_seconds.min() * (1 + _STAY)).argmax())
        if best == 0:
            most = min(most, _HOST_PROBE)
            # With many rows a round may not pay even if all drafts found are accepted. With fewer
            # rows, later, it costs less. Its cost is measured only by drafting, so it is tried
            # now and then: the first rounds may have been slow.
            found = statistics.fmean(min(count, most) for count in num_drafts)
            least = float(round_seconds[most]) * math.exp(-self._relative_uncertainty(most))
            pays = least < plain * (1 + found)
            self._this_choice = self._probe(most, self._round_seconds, hopeful=pays)
        return best or self._this_choice[0]

    def observe(self, done: RoundResult) -> None:
        self._learn()
        if done.wanted in self._choices:  # a round of another length shows nothing about this one
            self._is_served[self._choices.index(done.wanted)] = done.width == done.wanted
        inputs, round_seconds = self._inputs, self._round_seconds
        if done.padded not in (0, inputs.padded) and not self._frozen:
            inputs = inputs._replace(padded=done.padded)  # the next round has fewer rows
            if round_seconds is not None:
                round_seconds = self._costs.round_seconds(
                    done.padded, inputs.context, free=inputs.free
                )
        self._unlearnt = done, inputs
        if round_seconds is not None:
            self._account(done, round_seconds)
        # The next length depends on what a lookup found, and on the first known cost.
        self._next_is_chosen = (
            self._next_is_chosen and self._costs.known and not done.lookup_seconds
        )
        if done.width == 0:
            self._probes.idle += 1
            return
        self._next_is_chosen = self._next_is_chosen and not (
            self._this_choice[1] or self._acceptance.unsure
        )
        self._budget.drafted = self._budget.spent
        self._probes.observe(paid=done.mostly_accepted, probe=self._this_choice[1])

    def least(self, drafted: int) -> float:
        """One more draft pays if the tokens that it is expected to add would take longer at the
        current seconds a token."""
        if self._round_seconds is None or not self._token_seconds:
            return 0.0
        before, after = numpy.interp((drafted, drafted + 1), self._choices, self._round_seconds)
        return max(float((after - before) / (self._token_seconds * self._acceptance.rate)), 0.0)

    def learned(self) -> Surface | None:
        """Return the learnt costs, from which later jobs may begin; None if there is a measured
        profile, or little was learnt."""
        self._learn()
        return self._costs.surface(acceptance=self._acceptance.rate)

    def _choose_next(self) -> None:
        """Learn from the last round, then choose the next length."""
        self._learn()
        inputs = self._inputs
        self._acceptance.follow(inputs.samples or tuple(range(self._rows)))
        if self._costs.known:
            rows = inputs.padded or self._rows
            self._round_seconds = self._costs.round_seconds(rows, inputs.context, free=inputs.free)
            self._plain = float(self._round_seconds[0])
        if self._round_seconds is not None and not inputs.free:
            self._next_choice = self._choose(self._round_seconds, inputs)
        else:  # the cost of plain rounds is unknown, or drafts must be looked up first
            due = self._lookups.due and self._lookups.cost * self._plain <= self._affordable
            self._next_choice = (
                self._choices[-1] if self._round_seconds is not None and due else 0,
                False,
            )

    def _choose(self, round_seconds: Array, inputs: ControllerInput) -> tuple[int, bool]:
        """Return the length with the fewest seconds a token over the rest, and whether it is a
        probe."""
        rounds = self._acceptance.rounds(self._rows, inputs.rooms)[[*self._choices]]
        token_seconds = round_seconds * rounds
        self._token_seconds, unsure = float(token_seconds.min()), self._acceptance.unsure
        least = 1 + (0.0 if unsure else _LEAST_ACCEPTED) * (1 / rounds - 1)
        one_time = first_use(
            self._choices, inputs, round_seconds, least, self._affordable, self._warmup
        )
        token_seconds += one_time
        hopeful = token_seconds.copy()
        if self._last and not unsure:
            # A length may cost one standard deviation less than estimated. So lengths that may be
            # the best are tried, and each try makes their estimates better.
            rows = inputs.padded or self._rows
            spread = self._costs.spread(rows, self._last, inputs.context) * self._is_served
            hopeful[1:] *= numpy.exp(-spread[1:])
        best = int(hopeful.argmin())
        stays = token_seconds[self._last] <= hopeful[best] * (1 + (_STAY if best else _LEAVE))
        self._last = self._last if stays else best
        length = self._choices[self._last]
        if length and not unsure and not self._frozen:
            length = self._choices[self._try_longer(token_seconds, one_time, round_seconds)]
        if length:
            uncertainty = self._costs.uncertainty(
                inputs.padded or self._rows, self._last, inputs.context
            )
            if self._this_choice[0] and uncertainty > numpy.clip(
                self._plain / self._token_seconds - 1, *_UNSURE
            ):
                return 0, False
            return min(2 * length, self._choices[-1]) if inputs.stops else length, False
        short = [
            k
            for k in self._choices
            if 1 <= k <= (_DEVICE_PROBE if any(inputs.one_time_costs) else 1)
        ]
        return self._probe(min(short, key=inputs.one_time_cost, default=0), round_seconds)

    def _try_longer(self, token_seconds: Array, one_time: Array, round_seconds: Array) -> int:
        """Return the choice of this round: the last one, or a longer one that no job of the pair
        has measured with so many rows.

        A pass of more tokens may take no longer: products change their tiles with the number of
        tokens. The longer choice that would then gain most is tried, if drafting has gained what
        the trial loses by the estimates. Args as in `_choose`.
        """
        last, inputs, rows = self._last, self._inputs, self._inputs.padded or self._rows
        optimistic_seconds = self._costs.optimistic_seconds(
            rows, last, round_seconds, inputs.context
        )
        gains = 1 - optimistic_seconds / round_seconds * token_seconds / token_seconds[last]
        losses = round_seconds[last] * (token_seconds / token_seconds[last] - 1).clip(0.0)
        most = min(_TRIAL_SHARE * self._budget.spent - self._trial_losses, self._budget.won)
        may = (losses <= most) & (self._is_served > 0) & (one_time == 0)
        may &= ~self._costs.tried(rows)
        may[: last + 1] = False
        place = int(numpy.where(may, gains, 0.0).argmax())
        if not may[place] or gains[place] < _TRIAL_GAIN:
            return last
        self._trial_losses += float(losses[place])
        return place

    def _probe(
        self, length: int, round_seconds: Array, *, hopeful: bool = True
    ) -> tuple[int, bool]:
        """Return a short draft length if a probe is due and affordable, else 0. hopeful: whether it
        may pay by the estimates."""
        inputs, plain, backoff = self._inputs, self._plain, self._probes
        loss = float(numpy.interp(length, self._choices, round_seconds)) + inputs.catch_up - plain
        due = backoff.ready and backoff.due(loss / plain, hopeful=hopeful)
        due = due and loss <= self._affordable
        one_time = inputs.warmup_cost(length) or inputs.one_time_cost(length) - inputs.catch_up
        due = due and one_time <= self._first_use(0.0)
        return length if due else 0, due and length > 0

    def _relative_uncertainty(self, length: int) -> float:
        """Return the standard deviation of this length's cost relative to a plain round's."""
        rows = self._inputs.padded or self._rows
        spread = self._costs.spread(rows, 0, self._inputs.context)
        return float(numpy.interp(length, self._choices, spread))

    @property
    def _affordable(self) -> float:
        """Seconds that may still be lost."""
        return self._budget.left(plain=self._plain, rounds=self._inputs.left)

    def _first_use(self, left: float) -> float:
        """Return the seconds that a first use may take if the acceptance rate is unknown, with
        so many plain rounds left besides the time without drafts."""
        seconds = self._budget.spent - self._budget.drafted + self._plain * left
        saved = _SURE_SAVING * self._acceptance.rate * self._plain * self._inputs.left
        return min(_FIRST_USE_SHARE * seconds, saved)

    @property
    def _warmup(self) -> float:
        return self._first_use(self._inputs.left) if self._acceptance.unsure else math.inf

    def _learn(self) -> None:
        """Learn costs and acceptance from the last round."""
        if self._unlearnt is None:
            return
        (done, inputs), self._unlearnt = self._unlearnt, None
        rows, took = len(done.accepted), done.seconds - done.lookup_seconds
        if done.steady:
            padded = inputs.padded or rows
            replayed = inputs.padded > 0
            self._costs.learn(
                padded, done.width, took, inputs.context, free=inputs.free, warm=replayed
            )
        if done.width:
            self._acceptance.follow(done.rows or inputs.samples or tuple(range(rows)))
            if done.drafted is not None and not inputs.free:
                self._acceptance.choose(done.accepted, done.width)
            self._acceptance.observe(done.accepted, done.num_drafts)
        else:
            self._acceptance.idle()

    def _account(self, done: RoundResult, round_seconds: Array) -> None:
        """Record what drafting or a lookup gained in this round against plain decoding."""
        plain, taken = float(round_seconds[0]), done.seconds
        if not self._frozen:  # a gain counts by measured plain rounds if they are faster
            plain *= math.exp(-max(self._costs.unchecked, 0.0))
        looked_up = done.lookup_seconds > 0 and not self._frozen
        if self._frozen or not done.steady:
            taken = float(numpy.interp(done.width, self._choices, round_seconds))
        taken += self._inputs.catch_up if done.width else 0.0
        waited = 0.0 if self._frozen else done.waiting
        won = plain * (1 + sum(done.accepted) / len(done.accepted)) - taken - waited
        self._budget.spend(taken, won=won if done.width or looked_up else -waited)
        self._lookups.observe(
            cost=done.lookup_seconds / plain if looked_up else 0.0, gain=won / plain
        )


_TRIAL_SHARE = 0.005  # share of all time that trials of longer lengths may lose
_TRIAL_GAIN = 0.03  # possible gain from which a trial is worth it
_LEAST_ACCEPTED = 0.5  # share of the expected drafts that a round surely keeps if the rate is known
_CAUTION = 2.0  # a one-time cost must be saved this many times over: estimates may be wrong
# Share of all time that a first use may take if the acceptance rate is unknown.
_FIRST_USE_SHARE = 0.02
_SURE_SAVING = 0.25  # share of the time left that drafts surely save if all are accepted


def first_use(
    lengths: Sequence[int],
    inputs: ControllerInput,
    round_seconds: Array,
    tokens: Array | float,
    most: float,
    warmup: float,
) -> Array:
    """Return the one-time cost of each length, in seconds for each round left; inf if unaffordable.

    Args:
        round_seconds: seconds of a round with each length; the first is plain decoding.
        tokens: tokens that a row gains in such a round at the least.
        most: seconds that may still be lost, by catching up and by such a round.
        warmup: seconds that a first round may take.
    """
    one_time_costs, warmup_costs = (
        numpy.array([of(k) for k in lengths]) for of in (inputs.one_time_cost, inputs.warmup_cost)
    )
    one_time: Array = one_time_costs * (_CAUTION / inputs.left)
    lost = round_seconds - round_seconds[0] * tokens + inputs.catch_up
    one_time[((lost > most) & (numpy.array(lengths) > 0)) | (warmup_costs > warmup)] = numpy.inf
    return one_time


_PATIENCE = 4  # rounds before the next try, at the least
# Share of the time since the last try that a try may lose: at first, and at the least after
# failures. A smaller share would save almost nothing and miss changes.
_SHARES = (0.08, 0.005)
_HOPELESS = 0.001  # the same for a try that cannot pay by the estimates, which may be wrong


class Backoff:
    """Exponential back-off for something that may not pay: each failure halves what further
    backoff may lose."""

    def __init__(self) -> None:
        self.idle = 0.0  # rounds since the last use
        self._share = _SHARES[0]

    @property
    def ready(self) -> bool:
        """Whether enough rounds have passed without a try."""
        return self.idle >= _PATIENCE

    def due(self, loss: float, *, hopeful: bool = True) -> bool:
        """Return whether a try that would lose `loss` plain rounds is due.

        A try that the budget could pay for in every round is always due, if it may pay at all.
        """
        if not hopeful:
            return loss <= _HOPELESS * self.idle
        return loss <= max(_REGRET, self._share * self.idle)

    def observe(self, *, paid: bool, probe: bool = True) -> None:
        """Record a use and whether it paid. A probe that paid may be repeated at once."""
        if paid or probe:
            self._share = _SHARES[0] if paid else max(self._share / 2, _SHARES[1])
        self.idle = math.inf if paid and probe else 0.0


_LOOKUPS = (4, 24)  # prior weight and window, in lookups
_PRIOR_GAIN = 0.1  # prior gain of a lookup, in plain rounds: a tenth more tokens


class Lookups:
    """The cost and the gain of looking up drafts on the host, in plain rounds."""

    def __init__(self) -> None:
        self._backoff, self._count = Backoff(), _LOOKUPS[0]
        self.cost, self._gain, self._expected = 0.0, _PRIOR_GAIN, _PRIOR_GAIN
        self._found = 0.0  # possible gain of the drafts of the present lookup

    @property
    def due(self) -> bool:
        """Whether to look up drafts in this round: it pays on average, or the last try was long
        enough ago."""
        return self._gain >= 0 or self._backoff.due(self.cost)

    def begin(self) -> None:
        """Note that a lookup has begun whose result will not be known when the next round is
        chosen."""
        self._backoff.idle = 0.0

    def find(self, win: float) -> float:
        """Return the expected gain of a lookup once all graphs are captured.

        Args:
            win: what the drafts found now may gain then.
        """
        self._found = win
        return self._mean(self._expected, win) - self.cost

    def observe(self, *, cost: float, gain: float) -> None:
        """Record what a lookup cost (0: there was none) and gained."""
        if not cost:
            self._backoff.idle += 1
            return
        self.cost, self._gain = cost, self._mean(self._gain, gain)
        self._expected, self._found = self._mean(self._expected, self._found), 0.0
        self._count = min(self._count + 1, _LOOKUPS[1])
        self._backoff.observe(paid=self._gain >= 0)

    def _mean(self, before: float, now: float) -> float:
        return before + (now - before) / (self._count + 1)


_REGRET = 0.012  # share of all time that drafting may lose
_AHEAD = 256.0  # the same share of up to this many future rounds may be lost in advance
_GRACE = 1.5  # plain rounds that it may lose in addition
_RESERVED = 0.2  # share of its gains that it may not lose again


class Budget:
    """Seconds that drafting has gained or lost against plain decoding of the same tokens."""

    def __init__(self) -> None:
        self.spent = 0.0  # seconds of all rounds
        self.drafted = 0.0  # the same, up to the last round with drafts
        self.won = self._most = 0.0  # the total gain (below 0: a loss), and its maximum so far

    def spend(self, seconds: float, *, won: float = 0.0) -> None:
        """Record a round of `seconds` that gained `won` seconds."""
        self.spent, self.won = self.spent + seconds, self.won + won
        self._most = max(self._most, self.won)

    def left(self, *, plain: float, rounds: float) -> float:
        """Return the seconds that may still be lost.

        Args:
            plain: seconds of a plain round.
            rounds: plain rounds that may still come.
        """
        may = _REGRET * (self.spent + min(rounds, _AHEAD) * plain) + _GRACE * plain
        return may + self.won - _RESERVED * self._most
