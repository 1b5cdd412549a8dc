"""The decoding loop: rows join and leave, rounds are launched, and their results reach the host.

`Loop` ties the parts together, and keeps batch, target and drafter in step as rows come and go.
`AheadPolicy` decides whether launching a round before the last result arrives pays (asynchronous
scheduling). Not here: what a round does (round.py), which samples get rows and when they end
(run/scheduler.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
    RoundResult,
    Target,
)
from bass_cli.engine.graphs import Kind, RoundGraphs, Shape, kind_of
from bass_cli.engine.round import DrafterCatchUp, Round, RoundPlanner, catch_up_sizes, make_room
from bass_cli.engine.sizes import cover, step_down
from bass_cli.engine.verify import ALL, Cut, Rate, RoundExecutor, SimulatedAcceptance
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
        controller: DraftLength,
        coupling: str,
        clock: Clock,
        acceptance: Sequence[Rate] | None = None,
        graphs: Graphs | None = None,
        cut: Cut | None = None,
    ):
        assert coupling in ("shared", "maximal")
        assert acceptance is None or coupling == "shared"
        self.batch, self.clock, self.graphs, self.coupling = batch, clock, graphs, coupling
        self.target, self.drafter = target, drafter
        self.simulated = SimulatedAcceptance(acceptance, batch) if acceptance is not None else None
        self._followers: tuple[FollowsRows, ...] = (target, drafter)
        if self.simulated is not None:
            self._followers = (target, drafter, self.simulated)
        self._round_graphs: RoundGraphs | None = None
        if graphs is not None and graphs.enabled:
            self._round_graphs = RoundGraphs(
                graphs, batch, clock, self.function, drafter=drafter, cuts=self._cuts
            )
        self._executor = RoundExecutor(
            batch,
            target,
            drafter,
            coupling=coupling,
            simulated=self.simulated,
            cut=cut if coupling == "shared" and acceptance is None else None,
            may_stop=self._round_graphs is None and coupling == "shared",
        )
        self._drafter_catch_up = DrafterCatchUp(batch, drafter, clock, self._round_graphs)
        self._planner = RoundPlanner(
            batch,
            drafter,
            controller,
            coupling=coupling,
            clock=clock,
            graphs=self._round_graphs,
            catch_up=self._drafter_catch_up,
            stops=self._executor.stops,
        )
        self._in_flight: Round | None = None  # launched, and not returned by `round` yet
        self._ahead_policy = AheadPolicy()
        self._ahead = False  # whether the caller allows rounds to be launched ahead
        self._needs_result = False  # whether the next round must wait for the last one's tokens

    @property
    def controller(self) -> DraftLength:
        """The present draft-length controller."""
        return self._planner.controller

    @property
    def exact(self) -> bool:
        """Whether a round must have exactly the length that the controller returned."""
        return self._planner.exact

    def use(self, controller: DraftLength) -> None:
        """Use this controller from the next round on."""
        self._planner.controller = controller

    def restart(self, controller: DraftLength) -> None:
        """Use this controller from the next round on, and forget what the drafter has learnt."""
        self._planner.controller = controller
        self.drafter.forget()

    def with_drafter(
        self, drafter: Drafter, *, target: Target, clock: Clock, graphs: Graphs | None
    ) -> Loop:
        """Return a loop over the same batch with another drafter, and with this loop's coupling and
        controller. Only one of the two may have rows at a time."""
        return Loop(
            batch=self.batch,
            target=target,
            drafter=drafter,
            controller=self.controller,
            coupling=self.coupling,
            clock=clock,
            graphs=graphs,
        )

    def least_seconds(self, deadline: float) -> float:
        """See RoundPlanner.least_seconds."""
        return self._planner.least_seconds(deadline)

    @torch.inference_mode()
    def open(
        self,
        key: str,
        tokens: Sequence[int],
        reference: Sequence[int] = (),
        *,
        deadline: float | None = None,
        logprobs: int | None = None,
    ) -> bool:
        """Read a prompt once for all its rows, and return False if it was given up.

        Args:
            reference: see Drafter.open.
            deadline: give the prompt up if reading it is likely to take longer.
            logprobs: see Runner.open.
        """
        more: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
        if deadline is None:
            return self.target.open(key, tokens, **more) and self.drafter.open(
                key, tokens, reference
            )
        target, draft = (
            Prefill(
                self.clock.passes[model],
                deadline,
                now=self.clock.now,
                wait=lambda: synchronise(self.batch.device),
            )
            for model in ("target", "draft")
        )
        if not self.target.open(key, tokens, target, **more):
            return False
        target.end()
        if not self.drafter.open(key, tokens, reference, draft):
            self.target.close(key)
            return False
        draft.end()
        return True

    def close(self, key: str) -> None:
        """Forget a prompt; no further row will use it."""
        self.target.close(key)
        self.drafter.close(key)

    @torch.inference_mode()
    def swap_rows(self, ended: Sequence[int], rows: Sequence[Row]) -> None:
        """End the rows with the indices `ended` and make `rows`, of open prompts, live. It is
        cheapest to make all changes between two rounds in one call, with the rows of a prompt
        side by side."""
        if not len(self.batch):
            self._ahead_policy.idle()
        self._proceed()
        self._follow(self.batch.swap_rows(ended, rows))
        self._ahead_policy.rows_ended(len(ended))

    @torch.inference_mode()
    def grow(self) -> list[Row]:
        """Give every row enough cache blocks for the next round: for two, because the host may not
        have seen the result of the last one yet. Call it before `launch` and `round` if rows may
        outgrow their blocks.

        Returns: rows for which there were not enough blocks; they are not live any more and must be
            drawn again.
        """
        back: list[Row] = []
        self._proceed()
        while True:
            change, fails = self.batch.grow()
            if change is not None:
                self._follow(change)
            if fails is None:
                return back
            surplus = self.batch.surplus(fails)
            back += [self.batch.live_rows[index] for index in surplus]
            self._follow(self.batch.swap_rows(surplus, ()))

    def _proceed(self) -> None:
        """Launch what is left of the round in flight, which needs the rows as they were."""
        if self._in_flight is not None:
            self._in_flight.running.proceed()

    def _follow(self, change: Change) -> None:
        """Apply a change of the batch's rows to target and drafter."""
        for follower in self._followers:
            follower.follow(change)
        if change.ended or change.begun:
            self._planner.rows_changed()

    def _renew(self, graphs: RoundGraphs) -> None:
        """Drop the graphs if memory that they read has moved."""
        graphs.renew((self.batch.version, *(one.version for one in self._followers)))

    def admit(self, *rows: Row) -> None:
        """Make rows of open prompts live."""
        self.swap_rows((), rows)

    def retire(self, *ended: int) -> None:
        """End the rows with these indices; the last rows move there."""
        self.swap_rows(ended, ())

    @property
    def in_flight(self) -> bool:
        """Whether a launched round with live rows has not been returned by `round` yet."""
        return self._in_flight is not None and self._in_flight.has_live_rows

    @torch.inference_mode()
    def launch(
        self, deadline: float | None = None, *, pending_work: PendingWork = NO_PENDING_WORK
    ) -> None:
        """Launch the next round unless one is in flight, so that the host can work until
        `round`. Without graphs this does nothing: such rounds keep the host busy, and begin in
        `round`."""
        self._planner.pending_work = pending_work
        if self._round_graphs is not None and not self.in_flight:
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
        self._planner.pending_work = pending_work
        self._ahead = ahead and self._round_graphs is not None
        current, late = self._in_flight, False
        if current is not None and current.has_live_rows:
            late = current.running.over()  # then the host was the slower one
        else:
            current = self._begin(deadline)
        self._in_flight = None
        current.running.proceed()
        until = self._ahead_policy.until(deadline, current, self.clock)
        if not self._may_launch_ahead(current) or not self._planner.plain_round_fits(until):
            return self._complete(current, late=late)
        return self._complete_and_launch(current, until, late=late)

    def _complete_and_launch(
        self, current: Round, until: float | None, *, late: bool
    ) -> RoundResult:
        """Complete a round, and launch the following one: before the result of `current` is there,
        if that takes a replay only and the drafter can draft without the result; otherwise after.

        Args:
            until: the deadline of the following round.
            late: see `_complete`.
        """
        assert self._round_graphs is not None
        self._renew(self._round_graphs)
        following = self._next_request(until)
        _, step = self._planner.choose_step(following, until)
        reaches = self.drafter.reaches(current.most, self._executor.drafted(step.shape))
        if step.how == "replay" and reaches:
            self._launch(following, until, behind=True)
            self._in_flight = following
            done = self._complete(current, late=late)
            self.catch_up(following.capacity)  # reads nothing: it only updates the drafter's record
        else:
            done = self._complete(current, late=late)
            if until is not None:
                return done  # request the next one anew: the time is known now
            self._launch(following, None)
            self._in_flight = following
        self._planner.reflect()
        return done

    def _begin(self, deadline: float | None) -> Round:
        """Launch a round with no other one in flight."""
        if self._round_graphs is not None:
            self._renew(self._round_graphs)
        request = self._next_request(deadline)
        lookup_seconds = request.lookup_seconds  # launching adds the time that it lost
        self._launch(request, deadline)
        if self._ahead:
            self._ahead_policy.begins(request.began - lookup_seconds)
        self._planner.reflect()
        return request

    def _next_request(self, deadline: float | None) -> Round:
        """Return the request for the next round, and make room for masks if rows have a grammar."""
        request = self._planner.next_request(deadline)
        if self._round_graphs is not None and self.batch.masked:
            drafts = 0 if request.drafts is None else request.drafts.tokens.shape[1]
            make_room(self.batch, cover(max(request.width, drafts)))
            self._renew(self._round_graphs)
        return request

    def _may_launch_ahead(self, current: Round) -> bool:
        """Return whether the next round may, and should, be launched before this one ends."""
        self._needs_result = not self._planner.can_choose_early(current.width)
        may = self._ahead and current.steady and not self._needs_result
        return may and self._ahead_policy.pays(waiting=self._planner.pending_work.tokens > 0)

    def _launch(self, new: Round, deadline: float | None, *, behind: bool = False) -> None:
        """Launch a round, `behind` another one that is still in flight or not. Without graphs it
        has ended when this returns."""
        graphs = self._round_graphs
        if graphs is None:
            shape = self._run(new)
        else:
            if new.drafts is not None:
                self._planner.host_drafts.put(new.drafts)
            wanted, step = self._planner.choose_step(new, deadline)
            shape, new.padded = step.shape, step.shape.rows
            if not behind:
                self.catch_up(self._executor.drafted(shape), deadline)
            self._executor.limit_drafts(wanted.width if self.exact else ALL)
            new.began = graphs.start()
            new.running = graphs.launch(wanted, step)
            new.capturing, new.steady = graphs.capturing, graphs.steady
        # The time in which the device waits for a lookup or for the result of the last round:
        # otherwise this round would have been launched ahead.
        if self._ahead and (new.looked_up or (self._needs_result and not behind)):
            waits = self._ahead_policy.saves(waiting=self._planner.pending_work.tokens > 0)
            if new.looked_up:
                new.lookup_seconds += waits
            else:
                new.waiting = waits
        new.rows, new.changes = tuple(self.batch.live_rows), self.batch.changes
        new.width = min(shape.width, self._executor.most)
        new.capacity, new.cut = self._executor.drafted(shape), shape.kind == "cut"
        new.report = shape.report

    def _run(self, new: Round) -> Shape:
        """Run a round without graphs and return its shape."""
        rows = len(self.batch)
        kind: Kind = "cut" if self._cuts(rows, new.width) else kind_of(self.drafter)
        shape = Shape(kind, rows, new.width, self.batch.reports, self.batch.masked)
        self.catch_up(self._executor.drafted(shape))
        new.began = self.clock.now()
        table, shape = self._executor.run(shape, new.drafts, self.controller)
        if self.graphs is not None:
            self.graphs.check()
        new.running = Running(lambda: True, lambda: table)
        return shape

    def _complete(self, ended: Round, *, late: bool) -> RoundResult:
        """Wait for a round and record its tokens for rows that are still live. `late`: whether it
        had ended before the host looked, so that its time is unknown."""
        table = ended.running.wait()
        assert table is not None
        now = self.clock.now()
        seconds = ended.lookup_seconds + now - self._ahead_policy.start(ended) - ended.capturing
        self._ahead_policy.completed(now, seconds, len(ended.rows))
        rows, indices, num_drafts, lines = ended.live(table.numpy(), self.batch.changes)
        accepted = tuple(
            self.batch.host_state.take(
                lines,
                indices,
                width=ended.capacity,
                num_drafts=ended.width if num_drafts is None else numpy.array(num_drafts),
                report=ended.report,
            ).tolist()
        )
        done = RoundResult(
            ended.width,
            accepted,
            seconds,
            steady=ended.steady and not late,
            drafted=num_drafts,
            lookup_seconds=ended.lookup_seconds if ended.looked_up else 0.0,
            rows=rows,
            capturing=ended.capturing,
            waiting=ended.waiting,
            plain=self.controller.plain,
            padded=ended.padded,
            wanted=ended.wanted,
        )
        if done.steady:
            self.clock.observe(ended.length, seconds)
        if not ended.capacity:
            self._drafter_catch_up.note_missed(1 + max(accepted))
        self._executor.observe(accepted)
        self.controller.observe(done)
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
        graphs = self._round_graphs
        if graphs is None:
            return
        longest = self.drafter.longest
        usual: Callable[[int], int] = int if each else cover if self.exact else step_down
        lengths = [min(usual(min(width, longest)), longest) for width in widths]
        if self.batch.masked:
            make_room(self.batch, max(lengths, default=0))
        self._renew(graphs)
        self._drafter_catch_up.prepare()
        graphs.prepare(
            rows,
            lengths,
            only_compile=only_compile,
            catch_up=catch_up_sizes if catching_up and self.drafter.catches_up else None,
        )

    def capture_early(self) -> None:
        """Capture each pass over prompts when its size first comes: more requests follow."""
        if self._round_graphs is not None:
            self.target.capture_early()
            self.drafter.capture_early()

    @torch.inference_mode()
    def catch_up(self, width: int, deadline: float | None = None) -> None:
        """Feed the drafter what it must read before it can draft `width` tokens. The time is not
        counted as part of a round: plain rounds before it are the cause."""
        self._drafter_catch_up.run(width, left=self._planner.rounds_left(), deadline=deadline)

    def _cuts(self, rows: int, width: int) -> bool:
        """Return RoundExecutor.cuts, but False if rounds must have the exact length."""
        return not self.exact and self._executor.cuts(rows, width)

    def function(self, shape: Shape) -> Callable[[], Tensor | None]:
        """Return what a graph of this shape does."""
        if shape.kind == "catch up":
            return self._drafter_catch_up.function(shape.width)
        return self._executor.function(shape, self._planner.host_drafts)


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

    def start(self, running: Round) -> float:
        """Return when the device began this round, which is never before the last one ended."""
        return running.began if self._completed is None else max(running.began, self._completed)

    def until(self, deadline: float | None, running: Round, clock: Clock) -> float | None:
        """Return the deadline for a round launched now behind `running`: earlier by the time
        until that one ends."""
        if deadline is None:
            return None
        over = self.start(running) + clock.predict(running.length)
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
