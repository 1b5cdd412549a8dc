"""Captured CUDA graphs of rounds: which shapes are captured, capture, and replay over a padded
batch.

`RoundGraphs` runs the rounds of one loop. `GraphPolicy` decides which shapes are captured and which
graph serves instead. On other devices nothing is captured. Not here: what a round does (round.py),
the graphs themselves and the ski-rental rule (models/capture.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import Drafter
from bass_cli.engine.host_state import NO_REPORT, Report
from bass_cli.engine.sizes import WIDTHS, bucket, cover, step_down
from bass_cli.models.capture import Graphs, Running, SkiRental


class RoundGraphs:
    """The graphs of one loop.

    policy: decides which of them are captured.
    capturing: seconds of graph capture since the last `start`; later rounds will not need them.
    steady: whether everything since the last `start` was replayed.

    Args:
        function: returns what a shape does, for the rows to which the batch is padded.
        cuts: see GraphPolicy.
    """

    def __init__(
        self,
        graphs: Graphs,
        batch: Batch,
        clock: Clock,
        function: Callable[[Shape], Callable[[], Tensor | None]],
        *,
        drafter: Drafter,
        cuts: Cuts,
    ):
        self._graphs, self._batch, self._clock, self._function = graphs, batch, clock, function
        self.policy = GraphPolicy(
            graphs,
            longest=drafter.longest,
            drafts=kind_of(drafter),
            cuts=cuts,
            report=lambda: batch.reports,
            masked=lambda: batch.masked,
        )
        self.capturing, self.steady = 0.0, True
        self._stages: dict[Shape, Callable[[Running], None]] = {}  # the host's, by shape

    @property
    def rows(self) -> int:
        """Rows, padding included, of the graph that fits the live ones."""
        return bucket(len(self._batch), self._batch.capacity)

    def start(self) -> float:
        """Reset `capturing` and `steady`, and return the time."""
        self.capturing, self.steady = 0.0, True
        return self._clock.now()

    def renew(self, version: Hashable) -> None:
        """Drop all graphs if `version` has changed, because memory that they read has moved."""
        if self._graphs.renew(version):
            self.policy.forget()

    def usual(self, width: int) -> Shape:
        """Return the shape of a round of `width` drafts for the live rows."""
        return self.policy.shape(self.rows, width)

    def choose(
        self, wanted: Shape, *, left: float, deadline: float | None = None, fit: Fit = "near"
    ) -> Step:
        """Choose as GraphPolicy does. With a `deadline`, avoid captures that only pay later."""
        return self.policy.choose(wanted, left=left if deadline is None else 0.0, fit=fit)

    def launch(self, wanted: Shape, step: Step) -> Running:
        """Launch `step` in place of `wanted`. A step that is not replayed has ended when this
        returns."""
        began = self._clock.now()
        self.policy.served(wanted, step)
        if step.how == "run":
            self.steady = False
            with self._padded(step.shape.rows):
                found = self._graphs.run(step.shape, self._function(step.shape))
            self.policy.took(step, self._clock.now() - began)
            return Running(lambda: True, lambda: found)
        if step.how == "capture":
            self.capture(step.shape)
            self.policy.took(step, self._clock.now() - began)
            self.capturing += self._clock.now() - began
        with self._padded(step.shape.rows):
            if step.shape.masked:
                return self._launch_stages(step.shape)
            return self._graphs.launch(step.shape)

    def _launch_stages(self, shape: Shape) -> Running:
        """Launch the first stages. The host's work and the last stage are left to `proceed`."""
        none = torch.zeros(shape.rows, 0)
        drafts = self._graphs.launch((shape, "draft")) if shape.width else _ended(none)
        self._graphs.replay((shape, "target"))
        host = self._stages[shape]

        verdicts = list[Running]()

        def proceed() -> None:
            if not verdicts:
                host(drafts)
                with self._padded(shape.rows):
                    verdicts.append(self._graphs.launch(shape))

        def wait() -> Tensor | None:
            proceed()
            return verdicts[0].wait()

        return Running(lambda: bool(verdicts) and verdicts[0].over(), wait, proceed)

    def prepare(
        self,
        rows: Iterable[int],
        widths: Iterable[int],
        *,
        catch_up: Callable[[int], Sequence[int]] | None,
        only_compile: bool,
    ) -> None:
        """Capture, or only compile, what rounds of these numbers of rows and drafts need.

        Args:
            catch_up: returns, for a number of rows, the numbers of tokens for which catch-up passes
                are captured. None: none.
        """
        shapes = [
            self.policy.shape(count, width)
            for count in sorted({bucket(n, self._batch.capacity) for n in rows})
            for width in sorted(set(widths))
        ]
        if catch_up is not None:
            shapes += [
                Shape("catch up", shape.rows, tokens)
                for shape in shapes
                if shape.width
                for tokens in catch_up(shape.rows)
            ]
        shapes = [shape for shape in dict.fromkeys(shapes) if not self._graphs.holds(shape)]
        if only_compile:
            with self._batch.still():
                self._graphs.compile([functools.partial(self._dry, shape) for shape in shapes])
            return
        for shape in shapes:
            self.capture(shape)

    def _dry(self, shape: Shape) -> None:
        with self._padded(shape.rows):
            self._function(shape)()

    def capture(self, shape: Shape) -> None:
        """Capture this shape unless a graph of it exists."""
        if self._graphs.holds(shape):
            return
        function = self._function(shape)
        with self._padded(shape.rows), self._batch.still():
            if not self._graphs.is_warm(shape):
                self._graphs.run(shape, function)
            if isinstance(function, Stages):
                if shape.width:
                    self._graphs.capture((shape, "draft"), function.draft)
                else:
                    function.draft()  # it launches nothing
                self._graphs.capture((shape, "target"), function.target)
                self._stages[shape], function = function.host, function.verdict
            self._graphs.capture(shape, function)

    @contextlib.contextmanager
    def _padded(self, rows: int) -> Iterator[None]:
        self._batch.pad(rows)
        try:
            yield
        finally:
            self._batch.pad(None)


# Cost of capturing a pass, in plain passes on the device. Measured on an H200: 27 ms, which is 18
# passes of the 1.5B model and 7 of the 7B.
_CAPTURE = 15.0
_FEW = 3  # with fewer rounds left, capturing does not pay
# Costs before anything is measured, in plain passes on the device; lengths/costs.py begins from
# them too.
STEP = 0.2  # one draft step
ARITHMETIC = 300.0  # tokens of a pass whose arithmetic takes as long as reading the weights
# Cost of a draft step on the host, in plain passes: there the number of launches counts, not sizes.
_STEP_LAUNCHES = 0.6
_SECONDS = 0.1  # the most for a pass on the host; what takes longer is compiling, which comes once
Kind = Literal["round", "block", "cut", "given", "catch up"]
Cuts = Callable[[int, int], bool]  # (rows, drafts of each row) -> whether such rounds are cut
# Which other draft lengths may serve: any, longer ones, or none.
Fit = Literal["near", "wider", "same"]


class Shape(NamedTuple):
    """What a graph is captured for.

    kind: "round": drafts one after the other. "block": one pass makes all drafts. "cut": one pass
        makes more drafts than are verified (verify.py); `width` is the mean number. "given":
        drafts come from the host. "catch up": no round; a drafter reads tokens of plain rounds.
    rows: rows of the batch, padding included.
    width: drafts of each row, or tokens of each row in "catch up".
    report: what the round reports besides tokens and their log-probabilities.
    masked: whether the host makes masks for rows with a grammar, so that there are Stages.
    """

    kind: Kind
    rows: int
    width: int
    report: Report = NO_REPORT
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Stages:
    """A round with work of the host inside. On the device each part is a graph of its own.

    draft: proposes, and returns the drafts [B, k].
    target: runs the target.
    host: gets the drafts that are coming to the host, while the device runs the target.
    verdict: returns the round's result.
    """

    draft: Callable[[], Tensor]
    target: Callable[[], None]
    host: Callable[[Running], None]
    verdict: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        """Do all of it, one part after the other."""
        drafts = self.draft()
        self.target()
        self.host(_ended(drafts.cpu()))
        return self.verdict()


def _ended(result: Tensor) -> Running:
    return Running(lambda: True, lambda: result)


class Step(NamedTuple):
    """A shape and how to run it: replay its graph, run it uncaptured, or capture and then replay
    it."""

    shape: Shape
    how: Literal["replay", "run", "capture"]


def kind_of(drafter: Drafter) -> Kind:
    """Return the kind of the drafter's rounds with drafts."""
    if not drafter.on_device:
        return "given"
    return "block" if drafter.at_once else "round"


class GraphPolicy:
    """Decide for one loop which graphs are captured and which serve other shapes.

    Args:
        longest: the most tokens that the drafter proposes.
        drafts: the kind of its rounds with drafts.
        cuts: whether rounds of these rows and drafts are of kind "cut" instead.
        report: returns what rounds report now.
        masked: returns whether a row has a grammar now.
    """

    def __init__(
        self,
        graphs: Graphs,
        *,
        longest: int,
        drafts: Kind = "round",
        cuts: Cuts = lambda rows, width: False,
        report: Callable[[], Report] = lambda: NO_REPORT,
        masked: Callable[[], bool] = lambda: False,
    ):
        self._report, self._masked = report, masked
        self._graphs, self._drafts, self._longest, self._cuts = graphs, drafts, longest, cuts
        self._widths = [step_down(min(width, longest)) for width in range(WIDTHS[-1] + 1)]
        self._rental = SkiRental[Shape]()  # losses in plain passes
        # By kind and how it ran: seconds on the host for a pass.
        self._unit: dict[tuple[str, str], float] = {}
        self._one_time_costs: dict[tuple[int, Report, bool], tuple[float, ...]] = {}

    def choose(self, wanted: Shape, *, left: float, fit: Fit = "near") -> Step:
        """Choose what to run for the shape `wanted`: other graphs serve by the ski-rental rule.

        Args:
            left: the largest number of such rounds that may still come.
            fit: which other draft lengths may serve. With "wider" and nothing that serves, one of
                the usual widths is captured, because it serves others too.
        """
        if self._graphs.holds(wanted):
            return Step(wanted, "replay")
        near = self._near(wanted, fit)
        if near is not None:
            lost = _account(near, wanted)
            if not self._rental.pays(lost, _CAPTURE * _launches(wanted), left=left):
                return Step(near, "replay")
        elif fit == "wider":
            usual = min(cover(wanted.width), self._longest)  # the drafter proposes no more
            wanted = wanted._replace(width=max(usual, wanted.width))
        if left < _FEW or not self._graphs.is_warm(wanted):
            return Step(wanted, "run")
        return Step(wanted, "capture")

    def served(self, wanted: Shape, step: Step) -> None:
        """Note that `step` was run for `wanted`."""
        if step.shape != wanted:
            self._rental.lose(_account(step.shape, wanted), _loss(step.shape, wanted))
        elif step.how == "capture" and (near := self._near(wanted)) is not None:
            self._rental.restart(_account(near, wanted), 0.0)

    def took(self, step: Step, seconds: float) -> None:
        """Note that running or capturing a shape kept the host busy for `seconds`."""
        key, unit = (step.shape.kind, step.how), seconds / _launches(step.shape)
        if unit < _SECONDS:  # else it compiled, and shows nothing about the next one
            self._unit[key] = min(self._unit.get(key, unit), unit)
        self._one_time_costs.clear()

    def delay(self, step: Step) -> float:
        """Return the seconds that `step` is likely to take on top of a replay."""
        if step.how == "replay":
            return 0.0
        # The time of a plain pass is the best estimate for a kind that never ran.
        kind = step.shape.kind
        kinds = (kind,) if kind == "catch up" else (kind, "round")
        known = [self._unit[kind, step.how] for kind in kinds if (kind, step.how) in self._unit]
        return (known[0] if known else _SECONDS) * _launches(step.shape)

    def one_time_costs(self, rows: int) -> tuple[float, ...]:
        """Return, for each draft length from 0, the seconds that it costs once until rounds of
        `rows` rows (padding included) run at their usual speed. 0 if a graph serves it."""
        key = rows, self._report(), self._masked()
        if key not in self._one_time_costs:
            self._one_time_costs[key] = tuple(
                self._one_time_cost(self.shape(rows, width)) for width in self._widths
            )
        return self._one_time_costs[key]

    def shape(self, rows: int, width: int) -> Shape:
        """Return the shape of a round of `width` drafts."""
        kind: Kind = "cut" if self._cuts(rows, width) else self._drafts
        kind = kind if width else "round"
        return Shape(kind, rows, width, self._report(), self._masked())

    def warmup_costs(self, rows: int) -> tuple[float, ...]:
        """Return the part of the one-time costs that the first round takes. It runs uncaptured,
        but already shows how many drafts are accepted."""
        return tuple(
            self._warmup_cost(self.shape(rows, width)) if one_time_cost else 0.0
            for width, one_time_cost in zip(self._widths, self.one_time_costs(rows), strict=True)
        )

    def forget(self) -> None:
        """Note that all graphs have been dropped."""
        self._one_time_costs.clear()

    def _one_time_cost(self, wanted: Shape) -> float:
        if self._graphs.holds(wanted) or self._near(wanted) is not None:
            return 0.0
        return self._warmup_cost(wanted) + self.delay(Step(wanted, "capture"))

    def _warmup_cost(self, wanted: Shape) -> float:
        return 0.0 if self._graphs.is_warm(wanted) else self.delay(Step(wanted, "run"))

    def _near(self, wanted: Shape, fit: Fit = "near") -> Shape | None:
        """Return the captured shape that serves instead with the smallest loss; None if none
        serves."""
        fitting = [
            shape
            for shape in self._graphs.held()
            if isinstance(shape, Shape) and _serves(shape, wanted, fit)
        ]
        return min(fitting, key=lambda shape: _loss(shape, wanted), default=None)


def _account(serving: Shape, wanted: Shape) -> Shape:
    """Return the shape to which the loss is charged if another one serves.

    While rows run out, each number of rows is wanted for some rounds only. So what a graph of too
    many rows loses is added up, and pays for a graph of the rows that are left then.
    """
    return serving if serving.rows > wanted.rows else wanted


def _serves(shape: Shape, wanted: Shape, fit: Fit) -> bool:
    """Return whether a graph of `shape` may serve `wanted`.

    In catching up, known tokens may be read again. If any length may serve, there may be more or
    fewer drafts than wanted, but not none: then nothing would be learnt about drafts; and "cut" and
    "block" may serve each other.
    """
    any_length = fit == "near"
    alike = shape.kind == wanted.kind or (
        any_length and {shape.kind, wanted.kind} == {"cut", "block"}
    )
    if not alike or shape.rows < wanted.rows or shape[3:] != wanted[3:]:
        return False
    if wanted.kind == "catch up" or fit == "wider":
        return shape.width >= wanted.width
    return shape.width == wanted.width or (any_length and bool(shape.width or not wanted.width))


def _loss(shape: Shape, wanted: Shape) -> float:
    """Return the loss if this shape serves, in plain passes: unused places in it, and drafts
    that find no place although they cost next to nothing."""
    cheap = wanted.kind in ("given", "block", "cut")
    dropped = STEP * max(wanted.width - shape.width, 0) if cheap else 0.0
    return dropped + abs(price(shape) - price(wanted))


def price(shape: Shape) -> float:
    """Return the cost on the device, in plain passes."""
    if shape.kind == "catch up":
        return 1 + shape.rows * shape.width / ARITHMETIC
    return 1 + STEP * _steps(shape) + shape.rows * (shape.width + 1) / ARITHMETIC


def _launches(shape: Shape) -> float:
    """Return the cost on the host, in plain passes."""
    return 1 + _STEP_LAUNCHES * _steps(shape)


def _steps(shape: Shape) -> int:
    """Return the number of draft passes in a round."""
    once = min(shape.width, 1)
    return {"round": shape.width, "block": once, "cut": once}.get(shape.kind, 0)
