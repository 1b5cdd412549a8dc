"""The live rows: their tokens, lengths, sampling parameters and noise keys on the device, and what
the host knows.

Rows are dense: 0 to len(batch) - 1 are live; those that end are replaced by new ones or by the
last ones. Not here: keys and values (models/kv_cache.py), when a row ends (scheduler.py).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.host_state import LENGTH, LIMIT, PROMPT, HostState, Row
from bass_cli.engine.sampling_params import Columns, SamplingParams, noise_key, params_of
from bass_cli.engine.sizes import WIDTHS, cover
from bass_cli.models.block_allocator import Change, Copied, Pieces, Sender, Slabs

__all__ = ["Batch", "Change", "Row", "beyond"]


def beyond(longest: int) -> int:
    """Places that a row may take behind its limit with drafts of up to `longest`: its last round
    may go beyond that, and a round that was launched meanwhile further."""
    return 2 * (cover(longest) + 1)


class Batch:
    """Up to `rows` live rows. `tokens` [rows, context] and `lengths` [rows] are int64 on the
    device; beyond a row's length lies nothing that may be read. `hosts` lists the live Rows in
    order.

    The rows after the live ones are dummies: one token long, never advanced. `pad` lets the
    device's operations run over some of them too, so that a captured graph serves several
    numbers of live rows. `version` changes whenever `tokens` moves to another address.

    Rounds count with what lies on the device already: an operation that makes numbers is a launch.
    """

    def __init__(
        self, *, rows: int, context: int, device: torch.device, pieces: Pieces | None = None
    ):
        self.capacity, self.device = rows, device
        self._sender = Sender(device)
        self.slabs = Slabs(rows, pieces or Pieces(rows))
        self.tokens = torch.zeros(rows, context, dtype=torch.int64, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self._steps = torch.arange(-context, context, device=device)
        # What only the host changes is set by one copy of all of it, whatever has changed.
        self._host = Columns(rows)
        self._fixed = torch.from_numpy(self._host.whole.copy()).to(device)
        self._alive, self._params = params_of(self._fixed, rows)
        self.host_state = HostState(rows)
        self.hosts: list[Row] = []
        self.version = 0
        self.changes = 0  # how often other rows became live
        self._padded: int | None = None

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def rows(self) -> int:
        """How many rows the device's operations take: the live ones, or as many as `pad` said."""
        return len(self.hosts) if self._padded is None else self._padded

    def pad(self, rows: int | None) -> None:
        """From now on, device operations take the first `rows` rows; None: the live ones."""
        assert rows is None or len(self.hosts) <= rows <= self.capacity
        self._padded = rows

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While it lasts, no row advances, whatever is committed."""
        alive = self._alive.clone()
        self._alive.zero_()
        try:
            yield
        finally:
            self._alive.copy_(alive)

    def ends(self, further: int) -> list[int] | None:
        """Each live row's length plus `further`, from the host; None while padded."""
        if self._padded is not None:
            return None
        ends: list[int] = (self._live(LENGTH) + further).tolist()
        return ends

    def rooms(self) -> list[int]:
        """How many more tokens each live row may generate."""
        rooms: list[int] = (self._live(LIMIT) + self._live(PROMPT) - self._live(LENGTH)).tolist()
        return rooms

    def most_room(self) -> int:
        """The most of these."""
        return int((self._live(LIMIT) + self._live(PROMPT) - self._live(LENGTH)).max())

    def generated(self) -> NDArray[numpy.int64]:
        """How many tokens each live row has generated, as far as the host knows."""
        return self._live(LENGTH) - self._live(PROMPT)

    def known(self) -> NDArray[numpy.int64]:
        """Each live row's length, as far as the host knows."""
        return self._live(LENGTH)

    def _live(self, column: int) -> NDArray[numpy.int64]:
        return self.host_state.numbers[: len(self.hosts), column]

    @property
    def alive(self) -> Tensor:
        """1 for each row that advances, 0 for the others, [B] int64."""
        return self._alive[: self.rows]

    @property
    def params(self) -> SamplingParams:
        return self._params.first(self.rows)

    def swap_rows(self, ended: Sequence[int], rows: Sequence[Row]) -> Change:
        """End the rows at `ended` and make `rows` live: they take the places of those, and only
        where they are fewer, the last rows do. One copy to the device, which the host does not
        wait for."""
        leaving, old = sorted(ended), len(self.hosts)
        count = old - len(leaving) + len(rows)
        assert count <= self.capacity
        places = [*leaving, *range(old, count)][: len(rows)]
        holes = [place for place in leaving[len(rows) :] if place < count]
        gone = set(leaving)
        sources = [place for place in range(count, old) if place not in gone]
        for place in leaving:
            self.hosts[place].leave()
        self._write(places, rows, sources, holes, count)
        self._send(places, rows, sources, holes, slice(count, max(count, old)))
        self.changes += 1
        begun = (
            (tuple(place for place, _ in group), key)
            for key, group in itertools.groupby(
                zip(places, rows, strict=True), key=lambda one: one[1].key
            )
        )
        moved = tuple(zip(sources, holes, strict=True))
        self.slabs.swap_rows(leaving, moved, places)
        return Change(tuple(leaving), moved, tuple(begun), self.slabs.runs.copy())

    def room(self, tokens: float, *, ended: Sequence[int] = ()) -> int:
        """How many rows more there is place for, those at `ended` being over, if all that are
        live become so many tokens long or are longer already; one at least where none is."""
        live = numpy.ones(len(self.hosts), dtype=bool)
        live[list(ended)] = False
        pieces, sizes = self.slabs.pieces, self.slabs.runs[1, : len(self.hosts)][live]
        free = self.capacity - len(sizes)
        if pieces.most == 1:
            return free
        each = int(pieces.needed(numpy.array([math.ceil(tokens)]))[0])
        left = (pieces.total - int(numpy.maximum(sizes, each).sum())) // each
        return min(free, max(left, int(not len(sizes))))

    def grow(self) -> tuple[Change | None, int | None]:
        """Give the rows, longest first, as many pieces as two rounds more may take; and the row
        for which there are not so many together, where it ends."""
        slabs = self.slabs
        if slabs.pieces.most == 1:
            return None, None
        generated, copied = self.generated(), list[Copied]()
        needed, fails = slabs.pieces.needed(generated), None
        (places,) = numpy.nonzero(needed > slabs.runs[1, : len(needed)])
        for place in places[numpy.argsort(-generated[places], kind="stable")].tolist():
            found = slabs.grow(place, int(needed[place]))
            if found is None:
                fails = place
                break
            copied.append(found)
        if not copied:
            return None, fails
        return Change((), (), (), slabs.runs.copy(), tuple(copied)), fails

    def surplus(self, place: int) -> list[int]:
        """The rows to be put back so that the one at `place` can grow, or itself: those that have
        the fewest tokens among rows whose pieces lie well; never the longest row, so that one
        always comes to its end."""
        generated = self.generated()
        worth = generated.astype(numpy.float64)
        worth[longest := int(generated.argmax())] = numpy.inf
        size = int(self.slabs.pieces.needed(generated[place : place + 1])[0])
        others = self.slabs.least(size, worth, grows=place)
        return others if place == longest or worth[others].sum() <= worth[place] else [place]

    def _write(
        self,
        places: list[int],
        rows: Sequence[Row],
        sources: list[int],
        holes: list[int],
        count: int,
    ) -> None:
        """An exchange, in what the host knows."""
        hosts, host_state = self.hosts, self.host_state
        host_state.move(sources, holes)
        self._host.move(sources, holes)
        changed = [*zip(holes, (hosts[source] for source in sources), strict=True)]
        changed += zip(places, rows, strict=True)
        old = len(hosts)
        del hosts[count:]
        hosts += rows[len(rows) - max(count - old, 0) :]
        for place, row in changed:
            hosts[place] = row
        host_state.widen(max((row.limit for row in rows), default=0))
        for place, row in changed:
            row.write_to(host_state, place)
        self._host.clear(slice(count, max(count, old)))
        for place, row in zip(places, rows, strict=True):
            self._host.set(
                place,
                temperature=row.temperature,
                top_k=row.top_k,
                top_p=row.top_p,
                key=noise_key(row.seed, row.key, row.sample),
            )

    def _send(
        self,
        places: list[int],
        rows: Sequence[Row],
        sources: list[int],
        holes: list[int],
        dummies: slice,
    ) -> None:
        """The same on the device."""
        texts: list[list[int]] = []  # the rows of a prompt share one
        which = []
        for row in rows:
            if not texts or (row.prompt is not texts[-1] and row.prompt != texts[-1]):
                texts.append(row.prompt)
            which.append(len(texts) - 1)
        lines = numpy.zeros((len(texts), max(map(len, texts), default=0)), dtype=numpy.int64)
        for line, text in zip(lines, texts, strict=True):
            line[: len(text)] = text
        if rows:
            of_rows = self.host_state.numbers[places]
            longest = int((of_rows[:, LENGTH] + of_rows[:, LIMIT]).max())
            self._widen(longest + beyond(WIDTHS[-1]))
        indexes = [*sources, *holes, *places, *which, *(len(row.prompt) for row in rows)]
        parts = [self._host.whole, numpy.array(indexes, dtype=numpy.int64), lines.ravel()]
        fixed, numbers, flat = self._sender.send(numpy.concatenate(parts)).split(
            [len(part) for part in parts]
        )
        self._fixed.copy_(fixed)
        if sources:
            old, new = numbers[: 2 * len(sources)].view(2, -1)
            self.lengths[new] = self.lengths[old]
            self.tokens[new] = self.tokens[old]
        self.lengths[dummies] = 1
        if rows:
            new, text, lengths = numbers[2 * len(sources) :].view(3, -1)
            self.lengths[new] = lengths
            self.tokens[new, : lines.shape[1]] = flat.view(lines.shape)[text]

    def _widen(self, context: int) -> None:
        """See to it that rows of up to `context` tokens have place."""
        if context > self.tokens.shape[1]:
            grown = self.tokens.new_zeros(self.capacity, max(context, 2 * self.tokens.shape[1]))
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown
            self._steps = torch.arange(-grown.shape[1], grown.shape[1], device=self.device)
            self.version += 1

    def steps(self, first: int, count: int) -> Tensor:
        """first, first + 1, ..., [count] int64."""
        start = self.tokens.shape[1] + first
        assert 0 <= start <= start + count <= len(self._steps)
        return self._steps[start : start + count]

    def places(self, first: int, count: int) -> Tensor:
        """Of each row `count` positions from `first` behind its end on (before it where that is
        negative), [B, count]."""
        return self.lengths[: self.rows, None] + self.steps(first, count)

    def commit(self, block: Tensor, accepted: Tensor) -> None:
        """Append block [B, W] (drafts, then the target's token) up to accepted [B] + 1 tokens a
        row, on the device."""
        ops.commit(*self._texts, self.alive, accepted, block)

    def report(self, block: Tensor, accepted: Tensor, scores: Tensor) -> Tensor:
        """The same, and what the host is to know of it: ops.report."""
        return ops.report(*self._texts, self.alive, accepted, block, scores)

    def pending(self, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """What the target has not seen: each row's last token and drafts [B, k], and their
        positions, [B, k + 1] each."""
        return ops.pending(*self._texts, drafts)

    @property
    def _texts(self) -> tuple[Tensor, Tensor]:
        """The rows' tokens, and their lengths."""
        return self.tokens[: self.rows], self.lengths[: self.rows]

    def last(
        self, count: int, floor: Tensor | None = None, *, behind: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last `count` tokens of each row and their positions, [B, count] each; with
        `behind` (a number on the device, int64) the `count` tokens that begin so far before the
        row's end. Positions below floor [B] (0) are raised to it: the same token is then fed
        more than once, which writes the same key again."""
        if behind is None:
            positions = self.places(-count, count)
        else:
            positions = self.lengths[: self.rows, None] - behind + self.steps(0, count)
        if floor is not None:
            positions = torch.maximum(positions, floor[:, None])
        elif behind is not None or count > 1:  # no row is shorter than one token
            positions = positions.clamp(min=0)
        return self.tokens[: self.rows].gather(1, positions), positions
