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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .eight_bits import Store
from .segments import Segments

SPARE_KEYS = 256
"""Slots that the private store needs behind its last row: `padded_keys` adds fewer."""
_LINES = 8
_LANES = 16  # float32 numbers of a vector: the prompt's keys are padded to a multiple of it
_HIDDEN = -1e30  # finite, as in reference.py


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


class _Room(NamedTuple):
    """The tensors of a pass, which all layers use.

    Lines are a row's queries of one key/value head, W * H / K of them and padding. Keys are those
    of the prompt, padded to one number, and then the private ones.

    queries: [K, B, lines, D], 0 in the padding. scores: [K, B, lines, keys].
    mask: [B, lines, keys], what is added to the scores.
    own: where the rows' private keys begin. step: their distance, None if it varies
        or is negative.
    prompt, private: numbers of keys.
    """

    queries: Tensor
    scores: Tensor
    mask: Tensor
    own: Sequence[int]
    step: int | None
    prompt: int
    private: int


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
    if plain and _supports(q, own[0], segments):
        found = _decoded(q, own, prompt, segments, scale)
        # a row that sees a key of NaN, or stands before one in the store, is computed below
        if math.isfinite(float(found.sum())):
            return found
    return reference.attention(
        q, own, prompt, segments, scale=scale, window=window, cap=cap, sinks=sinks
    )


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def _supports(q: Tensor, keys: Tensor, segments: Segments) -> bool:
    """Return whether this is a decoding pass whose padded private keys lie within the store."""
    if not _is_float32_on_cpu(keys) or q.dtype != torch.float32:
        return False
    if segments.packed is not None or segments.groups is None or not segments.extent:
        return False
    last = segments.once("last own", lambda: int(segments.own.max()))
    return bool(last + padded_keys(segments.extent) <= keys.shape[1])


def _decoded(q: Tensor, own: Store, prompt: Store, segments: Segments, scale: float) -> Tensor:
    """Return the attention of a decoding pass, [B, W, H D]."""
    (rows, width, heads, size), kv_heads = q.shape, own[0].shape[0]
    room = segments.once(("host", kv_heads, heads), lambda: _room(q, kv_heads, segments))
    queries, scores, group = room.queries, room.scores, heads // kv_heads
    lines, used = queries.shape[2], width * group
    by_head = q.view(rows, width, kv_heads, group, size).permute(2, 0, 1, 3, 4)
    torch.mul(by_head, scale, out=queries[:, :, :used].view(by_head.shape))
    assert segments.groups is not None
    for start, length, members, _ in segments.groups:
        keys = prompt[0][:, start : start + length].transpose(1, 2)
        if isinstance(members, slice):
            target = scores[:, members]
            target = target.view(kv_heads, -1, target.shape[-1])[..., :length]
            torch.bmm(queries[:, members].flatten(1, 2), keys, out=target)
        else:
            found = torch.bmm(queries[:, members].flatten(1, 2), keys)
            scores[:, members, :, :length] = found.unflatten(1, (-1, lines))
    for some, keys in _private(own[0], room):
        torch.bmm(queries[some], keys.transpose(1, 2), out=scores[some][..., room.prompt :])
    weights = torch.softmax(scores.add_(room.mask), -1)
    mixed = torch.zeros_like(queries)
    for start, length, members, _ in segments.groups:
        values = prompt[1][:, start : start + length]
        seen = weights[:, members, :, :length].flatten(1, 2)
        if isinstance(members, slice):
            torch.bmm(seen, values, out=mixed[:, members].view(kv_heads, -1, size))
        else:
            mixed[:, members] = torch.bmm(seen, values).unflatten(1, (-1, lines))
    for some, values in _private(own[1], room):
        mixed[some].baddbmm_(weights[some][..., room.prompt :], values)
    by_row = mixed[:, :, :used].view(by_head.shape).permute(1, 2, 0, 3, 4)
    return by_row.reshape(rows, width, heads * size)


def _private(store: Tensor, room: _Room) -> list[tuple[int | tuple[slice, int], Tensor]]:
    """Return the private keys or values in as few parts as possible, each a view of the store: by
    head [B, keys, D], or by row [K, keys, D]; with the index of its queries [K, B, ...]."""
    kv_heads, _, size = store.shape
    if room.step is not None and kv_heads <= len(room.own):
        shape, stride = (len(room.own), room.private, size), (room.step * size, size, 1)
        first, pitch = store.storage_offset() + room.own[0] * size, store.stride(0)
        return [
            (head, store.as_strided(shape, stride, first + head * pitch))
            for head in range(kv_heads)
        ]
    return [
        ((slice(None), row), store[:, start : start + room.private])
        for row, start in enumerate(room.own)
    ]


def _room(q: Tensor, kv_heads: int, segments: Segments) -> _Room:
    rows, width, heads, size = q.shape
    group = heads // kv_heads
    lines = -(-width * group // _LINES) * _LINES
    assert segments.groups is not None
    longest = max((one.length for one in segments.groups), default=0)
    prompt, private = -(-longest // _LANES) * _LANES, padded_keys(segments.extent)
    ahead = (segments.positions - segments.base[:, None]).repeat_interleave(group, 1)
    ahead = torch.nn.functional.pad(ahead, (0, lines - width * group))
    seen_own = torch.arange(private) <= ahead[..., None]
    seen = torch.arange(prompt) < segments.base[:, None, None]
    seen = torch.cat((seen.expand(-1, lines, -1), seen_own), -1)
    own = segments.own.tolist()
    steps = {after - before for before, after in itertools.pairwise(own)} or {0}
    return _Room(
        queries=q.new_zeros(kv_heads, rows, lines, size),
        scores=q.new_zeros(kv_heads, rows, lines, prompt + private),
        mask=torch.where(seen, 0.0, _HIDDEN),
        own=own,
        step=min(steps) if len(steps) == 1 and min(steps) >= 0 else None,
        prompt=prompt,
        private=private,
    )
