"""What the next round is: its draft length, drafts from the host, its graph, catching up, and the
tokens that rows with a grammar may sample.

`Round` follows a round from the request to its result. `RoundPlanner` makes the request, and
`HostDrafts` holds drafts that the host made for it. `DrafterCatchUp` feeds a draft model the tokens
it has missed. `TokenMasks` follows grammars over drafts. Not here: launching rounds (loop.py),
their work on the device (verify.py), when a graph is captured (graphs.py), grammars (formats/).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import (
    NO_PENDING_WORK,
    ControllerInput,
    Drafter,
    DraftLength,
    Proposal,
)
from bass_cli.engine.graphs import STEP, Fit, RoundGraphs, Shape, Step, price
from bass_cli.engine.host_state import NO_REPORT, Integers, Report
from bass_cli.engine.sizes import LONGEST, step_down, step_up
from bass_cli.formats.grammars import DraftMasks, Matcher, fill
from bass_cli.models.capture import Running

_NOTHING = Running(lambda: True, lambda: None)


@dataclass(slots=True, eq=False)
class Round:
    """One round, from the request to its result. The first six fields are the request; `Loop` sets
    the others when it launches the round.

    width: draft length; after the launch, drafts of each row (their mean number if `cut`).
    drafts: drafts from the host; None if the device drafts.
    looked_up: whether the host looked up drafts.
    lookup_seconds: time in which the device waited for them.
    padded, wanted: as in RoundResult.
    running: the work on the device, which began at `began`.
    rows: its rows, of the batch after `changes` changes.
    capacity: drafts of each row that its result has room for, at least `width`.
    cut: whether only the likeliest drafts are verified (verify.py).
    report: what its result has besides tokens and their log-probabilities.
    steady: whether everything was replayed, or nothing is captured in this loop.
    capturing, waiting: as in RoundResult.
    """

    width: int
    drafts: Proposal | None
    looked_up: bool
    lookup_seconds: float
    padded: int = 0
    wanted: int = -1
    running: Running = _NOTHING
    began: float = 0.0
    rows: tuple[Row, ...] = ()
    changes: int = 0
    capacity: int = 0
    cut: bool = False
    report: Report = NO_REPORT
    steady: bool = True
    capturing: float = 0.0
    waiting: float = 0.0

    @property
    def length(self) -> int:
        """The draft length under which the clock records it."""
        return self.width if self.cut else self.capacity

    @property
    def most(self) -> int:
        """The largest number of drafts of a row that can be accepted."""
        return self.capacity if self.cut else self.width

    @property
    def has_live_rows(self) -> bool:
        """Whether one of its rows is still live."""
        return any(row.index >= 0 for row in self.rows)

    def live(
        self, table: Integers, changes: int
    ) -> tuple[tuple[Row, ...], Integers, tuple[int, ...] | None, Integers]:
        """Select the rows that are still live after `changes` changes of the batch.

        table: the result of the round. If it was cut, the last column is the number of verified
            drafts.
        Returns: those rows, their present indices, their numbers of drafts (None if all have
            `width`), and their lines of the table.
        """
        num_drafts = None
        if self.cut:
            num_drafts, table = tuple(table[: len(self.rows), -1].tolist()), table[:, :-1]
        elif self.drafts is not None:
            counts = self.drafts.num_drafts or ()
            num_drafts = tuple(min(count, self.width) for count in counts)
        if changes == self.changes:
            return self.rows, numpy.arange(len(self.rows)), num_drafts, table[: len(self.rows)]
        indices = numpy.fromiter([row.index for row in self.rows], numpy.int64, len(self.rows))
        alive = indices >= 0  # -1: no longer in the batch
        chosen = alive.tolist()
        rows = tuple(itertools.compress(self.rows, chosen))
        num_drafts = None if num_drafts is None else tuple(itertools.compress(num_drafts, chosen))
        (lines,) = alive.nonzero()
        return rows, indices[lines], num_drafts, table[lines]


class RoundPlanner:
    """Choose what the next round of one loop is.

    `pending_work` is the rest of the job, set by the loop before each round.

    Args:
        stops: whether drafting may end early inside a round.
    """

    def __init__(
        self,
        batch: Batch,
        drafter: Drafter,
        controller: DraftLength,
        *,
        coupling: str,
        clock: Clock,
        graphs: RoundGraphs | None,
        catch_up: DrafterCatchUp,
        stops: bool,
    ):
        self._batch, self._drafter, self._maximal = batch, drafter, coupling == "maximal"
        self._clock, self._graphs, self._catch_up = clock, graphs, catch_up
        self.controller, self._stops, self.pending_work = controller, stops, NO_PENDING_WORK
        self.host_drafts = HostDrafts(batch, drafter, learns_before=graphs is None or self._maximal)
        self._request: Round | None = None  # prepared before `next_request`

    @property
    def exact(self) -> bool:
        """Whether a round must have exactly the length that the controller returned. Under maximal
        coupling lengths affect the output, so they must not depend on which graphs exist."""
        return self._maximal or self.controller.exact

    def rows_changed(self) -> None:
        """Drop the prepared request, because the live rows have changed."""
        self._request = None

    def next_request(self, deadline: float | None) -> Round:
        """Return the request for the next round."""
        request, self._request = self._request or self._make_request(deadline), None
        return request

    def plain_round_fits(self, deadline: float | None) -> bool:
        """Return whether a plain round, the shortest one, should end by `deadline` if it begins
        now."""
        return deadline is None or self._clock.now() + self._clock.predict(0) <= deadline

    def can_choose_early(self, width: int) -> bool:
        """Return whether the round after one of `width` drafts can be chosen before that one ends.

        Never under maximal coupling: a draft length that was chosen earlier would give another
        sample.
        """
        return (
            not self._maximal
            and not self.controller.needs_result(width)
            and (self._drafter.on_device or not self.controller.drafts)
            and self._batch.most_room() > 1
        )

    def reflect(self) -> None:
        """Let controller and drafter learn while the device is busy."""
        if self._graphs is None:
            return
        self.controller.reflect()
        self._drafter.learn(self._batch)

    def choose_step(self, request: Round, deadline: float | None) -> tuple[Shape, Step]:
        """Choose the graph for a round.

        Returns: the shape that fits best, and the step that runs. The step may have more padding
            rows and another draft length. If the length must be exact, it may have room for more
            drafts than the round verifies.
        """
        graphs, drafts, width = self._graphs, request.drafts, request.width
        assert graphs is not None
        if drafts is not None:
            width = drafts.tokens.shape[1] if self.exact else step_up(drafts.tokens.shape[1])
        wanted = graphs.usual(width)
        fit: Fit = "same" if drafts is not None and not width else self._fit
        return wanted, graphs.choose(wanted, left=self.rounds_left(), deadline=deadline, fit=fit)

    def least_seconds(self, deadline: float) -> float:
        """Return the least seconds that the next round of the live rows is likely to take.

        That is a plain round. Under maximal coupling, where no deadline shortens drafts, it is a
        round of the length that comes next.
        """
        if not self._maximal:
            return self._clock.predict(0)
        request = self._request = self._request or self._make_request(deadline)
        if self._graphs is None:
            drafts = request.drafts
            return self._clock.predict(request.width if drafts is None else drafts.tokens.shape[1])
        _, step = self.choose_step(request, deadline)
        return self._clock.predict(step.shape.width) + self._graphs.policy.delay(step)

    def rounds_left(self) -> float:
        """Return the largest number of rounds that may follow."""
        return self._batch.most_room() + self.pending_work.tokens / self._batch.capacity

    def _make_request(self, deadline: float | None) -> Round:
        inputs = self._inputs(deadline)
        wanted = self.controller.next(len(inputs.rooms), inputs)
        width = self._width(wanted, inputs, deadline)
        began = self._clock.now()
        drafts = self.host_drafts.propose(width, self.controller)
        looked_up = not self._drafter.on_device and width > 0
        waited = self._clock.now() - began
        return Round(width, drafts, looked_up, waited, padded=inputs.padded, wanted=wanted)

    def _inputs(self, deadline: float | None) -> ControllerInput:
        rooms, work, graphs = self._batch.rooms(), self.pending_work, self._graphs
        # A sample that is longer than most ended ones is expected to become twice as long.
        ahead = numpy.maximum(work.typical, self._batch.generated())
        once: tuple[float, ...] = ()
        warm: tuple[float, ...] = ()
        padded = 0
        if graphs is not None:
            once = graphs.policy.one_time_costs(graphs.rows)
            warm = graphs.policy.warmup_costs(graphs.rows) if any(once) else ()
            # The time of a plain round depends on the padding rows of its graph.
            plain = graphs.choose(graphs.usual(0), left=self.rounds_left(), deadline=deadline)
            padded = plain.shape.rows
        return ControllerInput(
            (float(numpy.minimum(rooms, ahead).sum()) + work.tokens) / len(rooms),
            one_time_costs=once,
            catch_up=self._catch_up.seconds(),
            context=float(self._batch.known().mean()),
            samples=tuple(self._batch.live_rows),
            rooms=tuple(rooms),
            warmup_costs=warm,
            stops=self._stops,
            free=not self._drafter.on_device,
            skipped=self._drafter.recall(),
            padded=padded,
        )

    def _width(self, wanted: int, inputs: ControllerInput, deadline: float | None) -> int:
        """Return the draft length of the next round.

        It is `wanted`, the length that the controller returned, limited by the drafter, by the row
        with the most room, and by `deadline`. Time for capturing counts. With graphs it is one of
        the captured lengths unless it must be exact. Under maximal coupling the clock has no
        influence, because the length affects the samples.
        """
        graphs = self._graphs
        wanted = max(0, min(wanted, self._drafter.longest, max(inputs.rooms) - 1))
        if self._maximal:
            return wanted
        if graphs is None:
            return self._clock.longest_in_time(wanted, deadline)
        usual: Callable[[int], int] = int if self.exact else step_down
        left = self.rounds_left()

        def predict(width: int) -> float:
            shape = graphs.usual(usual(width))
            step = graphs.choose(shape, left=left, deadline=deadline, fit=self._fit)
            late = graphs.policy.delay(step) + (inputs.catch_up if step.shape.width else 0.0)
            return self._clock.predict(step.shape.width) + late

        return usual(self._clock.longest_in_time(usual(wanted), deadline, predict))

    @property
    def _fit(self) -> Fit:
        return "wider" if self.exact else "near"


class HostDrafts:
    """Drafts that one loop's drafter makes on the host. `put` copies them to the fixed address at
    which a graph reads them.

    Args:
        learns_before: let the drafter learn before each proposal, not only while the device is
            busy.
    """

    def __init__(self, batch: Batch, drafter: Drafter, *, learns_before: bool):
        self._batch, self._drafter, self._learns_before = batch, drafter, learns_before
        self._tokens = batch.tokens.new_zeros(batch.capacity, LONGEST)

    def propose(self, width: int, controller: DraftLength) -> Proposal | None:
        """Return the drafts for the live rows, up to `width` and as many as the controller wants;
        None if the device drafts."""
        if self._learns_before:
            self._drafter.learn(self._batch)
        if self._drafter.on_device:
            return None
        drafts = self._drafter.propose(self._batch, width) if width else self._nothing()
        counts = drafts.num_drafts
        assert counts is not None
        if width and self._batch.masked:
            counts = allowed(self._batch, drafts.by_row())
        best = max(counts)
        if best:
            best = min(controller.trim(counts), best)
            if best == 0:
                self._drafter.skip_last()
        if not best:
            return self._nothing()
        tokens = drafts.tokens[:, :best]
        # Compare types: a device may be given without its index.
        if tokens.device.type != self._batch.device.type:
            tokens = tokens.contiguous().pin_memory().to(self._batch.device, non_blocking=True)
        return Proposal(tokens, None, tuple(min(count, best) for count in counts))

    def put(self, drafts: Proposal) -> None:
        """Copy drafts to where `placed` reads them. Places beyond their length keep their old
        content."""
        rows, width = drafts.tokens.shape
        if width:
            self._tokens[:rows, :width] = drafts.tokens

    def placed(self, rows: int, width: int) -> Proposal:
        """Return what a graph verifies, padding rows included."""
        return Proposal(self._tokens[:rows, :width], None)

    def _nothing(self) -> Proposal:
        return Proposal.empty(self._batch)._replace(num_drafts=(0,) * len(self._batch))


# Tokens of each row that a catch-up graph reads at once. A few sizes suffice: reading some tokens
# again costs little.
_SIZES = (2, 8, 32, 128)
# Sizes up to the first number exist for any number of rows, longer ones only in passes of at most
# the second number of tokens. On an H200 a draft model of 0.5B parameters reads 128 tokens of one
# row in 1.0 ms, the same as 32.
_ALWAYS, _FLAT = 32, 1024
_HOST = 16  # without graphs (on a CPU), a pass of up to this many tokens takes as long as of one


class DrafterCatchUp:
    """Feed a drafter the tokens of rounds that ran without its drafts. It has nothing to read if
    the drafter does not override `expect`.

    Without graphs, one pass reads all missing tokens.
    """

    def __init__(self, batch: Batch, drafter: Drafter, clock: Clock, graphs: RoundGraphs | None):
        self._batch, self._drafter, self._clock, self._graphs = batch, drafter, clock, graphs
        # Where a pass begins: this many tokens before each row's end.
        self._behind = batch.tokens.new_zeros(())
        self._missed = 0  # the most tokens that a row may have gained without the drafter
        self._unit = 0.0  # seconds of a pass, see `_passes`; 0 if unknown

    def note_missed(self, tokens: int) -> None:
        """Note a round without drafts in which no row gained more than `tokens` tokens."""
        self._missed += tokens

    def seconds(self) -> float:
        """Return the predicted seconds of catching up before the next drafts; 0 if nothing is
        missing or no plain round was timed yet. Until such a pass was timed, one counts as a draft
        step: many rows that have run without drafts must not seem to catch up for nothing."""
        if not self._missed or not self._drafter.catches_up:
            return 0.0
        own = int(self._batch.generated().max())  # tokens of prompts are never missing
        unit = self._unit or STEP * self._clock.predict(0) / self._price(1)
        return unit * self._passes(min(self._missed, own))

    def function(self, count: int) -> Callable[[], None]:
        """Return what a graph that reads `count` tokens of each row does."""
        return functools.partial(self._drafter.catch_up, self._batch, self._behind, count)

    def prepare(self) -> None:
        """Set a valid start for graphs that run now: they must not read beyond a row's end."""
        self._behind.fill_(_SIZES[-1] + 2)

    def run(self, width: int, *, left: float, deadline: float | None = None) -> None:
        """Feed the drafter what it must read before it can draft `width` tokens.

        Args:
            left: the largest number of rounds that may follow.
            deadline: use graphs that exist already, if any fits.
        """
        missing = self._drafter.expect(self._batch, width)
        if width:
            self._missed = 0
        if not missing:
            return
        passes, began, graphs = self._passes(missing), self._clock.now(), self._graphs
        if graphs is None:
            self._drafter.catch_up(self._batch, self._behind.fill_(missing + 2), missing)
            self._unit = (self._clock.now() - began) / passes
            return
        graphs.start()
        while missing > 0:
            wanted, step = self._step(graphs, missing, left, deadline)
            self._behind.fill_(max(missing, step.shape.width) + 2)
            graphs.launch(wanted, step).wait()
            missing -= step.shape.width
        if graphs.steady:
            self._unit = (self._clock.now() - began - graphs.capturing) / passes

    def _passes(self, missing: int) -> float:
        """Return the number of passes of few tokens that take as long as those for `missing` tokens
        of each row."""
        if self._graphs is None:
            return max(missing * len(self._batch) / _HOST, 1.0)
        longest = catch_up_sizes(self._rows)[-1]
        return -(-missing // longest) * self._price(longest)

    def _price(self, tokens: int) -> float:
        return price(Shape("catch up", self._rows, tokens))

    @property
    def _rows(self) -> int:
        return len(self._batch) if self._graphs is None else self._graphs.rows

    def _step(
        self, graphs: RoundGraphs, missing: int, left: float, deadline: float | None
    ) -> tuple[Shape, Step]:
        """Return the next pass, wanted and run: one that reads all that is missing, or with a
        deadline the longest one that has a graph."""
        lengths = catch_up_sizes(graphs.rows)
        best = next((size for size in lengths if size >= missing), lengths[-1])

        def of(size: int) -> tuple[Shape, Step]:
            wanted = Shape("catch up", graphs.rows, size)
            return wanted, graphs.choose(wanted, left=left, deadline=deadline)

        if deadline is not None:
            shorter = (of(size) for size in reversed(lengths) if size <= best)
            replayed = next((one for one in shorter if one[1].how == "replay"), None)
            if replayed is not None:
                return replayed
        return of(best)


def catch_up_sizes(rows: int) -> tuple[int, ...]:
    """Return the numbers of tokens of each row that catch-up graphs for `rows` rows (padding
    included) read at once."""
    return tuple(size for size in _SIZES if size <= max(_ALWAYS, _FLAT // rows))


_FEWEST = 8  # drafts that there is room for at first
_PAUSE = 2e-5  # seconds between looks for a draft; a step of a draft model takes 1 ms


class TokenMasks:
    """Sends the masks of one loop's rounds to `batch.processors`: the tokens that rows may sample.

    The host follows each row's grammar over its drafts, while the device runs the target. The mask
    of a step is that after the drafts before it, so that the tokens are those of plain decoding.

    Args:
        defined: whether steps after a forbidden draft, or after the end, must allow all tokens.
            Else their masks are arbitrary. Block verification (maximal coupling) looks one step
            beyond a draft, so there samples would depend on the masks of earlier rounds.
    """

    def __init__(self, batch: Batch, *, defined: bool):
        self._batch, self._defined = batch, defined
        self._host = torch.zeros(0, dtype=torch.int32)  # where masks are made, line by line
        self._made: Collection[int] = ()  # lines of the next round that `follow` has made

    def follow(self, width: int, is_over: Callable[[], bool]) -> None:
        """Make masks while a graph makes `width` drafts one after the other (Batch.announce).

        Only for rows in their answer; `fill` does the others. is_over: whether the graph has ended.
        """
        early, count = self._batch.early, len(self._batch)
        if early is None:
            return
        rows = {
            line: matcher
            for line, matcher in enumerate(_matchers(self._batch))
            if matcher is not None and matcher.is_in_answer
        }
        masks = DraftMasks(rows, self._lines(count, width + 1).numpy())
        try:
            for drafts in early[:width, :count].numpy():
                while (drafts < 0).any():
                    if is_over() and (drafts < 0).any():
                        return
                    time.sleep(_PAUSE)
                masks.take(drafts.tolist())
            self._made = rows.keys()
        finally:
            masks.close()

    def fill(self, drafts: Sequence[Sequence[int]]) -> None:
        """Write the masks of the live rows' next round. drafts: of each row, the same number."""
        made, self._made = self._made, ()
        host = self._lines(len(drafts), len(drafts[0]) + 1 if drafts else 1, begin=not made)
        rows = zip(_matchers(self._batch), drafts, strict=True)
        given = [None if one[0] is None else (one[0], one[1]) for one in rows]
        fill(given, host.numpy(), made)
        masks = self._batch.processors.masks
        assert masks is not None
        masks[: len(drafts), : host.shape[1]].copy_(host, non_blocking=True)
        if self._batch.early is not None:
            self._batch.early.fill_(-1)

    def _lines(self, rows: int, steps: int, *, begin: bool = True) -> Tensor:
        """Return where the host makes masks, [rows, steps, words]; defined if that is needed."""
        make_room(self._batch, steps - 1)
        masks = self._batch.processors.masks
        assert masks is not None
        size = rows * steps * masks.shape[2]
        if self._host.numel() < size:
            self._host = torch.full((2 * size,), -1, dtype=torch.int32)
            if masks.device.type == "cuda":
                self._host = self._host.pin_memory()
        host = self._host[:size].view(rows, steps, masks.shape[2])
        if self._defined and begin:
            host.fill_(-1)
        return host


def make_room(batch: Batch, width: int) -> None:
    """Make room for the masks of rounds of up to `width` drafts."""
    masks = batch.processors.masks
    if masks is None or masks.shape[1] <= width:
        most = 1 << max(width - 1, _FEWEST - 1).bit_length()  # each growth captures graphs anew
        batch.processors.use_masks(min(most, LONGEST) + 1)
    if batch.early is None and batch.device.type == "cuda":
        batch.early = torch.full((LONGEST, batch.capacity), -1).pin_memory()


def allowed(batch: Batch, drafts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many drafts of each live row its grammar allows, one after the other."""
    return tuple(
        len(tokens) if matcher is None else matcher.allowed(tokens)
        for matcher, tokens in zip(_matchers(batch), drafts, strict=True)
    )


def _matchers(batch: Batch) -> list[Matcher | None]:
    """Return the matcher of each live row, after all of its tokens."""
    for row in batch.live_rows:
        if row.matcher is not None:
            row.matcher.advance(row.generated_since(row.matcher.seen))
    return [row.matcher for row in batch.live_rows]
