"""One round: propose, verify, accept, commit; then one copy to the host. Rows join and leave
between rounds.

Not here: which rows, when they end, what becomes of them (scheduler.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bass_cli.engine import verify
from bass_cli.engine.ahead import Flight, Worth
from bass_cli.engine.batch import Batch, Row
from bass_cli.engine.captured import Captured
from bass_cli.engine.contracts import (
    NO_MORE,
    Backlog,
    CatchesUp,
    Drafter,
    Foresees,
    Lengths,
    Outlook,
    Proposal,
    Round,
    StopsShort,
    Target,
)
from bass_cli.engine.deadline import Clock, Prefill
from bass_cli.engine.draft_sync import CatchingUp, sizes
from bass_cli.engine.graph_policy import Fit, Shape, Step
from bass_cli.engine.graphs import Graphs, Running, cover, step_down, step_up, synchronise
from bass_cli.engine.imposed import Imposed
from bass_cli.engine.offers import Asked, Offers
from bass_cli.engine.packed import pack, unpack
from bass_cli.engine.stopping import Stopping

_ALL = 2**31 - 1  # more drafts than any round has


class Loop:
    """A batch with its target, drafter and draft-length controller. `coupling` is "shared" or
    "maximal".

    With `graphs`, rounds are captured and replayed by shape (graph_policy.py says which).
    `acceptance` is for benchmarks of random weights: each draft is accepted with that
    probability, of several each row's own (imposed.py).
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
        acceptance: Sequence[float] | None = None,
        graphs: Graphs | None = None,
    ):
        assert coupling in ("shared", "maximal")
        assert acceptance is None or coupling == "shared"
        self.batch, self.clock, self.graphs = batch, clock, graphs
        self.target, self.drafter, self._coupling = target, drafter, coupling
        self.imposed = Imposed(acceptance, batch) if acceptance is not None else None
        self._backlog = NO_MORE  # as the last round was told
        self._captured: Captured | None = None
        if graphs is not None and graphs.enabled:
            self._captured = Captured(
                graphs,
                batch,
                clock,
                self.function,
                longest=drafter.longest,
                drafts="round" if drafter.on_device else "given",
            )
        # How many of a row's drafts a captured round looks at, on the host and where graphs read
        # it.
        self._most, self._bound = _ALL, batch.tokens.new_full((), _ALL)
        stoppable = (
            self._captured is None and coupling == "shared" and isinstance(drafter, StopsShort)
        )
        self._stopping = Stopping() if stoppable else None
        self._catching = CatchingUp(
            batch, drafter if isinstance(drafter, CatchesUp) else None, clock, self._captured
        )
        self._offers = Offers(batch, drafter)
        self._due: Asked | None = None  # the next round, if it has been asked for already
        self._flight: Flight | None = (
            None  # a round that was launched, and that no call has returned yet
        )
        self._worth = Worth()
        self._landed: float | None = None  # when the last one was over
        self.use(lengths)

    def use(self, lengths: Lengths) -> None:
        """From now on this controller."""
        self.lengths, self._foresees = lengths, lengths if isinstance(lengths, Foresees) else None

    def restart(self, lengths: Lengths) -> None:
        """From now on this controller, and whatever rounds have taught the drafter is forgotten."""
        self.use(lengths)
        self._offers.forget()

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
        if deadline is None:
            return self.target.open(key, tokens) and self.drafter.open(key, tokens, reference)
        target, draft = (
            Prefill(
                self.clock.passes[model],
                deadline,
                now=self.clock.now,
                wait=lambda: synchronise(self.batch.device),
            )
            for model in ("target", "draft")
        )
        if not self.target.open(key, tokens, target):
            return False
        target.end()
        if not self.drafter.open(key, tokens, reference, draft):
            self.target.close(key)
            return False
        draft.end()
        return True

    def close(self, key: str) -> None:
        """No further row of this prompt will come."""
        self.target.close(key)
        self.drafter.close(key)

    @torch.inference_mode()
    def admit(self, *rows: Row) -> None:
        """Make rows of open prompts live. Cheapest if a prompt's rows come together."""
        for key, group in itertools.groupby(rows, key=lambda row: row.key):
            index = self.batch.admit(*group)
            for part in self._parts:
                part.attach(index.start, key, len(index))
        self._due = None

    @torch.inference_mode()
    def retire(self, index: int) -> None:
        """End row `index`; the last row takes its place."""
        moved = self.batch.retire(index)
        self._due = None
        self._worth.row_ended()
        unseen = (
            0 if self._flight is None else self._flight.width + 1
        )  # tokens that the device may be ahead of the host
        for part in self._parts:
            part.detach(index)
            if moved is not None:
                part.move(moved, index, len(self.batch.hosts[index].tokens) + unseen)

    @torch.inference_mode()
    def round(
        self, deadline: float | None = None, *, backlog: Backlog = NO_MORE, ahead: bool = False
    ) -> Round:
        """Advance the live rows by one token or more. A row's new tokens may go past an
        end-of-sequence token or its limit: it must be cut and retired before the next round. The
        draft length is cut to end by `deadline`.

        `backlog`: what else the job has. `ahead`: this controller will be asked for the next
        round too, which may begin before this one's tokens are known, with the rows of now:
        others miss it. What is returned is still the oldest."""
        self._backlog = backlog
        if self._captured is not None:
            self._captured.renew(self._version)
        (flight, self._flight), late = (self._flight, None), False
        if flight is None or not set(flight.rows) & set(self.batch.hosts):
            asked, self._due = self._due or self._ask(deadline), None
            flight = self._launch(asked, deadline)
            if self._landed is not None:
                self._worth.waited(flight.began - self._landed)
            self._reflect()
        else:
            late = flight.running.over()  # then it is the host that took so long
        if not (ahead and deadline is None and self._may_go_on(flight)):
            return self._land(flight, late=late)
        asked = self._ask(None)
        _, step = self._plan(asked, None)
        # A drafter that has missed tokens must know them before it goes on.
        if step.how == "replay" and (flight.width or not step.shape.width):
            self._flight = self._launch(asked, None, behind=True)
            done = self._land(flight, late=late)
            self.catch_up(self._flight.width)  # nothing is missing: the drafter is only told
        else:
            done = self._land(flight, late=late)
            self._flight = self._launch(asked, None)
        self._reflect()
        return done

    @torch.inference_mode()
    def shortest(self, deadline: float) -> float:
        """Seconds that the next round of the live rows is likely to take at the least: those of
        a plain one, or under maximal coupling, where no deadline cuts drafts, those of the
        length that is due."""
        if self._coupling == "shared":
            return self.clock.predict(0)
        asked = self._due = self._due or self._ask(deadline)
        if self._captured is None:
            return self.clock.predict(
                asked.width if asked.offered is None else asked.offered.tokens.shape[1]
            )
        _, step = self._plan(asked, deadline)
        return self.clock.predict(step.shape.width) + self._captured.delay(step)

    def _may_go_on(self, flight: Flight) -> bool:
        """Whether the round after this one may begin before it is over. Under maximal coupling
        it must not: there a draft length decided earlier would be another sample."""
        return (
            self._captured is not None
            and self._coupling == "shared"
            and flight.steady
            and self.drafter.on_device
            and self._foresees is not None
            and not self._foresees.needs(flight.width)
            and max(self.batch.rooms()) > 1
            and self._worth.pays(waiting=self._backlog.tokens > 0)
        )

    def _ask(self, deadline: float | None) -> Asked:
        """The next round's draft length, and the drafts that the host has for it."""
        outlook = self._outlook(rooms := self.batch.rooms())
        width = self._width(rooms, outlook, deadline)
        began = self.clock.now()
        offered, looked = (
            self._offers.ask(width, self.lengths, outlook),
            not self.drafter.on_device and width > 0,
        )
        return Asked(width, offered, self.clock.now() - began, looked)

    def _launch(self, asked: Asked, deadline: float | None, *, behind: bool = False) -> Flight:
        """Begin a round; `behind` another one that is not over. Without graphs it is over when
        this returns."""
        captured, offered, rows = self._captured, asked.offered, tuple(self.batch.hosts)
        if captured is None:
            running, places, began = self._run(asked.width, offered)
        else:
            if offered is not None:
                self._offers.put(offered)
            wish, step = self._plan(asked, deadline)
            places = step.shape.width
            if not behind:
                self.catch_up(places)
            self._look_at(wish.width if self.exact else _ALL)
            began = captured.start()
            running = captured.launch(wish, step)
        width = min(places, self._most)
        meant = (
            None if offered is None else tuple(min(count, width) for count in offered.counts or ())
        )
        return Flight(
            rows,
            width,
            places,
            meant,
            running,
            began,
            asked.asking,
            asked.looked,
            captured.capturing if captured else 0.0,
            captured is None or captured.steady,
        )

    def _land(self, flight: Flight, *, late: bool) -> Round:
        """Wait for a round, and take in what it brought for those of its rows that are still
        live. `late`: it has been over for a while, so nobody knows what it took."""
        packed = flight.running.wait()
        assert packed is not None
        rows, meant, now = flight.rows, flight.meant, self.clock.now()
        if rows != tuple(self.batch.hosts):
            live = set(self.batch.hosts)
            places = [place for place, row in enumerate(rows) if row in live]
            packed, rows = packed[places], tuple(rows[place] for place in places)
            meant = None if meant is None else tuple(meant[place] for place in places)
        kept = unpack(packed, rows, width=flight.places, meant=meant or (flight.width,) * len(rows))
        began = flight.began if self._landed is None else max(flight.began, self._landed)
        seconds = flight.asking + now - began - flight.capturing
        self._landed = now
        self._worth.landed(seconds, len(flight.rows))
        done = Round(
            flight.width,
            kept,
            seconds,
            flight.steady and not late,
            meant,
            flight.asking if flight.looked else 0.0,
            rows,
        )
        if done.steady:
            self.clock.observe(flight.places, seconds)
        if not flight.places:
            self._catching.missed(1 + max(kept))
        if self._stopping is not None:
            self._stopping.observe(kept)
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
        captured.renew(self._version)
        self._catching.prepare()
        usual: Callable[[int], int] = int if each else cover if self.exact else step_down
        captured.prepare(
            rows,
            [usual(min(width, self.drafter.longest)) for width in widths],
            only_compile=only_compile,
            catch_up=sizes if catching_up and isinstance(self.drafter, CatchesUp) else None,
        )

    @torch.inference_mode()
    def catch_up(self, width: int) -> None:
        """Let the drafter take in what it must before it drafts `width` tokens. It is due to
        plain rounds before, and not counted as what a round of this width takes."""
        self._catching.run(width, left=self._left(self.batch.rooms()))

    @property
    def _parts(
        self,
    ) -> tuple[Target | Drafter | Imposed, ...]:  # what follows the rows as they come and go
        return (
            (self.target, self.drafter)
            if self.imposed is None
            else (self.target, self.drafter, self.imposed)
        )

    @property
    def _version(self) -> tuple[int, ...]:
        """Changes when what graphs read has moved."""
        return self.batch.version, *(part.version for part in self._parts)

    @property
    def exact(self) -> bool:
        """Whether a round must have the very length that the controller gave. Under maximal
        coupling lengths reach the output, and must not depend on what happens to be captured."""
        return self._coupling == "maximal" or self.lengths.exact

    @property
    def _fit(self) -> Fit:
        return "wider" if self.exact else "near"

    def _left(self, rooms: list[int]) -> float:
        """How many rounds there may still be, at most."""
        return max(rooms) + self._backlog.tokens / self.batch.capacity

    def _outlook(self, rooms: list[int]) -> Outlook:
        left = sum(min(room, self._backlog.typical) for room in rooms) + self._backlog.tokens
        hosts, captured = self.batch.hosts, self._captured
        entries = captured.entries() if captured else ()
        return Outlook(
            left / len(rooms),
            entries,
            self._catching.seconds(),
            sum(len(row.tokens) for row in hosts) / len(hosts),
            tuple(hosts),
            tuple(rooms),
            captured.colds() if captured and any(entries) else (),
            stops=self._stopping is not None,
            free=not self.drafter.on_device,
            hurried=captured is not None and self._coupling == "shared",
        )

    def _width(self, rooms: list[int], outlook: Outlook, deadline: float | None) -> int:
        """The controller's draft length, capped by what the drafter can, by the room of the row
        that has most of it (no other row decides), and by `deadline`, capturing included; with
        graphs one that they are made for, unless it must be the very length. Under maximal
        coupling the clock does not decide: a length is part of what the samples will be."""
        captured, wanted = self._captured, self.lengths.next(len(rooms), outlook)
        wanted = max(0, min(wanted, self.drafter.longest, max(rooms) - 1))
        if self._coupling == "maximal":
            return wanted
        if captured is None:
            return self.clock.longest_in_time(wanted, deadline)
        usual: Callable[[int], int] = int if self.exact else step_down

        def predict(width: int) -> float:
            step = captured.choose(
                captured.usual(usual(width)),
                left=self._left(rooms),
                deadline=deadline,
                fit=self._fit,
            )
            return self.clock.predict(step.shape.width) + captured.delay(step)

        return usual(self.clock.longest_in_time(usual(wanted), deadline, predict))

    def _run(self, width: int, offered: Proposal | None) -> tuple[Running, int, float]:
        """A round without graphs: what it gives, its draft length, and when it began."""
        self.catch_up(width)
        began = self.clock.now()
        if offered is None:
            offered = (
                self.drafter.propose(self.batch, width)
                if self._stopping is None
                else self._stopping.propose(self.drafter, self.batch, width, self.lengths)
            )
        packed = self._verify(offered).cpu()
        return Running(lambda: True, lambda: packed), offered.tokens.shape[1], began

    def _plan(self, asked: Asked, deadline: float | None) -> tuple[Shape, Step]:
        """The graph that is wanted for a round, and what runs instead: it may take some dummy
        rows too, and another draft length, or where it must be the same, more places for drafts
        than are looked at."""
        captured, offered, width = self._captured, asked.offered, asked.width
        assert captured is not None
        if offered is not None:
            width = offered.tokens.shape[1] if self.exact else step_up(offered.tokens.shape[1])
        wish = captured.usual(width)
        fit: Fit = "same" if offered is not None and not width else self._fit
        return wish, captured.choose(
            wish, left=self._left(self.batch.rooms()), deadline=deadline, fit=fit
        )

    def _look_at(self, most: int) -> None:
        """From now on graphs take so many drafts of a row for all there are."""
        if most != self._most:
            self._most = most
            self._bound.fill_(most)

    def _reflect(self) -> None:
        """What can be learnt while the device is busy."""
        if self._captured is None:
            return
        if self._foresees is not None:
            self._foresees.reflect()
        self._offers.learn()

    def function(self, shape: Shape) -> Callable[[], Tensor | None]:
        """What a graph of this shape does."""
        if shape.kind == "catch up":
            return self._catching.function(shape.width)
        if not self.drafter.on_device:
            return lambda: self._verify(self._offers.placed(shape.rows, shape.width), self._bound)
        return lambda: self._verify(
            self.drafter.propose(self.batch, shape.width), self._bound if shape.width else None
        )

    def _verify(self, proposal: Proposal, most: Tensor | None = None) -> Tensor:
        """The target's pass over the pending tokens and the drafts, of which no more than `most`
        count; commits. Returns what the host needs to know."""
        batch = self.batch
        lengths = batch.lengths[: batch.rows].clone()
        pending, positions = batch.last(1)
        width = proposal.tokens.shape[1]
        positions = positions + torch.arange(width + 1, device=batch.device)
        logits = self.target.forward(
            torch.cat((pending, proposal.tokens), 1), positions, batch.ends(width)
        )
        verdict = verify.judge(
            proposal,
            logits,
            batch,
            lengths,
            coupling=self._coupling,
            imposing=self.imposed,
            most=most,
        )
        batch.commit(verdict.block, verdict.accepted)
        return pack(verdict)
