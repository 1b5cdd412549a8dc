"""What attention reads: keys and values as they are stored, and what of them the rows of a pass may
attend to. Attention itself: reference.py, ragged.py.

Rows have equally many queries, or packed ones with different numbers. Keys and values may be in
eight bits: e4m3 numbers with one scale for each token and head. A stored token depends on its own
key and value only, so neither later tokens nor rejected drafts can change it. The Triton form of
that is in eight_bit_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Rows that share one prompt span: positions [start, start + length) of the prompt store.
    `queries`: in a prefill, whose rows are tiles of a prompt, the number of last positions that the
    pass computes."""

    start: int
    length: int
    rows: slice | Tensor
    queries: int = 0


class DeviceGroups(NamedTuple):
    """Shared-prefix groups on the device: rows that read the same prompt span. The Triton kernels
    read its keys once for each tile of such rows.

    member: [B] int32, 1 for a row that is in a tile, else 0. tiles: by the maximum rows m of a
    tile, a table [N, m] int32 of row numbers, padded with -1. A grouped row is in one tile of each
    table.
    """

    member: Tensor
    tiles: Mapping[int, Tensor]


class Packed(NamedTuple):
    """Contiguous queries of B rows, M in all, at least one for each row.

    begin: [B + 1], where each row's queries begin, and where the last ones end. row: [M], the row
    of each query. place: [M], its index within the row. All int64 and on the device only, so a
    captured pass serves any counts whose sum is M. widest: maximum queries of a row.
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
        """The query index of each row and place, [B, widest]. Beyond a row's queries it is its last
        one."""
        places = torch.arange(self.widest, device=self.begin.device)
        return torch.minimum(self.begin[:-1, None] + places, self.begin[1:, None] - 1)


def pack_queries(counts: Tensor, total: int, widest: int) -> Packed:
    """Pack rows with counts [B] int64 queries each, from 1 to `widest`. `total` is their sum, which
    the host knows without a synchronisation."""
    ends = counts.cumsum(0)
    begin = torch.nn.functional.pad(ends, (1, 0))
    every = torch.arange(total, device=counts.device)
    # with uninitialised counts (rounds run only to compile kernels) an index could be out of range
    row = torch.searchsorted(ends, every, right=True).clamp(max=len(counts) - 1)
    return Packed(begin, row, every - begin[row], widest)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What each row of a pass may attend to: its prompt's span, then its private KV.

    positions: [B, W], of the queries. base: [B], position of a row's private slot 0; this is also
    the length of its prompt span. start: [B], where that span begins in the prompt store. own: [B],
    where slot 0 is in the private store. All int64.

    groups and extent repeat this on the host. groups: rows by prompt span, None if unknown. extent:
    upper bound of private slots in use; 0 in a prefill, whose queries lie within the prompt's span
    (rows are tiles of prompts). Slots at positions beyond a query's are masked, so rejected drafts
    need no erasing. device_groups: the groups for the Triton kernels, or None. packed: the queries'
    rows if rows have different numbers of queries; then positions and the pass's tokens are [1, M].
    kept: for later passes of the same rows: what depends on base, start, own and groups only.
    """

    positions: Tensor
    base: Tensor
    start: Tensor
    own: Tensor
    groups: tuple[Group, ...] | None
    extent: int
    device_groups: DeviceGroups | None = None
    packed: Packed | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed once a pass and reused by later layers under the key `what`."""
        if what not in self._known:
            self._known[what] = make()
        return self._known[what]

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots in the private store for queries at these positions, [B, W] or packed
        [1, M] int64."""
        ahead = self.own - self.base
        return positions + (ahead[:, None] if self.packed is None else ahead[self.packed.row])


def by_row(q: Tensor, segments: Segments) -> tuple[Tensor, Segments]:
    """Unpack queries q [1, M, H, D] to [B, widest, H, D], repeating a row's last query as padding;
    also return their segments."""
    packed = segments.packed
    assert packed is not None
    index = packed.by_row

    def alone() -> Segments:
        return replace(segments, positions=segments.positions[0][index], packed=None)

    return q[0][index], segments.once("by row", alone)


def one_after_other(found: Tensor, packed: Packed) -> Tensor:
    """Pack the attention of `by_row`'s queries, [B, widest, N], to [1, M, N]."""
    return found[packed.row, packed.place][None]


# Keys and values [K, S, D] each, in the model's dtype. In eight bits: uint8, which hold the bits of
# e4m3 numbers, and then the scales of keys and of values, [K, S] float16 each.
Store = tuple[Tensor, ...]

SCALE = 2  # bytes of a scale
LARGEST = 448.0  # of e4m3 (OCP 8-bit floating point, revision 1.0)
# Exponents of scales. A scale times 256 and a softmax weight must fit float16, in which the kernels
# multiply. So numbers beyond 2^6 * 448 = 28,672 are stored as 28,672.
LEAST_EXPONENT, MOST_EXPONENT = -22, 6


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., D], of any float dtype, to e4m3 numbers times a power of two.

    The scale is the smallest power of two with which the largest number fits e4m3. Multiplication
    by a power of two does not round. So dequantised numbers are exact in bfloat16 and float32.

    Returns:
        The bits of the numbers, [..., D] uint8, and scales [...] float16. If a number is not
        finite, it is stored as 0 and the scale is NaN.
    """
    x = x.float()
    found = x.nan_to_num(0.0, 0.0, 0.0)
    bits = found.abs().amax(-1).view(torch.int32)
    # float32 exponent of the largest number, one more if its mantissa is above that of LARGEST
    exponents = ((bits + 0x1FFFFF) >> 23) - (127 + 8)
    exponents = exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT)
    scales = ((exponents + 127) << 23).view(torch.float32)
    numbers = (found / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8), (scales + (x * 0).sum(-1)).half()


def dequantise(bits: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers [..., D] of `quantise` in a float dtype.

    The bits are moved to float16's places, where the exponent is too small by 8. On a CPU this is
    four times as fast as torch's conversion."""
    wide = bits.to(torch.int16)
    small = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16)
    return small.to(dtype).mul_((scales.to(dtype) * 256)[..., None])


def is_eight_bit(store: Store) -> bool:
    """Return whether a store holds numbers in eight bits."""
    return len(store) > 2


def plain(
    keys: Tensor, values: Tensor, *scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a store, or of a part of it, [..., D] each. Those in eight bits are
    dequantised to `dtype`."""
    if not scales:
        return keys, values
    return dequantise(keys, scales[0], dtype), dequantise(values, scales[1], dtype)


def write(store: Store, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [K, ..., D] at `slots` [...] of a store."""
    if is_eight_bit(store):
        (keys, key_scales), (values, value_scales) = quantise(keys), quantise(values)
        store[2][:, slots], store[3][:, slots] = key_scales, value_scales
    store[0][:, slots], store[1][:, slots] = keys, values
