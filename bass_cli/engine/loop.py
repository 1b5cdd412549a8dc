"""The decoding loop: rows join and leave, rounds are launched, and their results reach the host.

`Loop` ties the parts together. `InFlightRound` is a launched round, `AheadPolicy` decides whether
launching a round before the last result arrives pays (asynchronous scheduling), and `Members` keeps
batch, target and drafter in step as rows come and go. Not here: what a round does (round.py), which
samples get rows and when they end (run/scheduler.py).
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
from bass_cli.engine.graphs import Captured, Shape
from bass_cli.engine.host_state import Integers
from bass_cli.engine.round import CatchingUp, NextRound, RoundRequest, Rounds, sizes
from bass_cli.engine.sizes import cover, step_down
from bass_cli.engine.verify import ALL, Cut, Rate, SimulatedAcceptance, Verifier
from bass_cli.models.capture import Graphs, Running, synchronise


class Loop:
    """A batch with its target, drafter and draft-length controller.

    Args:
        coupling: "shared" or "maximal".
        acceptance: for benchmarks with random weights: each draft is accepted with this
            probability. Several values are used row by row; a tuple gives one by position in the
            draft (verify.py).
        graphs: capture rounds and replay them by shape (graphs.py chooses which). None: no graphs.
        cut: when to cut rows' drafts by the draft's confidence, under shared coupling (verify.py).
            None: never.
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
        self._in_flight: InFlightRound | None = None  # launched, and not returned by `round` yet
        self._ahead_policy = AheadPolicy()
        self._ahead = False  # whether the caller allows rounds to be launched ahead
        self._needs_result = False  # whether the next round must wait for the last one's tokens

    @property
    def lengths(self) -> DraftLength:
        """The present draft-length controller."""
        return self._next.lengths

    @property
    def exact(self) -> bool:
        """Whether a round must have exactly the length that the controller returned."""
        return self._next.exact

    def use(self, lengths: DraftLength) -> None:
        """Use this controller from the next round on."""
        self._next.use(lengths)

    def restart(self, lengths: DraftLength) -> None:
        """Use this controller from the next round on, and forget what the drafter has learnt."""
        self._next.use(lengths)
        self._next.host_drafts.forget()

    def shortest(self, deadline: float) -> float:
        """See NextRound.shortest."""
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
        """Read a prompt once for all its rows, and return False if it was given up.

        Args:
            reference: see Drafter.open.
            deadline: give the prompt up if reading it is likely to take longer.
        """
        return self._members.open(key, tokens, reference, deadline)

    def close(self, key: str) -> None:
        """Forget a prompt; no further row will use it."""
        self._members.close(key)

    @torch.inference_mode()
    def swap_rows(self, ended: Sequence[int], rows: Sequence[Row]) -> None:
        """End the rows at the places `ended` and make `rows`, of open prompts, live. It is
        cheapest to make all changes between two rounds in one call, with the rows of a prompt
        side by side."""
        if not len(self.batch):
            self._ahead_policy.idle()
        self._members.swap_rows(ended, rows)
        self._next.changed()
        self._ahead_policy.rows_ended(len(ended))

    @torch.inference_mode()
    def grow(self) -> list[Row]:
        """Give every row enough cache blocks for the next round. Call it before `launch` and
        `round` if rows may outgrow their blocks.

        Returns: rows for which there were not enough blocks; they are not live any more and must be
            drawn again.
        """
        back = self._members.grow()
        if back:
            self._next.changed()
        return back

    def admit(self, *rows: Row) -> None:
        """Make rows of open prompts live."""
        self.swap_rows((), rows)

    def retire(self, *ended: int) -> None:
        """End the rows at these places; the last rows move there."""
        self.swap_rows(ended, ())

    @property
    def under_way(self) -> bool:
        """Whether a launched round with live rows has not been returned by `round` yet."""
        return self._in_flight is not None and self._in_flight.under_way

    @torch.inference_mode()
    def launch(
        self, deadline: float | None = None, *, pending_work: PendingWork = NO_PENDING_WORK
    ) -> None:
        """Launch the next round unless one is in flight, so that the host can work until
        `round`. Without graphs this does nothing: such rounds keep the host busy, and begin in
        `round`."""
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
        """Advance the live rows by one token or more and return the result of the oldest round in
        flight.

        A row's new tokens may go past an end-of-sequence token or its limit; the caller must cut
        and retire it before the next round.

        Args:
            deadline: shorten the draft length so that the round ends by then.
            pending_work: the rest of the job.
            ahead: the caller will call this again with the same controller. The next round may then
                be launched before the tokens of this one are known, with the same rows. Before a
                deadline this is done only if the next round should also end in time.
        """
        self._next.pending_work = pending_work
        self._ahead = ahead and self._captured is not None
        in_flight, late = self._in_flight, False
        if in_flight is not None and in_flight.under_way:
            late = in_flight.running.over()  # then the host was the slower one
        else:
            in_flight = self._begin(deadline)
        self._in_flight = None
        until = self._ahead_policy.until(deadline, in_flight, self.clock)
        if not self._may_launch_ahead(in_flight) or not self._next.in_time(until):
            return self._complete(in_flight, late=late)
        assert self._captured is not None
        self._captured.renew(self._members.version)
        request = self._next.take(until)
        _, step = self._next.served(request, until)
        reaches = self._catching.reaches(in_flight.most, self._rounds.drafted(step.shape))
        if step.how == "replay" and reaches:
            self._in_flight = self._launch(request, until, behind=True)
            done = self._complete(in_flight, late=late)
            self.catch_up(
                self._in_flight.places
            )  # reads nothing: it only updates the drafter's record
        else:
            done = self._complete(in_flight, late=late)
            if until is not None:
                return done  # request the next one anew: the time is known now
            self._in_flight = self._launch(request, None)
        self._next.reflect()
        return done

    def _begin(self, deadline: float | None) -> InFlightRound:
        """Launch a round with no other one in flight."""
        if self._captured is not None:
            self._captured.renew(self._members.version)
        request = self._next.take(deadline)
        in_flight = self._launch(request, deadline)
        if self._ahead:
            self._ahead_policy.begins(in_flight.began - request.lookup_seconds)
        self._next.reflect()
        return in_flight

    def _may_launch_ahead(self, in_flight: InFlightRound) -> bool:
        """Return whether the next round may, and should, be launched before this one ends."""
        self._needs_result = not self._next.foreseeable(in_flight.width)
        may = self._ahead and in_flight.steady and not self._needs_result
        return may and self._ahead_policy.pays(waiting=self._next.pending_work.tokens > 0)

    def _launch(
        self, request: RoundRequest, deadline: float | None, *, behind: bool = False
    ) -> InFlightRound:
        """Launch a round, `behind` another one that is still in flight or not. Without graphs it
        has ended when this returns."""
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
        # The time in which the device waits for a lookup or for the result of the last round:
        # otherwise this round would have been launched ahead.
        waits = 0.0
        if self._ahead and (request.looked_up or (self._needs_result and not behind)):
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
        """Wait for a round and record its tokens for rows that are still live. `late`: see
        InFlightRound.completed."""
        packed = in_flight.running.wait()
        assert packed is not None
        now, rows = self.clock.now(), len(in_flight.rows)
        in_flight, places, table = in_flight.live(packed.numpy(), self.batch.changes)
        counts, width = in_flight.num_drafts, in_flight.places
        num_drafts = in_flight.width if counts is None else numpy.array(counts)
        record = self.batch.host_state.take
        accepted = tuple(record(table, places, width=width, num_drafts=num_drafts).tolist())
        seconds = (
            in_flight.lookup_seconds
            + now
            - self._ahead_policy.start(in_flight)
            - in_flight.capturing
        )
        self._ahead_policy.completed(now, seconds, rows)
        done = in_flight.completed(accepted, seconds, late=late)
        if done.steady:
            self.clock.observe(in_flight.length, seconds)
        if not in_flight.places:
            self._catching.missed(1 + max(accepted))
        self._rounds.observe(accepted)
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
        """Capture graphs for these numbers of rows and draft lengths now rather than when they are
        first needed.

        Args:
            catching_up: also capture the passes in which the drafter catches up after plain rounds.
            only_compile: compile the kernels, but capture nothing.
            each: capture one graph for each length, also where one could serve several.
        """
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
        """Feed the drafter what it must read before it can draft `width` tokens. The time is not
        counted as part of a round: plain rounds before it are the cause."""
        self._catching.run(width, left=self._next.left(self.batch.rooms()), deadline=deadline)

    def _run(self, width: int, drafts: Proposal | None) -> tuple[Running, Shape, float]:
        """Run a round without graphs. Returns: its result, its shape, and when it began."""
        shape = self._rounds.planned(width, cut=self._cuts(len(self.batch), width))
        self.catch_up(self._rounds.drafted(shape))
        began = self.clock.now()
        table, shape = self._rounds.run(shape, drafts, self.lengths)
        return Running(lambda: True, lambda: table), shape, began

    def _cuts(self, rows: int, width: int) -> bool:
        """Return Rounds.cuts, but False if rounds must have the exact length."""
        return not self.exact and self._rounds.cuts(rows, width)

    def function(self, shape: Shape) -> Callable[[], Tensor | None]:
        """Return what a graph of this shape does."""
        if shape.kind == "catch up":
            return self._catching.function(shape.width)
        return self._rounds.function(shape, self._next.host_drafts)


class InFlightRound(NamedTuple):
    """A round that was launched.

    rows: its rows, of the batch after `changes` changes.
    width: drafts of each row; their mean number if `cut` (verify.py).
    places: places for drafts in each row of the result, at least `width`.
    num_drafts: the host's drafts of each row; None if the device drafted.
    running: the work on the device, which began at `began`.
    lookup_seconds: time in which the device waited for the host to look up drafts.
    looked_up: whether the host looked up drafts.
    steady: whether everything was replayed, or nothing is captured in this loop.
    capturing, waiting: as in RoundResult.
    """

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
        """The draft length under which the clock records it."""
        return self.width if self.cut else self.places

    @property
    def most(self) -> int:
        """The largest number of drafts of a row that can be accepted."""
        return self.places if self.cut else self.width

    @property
    def under_way(self) -> bool:
        """Whether one of its rows is still live."""
        return any(row.place >= 0 for row in self.rows)

    def live(self, table: Integers, changes: int) -> tuple[InFlightRound, Integers, Integers]:
        """Select the rows that are still live after `changes` changes of the batch.

        table: the result of the round. If it was cut, the last column is the number of verified
            drafts.
        Returns: this round with those rows only, their present places, and their lines of the
            table.
        """
        num_drafts = self.num_drafts
        if self.cut:
            num_drafts, table = tuple(table[: len(self.rows), -1].tolist()), table[:, :-1]
        if changes == self.changes:
            places = numpy.arange(len(self.rows))
            return self._replace(num_drafts=num_drafts), places, table[: len(self.rows)]
        places = numpy.fromiter([row.place for row in self.rows], numpy.int64, len(self.rows))
        alive = places >= 0  # -1: no longer in the batch
        chosen = alive.tolist()
        rows = tuple(itertools.compress(self.rows, chosen))
        num_drafts = None if num_drafts is None else tuple(itertools.compress(num_drafts, chosen))
        (lines,) = alive.nonzero()
        return self._replace(rows=rows, num_drafts=num_drafts), places[lines], table[lines]

    def completed(self, accepted: tuple[int, ...], seconds: float, *, late: bool) -> RoundResult:
        """Return the result. `late`: whether the round had ended before the host looked, so that
        its time is unknown."""
        return RoundResult(
            self.width,
            accepted,
            seconds,
            self.steady and not late,
            self.num_drafts,
            self.lookup_seconds if self.looked_up else 0.0,
            self.rows,
            self.capturing,
            waiting=self.waiting,
        )


# The smallest of this many recent gaps counts: longer ones included admitting rows, matching stop
# strings or writing results.
_RECENT = 8
# Exponential moving average of the share of rows that end: about twenty rounds count.
_WEIGHT = 0.05


class AheadPolicy:
    """Decide whether launching a round before the last result arrives pays: it hides the host's
    work between two rounds, but a row that ends meanwhile takes part in one more round in vain.
    All times are those of the loop's clock."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._ending = self._seconds = 0.0
        self._ended = 0
        self._completed: float | None = None  # when the last round ended

    def idle(self) -> None:
        """Note that no row was live, so that no round could have been launched ahead."""
        self._completed = None

    def begins(self, now: float) -> None:
        """Note that a round begins after a gap that launching ahead would have hidden (lookups
        excluded)."""
        if self._completed is not None:
            self._gaps.append(now - self._completed)

    def start(self, in_flight: InFlightRound) -> float:
        """Return when the device began this round, which is never before the last one ended."""
        return in_flight.began if self._completed is None else max(in_flight.began, self._completed)

    def until(self, deadline: float | None, in_flight: InFlightRound, clock: Clock) -> float | None:
        """Return the deadline for a round launched now behind `in_flight`: earlier by the time
        until that one ends."""
        if deadline is None:
            return None
        over = self.start(in_flight) + clock.predict(in_flight.length)
        return deadline - max(over - clock.now(), 0.0)

    def rows_ended(self, count: int) -> None:
        self._ended += count

    def completed(self, now: float, seconds: float, rows: int) -> None:
        """Note that a round of `rows` rows ended at `now` after `seconds`."""
        self._ending += _WEIGHT * (self._ended / rows - self._ending)
        self._ended, self._seconds, self._completed = 0, seconds, now

    def pays(self, *, waiting: bool) -> bool:
        """Return whether launching ahead pays. `waiting`: whether samples wait for rows; if not,
        an ended row's place in a round is worth nothing."""
        return self.saves(waiting=waiting) > 0

    def saves(self, *, waiting: bool) -> float:
        """Return the seconds that it saves in a round; 0 if it does not pay."""
        lost = self._ending * self._seconds if waiting else 0.0
        return max(min(self._gaps, default=0.0) - lost, 0.0)


class Members:
    """The prompts and rows of one loop: every change is applied to batch, target and drafter."""

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
        """Changes when memory that captured graphs read has moved."""
        return self._batch.version, *(follower.version for follower in self._followers)

    def open(
        self, key: str, tokens: Sequence[int], reference: Sequence[int], deadline: float | None
    ) -> bool:
        """See Loop.open."""
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
        """See Loop.close."""
        self._target.close(key)
        self._drafter.close(key)

    def grow(self) -> list[Row]:
        """See Loop.grow. A row gets blocks for two rounds, because the host may not have seen
        the result of the first one yet."""
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
        """See Loop.swap_rows."""
        self._follow(self._batch.swap_rows(ended, rows))

    def _follow(self, change: Change) -> None:
        for follower in self._followers:
            follower.follow(change)
