"""The decoding loop: rows join and leave, rounds are launched, and their results reach the host.

`Members` keeps batch, target and drafter in step as rows come and go. `InFlightRound` is a round
that was launched, `AheadPolicy` decides whether launching before the last result pays
(asynchronous scheduling), and `Loop` ties them together. Not here: what a round does (round.py),
which samples get rows and when they end (scheduler.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Change, Row
from bass_cli.engine.clock import Clock, Prefill
from bass_cli.engine.contracts import (
    NO_PENDING_WORK,
    Drafter,
    DraftLength,
    FollowsRows,
    PendingWork,
    Proposal,
    RoundResult,
    Target,
)
from bass_cli.engine.cutting import Cut
from bass_cli.engine.graphs import Captured, Graphs, Running, Shape, synchronise
from bass_cli.engine.host_state import Integers
from bass_cli.engine.round import CatchingUp, NextRound, RoundRequest, Rounds, sizes
from bass_cli.engine.simulated_acceptance import Rate, SimulatedAcceptance
from bass_cli.engine.sizes import cover, step_down
from bass_cli.engine.verify import ALL, Verifier


class Members:
    """The prompts and rows of one loop."""

    def __init__(
        self,
        batch: Batch,
        target: Target,
        drafter: Drafter,
        simulated: SimulatedAcceptance | None,
        clock: Clock,
    ):
        self._batch, self._target, self._drafter, self._clock = batch, target, drafter, clock
        self._followers: tuple[FollowsRows, ...] = (target, drafter)
        if simulated is not None:
            self._followers = (target, drafter, simulated)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when what graphs read has moved."""
        return self._batch.version, *(follower.version for follower in self._followers)

    def open(
        self, key: str, tokens: Sequence[int], reference: Sequence[int], deadline: float | None
    ) -> bool:
        """A prompt begins: it is stored once for all its rows, or given up (False) if a
        `deadline` is likely to come first. `reference`: see Drafter.open."""
        if deadline is None:
            return self._target.open(key, tokens) and self._drafter.open(key, tokens, reference)
        target, draft = (
            Prefill(
                self._clock.passes[model],
                deadline,
                now=self._clock.now,
                wait=lambda: synchronise(self._batch.device),
            )
            for model in ("target", "draft")
        )
        if not self._target.open(key, tokens, target):
            return False
        target.end()
        if not self._drafter.open(key, tokens, reference, draft):
            self._target.close(key)
            return False
        draft.end()
        return True

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self._target.close(key)
        self._drafter.close(key)

    def grow(self) -> list[Row]:
        """See to it that the rows' pieces hold what two rounds may bring, whether the host knows
        of the first or not; rows that had to be put back for that are live no more."""
        back: list[Row] = []
        while True:
            change, fails = self._batch.grow()
            if change is not None:
                self._follow(change)
            if fails is None:
                return back
            surplus = self._batch.surplus(fails)
            back += [self._batch.hosts[place] for place in surplus]
            self.swap_rows(surplus, ())

    def swap_rows(self, ended: Sequence[int], rows: Sequence[Row]) -> None:
        """Batch.exchange; the rows' prompts must be open."""
        self._follow(self._batch.swap_rows(ended, rows))

    def _follow(self, change: Change) -> None:
        for follower in self._followers:
            follower.follow(change)


# gaps of which the least counts: the others held an admission, a stop string, a line to write
_RECENT = 8
_WEIGHT = 0.05  # of the newest round in the share of rows that end: some twenty rounds count


class InFlightRound(NamedTuple):
    """A round that was launched: with these rows (of the batch as it was after so many `changes`),
    `width` drafts each (and maybe more `places`), or where it is `cut` on average,
    of which `meant` were the host's (None: all are the device's), `began` and `asking` as for
    RoundResult.seconds; what went into `capturing`; whether nothing was captured or ran uncaptured
    (`steady`); `waiting`: as RoundResult's."""

    rows: tuple[Row, ...]
    changes: int
    width: int
    places: int
    cut: bool
    num_drafts: tuple[int, ...] | None
    running: Running
    began: float
    lookup_seconds: float
    looked_up: bool
    capturing: float
    steady: bool
    waiting: float

    @property
    def length(self) -> int:
        """Its draft length, by which the clock knows it."""
        return self.width if self.cut else self.places

    @property
    def most(self) -> int:
        """Drafts of a row that may stand."""
        return self.places if self.cut else self.width

    @property
    def under_way(self) -> bool:
        """Whether a row of it is still live."""
        return any(row.place >= 0 for row in self.rows)

    def live(self, table: Integers, changes: int) -> tuple[InFlightRound, Integers, Integers]:
        """The same with only those of its rows that are live after so many changes; the places
        where they are now, and their lines of the table that it brought. Of a round that was cut
        that says at its end what was verified."""
        num_drafts = self.num_drafts
        if self.cut:
            num_drafts, table = tuple(table[: len(self.rows), -1].tolist()), table[:, :-1]
        if changes == self.changes:
            places = numpy.arange(len(self.rows))
            return self._replace(num_drafts=num_drafts), places, table[: len(self.rows)]
        places = numpy.fromiter([row.place for row in self.rows], numpy.int64, len(self.rows))
        alive = places >= 0  # -1: nowhere
        chosen = alive.tolist()
        rows = tuple(itertools.compress(self.rows, chosen))
        num_drafts = None if num_drafts is None else tuple(itertools.compress(num_drafts, chosen))
        (lines,) = alive.nonzero()
        return self._replace(rows=rows, num_drafts=num_drafts), places[lines], table[lines]

    def completed(self, kept: tuple[int, ...], seconds: float, *, late: bool) -> RoundResult:
        """What it did: each row kept so many drafts, and it took so long. `late`: it has been
        over for a while, so nobody knows what it took."""
        return RoundResult(
            self.width,
            kept,
            seconds,
            self.steady and not late,
            self.num_drafts,
            self.lookup_seconds if self.looked_up else 0.0,
            self.rows,
            self.capturing,
            waiting=self.waiting,
        )


class AheadPolicy:
    """Whether launching ahead pays: it hides what the host does between two rounds, and a row
    that ends takes part in one more round for nothing. All times are the loop's clock's."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._ending = self._seconds = 0.0
        self._ended = 0
        self._completed: float | None = None  # when the last round was over

    def idle(self) -> None:
        """No row was live: whatever the device did, no round could have been launched."""
        self._completed = None

    def begins(self, now: float) -> None:
        """A round begins behind nothing, which might have been launched ahead; looks for drafts
        are not counted as waiting."""
        if self._completed is not None:
            self._gaps.append(now - self._completed)

    def start(self, in_flight: InFlightRound) -> float:
        """When the device began with it: not before it was done with the last one."""
        return in_flight.began if self._completed is None else max(in_flight.began, self._completed)

    def until(self, deadline: float | None, in_flight: InFlightRound, clock: Clock) -> float | None:
        """What a deadline is to the round behind this one, which waits until that is over, if
        it is asked for now."""
        if deadline is None:
            return None
        over = self.start(in_flight) + clock.predict(in_flight.length)
        return deadline - max(over - clock.now(), 0.0)

    def rows_ended(self, count: int) -> None:
        self._ended += count

    def completed(self, now: float, seconds: float, rows: int) -> None:
        """A round of so many rows is over, and took so long."""
        self._ending += _WEIGHT * (self._ended / rows - self._ending)
        self._ended, self._seconds, self._completed = 0, seconds, now

    def pays(self, *, waiting: bool) -> bool:
        """`waiting`: whether samples wait for rows; otherwise nobody misses what an ended row
        takes."""
        return self.saves(waiting=waiting) > 0

    def saves(self, *, waiting: bool) -> float:
        """Seconds that it saves a round; 0 where it does not pay."""
        lost = self._ending * self._seconds if waiting else 0.0
        return max(min(self._gaps, default=0.0) - lost, 0.0)


class Loop:
    """A batch with its target, drafter and draft-length controller. `coupling` is "shared" or
    "maximal".

    With `graphs`, rounds are captured and replayed by shape (graphs.py decides which).
    `acceptance` is for benchmarks of random weights: each draft is accepted with that
    probability, of several each row's own, or by its place (simulated_acceptance.py).
    `cut`: where rows' drafts are cut by the draft's confidence, under shared coupling
    (cutting.py). None: nowhere.
    """

    def __init__(
        self,
        *,
        batch: Batch,
        target: Target,
        drafter: Drafter,
        lengths: DraftLength,
        coupling: str,
        clock: Clock,
        acceptance: Sequence[Rate] | None = None,
        graphs: Graphs | None = None,
        cut: Cut | None = None,
    ):
        assert coupling in ("shared", "maximal")
        assert acceptance is None or coupling == "shared"
        self.batch, self.clock, self.graphs = batch, clock, graphs
        self.target, self.drafter = target, drafter
        self.simulated = SimulatedAcceptance(acceptance, batch) if acceptance is not None else None
        self._members = Members(batch, target, drafter, self.simulated, clock)
        self._captured: Captured | None = None
        if graphs is not None and graphs.enabled:
            self._captured = Captured(
                graphs, batch, clock, self.function, drafter=drafter, cuts=self._cuts
            )
        self._verifier = Verifier(
            batch, target, coupling=coupling, simulated_acceptance=self.simulated
        )
        self._rounds = Rounds(
            batch,
            target,
            drafter,
            self._verifier,
            cut=cut if coupling == "shared" and acceptance is None else None,
            may_stop=self._captured is None and coupling == "shared",
        )
        self._catching = CatchingUp(batch, drafter, clock, self._captured)
        self._next = NextRound(
            batch,
            drafter,
            lengths,
            coupling=coupling,
            clock=clock,
            captured=self._captured,
            catching=self._catching,
            stops=self._rounds.stops,
        )
        self._in_flight: InFlightRound | None = None  # launched, and not yet returned by any call
        self._ahead_policy, self._ahead = (
            AheadPolicy(),
            False,
        )  # whether rounds may be launched ahead at all
        self._held = False  # whether the next one had to wait for the last one's tokens

    @property
    def lengths(self) -> DraftLength:
        """The controller of now."""
        return self._next.lengths

    @property
    def exact(self) -> bool:
        """Whether a round must have the very length that the controller gave."""
        return self._next.exact

    def use(self, lengths: DraftLength) -> None:
        """From now on this controller."""
        self._next.use(lengths)

    def restart(self, lengths: DraftLength) -> None:
        """From now on this controller, and whatever rounds have taught the drafter is forgotten."""
        self._next.use(lengths)
        self._next.host_drafts.forget()

    def shortest(self, deadline: float) -> float:
        """NextRound.shortest."""
        return self._next.shortest(deadline)

    @torch.inference_mode()
    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        *,
        deadline: float | None = None,
    ) -> bool:
        """A prompt begins: it is stored once for all its rows, or given up (False) if a
        `deadline` is likely to come first. `reference`: see Drafter.open."""
        return self._members.open(key, tokens, reference, deadline)

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self._members.close(key)

    @torch.inference_mode()
    def swap_rows(self, ended: Sequence[int], rows: Sequence[Row]) -> None:
        """End the rows at `ended` and make `rows`, of open prompts, live. Cheapest if a prompt's
        rows come together, and all that changes between two rounds at once."""
        if not len(self.batch):
            self._ahead_policy.idle()
        self._members.swap_rows(ended, rows)
        self._next.changed()
        self._ahead_policy.rows_ended(len(ended))

    @torch.inference_mode()
    def grow(self) -> list[Row]:
        """Before `launch` and `round` wherever rows may outgrow their pieces of the cache: see to
        it that they have enough. Rows for which there were not are put back: live no more, and to
        be drawn again."""
        back = self._members.grow()
        if back:
            self._next.changed()
        return back

    def admit(self, *rows: Row) -> None:
        """Make rows of open prompts live."""
        self.swap_rows((), rows)

    def retire(self, *ended: int) -> None:
        """End the rows at these places; the last rows take them."""
        self.swap_rows(ended, ())

    @property
    def under_way(self) -> bool:
        """Whether a round was launched that `round` has not returned, and has live rows."""
        return self._in_flight is not None and self._in_flight.under_way

    @torch.inference_mode()
    def launch(
        self, deadline: float | None = None, *, pending_work: PendingWork = NO_PENDING_WORK
    ) -> None:
        """Begin the next round, if none is under way: what the host does from now on until
        `round` takes the device no time. Rounds that are not captured leave the host no such
        time, and begin when they are asked for."""
        self._next.pending_work = pending_work
        if self._captured is not None and not self.under_way:
            self._in_flight = self._begin(deadline)

    @torch.inference_mode()
    def round(
        self,
        deadline: float | None = None,
        *,
        pending_work: PendingWork = NO_PENDING_WORK,
        ahead: bool = False,
    ) -> RoundResult:
        """Advance the live rows by one token or more. A row's new tokens may go past an
        end-of-sequence token or its limit: it must be cut and retired before the next round. The
        draft length is cut to end by `deadline`.

        `backlog`: what else the job has. `ahead`: this controller will be asked for the next
        round too, which may begin before this one's tokens are known, with the rows of now:
        others miss it. What is returned is still the oldest. Before a deadline that is only done
        where the next one too should be over by then: what is under way must be taken in."""
        self._next.pending_work = pending_work
        self._ahead = ahead and self._captured is not None
        in_flight, late = self._in_flight, False
        if in_flight is not None and in_flight.under_way:
            late = in_flight.running.over()  # then it is the host that took so long
        else:
            in_flight = self._begin(deadline)
        self._in_flight = None
        until = self._ahead_policy.until(deadline, in_flight, self.clock)
        if not self._may_go_on(in_flight) or not self._next.in_time(until):
            return self._complete(in_flight, late=late)
        assert self._captured is not None
        self._captured.renew(self._members.version)
        request = self._next.take(until)
        _, step = self._next.served(request, until)
        reaches = self._catching.reaches(in_flight.most, self._rounds.drafted(step.shape))
        if step.how == "replay" and reaches:
            self._in_flight = self._launch(request, until, behind=True)
            done = self._complete(in_flight, late=late)
            self.catch_up(self._in_flight.places)  # nothing is missing: the drafter is only told
        else:
            done = self._complete(in_flight, late=late)
            if until is not None:
                return done  # the next one is asked for anew: how late it is, is known now
            self._in_flight = self._launch(request, None)
        self._next.reflect()
        return done

    def _begin(self, deadline: float | None) -> InFlightRound:
        """Launch a round with nothing before it."""
        if self._captured is not None:
            self._captured.renew(self._members.version)
        request = self._next.take(deadline)
        in_flight = self._launch(request, deadline)
        if self._ahead:
            self._ahead_policy.begins(in_flight.began - request.lookup_seconds)
        self._next.reflect()
        return in_flight

    def _may_go_on(self, in_flight: InFlightRound) -> bool:
        """Whether the round after this one may, and should, begin before it is over."""
        self._held = not self._next.foreseeable(in_flight.width)
        may = self._ahead and in_flight.steady and not self._held
        return may and self._ahead_policy.pays(waiting=self._next.pending_work.tokens > 0)

    def _launch(
        self, request: RoundRequest, deadline: float | None, *, behind: bool = False
    ) -> InFlightRound:
        """Begin a round; `behind` another one that is not over. Without graphs it is over when
        this returns."""
        captured, drafts, batch = self._captured, request.drafts, self.batch
        if captured is None:
            running, shape, began = self._run(request.width, drafts)
        else:
            if drafts is not None:
                self._next.host_drafts.put(drafts)
            wish, step = self._next.served(request, deadline)
            shape = step.shape
            if not behind:
                self.catch_up(self._rounds.drafted(shape), deadline)
            self._verifier.look_at(wish.width if self.exact else ALL)
            began = captured.start()
            running = captured.launch(wish, step)
        # of the device, for a look or for the last round: another would have been launched ahead
        waits = 0.0
        if self._ahead and (request.looked_up or (self._held and not behind)):
            waits = self._ahead_policy.saves(waiting=self._next.pending_work.tokens > 0)
        width = min(shape.width, self._verifier.most)
        return InFlightRound(
            tuple(batch.hosts),
            batch.changes,
            width,
            self._rounds.drafted(shape),
            shape.kind == "cut",
            request.num_drafts(width),
            running,
            began,
            request.lookup_seconds + (waits if request.looked_up else 0.0),
            request.looked_up,
            captured.capturing if captured else 0.0,
            captured is None or captured.steady,
            0.0 if request.looked_up else waits,
        )

    def _complete(self, in_flight: InFlightRound, *, late: bool) -> RoundResult:
        """Wait for a round, and take in what it brought for those of its rows that are still
        live. `late`: see InFlightRound.landed."""
        packed = in_flight.running.wait()
        assert packed is not None
        now, rows = self.clock.now(), len(in_flight.rows)
        in_flight, places, table = in_flight.live(packed.numpy(), self.batch.changes)
        num_drafts = (
            in_flight.width if in_flight.num_drafts is None else numpy.array(in_flight.num_drafts)
        )
        kept = tuple(
            self.batch.host_state.take(
                table, places, width=in_flight.places, num_drafts=num_drafts
            ).tolist()
        )
        seconds = (
            in_flight.lookup_seconds
            + now
            - self._ahead_policy.start(in_flight)
            - in_flight.capturing
        )
        self._ahead_policy.completed(now, seconds, rows)
        done = in_flight.completed(kept, seconds, late=late)
        if done.steady:
            self.clock.observe(in_flight.length, seconds)
        if not in_flight.places:
            self._catching.missed(1 + max(kept))
        self._rounds.observe(kept)
        self.lengths.observe(done)
        return done

    @torch.inference_mode()
    def prepare(
        self,
        rows: Iterable[int],
        widths: Iterable[int],
        *,
        catching_up: bool = True,
        only_compile: bool = False,
        each: bool = False,
    ) -> None:
        """Capture the graphs that these numbers of rows and draft lengths need now, rather than
        when they are first met, or at least compile what is in them; `catching_up`: those for
        drafting after plain rounds too; `each`: one for each length, also where one serves
        several."""
        captured = self._captured
        if captured is None:
            return
        captured.renew(self._members.version)
        self._catching.prepare()
        longest = self.drafter.longest
        usual: Callable[[int], int] = int if each else cover if self.exact else step_down
        captured.prepare(
            rows,
            [min(usual(min(width, longest)), longest) for width in widths],
            only_compile=only_compile,
            catch_up=sizes if catching_up and self.drafter.catches_up else None,
        )

    @torch.inference_mode()
    def catch_up(self, width: int, deadline: float | None = None) -> None:
        """Let the drafter take in what it must before it drafts `width` tokens. It is due to
        plain rounds before, and not counted as what a round of this width takes."""
        self._catching.run(width, left=self._next.left(self.batch.rooms()), deadline=deadline)

    def _run(self, width: int, drafts: Proposal | None) -> tuple[Running, Shape, float]:
        """A round without graphs: what it gives, its shape, and when it began."""
        shape = self._rounds.planned(width, cut=self._cuts(len(self.batch), width))
        self.catch_up(self._rounds.drafted(shape))
        began = self.clock.now()
        table, shape = self._rounds.run(shape, drafts, self.lengths)
        return Running(lambda: True, lambda: table), shape, began

    def _cuts(self, rows: int, width: int) -> bool:
        """Rounds.cuts, which gives a row another number of drafts than its controller does."""
        return not self.exact and self._rounds.cuts(rows, width)

    def function(self, shape: Shape) -> Callable[[], Tensor | None]:
        """What a graph of this shape does."""
        if shape.kind == "catch up":
            return self._catching.function(shape.width)
        return self._rounds.function(shape, self._next.host_drafts)
