"""A round: its draft length, drafts from the host, catching up, and the pass on the device.

`NextRound` decides what the next round is and `HostDrafts` holds drafts that the host made for it.
`CatchingUp` feeds a draft model what it missed, `Stopping` ends drafting early, and `Rounds` is
the work on the device. Not here: launching rounds (loop.py), the arithmetic of acceptance
(verify.py), when a graph is captured (graphs.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import (
    NO_PENDING_WORK,
    ControllerInput,
    Drafter,
    DraftLength,
    Proposal,
    SkippedDrafts,
    TakesPacked,
    Target,
)
from bass_cli.engine.cutting import Cut, Cutting
from bass_cli.engine.graphs import Captured, Fit, Shape, Step, kind_of
from bass_cli.engine.sizes import LONGEST, step_down, step_up
from bass_cli.engine.verify import Verifier


class RoundRequest(NamedTuple):
    """What a round is to be: its draft length, drafts of the host's, the seconds in which it
    looked for them, and whether it did."""

    width: int
    drafts: Proposal | None
    lookup_seconds: float
    looked_up: bool

    def num_drafts(self, width: int) -> tuple[int, ...] | None:
        """How many drafts each row has of the host's, in `width` places; None: of the device's."""
        if self.drafts is None:
            return None
        return tuple(min(count, width) for count in self.drafts.num_drafts or ())


class HostDrafts:
    """What one loop's drafter has from the host. A graph reads it at a fixed address: `put` puts
    it there. `learns_before`: the drafter learns before it is asked, not only while a device
    works."""

    def __init__(self, batch: Batch, drafter: Drafter, *, learns_before: bool):
        self._batch, self._drafter, self._learns_before = batch, drafter, learns_before
        self._tokens = batch.tokens.new_zeros(batch.capacity, LONGEST)

    def ask(self, width: int, lengths: DraftLength) -> Proposal | None:
        """Drafts for the live rows, up to `width`, as many as `lengths` has use for; None: the
        device drafts in the round. The rows' counts never go beyond the width."""
        if self._learns_before:
            self.learn()
        if self._drafter.on_device:
            return None
        drafts = self._drafter.propose(self._batch, width) if width else _nothing(self._batch)
        assert drafts.num_drafts is not None
        best = max(drafts.num_drafts)
        if best and lengths.trims:
            best = min(lengths.trim(drafts.num_drafts), best)
            if best == 0:
                self._drafter.skip_last()
        if not best:
            return _nothing(self._batch)
        tokens = drafts.tokens[:, :best]
        if (
            tokens.device.type != self._batch.device.type
        ):  # a device may be named without its number
            tokens = tokens.contiguous().pin_memory().to(self._batch.device, non_blocking=True)
        return Proposal(tokens, None, tuple(min(count, best) for count in drafts.num_drafts))

    def learn(self) -> None:
        """Let the drafter take in what the rows have become: some work, which need not keep a
        device waiting."""
        self._drafter.learn(self._batch)

    def forget(self) -> None:
        """Let it forget how well drafts stand."""
        self._drafter.forget()

    def recall(self) -> SkippedDrafts | None:
        """What has become of drafts that `lengths` had no use for."""
        return self._drafter.recall()

    def put(self, drafts: Proposal) -> None:
        """From now on `placed` has these drafts; beyond their length stands what stood there."""
        rows, width = drafts.tokens.shape
        if width:
            self._tokens[:rows, :width] = drafts.tokens

    def placed(self, rows: int, width: int) -> Proposal:
        """What a graph verifies, dummy rows included."""
        return Proposal(self._tokens[:rows, :width], None)


def _nothing(batch: Batch) -> Proposal:
    return Proposal(batch.tokens.new_zeros(len(batch), 0), None, (0,) * len(batch))


_BINS = 12  # of confidence, each as wide as the others
_STRENGTH = 6.0  # trials that a bin's own middle counts as, before any
_MEMORY = 0.995  # what a round weighs one round later


class Stopping:
    """Whether one more draft is worth its time: the rows' chances of getting there, from the
    draft's confidence in each of their tokens so far and what drafts of such confidence were
    worth until now."""

    def __init__(self) -> None:
        middles = (torch.arange(_BINS) + 0.5) / _BINS
        self._kept, self._trials = _STRENGTH * middles, torch.full((_BINS,), _STRENGTH)
        self._bins: list[Tensor] = []  # by step, of each row

    def propose(
        self, drafter: Drafter, batch: Batch, length: int, lengths: DraftLength
    ) -> Proposal:
        """A proposal of up to `length` tokens, ended early where drafter and controller can do
        that."""
        if not (length and drafter.stops_short and lengths.stops):
            return drafter.propose(batch, length)
        least = lengths.least
        self._bins, alive = [], torch.ones(len(batch))

        def goes_on(confidence: Tensor) -> bool:
            nonlocal alive
            self._bins.append((confidence.cpu() * _BINS).long().clamp(0, _BINS - 1))
            alive = alive * (self._kept / self._trials)[self._bins[-1]]
            return float(alive.mean()) >= least(len(self._bins))

        return drafter.propose_while(batch, length, goes_on)

    def observe(self, accepted: Sequence[int]) -> None:
        """What the rows kept of the last proposal."""
        if not self._bins:
            return
        kept, bins = torch.tensor(accepted)[:, None], torch.stack(self._bins, 1)
        steps = torch.arange(bins.shape[1])
        self._kept *= _MEMORY
        self._trials *= _MEMORY
        self._kept += torch.bincount(bins[steps < kept], minlength=_BINS)
        self._trials += torch.bincount(bins[steps <= kept], minlength=_BINS)
        self._bins = []


# tokens a row that are taken in at once: few graphs, and a few tokens more cost little
_SIZES = (2, 8, 32, 128)
# The first ones for any number of rows, longer ones in passes of at most so many tokens: on an
# H200 a pass of 128 tokens of one row takes a draft of half a billion parameters 1.0 ms, as one
# of 32 does.
_ALWAYS, _FLAT = 32, 1024
_HOST = 16  # tokens up to which an uncaptured pass, on a CPU, takes as long as for one


def sizes(rows: int) -> tuple[int, ...]:
    """Of so many rows (dummies included), the tokens that graphs take in at once."""
    return tuple(size for size in _SIZES if size <= max(_ALWAYS, _FLAT // rows))


class CatchingUp:
    """For one loop; `drafter`: None if it never misses anything. Without `captured` a single
    pass takes in all that is missing."""

    def __init__(self, batch: Batch, drafter: Drafter, clock: Clock, captured: Captured | None):
        self._batch, self._drafter, self._clock, self._captured = batch, drafter, clock, captured
        # where a pass begins, tokens before each row's end
        self._behind = batch.tokens.new_zeros(())
        # tokens that some row may have got meanwhile; seconds of a pass
        self._missed, self._unit = (0, 0.0)

    def missed(self, tokens: int) -> None:
        """A round went by without the drafter's drafts, in which no row got more than so many
        tokens."""
        self._missed += tokens

    def seconds(self) -> float:
        """What catching up is likely to take before drafts; 0.0 if no round went by, or none was
        seen to take any time."""
        if not self._missed or not self._unit:
            return 0.0
        own = int(self._batch.generated().max())  # of a prompt nothing is missing
        return self._unit * self._passes(min(self._missed, own))

    def reaches(self, before: int, length: int) -> bool:
        """Whether a round of `length` drafts may begin behind one of `before` that is under way: a
        drafter that has missed tokens must know them before it goes on."""
        return self._drafter.reaches(before, length)

    def function(self, count: int) -> Callable[[], None]:
        """What a graph of so many tokens a row does."""
        return functools.partial(self._drafter.catch_up, self._batch, self._behind, count)

    def prepare(self) -> None:
        """Graphs may run now, and must not read beyond a row's end."""
        self._behind.fill_(_SIZES[-1] + 2)

    def run(self, width: int, *, left: float, deadline: float | None = None) -> None:
        """See to it that `width` tokens can be drafted; `left`: rounds that may still come, at
        most. With a `deadline` in graphs that are there, if any will do."""
        missing = self._drafter.expect(self._batch, width)
        if width:
            self._missed = 0
        if not missing:
            return
        passes, began, captured = self._passes(missing), self._clock.now(), self._captured
        if captured is None:
            self._drafter.catch_up(self._batch, self._behind.fill_(missing + 2), missing)
        else:
            captured.start()
            self._replay(captured, missing, left, deadline)
        if captured is None or captured.steady:
            self._unit = (
                self._clock.now() - began - (captured.capturing if captured else 0.0)
            ) / passes

    def _passes(self, missing: int) -> float:
        """How many it takes, or a single one's time in those of few tokens."""
        if self._captured is None:
            return max(missing * len(self._batch) / _HOST, 1.0)
        longest = sizes(self._captured.bucket(len(self._batch)))[-1]
        return -(-missing // longest)

    def _replay(
        self, captured: Captured, missing: int, left: float, deadline: float | None
    ) -> None:
        there = sizes(captured.bucket(len(self._batch)))
        while missing > 0:
            wish, step = self._step(captured, there, missing, left, deadline)
            self._behind.fill_(max(missing, step.shape.width) + 2)
            captured.perform(wish, step)
            missing -= step.shape.width

    def _step(
        self,
        captured: Captured,
        there: tuple[int, ...],
        missing: int,
        left: float,
        deadline: float | None,
    ) -> tuple[Shape, Step]:
        """The next pass: one for all that is missing, or with a deadline the longest that has
        a graph."""

        def of(size: int) -> tuple[Shape, Step]:
            wish = captured.wish("catch up", size)
            return wish, captured.choose(wish, left=left, deadline=deadline)

        best = next((size for size in there if size >= missing), there[-1])
        shorter = [size for size in reversed(there) if size <= best and deadline is not None]
        steps = (of(size) for size in shorter)
        return next((one for one in steps if one[1].how == "replay"), None) or of(best)


class Rounds:
    """Those of one loop. `cut`: where rows' drafts may be cut (None: nowhere), if drafter and
    target can do that; `may_stop`: a draft may be ended inside a round where it is no longer worth
    it, if the drafter can do that (`stops`)."""

    def __init__(
        self,
        batch: Batch,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        *,
        cut: Cut | None,
        may_stop: bool,
    ):
        self._batch, self._drafter, self._verifier = batch, drafter, verifier
        self.stops = may_stop and drafter.stops_short
        self._stopping = Stopping() if self.stops else None
        self._cutting: Cutting | None = None
        able = drafter.at_once and isinstance(target, TakesPacked)
        if cut is not None and able:
            self._cutting = Cutting(cut, batch.device)

    def cuts(self, rows: int, width: int) -> bool:
        """Whether rounds of so many rows, dummies included, that verify `width` drafts of each on
        average choose these from more."""
        return self._cutting is not None and self._cutting.pays(rows, width)

    def drafted(self, shape: Shape) -> int:
        """How many tokens a round of this shape drafts for each row."""
        if shape.kind != "cut":
            return shape.width
        assert self._cutting is not None
        return self._cutting.drafted(shape.width)

    def function(self, shape: Shape, host_drafts: HostDrafts) -> Callable[[], Tensor]:
        """What a graph of this shape does; `offers`: what there is from the host."""
        check, drafter, batch = self._verifier.check, self._drafter, self._batch
        if shape.kind == "cut":
            return lambda: self._part(shape)
        if not drafter.on_device:
            return lambda: check(host_drafts.placed(shape.rows, shape.width), bounded=True)
        return lambda: check(drafter.propose(batch, shape.width), bounded=shape.width > 0)

    def planned(self, width: int, *, cut: bool) -> Shape:
        """The shape of a round of the live rows that is not captured."""
        return Shape("cut" if cut else kind_of(self._drafter), len(self._batch), width)

    def run(
        self, shape: Shape, drafts: Proposal | None, lengths: DraftLength
    ) -> tuple[Tensor, Shape]:
        """A round that is not captured, with these drafts of the host's (None: the device's own):
        what it brought, on the host; and the shape with the draft length that it came to."""
        if shape.kind == "cut":
            return self._part(shape).cpu(), shape
        if drafts is None:
            drafts = (
                self._drafter.propose(self._batch, shape.width)
                if self._stopping is None
                else self._stopping.propose(self._drafter, self._batch, shape.width, lengths)
            )
        width = drafts.tokens.shape[1]
        return self._verifier.check(drafts).cpu(), shape._replace(width=width)

    def observe(self, accepted: Sequence[int]) -> None:
        """What the rows kept of the last round's drafts."""
        if self._stopping is not None:
            self._stopping.observe(accepted)

    def _part(self, shape: Shape) -> Tensor:
        assert self._cutting is not None
        proposal = self._drafter.propose(self._batch, self._cutting.drafted(shape.width))
        return self._verifier.check_part(proposal, shape.width, self._cutting)


class NextRound:
    """For one loop. `stops`: drafting will be ended inside a round where it is no longer worth
    it. `backlog`: what the job has beside the live rows, as the last round was told."""

    def __init__(
        self,
        batch: Batch,
        drafter: Drafter,
        lengths: DraftLength,
        *,
        coupling: str,
        clock: Clock,
        captured: Captured | None,
        catching: CatchingUp,
        stops: bool,
    ):
        self._batch, self._drafter, self._maximal = batch, drafter, coupling == "maximal"
        self._clock, self._captured, self._catching = clock, captured, catching
        self._stops, self.pending_work = stops, NO_PENDING_WORK
        self.host_drafts = HostDrafts(
            batch, drafter, learns_before=captured is None or self._maximal
        )
        self._request: RoundRequest | None = None  # if it has been asked for already
        self.use(lengths)

    def use(self, lengths: DraftLength) -> None:
        """From now on this controller."""
        self.lengths = lengths

    @property
    def exact(self) -> bool:
        """Whether a round must have the very length that the controller gave. Under maximal
        coupling lengths reach the output, and must not depend on what happens to be captured."""
        return self._maximal or self.lengths.exact

    def changed(self) -> None:
        """Other rows are live than when the next round was asked for."""
        self._request = None

    def take(self, deadline: float | None) -> RoundRequest:
        """The next round's draft length, and the drafts that the host has for it."""
        request, self._request = self._request or self._make_request(deadline), None
        return request

    def in_time(self, deadline: float | None) -> bool:
        """Whether the shortest round there is should end by `deadline`, if it began now."""
        return deadline is None or self._clock.now() + self._clock.predict(0) <= deadline

    def foreseeable(self, width: int) -> bool:
        """Whether the round after one of `width` drafts can be asked for before that is over.
        Under maximal coupling it must not: there a draft length decided earlier would be another
        sample."""
        return (
            not self._maximal
            and self.lengths.foresees
            and not self.lengths.needs_result(width)
            and (self._drafter.on_device or not self.lengths.drafts)
            and self._batch.most_room() > 1
        )

    def reflect(self) -> None:
        """What can be learnt while the device is busy."""
        if self._captured is None:
            return
        self.lengths.reflect()
        self.host_drafts.learn()

    def served(self, request: RoundRequest, deadline: float | None) -> tuple[Shape, Step]:
        """The graph that is wanted for a round, and what runs instead: it may take some dummy
        rows too, and another draft length, or where it must be the same, more places for drafts
        than are looked at."""
        captured, drafts, width = self._captured, request.drafts, request.width
        assert captured is not None
        if drafts is not None:
            width = drafts.tokens.shape[1] if self.exact else step_up(drafts.tokens.shape[1])
        wish = captured.usual(width)
        fit: Fit = "same" if drafts is not None and not width else self._fit
        left = self._rounds_left(self._batch.most_room())
        return wish, captured.choose(wish, left=left, deadline=deadline, fit=fit)

    def shortest(self, deadline: float) -> float:
        """Seconds that the next round of the live rows is likely to take at the least: those of
        a plain one, or under maximal coupling, where no deadline cuts drafts, those of the
        length that is due."""
        if not self._maximal:
            return self._clock.predict(0)
        request = self._request = self._request or self._make_request(deadline)
        if self._captured is None:
            drafts = request.drafts
            return self._clock.predict(request.width if drafts is None else drafts.tokens.shape[1])
        _, step = self.served(request, deadline)
        return self._clock.predict(step.shape.width) + self._captured.delay(step)

    def left(self, rooms: list[int]) -> float:
        """How many rounds there may still be, at most."""
        return self._rounds_left(max(rooms))

    def _rounds_left(self, most_room: int) -> float:
        return most_room + self.pending_work.tokens / self._batch.capacity

    def _make_request(self, deadline: float | None) -> RoundRequest:
        inputs = self._inputs(rooms := self._batch.rooms())
        inputs = inputs._replace(padded=self._padded(rooms, deadline))
        width = self._width(rooms, inputs, deadline)
        began = self._clock.now()
        drafts = self.host_drafts.ask(width, self.lengths)
        looked_up = not self._drafter.on_device and width > 0
        return RoundRequest(width, drafts, self._clock.now() - began, looked_up)

    def _inputs(self, rooms: list[int]) -> ControllerInput:
        left = (
            float(numpy.minimum(rooms, self.pending_work.typical).sum()) + self.pending_work.tokens
        )
        captured = self._captured
        one_time_costs = captured.one_time_costs() if captured else ()
        return ControllerInput(
            left / len(rooms),
            one_time_costs,
            self._catching.seconds(),
            float(self._batch.known().mean()),
            tuple(self._batch.hosts),
            tuple(rooms),
            captured.warmup_costs() if captured and any(one_time_costs) else (),
            stops=self._stops,
            free=not self._drafter.on_device,
            skipped=self.host_drafts.recall(),
        )

    def _padded(self, rooms: list[int], deadline: float | None) -> int:
        """Rows of the graph that serves a plain round, dummies included, which take as long."""
        captured = self._captured
        if captured is None:
            return 0
        return captured.choose(
            captured.usual(0), left=self.left(rooms), deadline=deadline
        ).shape.rows

    def _width(self, rooms: list[int], inputs: ControllerInput, deadline: float | None) -> int:
        """The controller's draft length, capped by what the drafter can, by the room of the row
        that has most of it (no other row decides), and by `deadline`, capturing included; with
        graphs one that they are made for, unless it must be the very length. Under maximal
        coupling the clock does not decide: a length is part of what the samples will be."""
        captured, wanted = self._captured, self.lengths.next(len(rooms), inputs)
        wanted = max(0, min(wanted, self._drafter.longest, max(rooms) - 1))
        if self._maximal:
            return wanted
        if captured is None:
            return self._clock.longest_in_time(wanted, deadline)
        usual: Callable[[int], int] = int if self.exact else step_down
        behind = inputs.catch_up

        def predict(width: int) -> float:
            wish, left = captured.usual(usual(width)), self.left(rooms)
            step = captured.choose(wish, left=left, deadline=deadline, fit=self._fit)
            late = captured.delay(step) + (behind if step.shape.width else 0.0)
            return self._clock.predict(step.shape.width) + late

        return usual(self._clock.longest_in_time(usual(wanted), deadline, predict))

    @property
    def _fit(self) -> Fit:
        return "wider" if self.exact else "near"
