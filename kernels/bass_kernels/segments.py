"""What the rows of a pass may attend to, and how many queries each has: all as many, or packed,
each its own number of them. Not here: attention (reference.py, ragged.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Rows that share one prompt span: positions [start, start + length) of the prompt store.
    `queries`: how many of the last of these positions the pass computes, in a prefill, whose rows
    are tiles of them."""

    start: int
    length: int
    rows: slice | Tensor
    queries: int = 0


class Teams(NamedTuple):
    """On the device, which rows read one prompt span: the Triton kernels read its keys once for
    each tile of such rows.

    member [B]: 1 for a row that is in a tile, else 0. tiles: by the most rows of a tile m, a
    table [N, m] of row numbers; a row is in one tile of each table, and -1 stands where there is
    no row. All int32.
    """

    member: Tensor
    tiles: Mapping[int, Tensor]


class Packed(NamedTuple):
    """The queries of B rows one after the other, M in all, one at least of each row.

    begin [B + 1]: where each row's begin, and where the last one's end. row [M], place [M]: of
    each query its row, and how many of that row's are before it. All int64, on the device alone:
    a captured pass serves any numbers whose sum is M. widest: the most that a row may have.
    """

    begin: Tensor
    row: Tensor
    place: Tensor
    widest: int

    @property
    def rows(self) -> int:
        return len(self.begin) - 1

    @property
    def by_row(self) -> Tensor:
        """Of each row and place [B, widest] the query; the row's last one beyond those it has."""
        places = torch.arange(self.widest, device=self.begin.device)
        return torch.minimum(self.begin[:-1, None] + places, self.begin[1:, None] - 1)


def pack_queries(counts: Tensor, total: int, widest: int) -> Packed:
    """Rows of counts [B] int64 queries each, at least 1 and at most `widest`, `total` in all,
    which the host knows without them."""
    ends = counts.cumsum(0)
    begin = torch.nn.functional.pad(ends, (1, 0))
    every = torch.arange(total, device=counts.device)
    # where a device computes with memory that nobody filled, no place may be beyond the last
    row = torch.searchsorted(ends, every, right=True).clamp(max=len(counts) - 1)
    return Packed(begin, row, every - begin[row], widest)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What each row of a pass may attend to: its prompt's span, then its own.

    positions [B, W]: of the queries. base [B]: position of a row's own slot 0, which is also the
    length of its prompt span. start [B]: where that span begins in the prompt store; own [B]:
    where slot 0 lies in the store of own keys. All int64.
    groups and extent say the same on the host: rows by prompt span (None: the host does not
    know), and an upper bound of own slots in use. Slots at positions beyond a query's are not
    seen: what lies there, rejected drafts included, needs no erasing. extent 0: nothing is seen
    of own spans, since the queries stand in their prompt's span themselves (a prefill, whose rows
    are tiles of prompts). teams: the rows by prompt span as the Triton kernels take them, or None.
    packed: the queries' rows, where these have unequal numbers of them; then positions are
    [1, M], as are a pass's tokens.
    """

    positions: Tensor
    base: Tensor
    start: Tensor
    own: Tensor
    groups: tuple[Group, ...] | None
    extent: int
    teams: Teams | None = None
    packed: Packed | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made for the first layer of the pass that asks for `what`."""
        if what not in self._known:
            self._known[what] = make()
        return self._known[what]

    def slots(self, positions: Tensor) -> Tensor:
        """Where in the store of own keys those of the queries go that stand at these positions,
        [B, W] or packed [1, M] int64."""
        ahead = self.own - self.base
        return positions + (ahead[:, None] if self.packed is None else ahead[self.packed.row])


def by_row(q: Tensor, segments: Segments) -> tuple[Tensor, Segments]:
    """Packed queries q [1, M, H, D] as [B, widest, H, D], the last of a row again and again beyond
    those it has; and what they may attend to."""
    packed = segments.packed
    assert packed is not None
    index = packed.by_row

    def alone() -> Segments:
        return replace(segments, positions=segments.positions[0][index], packed=None)

    return q[0][index], segments.once("by row", alone)


def one_after_other(found: Tensor, packed: Packed) -> Tensor:
    """What attention gives for `by_row`'s queries, [B, widest, N], as packed: [1, M, N]."""
    return found[packed.row, packed.place][None]
