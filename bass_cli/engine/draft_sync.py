"""Lets a loop's drafter take in the tokens that it missed in rounds without its drafts, and
foresees what that takes.

Not here: what the drafter does with them (drafting/), whether drafts are worth it
(lengths/goodput.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from bass_cli.engine.batch import Batch
from bass_cli.engine.captured import Captured
from bass_cli.engine.contracts import CatchesUp
from bass_cli.engine.deadline import Clock
from bass_cli.engine.graph_policy import Shape, Step

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

    def __init__(
        self, batch: Batch, drafter: CatchesUp | None, clock: Clock, captured: Captured | None
    ):
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
        return self._drafter is None or self._drafter.reaches(before, length)

    def function(self, count: int) -> Callable[[], None]:
        """What a graph of so many tokens a row does."""
        assert self._drafter is not None
        return functools.partial(self._drafter.catch_up, self._batch, self._behind, count)

    def prepare(self) -> None:
        """Graphs may run now, and must not read beyond a row's end."""
        self._behind.fill_(_SIZES[-1] + 2)

    def run(self, width: int, *, left: float, deadline: float | None = None) -> None:
        """See to it that `width` tokens can be drafted; `left`: rounds that may still come, at
        most. With a `deadline` in graphs that are there, if any will do."""
        if self._drafter is None:
            return
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
