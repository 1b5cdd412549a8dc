"""The ragged key/value store: each prompt's keys and values once, shared by its samples, and for
every row a run of pieces of a second store, which grows with it.

A row's own slot 0 holds position `base`, the length of its prompt's span. Positions say where a
key goes and who may see it; nothing is erased when drafts are rejected. Not here: which pieces a
row has (block_allocator.py), which tokens are fed (runner.py), attention (kernels).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from bass_cli.models.block_allocator import Copied, Integers, Pieces, Sender
from bass_cli.models.prefix_groups import TeamTable
from bass_cli.system.host import free_memory
from bass_kernels import Group, Packed, Segments

# Positions that the prompt store starts with; it doubles as needed, or has four times as many where
# that is a small part of what is free: all graphs are captured anew when it moves.
ARENA = {"cpu": 1024, "cuda": 8192}
_LITTLE, _UNIT = 16, 16  # Triton compiles anew where strides are no multiples of the second
# the length from which a prompt is read once for several rows: shorter ones are not worth a merge
_TEAMED = 1024
_MOVED = 2**26  # bytes of keys and values that are copied at once, and stand elsewhere meanwhile


@dataclass(slots=True, eq=False)
class Span:
    """A prompt's place in the store: `length` positions from `start` on; the rows that read it,
    and whether new rows may still come."""

    start: int
    length: int
    rows: set[int] = field(default_factory=set)
    open: bool = True

    @property
    def taken(self) -> bool:
        """Whether its place is its own: what it holds stays."""
        return self.open or bool(self.rows)


class Layers(NamedTuple):
    """How many layers' keys and values a store has of one shape."""

    number: int
    kv_heads: int
    head_size: int


class Pass(NamedTuple):
    """One forward pass's view of a store: where its tokens stand and what they may see. positions
    [B, W] int64, or packed [1, M]. `prefill` [1, W] int64: where in the prompt store the one row
    of tokens goes, parts of several prompts one after the other, which `segments` takes for rows,
    and `following` [1, W] the token behind each; None: these are the first B rows. `first`: the
    store's layer that is the pass's layer 0; `mutual`: its tokens see each other, also those
    behind them."""

    positions: Tensor
    segments: Segments
    store: KVCache
    prefill: Tensor | None
    first: int = 0
    mutual: bool = False
    following: Tensor | None = None

    def block(self, first: int) -> Pass:
        """The same tokens as a block in which all see all, by the store's layers from `first` on:
        what a query sees goes by its row's last position, where keys go by their own."""
        last = self.positions[:, -1:].expand_as(self.positions)
        segments = replace(self.segments, positions=last)
        return self._replace(segments=segments, first=first, mutual=True)

    def slots(self) -> Tensor:
        """Where in `own` the keys and values of its tokens go, as `positions`."""
        if self.prefill is not None:
            return self.prefill
        return self.segments.once("slots", lambda: self.segments.slots(self.positions))

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that it writes to, the rows' own or the prompt store, [K, S, D]
        each."""
        if self.prefill is not None:
            return self.prompt(layer)
        at = self.first + layer
        return self.store.own_keys[at], self.store.own_values[at]

    def prompt(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt store, [K, T, D] each."""
        at = self.first + layer
        return self.store.prompt_keys[at], self.store.prompt_values[at]


class KVCache:
    """Keys and values of up to `rows` rows of up to `span` own positions, and of the prompts they
    share.

    Rows are dense: rows 0 to B - 1 are live. `own_keys`, `own_values`: one tensor [K, S, D] a
    layer, of the `shapes` one after the other; those of one shape are views of one block [layers,
    2, K, S, D], so that rows grow in one copy. Their first slots, `beside` of `pieces`, are where
    rows that are not live write, at base 0; then come the pieces (None: one of `span` slots a
    row, and as many aside), the rows' own. `prompt_keys`, `prompt_values`: [K, T, D] a layer, T
    growing. `version` changes when they move to another address, and when the first rows share a
    long prompt (passes are launched otherwise then). A prompt span that no row reads and that is
    closed is free again.
    """

    def __init__(
        self,
        shapes: Sequence[Layers],
        *,
        rows: int,
        span: int,
        dtype: torch.dtype,
        device: torch.device,
        pieces: Pieces | None = None,
    ):
        def zeros() -> list[Tensor]:
            arena = ARENA.get(device.type, 1024)
            return [
                torch.zeros(heads, arena, size, dtype=dtype, device=device)
                for count, heads, size in shapes
                for _ in range(count)
            ]

        pieces = pieces or Pieces(rows, 1, span, span)
        assert pieces.most * pieces.size >= span
        self._pieces, slots = pieces, pieces.beside + pieces.total * pieces.size
        self._own = [
            torch.zeros(count, 2, heads, slots, size, dtype=dtype, device=device)
            for count, heads, size in shapes
        ]
        self.own_keys, self.own_values = (
            [layer for block in self._own for layer in block[:, part]] for part in (0, 1)
        )
        self.prompt_keys, self.prompt_values = zeros(), zeros()
        self.span, self.version = span, 0
        self._sender = Sender(device)
        # together, so that one operation sets both
        self._places = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._base, self._start, self._slot = self._places
        self._host = numpy.zeros((3, rows), dtype=numpy.int64)
        # of each row, the first piece and how many it has
        self._runs: Integers = numpy.stack((numpy.arange(rows), numpy.ones(rows, numpy.int64)))
        self._live = numpy.zeros(rows, dtype=bool)
        self._of_row: list[Span | None] = [None] * rows
        self._spans: list[Span] = []
        self._groups: tuple[Group, ...] | None = None
        self._teams = TeamTable(rows, device)
        self._sharing = False

    def reserve(self, length: int) -> Span:
        """A free span for a prompt of `length` positions, growing the store if there is none."""
        start, at = 0, 0
        for at, taken in enumerate(self._spans):  # noqa: B007 (first gap that is large enough)
            if taken.start - start >= length:
                break
            start = taken.start + taken.length
        else:
            at = len(self._spans)
            self._grow(start + length)
        span = Span(start, length)
        self._spans.insert(at, span)
        return span

    def copy(self, source: Span, target: Span, count: int) -> None:
        """The first `count` positions of one span are those of another too."""
        old, new = (slice(span.start, span.start + count) for span in (source, target))
        for layer in (*self.prompt_keys, *self.prompt_values):
            layer[:, new] = layer[:, old]

    def close(self, span: Span) -> None:
        """No further row will be attached to this span."""
        span.open = False
        self._collect(span)

    def swap_rows(
        self,
        *,
        ended: Sequence[int] = (),
        moved: Sequence[tuple[int, int]] = (),
        begun: Iterable[tuple[Sequence[int], Span]] = (),
        runs: Integers | None = None,
        copied: Sequence[Copied] = (),
    ) -> None:
        """Rows end; then of each (source, target) row `source` becomes row `target`, which must
        be free and is no other's source; then rows begin, whose own slot 0 is position
        span.length. `runs`, `copied`: see Change. The device is told by one copy of all."""
        for row in ended:
            self._span_of(row).rows.discard(row)
            self._collect(self._span_of(row))
            self._of_row[row] = None
        self._host[:, ended], self._live[list(ended)] = 0, False
        for source, target in moved:
            assert self._of_row[target] is None
            span = self._of_row[target] = self._span_of(source)
            span.rows ^= {source, target}
            self._of_row[source] = None
            self._host[:, target] = self._host[:, source]
            self._host[:, source], self._live[[source, target]] = 0, (False, True)
            if runs is None:
                self._runs[:, [source, target]] = self._runs[:, [target, source]]
        if runs is not None:
            self._runs = runs
        for rows, span in begun:
            assert span.open
            assert not any(self._of_row[row] for row in rows)
            span.rows.update(rows)
            for row in rows:
                self._of_row[row] = span
            self._host[:2, rows], self._live[list(rows)] = [[span.length], [span.start]], True
        self._host[2] = self._pieces.slot(self._runs[0]) * self._live
        self._places.copy_(self._sender.send(self._host))
        self._copy(copied)
        self._regroup()

    def _copy(self, copied: Sequence[Copied]) -> None:
        """In parts, of which each is read before it is written: a row's new pieces may be those
        that one before it has left."""
        places = self._pieces.slots(copied)
        for own in self._own:
            each = own[:, :, :, :1].numel() * own.element_size()
            at_once = max(_MOVED // max(each, 1), 1)
            for part in range(0, places.shape[1], at_once):
                old, new = self._sender.send(places[:, part : part + at_once].copy())
                own[:, :, :, new] = own[:, :, :, old]

    def _span_of(self, row: int) -> Span:
        span = self._of_row[row]
        assert span is not None
        return span

    def base(self, row: int) -> int:
        """The position of the row's own slot 0."""
        return self._span_of(row).length

    def bases(self, rows: int) -> Tensor:
        """The positions of own slot 0 of rows 0 to rows - 1, [rows] int64."""
        return self._base[:rows]

    def decode(
        self, positions: Tensor, ends: Sequence[int] | None, packed: Packed | None = None
    ) -> Pass:
        """A pass of rows 0 to B - 1 at positions [B, W], or [1, M] `packed`. ends: each row's last
        position + 1, or more, on the host; None if the host is not to take part (a captured
        graph): the kernels then go by what is on the device alone."""
        rows = len(positions) if packed is None else packed.rows
        assert not any(self._of_row[rows:]), "a pass takes all rows"
        groups: tuple[Group, ...] | None = None
        extent = self.span
        if ends is not None:
            used = ends - self._host[0, :rows]
            extent = int(used.max())
            spare = self._pieces.size * self._runs[1, :rows] - used
            assert spare.min() >= 0, f"a row lacks {-spare.min()} own slots"
        if ends is not None or self._base.device.type == "cpu":
            groups = self._rows_by_span(rows)
        teams = self._teams.of(rows) if self._sharing else None
        base, start, own = self._places[:, :rows]
        segments = Segments(positions, base, start, own, groups, extent, teams, packed)
        # positions of its prompt that a row is fed again have their keys in the span already
        return Pass(positions, segments, self, None)

    def fill(
        self,
        positions: Tensor,
        slots: Tensor,
        starts: Tensor,
        ends: Tensor,
        following: Tensor,
        groups: tuple[Group, ...] | None,
    ) -> Pass:
        """A pass over parts of prompts, one after the other in tiles of W / N tokens, each of one
        prompt: of the tokens positions, slots (of the store) and the tokens behind them, [W]; of
        the tiles where their prompt starts in the store, and up to which position it is there
        after the pass, [N]; int64. groups: the tiles by prompt, None in a captured pass."""
        segments = Segments(positions.view(len(ends), -1), ends, starts, starts, groups, 0)
        return Pass(positions[None], segments, self, slots[None], following=following[None])

    @property
    def positions(self) -> int:
        """Positions of the prompt store, which moves to another address when this changes."""
        return self.prompt_keys[0].shape[1]

    def bytes(self) -> int:
        """Memory held, in bytes."""
        stores = (self.own_keys, self.own_values, self.prompt_keys, self.prompt_values)
        return sum(t.numel() * t.element_size() for store in stores for t in store)

    def _regroup(self) -> None:
        self._groups = None
        shared = [
            sorted(span.rows)
            for span in self._spans
            if span.length >= _TEAMED and len(span.rows) > 1
        ]
        if shared or self._sharing:
            self._teams.update(shared)
        if shared and not self._sharing:
            self._sharing = True
            self.version += 1

    def _collect(self, span: Span) -> None:
        if not span.taken:
            self._spans.remove(span)

    def _grow(self, needed: int) -> None:
        have = self.prompt_keys[0].shape[1]
        if needed <= have:
            return
        sizes = ((4 * have, _LITTLE), (2 * have, 1), (-(-needed // _UNIT) * _UNIT, 1))
        free = free_memory(self.prompt_keys[0].device)
        size = next(
            (n for n, few in sizes if n >= needed and few * self._takes(n - have) <= free), None
        )
        if size is None:
            raise MemoryError(
                f"prompts need {needed} positions of the store, and it cannot grow from {have}"
            )
        self.version += 1
        for store in (self.prompt_keys, self.prompt_values):
            for layer, old in enumerate(store):
                store[layer] = old.new_zeros(old.shape[0], size, old.shape[2])
                store[layer][:, :have] = old

    def _takes(self, positions: int) -> int:
        """Bytes of so many more in the prompt store, of which one tensor is there twice then."""
        each = [layer[:, :1].numel() * layer.element_size() for layer in self.prompt_keys]
        return 2 * sum(each) * positions + max(each) * self.positions

    def _rows_by_span(self, rows: int) -> tuple[Group, ...]:
        if self._groups is None:
            device = self._base.device
            live = [span for span in self._spans if span.rows and span.length]
            self._groups = tuple(
                Group(s.start, s.length, _rows_index(sorted(s.rows), device)) for s in live
            )
        return self._groups


def _rows_index(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
