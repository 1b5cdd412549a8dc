"""What the next round is to be: its draft length, the drafts that the host has for it, the graph
that serves it.

Not here: running it (step.py), what a controller goes by (lengths/), which graphs there are and
when another is worth it (graph_policy.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

from bass_cli.engine.batch import Batch
from bass_cli.engine.captured import Captured
from bass_cli.engine.contracts import NO_MORE, Drafter, Foresees, Lengths, Outlook
from bass_cli.engine.deadline import Clock
from bass_cli.engine.draft_sync import CatchingUp
from bass_cli.engine.graph_policy import Fit, Shape, Step
from bass_cli.engine.graphs import step_down, step_up
from bass_cli.engine.offers import Asked, Offers


class NextRound:
    """For one loop. `stops`: drafting will be ended inside a round where it is no longer worth
    it. `backlog`: what the job has beside the live rows, as the last round was told."""

    def __init__(
        self,
        batch: Batch,
        drafter: Drafter,
        lengths: Lengths,
        *,
        coupling: str,
        clock: Clock,
        captured: Captured | None,
        catching: CatchingUp,
        stops: bool,
    ):
        self._batch, self._drafter, self._maximal = batch, drafter, coupling == "maximal"
        self._clock, self._captured, self._catching = clock, captured, catching
        self._stops, self.backlog = stops, NO_MORE
        self.offers = Offers(batch, drafter, learns_before=captured is None or self._maximal)
        self._due: Asked | None = None  # if it has been asked for already
        self.use(lengths)

    def use(self, lengths: Lengths) -> None:
        """From now on this controller."""
        self.lengths, self._foresees = lengths, lengths if isinstance(lengths, Foresees) else None

    @property
    def exact(self) -> bool:
        """Whether a round must have the very length that the controller gave. Under maximal
        coupling lengths reach the output, and must not depend on what happens to be captured."""
        return self._maximal or self.lengths.exact

    def changed(self) -> None:
        """Other rows are live than when the next round was asked for."""
        self._due = None

    def take(self, deadline: float | None) -> Asked:
        """The next round's draft length, and the drafts that the host has for it."""
        asked, self._due = self._due or self._ask(deadline), None
        return asked

    def in_time(self, deadline: float | None) -> bool:
        """Whether the shortest round there is should end by `deadline`, if it began now."""
        return deadline is None or self._clock.now() + self._clock.predict(0) <= deadline

    def foreseeable(self, width: int) -> bool:
        """Whether the round after one of `width` drafts can be asked for before that is over.
        Under maximal coupling it must not: there a draft length decided earlier would be another
        sample."""
        return (
            not self._maximal
            and self._foresees is not None
            and not self._foresees.needs(width)
            and (self._drafter.on_device or not self._foresees.drafts)
            and self._batch.most_room() > 1
        )

    def reflect(self) -> None:
        """What can be learnt while the device is busy."""
        if self._captured is None:
            return
        if self._foresees is not None:
            self._foresees.reflect()
        self.offers.learn()

    def served(self, asked: Asked, deadline: float | None) -> tuple[Shape, Step]:
        """The graph that is wanted for a round, and what runs instead: it may take some dummy
        rows too, and another draft length, or where it must be the same, more places for drafts
        than are looked at."""
        captured, offered, width = self._captured, asked.offered, asked.width
        assert captured is not None
        if offered is not None:
            width = offered.tokens.shape[1] if self.exact else step_up(offered.tokens.shape[1])
        wish = captured.usual(width)
        fit: Fit = "same" if offered is not None and not width else self._fit
        left = self._rounds_left(self._batch.most_room())
        return wish, captured.choose(wish, left=left, deadline=deadline, fit=fit)

    def shortest(self, deadline: float) -> float:
        """Seconds that the next round of the live rows is likely to take at the least: those of
        a plain one, or under maximal coupling, where no deadline cuts drafts, those of the
        length that is due."""
        if not self._maximal:
            return self._clock.predict(0)
        asked = self._due = self._due or self._ask(deadline)
        if self._captured is None:
            offered = asked.offered
            return self._clock.predict(asked.width if offered is None else offered.tokens.shape[1])
        _, step = self.served(asked, deadline)
        return self._clock.predict(step.shape.width) + self._captured.delay(step)

    def left(self, rooms: list[int]) -> float:
        """How many rounds there may still be, at most."""
        return self._rounds_left(max(rooms))

    def _rounds_left(self, most_room: int) -> float:
        return most_room + self.backlog.tokens / self._batch.capacity

    def _ask(self, deadline: float | None) -> Asked:
        outlook = self._outlook(rooms := self._batch.rooms())
        outlook = outlook._replace(padded=self._padded(rooms, deadline))
        width = self._width(rooms, outlook, deadline)
        began = self._clock.now()
        offered = self.offers.ask(width, self.lengths)
        looked = not self._drafter.on_device and width > 0
        return Asked(width, offered, self._clock.now() - began, looked)

    def _outlook(self, rooms: list[int]) -> Outlook:
        left = float(numpy.minimum(rooms, self.backlog.typical).sum()) + self.backlog.tokens
        captured = self._captured
        entries = captured.entries() if captured else ()
        return Outlook(
            left / len(rooms),
            entries,
            self._catching.seconds(),
            float(self._batch.known().mean()),
            tuple(self._batch.hosts),
            tuple(rooms),
            captured.colds() if captured and any(entries) else (),
            stops=self._stops,
            free=not self._drafter.on_device,
            foregone=self.offers.recall(),
        )

    def _padded(self, rooms: list[int], deadline: float | None) -> int:
        """Rows of the graph that serves a plain round, dummies included, which take as long."""
        captured = self._captured
        if captured is None:
            return 0
        return captured.choose(
            captured.usual(0), left=self.left(rooms), deadline=deadline
        ).shape.rows

    def _width(self, rooms: list[int], outlook: Outlook, deadline: float | None) -> int:
        """The controller's draft length, capped by what the drafter can, by the room of the row
        that has most of it (no other row decides), and by `deadline`, capturing included; with
        graphs one that they are made for, unless it must be the very length. Under maximal
        coupling the clock does not decide: a length is part of what the samples will be."""
        captured, wanted = self._captured, self.lengths.next(len(rooms), outlook)
        wanted = max(0, min(wanted, self._drafter.longest, max(rooms) - 1))
        if self._maximal:
            return wanted
        if captured is None:
            return self._clock.longest_in_time(wanted, deadline)
        usual: Callable[[int], int] = int if self.exact else step_down
        behind = outlook.catch_up

        def predict(width: int) -> float:
            wish, left = captured.usual(usual(width)), self.left(rooms)
            step = captured.choose(wish, left=left, deadline=deadline, fit=self._fit)
            late = captured.delay(step) + (behind if step.shape.width else 0.0)
            return self._clock.predict(step.shape.width) + late

        return usual(self._clock.longest_in_time(usual(wanted), deadline, predict))

    @property
    def _fit(self) -> Fit:
        return "wider" if self.exact else "near"
