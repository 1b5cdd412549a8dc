"""Attention and rotary embedding on a CPU in float32, in a few large calls for a decoding pass.

They compute what reference.py defines, and call it for everything else (windows, prefill, packed
queries, numbers that are not finite). Two passes that compute a token with other tokens beside it
should give the same bits: then drafts change no sample, also where results are rounded to bfloat16
afterwards. MKL's products allow that: a line of a product has the same bits for any number of
lines that is a multiple of 8, and sums over keys with weight 0 at the end do not change if the
number of keys is one of `padded_keys`. tests/kernels/test_host.py measures both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .segments import Segments, Store
from .segments import plain as dequantised

SPARE_KEYS = 256
"""Slots that the private store needs behind its last row: `padded_keys` adds fewer."""
_LINES = 8
# torch multiplies without MKL, in another order, if lines * keys * head size is smaller. Heads of
# small test models need more lines for that.
_SMALL = 400
_LANES = 16  # float32 numbers of a vector: the prompt's keys are padded to a multiple of it
_HIDDEN = -1e30  # finite, as in reference.py
_ROOMS = 8  # kept for later passes: one for each width of the rounds that follow each other
_KEPT_BYTES = 32 << 20  # of all of them; the memory plan counts those of one pass


def padded_keys(count: int) -> int:
    """Return the number of keys that are multiplied for `count` private keys: a multiple of 128.
    It is not 256, where MKL sums in another order."""
    padded = -(-count // 128) * 128
    return 384 if padded == 256 else padded


def rope_write(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    own: Store,
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Do `reference.rope_write`."""
    keys, values = own[:2]
    kv_heads, _, size = keys.shape
    simple = _is_float32_on_cpu(keys) and qkv.dtype == torch.float32
    if not simple or not math.isfinite(float(qkv.sum())):
        return reference.rope_write(qkv, angles, slots, own, heads=heads, norms=norms, eps=eps)
    lines, where = qkv.reshape(-1, heads + 2 * kv_heads, size), slots.reshape(-1)
    qk, v = lines[:, : heads + kv_heads], lines[:, heads + kv_heads :]
    if norms is not None:
        parts = zip(qk.split((heads, kv_heads), dim=1), norms, strict=True)
        qk = torch.cat([torch.rms_norm(x, x.shape[-1:], weight, eps) for x, weight in parts], 1)
    if angles is not None:
        qk = _rotate(qk, *angles)
    keys.index_copy_(1, where, qk[:, heads:].transpose(0, 1))
    values.index_copy_(1, where, v.transpose(0, 1))
    return qk[:, :heads].view(*slots.shape, heads, size)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do `reference.rotate` for x [N, H, D] and angles [..., half] of N tokens."""
    half = cos.shape[-1]
    cos, sin = cos.reshape(-1, 1, half), sin.reshape(-1, 1, half)
    out = torch.empty_like(x)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _Part(NamedTuple):
    """Views for one product: queries and mixed [n, lines, D], scores and weights [n, lines, keys],
    and the place of its keys: of a prompt's span (first, number), or of rows' private keys.

    product: [n, lines, keys], contiguous, in the memory of all weights, which are written later.
        Queries and keys are multiplied there and copied to `scores`: into a view of a larger tensor
        torch would multiply one matrix at a time.
    """

    place: tuple[int, int]
    queries: Tensor
    scores: Tensor
    weights: Tensor
    mixed: Tensor
    product: Tensor

    @classmethod
    def of(cls, place: tuple[int, int], room: Tensor, views: Iterable[Tensor]) -> _Part:
        """Make a part of the views of queries, scores, weights and mixed. room: all weights."""
        queries, scores, weights, mixed = views
        product = room.view(-1)[: scores.numel()].view(scores.shape)
        return cls(place, queries, scores, weights, mixed, product)


# Keys, transposed [n, D, keys], and values [n, keys, D] of a part in the store of one layer.
_Views = list[tuple[Tensor, Tensor]]


class Room(NamedTuple):
    """The tensors of passes of the same rows and width, which all layers use, and the parts of
    their products.

    A line is one query of a row: W * H / K of them for each key/value head, and padding. Keys are
    those of the prompt, padded to one number, and then the private ones.

    queries: [K, B, W, H / K, D]. scores, weights: [K, B, lines, keys]. mask: [B, lines, keys],
    what is added to the scores. places: [lines], the place of each line's query in its row. mixed:
    [K, B, lines, D]. found: the same in the order of results, [B, W, K, H / K, D].
    alone: whether a row reads no prompt.
    prompts: parts whose keys are in the prompt store. privates: the others; by key/value head if
        `step`, the distance between the rows' first private keys, is not None, else by row.
    owner: the pass whose positions are in the mask.
    known: the views of layers.
    """

    queries: Tensor
    scores: Tensor
    weights: Tensor
    mask: Tensor
    places: Tensor
    mixed: Tensor
    found: Tensor
    alone: bool
    prompts: list[_Part]
    privates: list[_Part]
    step: int | None
    owner: list[object]
    known: dict[int, _Views]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.scores, self.weights, self.mask, self.mixed))

    def views_of(self, layer: int, own: Store, prompt: Store) -> _Views:
        """Do `views` once for each layer, which must have the same stores each time."""
        if layer not in self.known:
            self.known[layer] = self.views(own, prompt)
        return self.known[layer]

    def views(self, own: Store, prompt: Store) -> _Views:
        """Return the keys and values of all parts in the stores of one layer, prompts first."""
        found = []
        for part in self.prompts:
            first, number = part.place
            found.append(tuple(store[:, first : first + number] for store in prompt[:2]))
        for part in self.privates:
            found.append(tuple(_private(store, part, self) for store in own[:2]))
        return [(keys.transpose(1, 2), values) for keys, values in found]


def attention(
    q: Tensor,
    own: Store,
    prompt: Store,
    segments: Segments,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    next_weight: Tensor | None = None,
) -> Tensor:
    """Do `reference.attention`."""
    plain = not window and not cap and sinks is None
    if plain and q.dtype == torch.float32 and supports(q, own, segments):
        found = _decoded(q, own, prompt, segments, scale)
        # a row that sees a key of NaN, or stands before one in the store, is computed below
        if math.isfinite(float(found.sum())):
            return found
    return reference.attention(
        q, own, prompt, segments, scale=scale, window=window, cap=cap, sinks=sinks
    )


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def supports(like: Tensor, own: Store, segments: Segments) -> bool:
    """Return whether this is a decoding pass in float32 whose padded private keys lie within the
    store. `like`: a tensor on its device."""
    if own[0].dtype not in (torch.float32, torch.uint8) or like.device.type != "cpu":
        return False
    if segments.packed is not None or segments.groups is None or not segments.extent:
        return False
    last = segments.once("last own", lambda: int(segments.own.max()))
    return bool(last + padded_keys(segments.extent) <= own[0].shape[1])


def _decoded(q: Tensor, own: Store, prompt: Store, segments: Segments, scale: float) -> Tensor:
    """Return the attention of a decoding pass, [B, W, H D]."""
    own, prompt = (dequantised(*store, dtype=torch.float32) for store in (own, prompt))
    room = room_of(segments, q.shape, own[0].shape[0])
    found = attend(q, room, room.views(own, prompt), scale)
    return found.reshape(*q.shape[:2], -1)


def attend(q: Tensor, room: Room, views: _Views, scale: float) -> Tensor:
    """Return the attention of a decoding pass for queries q [B, W, H, D]: a view of `room`,
    [B, W, K, H / K, D], which the next call overwrites."""
    (rows, width, _, size), kv_heads = q.shape, room.scores.shape[0]
    by_head = q.view(rows, width, kv_heads, -1, size).permute(2, 0, 1, 3, 4)
    torch.mul(by_head, scale, out=room.queries)
    number = len(room.prompts)
    for part, (keys, _) in zip((*room.prompts, *room.privates), views, strict=True):
        part.scores.copy_(torch.bmm(part.queries, keys, out=part.product))
    torch.softmax(room.scores.add_(room.mask), -1, out=room.weights)
    if room.alone:
        room.mixed.zero_()
    for part, (_, values) in zip(room.prompts, views, strict=False):
        torch.bmm(part.weights, values, out=part.mixed)
    for part, (_, values) in zip(room.privates, views[number:], strict=True):
        part.mixed.baddbmm_(part.weights, values)
    return room.found


def _private(store: Tensor, part: _Part, room: Room) -> Tensor:
    """Return a part's private keys or values, [n, keys, D], a view of the store."""
    first, head = part.place
    number = part.scores.shape[-1]
    if room.step is None:
        return store[:, first : first + number]
    _, _, size = store.shape
    shape = (len(part.queries), number, size)
    begin = store.storage_offset() + head * store.stride(0) + first * size
    return store.as_strided(shape, (room.step * size, size, 1), begin)


def room_of(segments: Segments, shape: Sequence[int], kv_heads: int) -> Room:
    """Return the room of a pass with queries of this shape [B, W, H, D], with its mask. It is made
    once for a pass. A small one is kept for all passes of the same rows and width while their
    private keys fit."""
    private = padded_keys(segments.extent)
    # a tensor of inference mode cannot be written outside of it
    kept, key = segments.kept, (*shape, kv_heads, private, torch.is_inference_mode_enabled())
    room: Room | None = kept.get(key)
    if room is None:
        room = segments.once(key, lambda: _room(segments, shape, kv_heads))
        if room.nbytes <= _KEPT_BYTES:
            taken = room.nbytes + sum(one.nbytes for one in kept.values())
            if len(kept) == _ROOMS or taken > _KEPT_BYTES:
                kept.clear()
            kept[key] = room
    owner = segments.once("owner", object)
    if room.owner != [owner]:
        ahead = (segments.positions - segments.base[:, None])[:, room.places, None]
        hidden = torch.arange(private) > ahead
        torch.mul(hidden, _HIDDEN, out=room.mask[..., -private:])
        room.owner[:] = [owner]
    return room


def _room(segments: Segments, shape: Sequence[int], kv_heads: int) -> Room:
    (rows, width, heads, size), groups = shape, segments.groups
    assert groups is not None
    group = heads // kv_heads
    unit = -(-max(_LINES, -(-_SMALL // size)) // _LINES) * _LINES
    lines = -(-width * group // unit) * unit
    longest = max((one.length for one in groups), default=0)
    prompt, private = -(-longest // _LANES) * _LANES, padded_keys(segments.extent)
    queries, mixed = (torch.zeros(kv_heads, rows, lines, size) for _ in range(2))
    scores, weights = (torch.zeros(kv_heads, rows, lines, prompt + private) for _ in range(2))
    runs = [run for one in groups for run in _runs(one.start, one.length, one.rows)]
    first = segments.own.tolist()
    step = _distance(first)
    prompts = [
        _Part.of(
            (start, length),
            weights,
            (
                whole[:, some].view(kv_heads, -1, whole.shape[-1])[..., :kept]
                for whole, kept in (
                    (queries, size),
                    (scores, length),
                    (weights, length),
                    (mixed, size),
                )
            ),
        )
        for start, length, some in runs
    ]
    by_head = step is not None and kv_heads <= rows
    privates = [
        _Part.of(
            (first[0], index) if by_head else (first[index], 0),
            weights,
            (
                (whole[index] if by_head else whole[:, index])[..., begin:]
                for whole, begin in ((queries, 0), (scores, prompt), (weights, prompt), (mixed, 0))
            ),
        )
        for index in range(kv_heads if by_head else rows)
    ]
    used, heads_shape = width * group, (kv_heads, rows, width, group, size)
    outside = torch.arange(prompt) >= segments.base[:, None, None]
    mask = torch.nn.functional.pad(outside * _HIDDEN, (0, private)).expand(-1, lines, -1)
    return Room(
        queries=queries[:, :, :used].view(heads_shape),
        scores=scores,
        weights=weights,
        mask=mask.contiguous(),
        places=(torch.arange(lines) // group).where(torch.arange(lines) < used, 0),
        mixed=mixed,
        found=mixed[:, :, :used].view(heads_shape).permute(1, 2, 0, 3, 4),
        alone=sum(some.stop - some.start for _, _, some in runs) < rows,
        prompts=prompts,
        privates=privates,
        step=step if by_head else None,
        owner=[],
        known={},
    )


def _runs(start: int, length: int, rows: slice | Tensor) -> list[tuple[int, int, slice]]:
    """Return a prompt's span with the rows that read it: a slice, or one for each row."""
    if isinstance(rows, slice):
        return [(start, length, rows)]
    return [(start, length, slice(row, row + 1)) for row in rows.tolist()]


def _distance(own: list[int]) -> int | None:
    """Return the distance between rows' private keys: None if it varies, or is negative, which no
    view can have."""
    steps = {after - before for before, after in itertools.pairwise(own)} or {0}
    return min(steps) if len(steps) == 1 and min(steps) >= 0 else None
