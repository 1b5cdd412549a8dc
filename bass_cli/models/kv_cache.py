"""The ragged key/value store. The keys and values of a prompt are stored once and shared by its
samples. Each row also has private blocks of a second store, which grow with it.

Private slot 0 of a row holds position `base`, the length of its prompt's span. Positions alone
determine where a key goes and which queries see it, so nothing is erased when drafts are
rejected. Not here: the blocks of a row (block_allocator.py), the tokens (runner.py), attention
(kernels).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from bass_cli.models.block_allocator import BlockCopy, BlockLayout, Integers, Sender
from bass_cli.models.recurrent import RecurrentStates, StatePass
from bass_cli.system.host import free_memory
from bass_kernels import SPARE_KEYS, DeviceGroups, Group, Packed, Segments, Store

# Initial positions of the prompt store. It grows to twice its size, or to four times if a sixteenth
# of the free memory suffices, because all graphs are captured again when it moves.
ARENA = {"cpu": 1024, "cuda": 8192}
_SMALL_PART = 16  # a growth is small if this many of it would fit
# Triton compiles other forms of kernels if strides are no multiples of this, or addresses are no
# multiples of this many bytes. So no address may depend on the number of rows in another way.
_UNIT = 16
# Minimum length of a prompt whose keys are read once for several rows. The merge of the two parts
# of attention costs more for shorter ones.
_SHARED_FROM = 1024
TILES = (2, 4, 8, 16, 32)  # maximum rows of a tile; a kernel takes what fills its tile of queries
_COPY_BYTES = 2**26  # bytes of keys and values that are copied at once, through a temporary


@dataclass(slots=True, eq=False)
class Span:
    """A prompt's place in the store: `length` positions from `start` on.

    rows: the rows that read it.
    open: whether new rows may begin.
    """

    start: int
    length: int
    rows: set[int] = field(default_factory=set)
    open: bool = True

    @property
    def in_use(self) -> bool:
        """Whether its place is in use, so that its content is valid."""
        return self.open or bool(self.rows)


class Layers(NamedTuple):
    """`number` layers of a store whose keys and values have one shape.

    hidden: whether they hold hidden states, which are always stored in the model's dtype.
    """

    number: int
    kv_heads: int
    head_size: int
    hidden: bool = False


class Pass(NamedTuple):
    """One forward pass's view of a store: the positions of its tokens and what they attend to.

    positions: [B, W] int64, or [1, M] if packed.
    prefill: [1, W] int64, the slots of the prompt store where the tokens go; None for a pass of
        rows 0 to B - 1. In a prefill the one row holds parts of several prompts, one after the
        other, and `segments` describes each tile of it as a row.
    following: [1, W], in a prefill, the token after each.
    first: the store's layer that is layer 0 of the pass.
    mutual: whether a token also attends to later tokens of its block.
    states: in a prefill, those of the recurrent layers; None without such layers.
    """

    positions: Tensor
    segments: Segments
    store: KVCache
    prefill: Tensor | None
    first: int = 0
    mutual: bool = False
    following: Tensor | None = None
    states: StatePass | None = None

    def block(self, first: int) -> Pass:
        """Return a pass of the same tokens as blocks without a causal mask, over the store's
        layers from `first` on. A query sees up to its row's last position; keys are still written
        at their own."""
        last = self.positions[:, -1:].expand_as(self.positions)
        segments = replace(self.segments, positions=last)
        return self._replace(segments=segments, first=first, mutual=True)

    def begin_states(self) -> StatePass:
        """Return what the recurrent layers need. The rows' states roll forward to the first tokens,
        so it is called once in a pass, by the model that has such layers."""
        if self.states is not None:
            return self.states
        assert self.store.states is not None
        return self.store.states.decode_pass(self.positions, self.segments.packed)

    def slots(self) -> Tensor:
        """Return the slots in `own` of the tokens' keys and values, in the shape of `positions`."""
        if self.prefill is not None:
            return self.prefill
        return self.segments.once("slots", lambda: self.segments.slots(self.positions))

    def own(self, layer: int) -> Store:
        """Return the keys and values that the pass writes: the rows' private store, or in a
        prefill the prompt store. [K, S, D] each, and in eight bits their scales."""
        if self.prefill is not None:
            return self.prompt(layer)
        at, store = self.first + layer, self.store
        return store.own_keys[at], store.own_values[at], *store.own_scales[at]

    def own_pair(self, layer: int) -> Tensor:
        """Return the keys and values of the rows' private store in one tensor, [2, K, S, D]. The
        store must not have eight bits."""
        return self.store.own_pairs[self.first + layer]

    def prompt(self, layer: int) -> Store:
        """Return the keys and values of the prompt store, [K, T, D] each, and in eight bits their
        scales."""
        at, store = self.first + layer, self.store
        return store.prompt_keys[at], store.prompt_values[at], *store.prompt_scales[at]


class KVCache:
    """Keys and values of up to `rows` rows with up to `span` private positions each, and of their
    prompts. Rows are dense: rows 0 to B - 1 are live.

    own_keys, own_values: a tensor [K, S, D] for each layer, in the order of `shapes`. Layers of one
        shape are views of one tensor [layers, 2, K, S, D], so that a row grows by one copy. The
        first `blocks.extra` slots are scrap: rows that are not live write there, at base 0. The
        blocks of the rows follow. Default of `blocks`: one block of `span` slots for each row.
    own_pairs: both in one tensor [2, K, S, D] for each layer.
    prompt_keys, prompt_values: a tensor [K, T, D] for each layer. T grows.
    own_scales, prompt_scales: for each layer in eight bits the scales of keys and of values, [K, S]
        or [K, T] float16; nothing for others.
    version: changes when these tensors move, and when rows share a long prompt for the first
        time, because passes are launched differently from then on.

    A prompt's span is freed when it is closed and no row reads it.

    Args:
        dtype: of the model.
        eight_bits: whether keys and values are stored as e4m3 numbers with scales
            (bass_kernels/segments.py), in place of the model's dtype.
        states: of recurrent layers, which this object does not move (see Runner).
    """

    def __init__(
        self,
        shapes: Sequence[Layers],
        *,
        rows: int,
        span: int,
        dtype: torch.dtype,
        device: torch.device,
        blocks: BlockLayout | None = None,
        eight_bits: bool = False,
        states: RecurrentStates | None = None,
    ):
        zeros = partial(_zeros, dtype=dtype, device=device, eight_bits=eight_bits)
        blocks = blocks or BlockLayout(rows, 1, span, span)
        assert blocks.most * blocks.size >= span
        self._blocks, slots = blocks, blocks.extra + blocks.total * blocks.size
        if device.type == "cpu":
            slots += SPARE_KEYS
        own = [zeros(layers, layers.number, 2, layers.kv_heads, slots) for layers in shapes]
        self._own = [part for parts in own for part in parts]
        self.own_keys, self.own_values = (
            [layer for parts in own for layer in parts[0][:, part]] for part in (0, 1)
        )
        self.own_pairs = [layer for parts in own for layer in parts[0]]
        self.own_scales: list[tuple[Tensor, ...]] = [
            tuple(scales for part in parts[1:] for scales in part[layer])
            for parts in own
            for layer in range(len(parts[0]))
        ]
        arena = ARENA.get(device.type, 1024)
        pairs = [
            (zeros(layers, layers.kv_heads, arena), zeros(layers, layers.kv_heads, arena))
            for layers in shapes
            for _ in range(layers.number)
        ]
        self.prompt_keys = [keys[0] for keys, _ in pairs]
        self.prompt_values = [values[0] for _, values in pairs]
        self.prompt_scales = [(*keys[1:], *values[1:]) for keys, values in pairs]
        self.span, self.version, self.states = span, 0, states
        self._sender = Sender(device)
        # in one tensor, so that one copy sets all three, with an aligned place for each
        places = torch.zeros(3, -(-rows // _UNIT) * _UNIT, dtype=torch.int64, device=device)
        self._whole_places, self._places = places, places[:, :rows]
        self._base, _, self._slot = self._places
        self._whole_host = numpy.zeros(places.shape, dtype=numpy.int64)
        self._host = self._whole_host[:, :rows]
        # each row's first block and number of blocks
        self._runs: Integers = numpy.stack((numpy.arange(rows), numpy.ones(rows, numpy.int64)))
        self._live = numpy.zeros(rows, dtype=bool)
        self._of_row: list[Span | None] = [None] * rows
        self._spans: list[Span] = []
        self._groups: tuple[Group, ...] | None = None
        # What attention keeps from pass to pass of so many rows, until these change
        self._attention_data, self._attention_rows = dict[Hashable, Any](), 0
        self._group_tables = GroupTables(rows, device)
        self._sharing = False

    def reserve(self, length: int) -> Span:
        """Allocate a span for a prompt of `length` positions. Grow the store if it is full."""
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
        """Copy the first `count` positions of one span to another."""
        old, new = (slice(span.start, span.start + count) for span in (source, target))
        for layer in self._prompt_parts():
            layer[:, new] = layer[:, old]

    def close(self, span: Span) -> None:
        """Accept no further rows for this span."""
        span.open = False
        if self.states is not None:
            self.states.drop(span)
        self._collect(span)

    def swap_rows(
        self,
        *,
        ended: Sequence[int] = (),
        moved: Sequence[tuple[int, int]] = (),
        begun: Iterable[tuple[Sequence[int], Span]] = (),
        runs: Integers | None = None,
        copied: Sequence[BlockCopy] = (),
    ) -> None:
        """Apply a Change to the rows, with one copy to the device.

        A target of `moved` must be free and no other's source. Private slot 0 of a row that
        begins is position span.length.
        """
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
        self._host[2] = self._blocks.slot(self._runs[0]) * self._live
        self._whole_places.copy_(self._sender.send(self._whole_host))
        self._copy(copied)
        self._regroup()

    def _copy(self, copied: Sequence[BlockCopy]) -> None:
        """Copy blocks in order, a part at a time: a row's new blocks may be the old ones of a row
        before it."""
        places = self._blocks.slots(copied)
        for own in self._own:
            each = own[:, :, :, :1].numel() * own.element_size()  # numbers, or their scales
            at_once = max(_COPY_BYTES // max(each, 1), 1)
            for part in range(0, places.shape[1], at_once):
                old, new = self._sender.send(places[:, part : part + at_once].copy())
                own[:, :, :, new] = own[:, :, :, old]

    def _span_of(self, row: int) -> Span:
        span = self._of_row[row]
        assert span is not None
        return span

    def base(self, row: int) -> int:
        """Return the position of the row's private slot 0."""
        return self._span_of(row).length

    def bases(self, rows: int) -> Tensor:
        """Return the positions of private slot 0 of rows 0 to rows - 1, [rows] int64."""
        return self._base[:rows]

    def decode_pass(
        self, positions: Tensor, ends: Sequence[int] | None, packed: Packed | None = None
    ) -> Pass:
        """Return a pass of rows 0 to B - 1.

        Args:
            positions: [B, W], or [1, M] if `packed`.
            ends: each row's last position + 1, or more, on the host. None in a captured graph:
                the kernels then use the tensors on the device alone.
        """
        rows = len(positions) if packed is None else packed.rows
        assert not any(self._of_row[rows:]), "a pass takes all rows"
        groups: tuple[Group, ...] | None = None
        extent = self.span
        if ends is not None:
            used = ends - self._host[0, :rows]
            extent = int(used.max())
            spare = self._blocks.size * self._runs[1, :rows] - used
            assert spare.min() >= 0, f"a row lacks {-spare.min()} private slots"
        if ends is not None or self._base.device.type == "cpu":
            groups = self._rows_by_span(rows)
        device_groups = self._group_tables.of(rows) if self._sharing else None
        base, start, own = self._places[:, :rows]
        if self._attention_rows != rows:
            self._attention_data, self._attention_rows = {}, rows
        segments = Segments(
            positions, base, start, own, groups, extent, device_groups, packed, self._attention_data
        )
        # a row may be fed the end of its prompt again: those keys are in the span already
        return Pass(positions, segments, self, None)

    def prefill_pass(
        self,
        positions: Tensor,
        slots: Tensor,
        starts: Tensor,
        ends: Tensor,
        following: Tensor,
        groups: tuple[Group, ...] | None,
    ) -> Pass:
        """Return a pass over parts of prompts, one after the other in N tiles of W / N tokens. A
        tile has tokens of one prompt. All tensors are int64.

        Args:
            positions: of the tokens, [W].
            slots: of the tokens in the prompt store, [W].
            starts: the slot where each tile's prompt begins, [N].
            ends: positions of each tile's prompt that are stored after the pass, [N].
            following: the token after each token, [W].
            groups: the tiles by prompt; None in a captured pass.
        """
        segments = Segments(positions.view(len(ends), -1), ends, starts, starts, groups, 0)
        states = None
        if self.states is not None:
            states = self.states.prefill_pass(self._parts(groups, len(positions) // len(ends)))
        return Pass(
            positions[None], segments, self, slots[None], following=following[None], states=states
        )

    def _parts(
        self, groups: tuple[Group, ...] | None, tile: int
    ) -> list[tuple[Span, int, int, int]]:
        """Return the parts of a prefill for RecurrentStates.prefill_pass. `tile`: tokens of one."""
        assert self.states is not None
        assert groups is not None, "passes with recurrent layers are not captured"
        spans = {span.start: span for span in self._spans if span.length}
        found = []
        for group in groups:
            span = spans[group.start]
            assert self.states.take(span), "more prompts than slots for their states"
            assert isinstance(group.rows, slice)
            first = group.length - group.queries
            found.append((span, group.rows.start * tile, group.queries, first))
        return found

    @property
    def positions(self) -> int:
        """Positions of the prompt store. It moves to another address when this changes."""
        return self.prompt_keys[0].shape[1]

    def bytes(self) -> int:
        """Return the memory of the store in bytes, with the recurrent states."""
        states = 0 if self.states is None else self.states.bytes()
        parts = (*self._own, *self._prompt_parts())
        return states + sum(t.numel() * t.element_size() for t in parts)

    def _prompt_parts(self) -> Iterator[Tensor]:
        """Yield the tensors of the prompt store, [K, T, ...] each."""
        yield from (*self.prompt_keys, *self.prompt_values)
        for scales in self.prompt_scales:
            yield from scales

    def _regroup(self) -> None:
        self._groups, self._attention_data = None, {}
        shared = [
            sorted(span.rows)
            for span in self._spans
            if span.length >= _SHARED_FROM and len(span.rows) > 1
        ]
        if shared or self._sharing:
            self._group_tables.update(shared)
        if shared and not self._sharing:
            self._sharing = True
            self.version += 1

    def _collect(self, span: Span) -> None:
        if not span.in_use:
            self._spans.remove(span)

    def _grow(self, needed: int) -> None:
        have = self.prompt_keys[0].shape[1]
        if needed <= have:
            return
        sizes = ((4 * have, _SMALL_PART), (2 * have, 1), (-(-needed // _UNIT) * _UNIT, 1))
        free = free_memory(self.prompt_keys[0].device)
        size = next(
            (n for n, few in sizes if n >= needed and few * self._takes(n - have) <= free), None
        )
        if size is None:
            raise MemoryError(
                f"prompts need {needed} positions of the store, and it cannot grow from {have}"
            )

        def grown(old: Tensor) -> Tensor:
            new = old.new_zeros(old.shape[0], size, *old.shape[2:])
            new[:, :have] = old
            return new

        self.version += 1
        self._attention_data = {}
        for store in (self.prompt_keys, self.prompt_values):
            for layer, old in enumerate(store):
                store[layer] = grown(old)
        self.prompt_scales = [tuple(map(grown, scales)) for scales in self.prompt_scales]

    def _takes(self, positions: int) -> int:
        """Return the bytes that the prompt store needs to grow by so many positions. One tensor
        exists twice meanwhile."""
        each = [part[:, :1].numel() * part.element_size() for part in self._prompt_parts()]
        return sum(each) * positions + max(each) * self.positions

    def _rows_by_span(self, rows: int) -> tuple[Group, ...]:
        if self._groups is None:
            device = self._base.device
            live = [span for span in self._spans if span.rows and span.length]
            self._groups = tuple(
                Group(s.start, s.length, _rows_index(sorted(s.rows), device)) for s in live
            )
        return self._groups


def _zeros(
    layers: Layers, *places: int, dtype: torch.dtype, device: torch.device, eight_bits: bool
) -> list[Tensor]:
    """Return numbers [*places, D], and in eight bits their scales [places]."""
    if not eight_bits or layers.hidden:
        return [torch.zeros(*places, layers.head_size, dtype=dtype, device=device)]
    bits = torch.zeros(*places, layers.head_size, dtype=torch.uint8, device=device)
    *parts, heads, slots = places
    space = -(-heads * slots // _UNIT) * _UNIT  # so that each part is aligned
    scales = torch.zeros(*parts, space, dtype=torch.float16, device=device)
    return [bits, scales[..., : heads * slots].unflatten(-1, (heads, slots))]


def _rows_index(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def most_tiles(rows: int, size: int) -> int:
    """Return the maximum number of tiles of up to `size` rows that `rows` rows can need. A row that
    shares its prompt with no other is in no tile."""
    # the worst case: groups of three for tiles of two, otherwise pairs
    return 2 * rows // 3 if size == 2 else rows // 2


def _cut(flat: Tensor, sizes: list[int], spaces: list[int]) -> list[Tensor]:
    """Return the first `sizes` elements of each of the consecutive `spaces` of a tensor."""
    return [part[:size] for part, size in zip(flat.split(spaces), sizes, strict=True)]


class GroupTables:
    """The groups of up to `rows` rows. For each of TILES a table of tiles, filled up with -1."""

    def __init__(self, rows: int, device: torch.device):
        self._groups: list[list[int]] = []
        sizes = [rows, *(most_tiles(rows, size) * size for size in TILES)]
        spaces = [-(-count // _UNIT) * _UNIT for count in sizes]  # so that each table is aligned
        self._host = torch.full((sum(spaces),), -1, dtype=torch.int32)
        self._parts = _cut(self._host, sizes, spaces)
        self._parts[0].zero_()
        self._flat = self._host.to(device, copy=True)
        self._views = _cut(self._flat, sizes, spaces)
        self._of: dict[int, DeviceGroups] = {}

    def update(self, spans: Iterable[list[int]]) -> None:
        """Set the groups: the rows of each list read one span. Lists of one row are ignored."""
        groups = [rows for rows in spans if len(rows) > 1]
        if groups == self._groups:
            return
        self._groups = groups
        member, *tables = self._parts
        member.zero_()
        member[[row for rows in groups for row in rows]] = 1
        for size, table in zip(TILES, tables, strict=True):
            entries: list[int] = []
            for rows in groups:
                entries += rows
                entries += [-1] * (-len(rows) % size)
            table[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
            table[len(entries) :] = -1
        host = self._host.pin_memory() if self._flat.is_cuda else self._host
        self._flat.copy_(host, non_blocking=True)  # the host does not wait for the device

    def of(self, rows: int) -> DeviceGroups:
        """Return the tables for a pass of rows 0 to `rows` - 1, which must be all live rows."""
        if rows not in self._of:
            member, *tables = self._views
            tiles = {
                size: table[: most_tiles(rows, size) * size].view(-1, size)
                for size, table in zip(TILES, tables, strict=True)
            }
            self._of[rows] = DeviceGroups(member[:rows], tiles)
        return self._of[rows]
