"""Runs a loop's rounds, and its drafter's catching up, as captured graphs over a padded batch.

Not here: what is in them (step.py), which shapes are worth a graph (graph_policy.py), CUDA
itself (graphs.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.contracts import Drafter
from bass_cli.engine.deadline import Clock
from bass_cli.engine.graph_policy import Cuts, Fit, Kind, Ladder, Shape, Step, kind_of
from bass_cli.engine.graphs import Graphs, Running, bucket


class Captured:
    """The graphs of one loop. `function` gives what a shape does, for as many rows as the batch is
    padded to; `cuts`: see Ladder.

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
        self._ladder = Ladder(graphs, longest=drafter.longest, drafts=kind_of(drafter), cuts=cuts)
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
        """Ladder.choose, but with a `deadline` nothing that only pays later, if there is another
        way."""
        return self._ladder.choose(wish, left=left if deadline is None else 0.0, fit=fit)

    def delay(self, step: Step) -> float:
        """Seconds that `step` is likely to take beyond those of a replay."""
        return self._ladder.delay(step)

    def entries(self) -> tuple[float, ...]:
        """Ladder.entries for the live rows."""
        return self._ladder.entries(self.bucket(len(self._batch)))

    def colds(self) -> tuple[float, ...]:
        """Ladder.colds for the live rows."""
        return self._ladder.colds(self.bucket(len(self._batch)))

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
