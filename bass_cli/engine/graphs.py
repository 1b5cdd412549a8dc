"""Captured CUDA graphs of rounds: capture and replay, which shapes are captured, and replay over a
padded batch.

`Graphs` holds captured functions by key, `GraphPolicy` decides what is captured and what serves
instead, `Captured` runs the rounds of one loop by both. Off CUDA everything is simply called.
Not here: what is in a round (round.py), CUDA itself (models/capture.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.clock import Clock
from bass_cli.engine.contracts import Drafter
from bass_cli.engine.sizes import WIDTHS, bucket, cover, step_down
from bass_cli.models.capture import Capture, Graph, capture
from bass_kernels import has_triton


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Running(NamedTuple):
    """A replay under way. `over`: whether the device is done with it; `wait`: its result on the
    host, which stays what it is until the second replay after this one begins."""

    over: Callable[[], bool]
    wait: Callable[[], Tensor | None]


class Graphs:
    """Captured functions of no arguments, each with a result that is copied to the host, or None.

    `captures` counts how many were captured so far: a measured run should add none. Memory of
    intermediate results is shared by all graphs: they run one after the other. `wanted`: whether
    there are to be any; `record` captures one.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True, record: Capture = capture):
        self.enabled, self.record = wanted and device.type == "cuda", record
        self.captures = 0
        # A graph, its result, and where that is copied to on the host: in turn, since two
        # replays may be under way.
        self._held: dict[Hashable, tuple[Graph, Tensor | None, list[Tensor]]] = {}
        self._dropped = self._held  # not run any more, see renew
        self._warm: dict[Hashable, Tensor | None] = {}  # what ran uncaptured, and a result of it
        self._version: Hashable = None
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def renew(self, version: Hashable) -> bool:
        """Forget all graphs if `version` is another than last time (what they read has moved);
        says whether it was."""
        if version == self._version:
            return False
        # The memory that all of them share must not be without any: CUDA's allocator may refuse
        # to capture into it then.
        self._dropped, self._held = self._held or self._dropped, {}
        self._warm.clear()
        self._version = version
        return True

    def holds(self, key: Hashable) -> bool:
        return key in self._held

    def held(self) -> Iterable[Hashable]:
        """The keys of all graphs."""
        return self._held.keys()

    def is_warm(self, key: Hashable) -> bool:
        """Whether `key` has run uncaptured: its kernels are compiled, its libraries set up."""
        return key in self._warm

    def compile(self, functions: Iterable[Callable[[], object]]) -> None:
        """Compile the kernels that these functions launch, many at a time, without launching
        them."""
        if has_triton():
            from bass_kernels.ahead import compile_ahead

            compile_ahead(functions)

    def run(self, key: Hashable, function: Callable[[], Tensor | None]) -> Tensor | None:
        """Run `function` uncaptured; returns its result on the host."""
        found = function()
        self._warm[key] = None if found is None else found.cpu()
        torch.cuda.synchronize()
        return self._warm[key]

    def capture(self, key: Hashable, function: Callable[[], Tensor | None]) -> None:
        """Capture `function`, which must be warm (see `run`): compiling and loading cannot be
        captured."""
        found: list[Tensor | None] = []
        graph = self.record(lambda: found.append(function()), self._pool)
        result = found[0]
        hosts = (
            []
            if result is None
            else [torch.empty_like(result, device="cpu").pin_memory() for _ in range(2)]
        )
        self._held[key] = graph, result, hosts
        self._dropped = {}
        self.captures += 1

    def replay(self, key: Hashable, meanwhile: Callable[[], None] = lambda: None) -> Tensor | None:
        """Run what was captured under `key`, and `meanwhile` on the host; returns its result on the
        host (see Running)."""
        running = self.launch(key)
        meanwhile()
        return running.wait()

    def launch(self, key: Hashable) -> Running:
        """Begin what was captured under `key`, behind all that the device was given before."""
        graph, result, hosts = self._held[key]
        graph.replay()
        hosts.reverse()
        host = None
        if result is not None:
            host = hosts[0].copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> Tensor | None:
            done.synchronize()
            return host

        return Running(done.query, wait)


# Plain passes on the device that running and capturing one takes, by the launches in it: 27 ms on
# an H200, 18 of the 1.5B and 7 of the 7B.
_CAPTURE = 15.0
_FEW = 3  # rounds left for which it is not worth capturing anything
# What a round costs where nobody measured, in plain passes on the device; lengths/costs.py too
# begins from this.
STEP = 0.2  # of a draft step
ARITHMETIC = 300.0  # tokens of a pass whose arithmetic takes as long as reading the weights
_STEP_LAUNCHES = (
    0.6  # what a draft step costs of a pass on the host, where launches count and not sizes
)
_SECONDS = 0.1  # for a pass on the host, at most: what takes longer is compiling, which comes once
Kind = Literal["round", "block", "cut", "given", "catch up"]
Cuts = Callable[[int, int], bool]  # whether rounds of so many rows and drafts are cut
# which draft lengths may serve another: any, longer ones, or none
Fit = Literal["near", "wider", "same"]


class Shape(NamedTuple):
    """What a graph is made for: `rows`, dummies included, and in a round `width` drafts a row
    ("block": one pass makes all of them; "cut": it makes more, and so many on average are verified
    (cutting.py); "given": they come from the host); in catching up, of a drafter after plain
    rounds, `width` tokens."""

    kind: Kind
    rows: int
    width: int


class Step(NamedTuple):
    """A shape, and how to run it: by replaying its graph, uncaptured ("run"), or capturing and
    then replaying it."""

    shape: Shape
    how: Literal["replay", "run", "capture"]


def kind_of(drafter: Drafter) -> Kind:
    """The kind of its rounds with drafts."""
    if not drafter.on_device:
        return "given"
    return "block" if drafter.at_once else "round"


class GraphPolicy:
    """The policy for one loop's graphs. `longest`: the most that the drafter proposes. `drafts`:
    the kind of its rounds with drafts, if `cuts` does not say that those of so many rows and
    drafts are cut."""

    def __init__(
        self,
        graphs: Graphs,
        *,
        longest: int,
        drafts: Kind = "round",
        cuts: Cuts = lambda rows, width: False,
    ):
        self._graphs, self._drafts, self._longest, self._cuts = graphs, drafts, longest, cuts
        self._widths = [step_down(min(width, longest)) for width in range(WIDTHS[-1] + 1)]
        self._lost: dict[
            Shape, tuple[int, float]
        ] = {}  # by wish: times another shape served, and passes lost by that
        self._unit: dict[
            tuple[str, str], float
        ] = {}  # by kind and how: seconds on the host for a pass
        self._one_time_costs: dict[int, tuple[float, ...]] = {}

    def choose(self, wish: Shape, *, left: float, fit: Fit = "near") -> Step:
        """What to run for `wish`, of which at most `left` more may come. With the fit "wider",
        what nothing serves begins in one of the usual widths, which serves others too."""
        if self._graphs.holds(wish):
            return Step(wish, "replay")
        near = self._near(wish, fit)
        if near is not None:
            times, lost = self._lost.get(wish, (0, 0.0))
            price = _CAPTURE * _launches(wish)
            if lost < price or left * lost < price * times:
                return Step(near, "replay")
        elif fit == "wider":
            usual = min(cover(wish.width), self._longest)  # more is never drafted
            wish = wish._replace(width=max(usual, wish.width))
        if left < _FEW or not self._graphs.is_warm(wish):
            return Step(wish, "run")
        return Step(wish, "capture")

    def served(self, wish: Shape, step: Step) -> None:
        """`step` was run for `wish`."""
        if step.shape != wish:
            times, lost = self._lost.get(wish, (0, 0.0))
            self._lost[wish] = times + 1, lost + _loss(step.shape, wish)

    def took(self, step: Step, seconds: float) -> None:
        """Running or capturing a shape kept the host for `seconds`."""
        key = (step.shape.kind, step.how)
        self._unit[key] = min(self._unit.get(key, _SECONDS), seconds / _launches(step.shape))
        self._one_time_costs.clear()

    def delay(self, step: Step) -> float:
        """Seconds that `step` is likely to take beyond those of a replay."""
        if step.how == "replay":
            return 0.0
        # a plain pass tells of the former
        kind = step.shape.kind
        kinds = (kind,) if kind == "catch up" else (kind, "round")
        known = [self._unit[kind, step.how] for kind in kinds if (kind, step.how) in self._unit]
        return (known[0] if known else _SECONDS) * _launches(step.shape)

    def one_time_costs(self, rows: int) -> tuple[float, ...]:
        """For each draft length from 0 the seconds that it takes, once, until rounds of so many
        rows (dummies included) run at their usual speed: 0 if a graph is there, or one near."""
        if rows not in self._one_time_costs:
            self._one_time_costs[rows] = tuple(
                self._one_time_cost(self.shape(rows, width)) for width in self._widths
            )
        return self._one_time_costs[rows]

    def shape(self, rows: int, width: int) -> Shape:
        """A round of so many drafts."""
        kind: Kind = "cut" if self._cuts(rows, width) else self._drafts
        return Shape(kind if width else "round", rows, width)

    def warmup_costs(self, rows: int) -> tuple[float, ...]:
        """Of the entries, what the very first round takes: it runs uncaptured, and tells already
        what rows keep."""
        return tuple(
            self._warmup_cost(self.shape(rows, width)) if one_time_cost else 0.0
            for width, one_time_cost in zip(self._widths, self.one_time_costs(rows), strict=True)
        )

    def forget(self) -> None:
        """The graphs have been dropped."""
        self._one_time_costs.clear()

    def _one_time_cost(self, wish: Shape) -> float:
        if self._graphs.holds(wish) or self._near(wish) is not None:
            return 0.0
        return self._warmup_cost(wish) + self.delay(Step(wish, "capture"))

    def _warmup_cost(self, wish: Shape) -> float:
        return 0.0 if self._graphs.is_warm(wish) else self.delay(Step(wish, "run"))

    def _near(self, wish: Shape, fit: Fit = "near") -> Shape | None:
        """The captured shape that serves instead at the least loss."""
        fitting = [
            shape
            for shape in self._graphs.held()
            if isinstance(shape, Shape)
            and _alike(shape.kind, wish.kind, fit)
            and shape.rows >= wish.rows
            and _serves(shape, wish, fit)
        ]
        return min(fitting, key=lambda shape: _loss(shape, wish), default=None)


def _alike(kind: Kind, wish: Kind, fit: Fit) -> bool:
    """Whether rounds cut and not cut may stand for each other: where any length will do."""
    return kind == wish or (fit == "near" and {kind, wish} == {"cut", "block"})


def _serves(shape: Shape, wish: Shape, fit: Fit) -> bool:
    """Whether the width will do. Tokens that are known already may be taken in again. If any
    length will do, drafts may be more or fewer than asked for, but not none: then nothing would
    be learnt of them."""
    if wish.kind == "catch up" or fit == "wider":
        return shape.width >= wish.width
    return shape.width == wish.width or (fit == "near" and bool(shape.width or not wish.width))


def _loss(shape: Shape, wish: Shape) -> float:
    """What is lost if this shape serves, in plain passes: places in it that are not filled, or
    drafts that have none, where these cost next to nothing."""
    cheap = wish.kind in ("given", "block", "cut")
    dropped = STEP * max(wish.width - shape.width, 0) if cheap else 0.0
    return dropped + abs(_price(shape) - _price(wish))


def _price(shape: Shape) -> float:
    """What it costs on the device, in plain passes."""
    if shape.kind == "catch up":
        return 1 + shape.rows * shape.width / ARITHMETIC
    return 1 + STEP * _steps(shape) + shape.rows * (shape.width + 1) / ARITHMETIC


def _launches(shape: Shape) -> float:
    """What it costs on the host, in passes."""
    return 1 + _STEP_LAUNCHES * _steps(shape)


def _steps(shape: Shape) -> int:
    """Passes of a draft in a round."""
    once = min(shape.width, 1)
    return {"round": shape.width, "block": once, "cut": once}.get(shape.kind, 0)


class Captured:
    """The graphs of one loop. `function` gives what a shape does, for as many rows as the batch is
    padded to; `cuts`: see GraphPolicy.

    `capturing`: seconds that went into capturing since the last `start`; no later round will
    take them. `steady`: whether all since then was replayed.
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
        self._ladder = GraphPolicy(
            graphs, longest=drafter.longest, drafts=kind_of(drafter), cuts=cuts
        )
        self.capturing, self.steady = 0.0, True

    def start(self) -> float:
        """From now on `capturing` and `steady` count; returns the time."""
        self.capturing, self.steady = 0.0, True
        return self._clock.now()

    def renew(self, version: Hashable) -> None:
        """Drop all graphs if something that they read has moved, as `version` tells."""
        if self._graphs.renew(version):
            self._ladder.forget()

    def wish(self, kind: Kind, width: int) -> Shape:
        """The shape made for the live rows."""
        return Shape(kind, self.bucket(len(self._batch)), width)

    def usual(self, width: int) -> Shape:
        """The same for a round of so many drafts."""
        return self._ladder.shape(self.bucket(len(self._batch)), width)

    def bucket(self, rows: int) -> int:
        """So many rows with the dummies that a graph takes."""
        return bucket(rows, self._batch.capacity)

    def choose(
        self, wish: Shape, *, left: float, deadline: float | None = None, fit: Fit = "near"
    ) -> Step:
        """Choose as GraphPolicy does. With a `deadline`, avoid captures that only pay later."""
        return self._ladder.choose(wish, left=left if deadline is None else 0.0, fit=fit)

    def delay(self, step: Step) -> float:
        """Seconds that `step` is likely to take beyond those of a replay."""
        return self._ladder.delay(step)

    def one_time_costs(self) -> tuple[float, ...]:
        """GraphPolicy.entries for the live rows."""
        return self._ladder.one_time_costs(self.bucket(len(self._batch)))

    def warmup_costs(self) -> tuple[float, ...]:
        """GraphPolicy.colds for the live rows."""
        return self._ladder.warmup_costs(self.bucket(len(self._batch)))

    def perform(
        self, wish: Shape, step: Step, meanwhile: Callable[[], None] = lambda: None
    ) -> Tensor | None:
        """Run a shape as `step` says, for what was wished, and `meanwhile` while the device is
        busy; its result on the host."""
        running = self.launch(wish, step)
        meanwhile()
        return running.wait()

    def launch(self, wish: Shape, step: Step) -> Running:
        """The same, not waited for; what is not replayed is over when this returns."""
        began = self._clock.now()
        self._ladder.served(wish, step)
        if step.how == "run":
            self.steady = False
            with self._padded(step.shape.rows):
                found = self._graphs.run(step.shape, self._function(step.shape))
            self._ladder.took(step, self._clock.now() - began)
            return Running(lambda: True, lambda: found)
        if step.how == "capture":
            self.capture(step.shape)
            self._ladder.took(step, self._clock.now() - began)
            self.capturing += self._clock.now() - began
        with self._padded(step.shape.rows):
            return self._graphs.launch(step.shape)

    def prepare(
        self,
        rows: Iterable[int],
        widths: Iterable[int],
        *,
        catch_up: Callable[[int], Sequence[int]] | None,
        only_compile: bool,
    ) -> None:
        """Capture what rounds of these numbers of rows and drafts need, and what catches up as
        many tokens as `catch_up` says for a number of rows; or only compile it."""
        shapes = [
            self._ladder.shape(count, width)
            for count in sorted({self.bucket(n) for n in rows})
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
        """See to it that there is a graph of this shape."""
        if self._graphs.holds(shape):
            return
        function = self._function(shape)
        with self._padded(shape.rows), self._batch.still():
            if not self._graphs.is_warm(shape):
                self._graphs.run(shape, function)
            self._graphs.capture(shape, function)

    @contextlib.contextmanager
    def _padded(self, rows: int) -> Iterator[None]:
        self._batch.pad(rows)
        try:
            yield
        finally:
            self._batch.pad(None)
