"""One round: propose, verify, accept, commit; then one copy to the host. Rows join and leave
between rounds.

Not here: what the next round is to be (next_round.py), which rows there are, when they end and
what becomes of them (conductor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy
import torch
from torch import Tensor

from bass_cli.engine.ahead import Flight, Worth
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.captured import Captured
from bass_cli.engine.contracts import (
    NO_MORE,
    Backlog,
    CatchesUp,
    Drafter,
    Lengths,
    Proposal,
    Round,
    Target,
)
from bass_cli.engine.cutting import Cut
from bass_cli.engine.deadline import Clock
from bass_cli.engine.draft_sync import CatchingUp, sizes
from bass_cli.engine.graph_policy import Shape
from bass_cli.engine.graphs import Graphs, Running, cover, step_down
from bass_cli.engine.imposed import Imposed, Rate
from bass_cli.engine.members import Members
from bass_cli.engine.next_round import NextRound
from bass_cli.engine.offers import Asked
from bass_cli.engine.rounds import Rounds
from bass_cli.engine.verify import ALL, Verifier


class Loop:
    """A batch with its target, drafter and draft-length controller. `coupling` is "shared" or
    "maximal".

    With `graphs`, rounds are captured and replayed by shape (graph_policy.py says which).
    `acceptance` is for benchmarks of random weights: each draft is accepted with that
    probability, of several each row's own, or by its place (imposed.py). `cut`: where rows' drafts
    are cut by the draft's confidence, under shared coupling (cutting.py); None: nowhere.
    """

    def __init__(
        self,
        *,
        batch: Batch,
        target: Target,
        drafter: Drafter,
        lengths: Lengths,
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
        self.imposed = Imposed(acceptance, batch) if acceptance is not None else None
        self._members = Members(batch, target, drafter, self.imposed, clock)
        self._captured: Captured | None = None
        if graphs is not None and graphs.enabled:
            self._captured = Captured(
                graphs, batch, clock, self.function, drafter=drafter, cuts=self._cuts
            )
        self._verifier = Verifier(batch, target, coupling=coupling, imposing=self.imposed)
        self._rounds = Rounds(
            batch,
            target,
            drafter,
            self._verifier,
            cut=cut if coupling == "shared" and acceptance is None else None,
            may_stop=self._captured is None and coupling == "shared",
        )
        self._catching = CatchingUp(
            batch, drafter if isinstance(drafter, CatchesUp) else None, clock, self._captured
        )
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
        self._flight: Flight | None = None  # launched, and not yet returned by any call
        self._worth, self._ahead = Worth(), False  # whether rounds may be launched ahead at all
        self._held = False  # whether the next one had to wait for the last one's tokens

    @property
    def lengths(self) -> Lengths:
        """The controller of now."""
        return self._next.lengths

    @property
    def exact(self) -> bool:
        """Whether a round must have the very length that the controller gave."""
        return self._next.exact

    def use(self, lengths: Lengths) -> None:
        """From now on this controller."""
        self._next.use(lengths)

    def restart(self, lengths: Lengths) -> None:
        """From now on this controller, and whatever rounds have taught the drafter is forgotten."""
        self._next.use(lengths)
        self._next.offers.forget()

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
    def exchange(self, ended: Sequence[int], rows: Sequence[Row]) -> None:
        """End the rows at `ended` and make `rows`, of open prompts, live. Cheapest if a prompt's
        rows come together, and all that changes between two rounds at once."""
        if not len(self.batch):
            self._worth.idle()
        self._members.exchange(ended, rows)
        self._next.changed()
        self._worth.rows_ended(len(ended))

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
        self.exchange((), rows)

    def retire(self, *ended: int) -> None:
        """End the rows at these places; the last rows take them."""
        self.exchange(ended, ())

    @property
    def under_way(self) -> bool:
        """Whether a round was launched that `round` has not returned, and has live rows."""
        return self._flight is not None and self._flight.under_way

    @torch.inference_mode()
    def launch(self, deadline: float | None = None, *, backlog: Backlog = NO_MORE) -> None:
        """Begin the next round, if none is under way: what the host does from now on until
        `round` takes the device no time. Rounds that are not captured leave the host no such
        time, and begin when they are asked for."""
        self._next.backlog = backlog
        if self._captured is not None and not self.under_way:
            self._flight = self._begin(deadline)

    @torch.inference_mode()
    def round(
        self, deadline: float | None = None, *, backlog: Backlog = NO_MORE, ahead: bool = False
    ) -> Round:
        """Advance the live rows by one token or more. A row's new tokens may go past an
        end-of-sequence token or its limit: it must be cut and retired before the next round. The
        draft length is cut to end by `deadline`.

        `backlog`: what else the job has. `ahead`: this controller will be asked for the next
        round too, which may begin before this one's tokens are known, with the rows of now:
        others miss it. What is returned is still the oldest. Before a deadline that is only done
        where the next one too should be over by then: what is under way must be taken in."""
        self._next.backlog = backlog
        self._ahead = ahead and self._captured is not None
        flight, late = self._flight, False
        if flight is not None and flight.under_way:
            late = flight.running.over()  # then it is the host that took so long
        else:
            flight = self._begin(deadline)
        self._flight = None
        until = self._worth.until(deadline, flight, self.clock)
        if not self._may_go_on(flight) or not self._next.in_time(until):
            return self._land(flight, late=late)
        assert self._captured is not None
        self._captured.renew(self._members.version)
        asked = self._next.take(until)
        _, step = self._next.served(asked, until)
        reaches = self._catching.reaches(flight.most, self._rounds.drafted(step.shape))
        if step.how == "replay" and reaches:
            self._flight = self._launch(asked, until, behind=True)
            done = self._land(flight, late=late)
            self.catch_up(self._flight.places)  # nothing is missing: the drafter is only told
        else:
            done = self._land(flight, late=late)
            if until is not None:
                return done  # the next one is asked for anew: how late it is, is known now
            self._flight = self._launch(asked, None)
        self._next.reflect()
        return done

    def _begin(self, deadline: float | None) -> Flight:
        """Launch a round with nothing before it."""
        if self._captured is not None:
            self._captured.renew(self._members.version)
        asked = self._next.take(deadline)
        flight = self._launch(asked, deadline)
        if self._ahead:
            self._worth.begins(flight.began - asked.asking)
        self._next.reflect()
        return flight

    def _may_go_on(self, flight: Flight) -> bool:
        """Whether the round after this one may, and should, begin before it is over."""
        self._held = not self._next.foreseeable(flight.width)
        may = self._ahead and flight.steady and not self._held
        return may and self._worth.pays(waiting=self._next.backlog.tokens > 0)

    def _launch(self, asked: Asked, deadline: float | None, *, behind: bool = False) -> Flight:
        """Begin a round; `behind` another one that is not over. Without graphs it is over when
        this returns."""
        captured, offered, batch = self._captured, asked.offered, self.batch
        if captured is None:
            running, shape, began = self._run(asked.width, offered)
        else:
            if offered is not None:
                self._next.offers.put(offered)
            wish, step = self._next.served(asked, deadline)
            shape = step.shape
            if not behind:
                self.catch_up(self._rounds.drafted(shape), deadline)
            self._verifier.look_at(wish.width if self.exact else ALL)
            began = captured.start()
            running = captured.launch(wish, step)
        # of the device, for a look or for the last round: another would have been launched ahead
        waits = 0.0
        if self._ahead and (asked.looked or (self._held and not behind)):
            waits = self._worth.saves(waiting=self._next.backlog.tokens > 0)
        width = min(shape.width, self._verifier.most)
        return Flight(
            tuple(batch.hosts),
            batch.changes,
            width,
            self._rounds.drafted(shape),
            shape.kind == "cut",
            asked.meant(width),
            running,
            began,
            asked.asking + (waits if asked.looked else 0.0),
            asked.looked,
            captured.capturing if captured else 0.0,
            captured is None or captured.steady,
            0.0 if asked.looked else waits,
        )

    def _land(self, flight: Flight, *, late: bool) -> Round:
        """Wait for a round, and take in what it brought for those of its rows that are still
        live. `late`: see Flight.landed."""
        packed = flight.running.wait()
        assert packed is not None
        now, rows = self.clock.now(), len(flight.rows)
        flight, places, table = flight.live(packed.numpy(), self.batch.changes)
        meant = flight.width if flight.meant is None else numpy.array(flight.meant)
        kept = tuple(
            self.batch.ledger.take(table, places, width=flight.places, meant=meant).tolist()
        )
        seconds = flight.asking + now - self._worth.start(flight) - flight.capturing
        self._worth.landed(now, seconds, rows)
        done = flight.landed(kept, seconds, late=late)
        if done.steady:
            self.clock.observe(flight.length, seconds)
        if not flight.places:
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
            catch_up=sizes if catching_up and isinstance(self.drafter, CatchesUp) else None,
        )

    @torch.inference_mode()
    def catch_up(self, width: int, deadline: float | None = None) -> None:
        """Let the drafter take in what it must before it drafts `width` tokens. It is due to
        plain rounds before, and not counted as what a round of this width takes."""
        self._catching.run(width, left=self._next.left(self.batch.rooms()), deadline=deadline)

    def _run(self, width: int, offered: Proposal | None) -> tuple[Running, Shape, float]:
        """A round without graphs: what it gives, its shape, and when it began."""
        shape = self._rounds.planned(width, cut=self._cuts(len(self.batch), width))
        self.catch_up(self._rounds.drafted(shape))
        began = self.clock.now()
        table, shape = self._rounds.run(shape, offered, self.lengths)
        return Running(lambda: True, lambda: table), shape, began

    def _cuts(self, rows: int, width: int) -> bool:
        """Rounds.cuts, which gives a row another number of drafts than its controller does."""
        return not self.exact and self._rounds.cuts(rows, width)

    def function(self, shape: Shape) -> Callable[[], Tensor | None]:
        """What a graph of this shape does."""
        if shape.kind == "catch up":
            return self._catching.function(shape.width)
        return self._rounds.function(shape, self._next.offers)
