"""The ops of a decoder, and at the end those of training only, in plain torch: their definition,
the CPU path, and the reference of the kernel tests.

Reductions and softmax run in float32 for every dtype. Sampling and acceptance are in other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .segments import Group, Segments, Store, by_row, one_after_other, plain, write

_VECTORS = 64  # a multiple of the elements that torch computes at once, for all processors
# torch gives a thread at least so many elements, and divides no tensor of the second size.
_SHARE, _ALONE = 32768, 16384
# positions with padding, up to which prompt spans are copied into one padded block
_GATHERED = 4096
_MASKED = -1e30  # finite, so that a segment without visible keys gets weight 0 instead of NaN


def embed(tokens: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return rows of weight [V, N] for tokens [...] int64, times scale: [..., N]. Ids beyond V use
    the last row."""
    found = functional.embedding(tokens.clamp(max=len(weight) - 1), weight)
    return found if scale == 1.0 else found * torch.tensor(scale, dtype=weight.dtype)


def write_hidden(hidden: Tensor, slots: Tensor, store: Store) -> None:
    """Write hidden states [B, W, N] to the slots [B, W] of a store of two halves [1, S, N / 2]."""
    for half, part in zip(store, hidden.chunk(2, -1), strict=True):
        half[0, slots] = part


def read_hidden(positions: Tensor, segments: Segments, own: Store, prompt: Store) -> Tensor:
    """Return the hidden states [B, W, N] at positions [B, W] of rows whose queries are not packed:
    from the halves [1, T, N / 2] of the prompt store before a row's base, else from those of its
    private store. Zeros before position 0."""
    base, start, first = segments.base[:, None], segments.start[:, None], segments.own[:, None]
    inside, count = positions >= base, prompt[0].shape[1]
    at = (positions - base + first).masked_fill(~inside, 0)
    shared = (positions + start).clamp(0, count - 1)
    halves = (
        torch.where(inside[..., None], mine[0, at], theirs[0, shared])
        for mine, theirs in zip(own, prompt, strict=True)
    )
    return torch.cat([*halves], -1).masked_fill((positions < 0)[..., None], 0.0)


def norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Add x [..., N] (optional) to the residual stream and normalise the sum. Returns (normed, sum)
    in the residual's dtype. kind: "layer", else RMS norm. weight and bias [N] may have any dtype.
    """
    if x is not None:
        residual = residual + x
    if kind == "layer":
        wide = residual.to(torch.promote_types(residual.dtype, weight.dtype))
        shift = None if bias is None else bias.to(wide.dtype)
        return functional.layer_norm(wide, wide.shape[-1:], weight.to(wide.dtype), shift, eps).to(
            residual.dtype
        ), residual
    return _rms(residual, weight, eps), residual


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def activation(x: Tensor, kind: str, *, gated: bool) -> Tensor:
    """Apply silu, gelu, gelu_tanh, relu or relu2 to x [..., N]. If gated, apply it to the first
    half of x and multiply by the second half: [..., N / 2]."""
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return _ACTIVATIONS[kind](gate) * up
    return _ACTIVATIONS[kind](x)


def gate_outputs(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply the outputs of attention x [..., N] by the sigmoid of their gate [..., N]."""
    return x * sigmoid(gate)


def angles(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [..., half] float32 each, of positions [...] int64 times frequencies
    inverse [half] float32."""
    radians = positions[..., None] * inverse  # in float32
    return radians.cos(), radians.sin()


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
    """Split qkv, normalise the heads of q and k (if norms), rotate them, and write k and v to the
    private KV store.

    Args:
        qkv: [B, W, (H + 2K) D].
        angles: cos and sin [B, W, R / 2] float32, for the first R of D dimensions, whose halves are
            rotated against each other.
        slots: [B, W], where in `own` to write.
        own: keys and values, [K, S, D] each; possibly in eight bits (see segments.Store).

    Returns: q [B, W, H, D].

    A value that is not finite is stored as 0, with NaN in its key. Then a query that sees the key
    gives NaN, and other queries are not affected. (A NaN value with weight 0 would give NaN.)
    """
    kv_heads, _, size = own[0].shape
    qk, v = qkv.unflatten(-1, (-1, size)).split((heads + kv_heads, kv_heads), dim=2)
    if norms is not None:
        parts = zip(qk.split((heads, kv_heads), dim=2), norms, strict=True)
        qk = torch.cat([_rms(part, weight, eps) for part, weight in parts], dim=2)
    if angles is not None:
        cos, sin = angles
        qk = rotate(qk, cos[:, :, None], sin[:, :, None])
    q, k = qk.split((heads, kv_heads), dim=2)
    poisoned = (k + (k * 0 + v * 0)).movedim(2, 0)
    write(own, slots, poisoned, v.nan_to_num(0.0, 0.0, 0.0).movedim(2, 0))
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the first `size` dimensions of x [B, T, H, D] in pairs that are half of `size` apart.
    cos and sin: [B, T, 1, size / 2] float32. `back`: rotate by the opposite angle, for gradients.
    """
    half = cos.shape[-1]
    if back:
        sin = -sin
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in rotated), rest), -1)


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
    """Causal softmax attention over two segments, merged by log-sum-exp.

    Args:
        q: [B, W, H, D], or packed [1, M, H, D].
        own: private keys and values, [K, S, D] each; possibly in eight bits.
        prompt: keys and values of the prompt store, [K, T, D] each, in the form of `own`. Each span
            is read once for all rows of its group.
        window: number of latest positions that a query sees, itself included; 0 for all.
        cap: soft cap of scores, which become cap * tanh(score / cap); 0 for none (Gemma 2, arXiv
            2408.00118).
        sinks: [H], a score of each head that takes weight and adds no value (gpt-oss).
        next_weight: a weight that is read next. A GPU may prefetch it.

    Returns: [B, W, H D], or packed [1, M, H D].
    """
    if segments.packed is not None:
        rows_of_q, alone = by_row(q, segments)
        found = attention(
            rows_of_q, own, prompt, alone, scale=scale, window=window, cap=cap, sinks=sinks
        )
        return one_after_other(found, segments.packed)
    (rows, width, _heads, size), kv_heads = q.shape, own[0].shape[0]
    dtype, q = q.dtype, q.to(torch.promote_types(q.dtype, torch.float32)) * scale
    # [B, K, W H / K, D]: one matrix of queries for each key/value head.
    q = q.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(rows, kv_heads, -1, size)
    everywhere = prompt[0].shape[1]
    if sinks is not None:  # in the order of the queries' lines, [K, W H / K, 1]
        sinks = sinks.to(q.dtype).view(kv_heads, 1, -1).expand(-1, width, -1).flatten(1)[..., None]
    if not segments.extent:
        mixed = _inside(q, prompt, segments, window, width, cap, sinks)
        return _finish(mixed, width, dtype)
    total, peak, mass = _owned(q, own, segments, window, width, cap)
    if segments.groups is None or _many_short(segments.groups, rows):
        longest = (
            everywhere
            if segments.groups is None
            else max(group.length for group in segments.groups)
        )
        part = _gathered(q, prompt, segments, window, width, longest, cap)
        total, peak, mass = _merge((total, peak, mass), part, slice(None))
        return _finish(_divided(total, peak, mass, sinks), width, dtype)
    for number, group in enumerate(segments.groups):
        span = slice(group.start, group.start + group.length)
        mask = _seen(segments, number, window) if window else None
        part = _partial(q[group.rows], *_taken(prompt, span), mask, width, cap)
        total, peak, mass = _merge((total, peak, mass), part, group.rows)
    return _finish(_divided(total, peak, mass, sinks), width, dtype)


def _taken(store: Store, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all heads at these slots, [K, ..., D] each."""
    return plain(*(part[:, slots] for part in store), dtype=torch.float32)


def _owned(
    q: Tensor, own: Store, segments: Segments, window: int, width: int, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `_partial` over the private keys of every row, copied side by side, `segments.extent` of
    each."""
    kv_heads, slots, size = own[0].shape

    def index() -> Tensor:
        steps = torch.arange(segments.extent, device=q.device)
        # slots behind a row's own belong to other rows or lie beyond the store; no query sees them
        each = (segments.own[:, None] + steps).clamp(max=slots - 1)
        heads = slots * torch.arange(kv_heads, device=q.device)
        return heads[:, None] + each[:, None]

    def visible() -> Tensor:
        places = segments.base[:, None] + torch.arange(segments.extent, device=q.device)
        return _visible(segments.positions, places, window)

    where = segments.once(("own", kv_heads, slots), index)
    parts = [functional.embedding(where, store.reshape(-1, size)) for store in own[:2]]
    parts += [scales.flatten()[where] for scales in own[2:]]
    keys, values = plain(*parts, dtype=torch.float32)
    return _partial(q, keys, values, segments.once(("own", window), visible), width, cap)


def _inside(
    q: Tensor,
    prompt: Store,
    segments: Segments,
    window: int,
    width: int,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of queries that lie within their prompts' spans, [B, K, M, D]."""
    if segments.groups is None:
        found = _gathered(q, prompt, segments, window, width, prompt[0].shape[1], cap)
        return _divided(*found, sinks)
    mixed = torch.empty_like(q)
    for number, group in enumerate(segments.groups):
        span = slice(group.start, group.start + group.length)
        found = _partial(
            q[group.rows], *_taken(prompt, span), _seen(segments, number, window), width, cap
        )
        mixed[group.rows] = _divided(*found, sinks)
    return mixed


def _divided(total: Tensor, peak: Tensor, mass: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention [B, K, M, D] from the sums of all segments, and of sinks [K, M, 1]."""
    if sinks is None:
        return total / mass
    high = torch.maximum(peak, sinks)
    ours = torch.exp(peak - high)
    return total * ours / (mass * ours + torch.exp(sinks - high))


def _finish(mixed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Reshape [B, K, W * group size, D] to [B, W, H D]."""
    rows, kv_heads, _, size = mixed.shape
    out = mixed.reshape(rows, kv_heads, width, -1, size).transpose(1, 2)
    return out.reshape(rows, width, -1).to(dtype)


def _many_short(groups: tuple[Group, ...], rows: int) -> bool:
    """Return whether to copy the prompts' spans into one padded block. For many short spans
    launches cost more than bytes."""
    if len(groups) <= 2:
        return False
    return rows * max(group.length for group in groups) <= _GATHERED


def _gathered(
    q: Tensor, prompt: Store, segments: Segments, window: int, width: int, longest: int, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `_partial` over every row's prompt span, all padded to the longest."""
    base = segments.base[:, None]

    def places() -> Tensor:
        return torch.arange(longest, device=q.device).expand(len(base), -1)

    def index() -> Tensor:
        return segments.start[:, None] + torch.minimum(places(), (base - 1).clamp(min=0))

    def visible() -> Tensor:
        return _visible(segments.positions, places(), window) & (places() < base)[:, None]

    where = segments.once(("prompts", longest), index)
    keys, values = (part.transpose(0, 1) for part in _taken(prompt, where))
    mask = segments.once(("prompts", longest, window), visible)
    return _partial(q, keys, values, mask, width, cap)


def _seen(segments: Segments, number: int, window: int) -> Tensor:
    """Return `_visible` of the prompt of group `number`, for its rows."""
    assert segments.groups is not None
    group = segments.groups[number]

    def visible() -> Tensor:
        positions = segments.positions[group.rows]
        places = torch.arange(group.length, device=positions.device)
        return _visible(positions, places.expand(len(positions), -1), window)

    found: Tensor = segments.once((number, window), visible)
    return found


def _visible(positions: Tensor, places: Tensor, window: int) -> Tensor:
    """Return which keys, at places [B, N], the queries at positions [B, W] see: [B, W, N] bool."""
    ahead = positions[:, :, None] - places[:, None, :]
    return (ahead >= 0) & (ahead < window) if window else ahead >= 0


def _partial(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, width: int, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute unnormalised attention over one segment.

    Args:
        q: [B, K, M, D] with M = W * group size.
        keys, values: [B, K, N, D], or [K, N, D] for one span read by all rows.
        mask: [B, W, N] bool, or None if all keys are visible.

    Returns: weighted sum [B, K, M, D], maximum score and mass [B, K, M, 1].
    """
    rows, kv_heads, queries, size = q.shape
    if shared := keys.dim() == 3:
        q = q.transpose(0, 1).reshape(kv_heads, rows * queries, size)
    scores = q @ keys.to(q.dtype).transpose(-1, -2)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        grid = (
            scores.view(kv_heads, rows, width, -1, scores.shape[-1]).transpose(0, 1)
            if shared
            else scores.view(rows, kv_heads, width, -1, scores.shape[-1])
        )
        grid.masked_fill_(~mask[:, None, :, None, :], _MASKED)
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores.sub_(peak))
    part = (weights @ values.to(q.dtype), peak, weights.sum(-1, keepdim=True))
    if shared:
        return tuple(t.view(kv_heads, rows, queries, -1).transpose(0, 1) for t in part)  # type: ignore[return-value]
    return part


def _merge(
    whole: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor], rows: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge a segment's partial result into those of the given rows (log-sum-exp merge)."""
    total, peak, mass = (t[rows] for t in whole)
    high = torch.maximum(peak, part[1])
    ours, theirs = torch.exp(peak - high), torch.exp(part[1] - high)
    merged = (total * ours + part[0] * theirs, high, mass * ours + part[2] * theirs)
    if isinstance(rows, slice) and len(total) == len(whole[0]):
        return merged
    for destination, source in zip(whole, merged, strict=True):
        destination[rows] = source
    return whole


def gate_gradient(x: Tensor, outer: Tensor) -> Tensor:
    """Return the gradient of silu(gate) * up with respect to x [..., 2 I] (gate, then up), given
    the gradient `outer` [..., I] of the result."""
    gate, up = x.float().chunk(2, -1)
    outer, sigmoid = outer.float(), gate.sigmoid()
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    activated = (gate * sigmoid).to(x.dtype).float()
    return torch.cat((outer * up * slope, outer * activated), -1).to(x.dtype)


class Distances(NamedTuple):
    """Comparison of N student distributions q with target distributions p, [N] float32 each.

    divergence: KL(p, q) in nats. overlap: sum of min(p, q). below: the mass of q where q < p.
    ratio: log q(x) - log p(x) of the given token. q_norm, p_norm: log-normalisers of q and p.
    """

    divergence: Tensor
    overlap: Tensor
    below: Tensor
    ratio: Tensor
    q_norm: Tensor
    p_norm: Tensor


def distances(
    student: Tensor, target: Tensor, rows: Tensor, tokens: Tensor, vocab: int
) -> Distances:
    """Compare N student distributions with their targets.

    Args:
        student: the student's logits [N, S].
        target: the target's logits [M, S].
        rows: [N] int64, the row of `target` for each student row.
        tokens: [N] int64, the token for `ratio`.
        vocab: ids from here on are ignored.
    """
    q, q_norm = _log_probs(student, vocab)
    p, p_norm = _log_probs(target, vocab)
    p, p_norm = p[rows], p_norm[rows]
    p_mass, q_mass = p.exp(), q.exp()
    return Distances(
        (p_mass * (p - q)).sum(-1),
        torch.minimum(p_mass, q_mass).sum(-1),
        torch.where(q < p, q_mass, 0.0).sum(-1),
        (q - p).gather(-1, tokens[:, None])[:, 0],
        q_norm,
        p_norm,
    )


def distance_gradient(
    student: Tensor, target: Tensor, rows: Tensor, found: Distances, slopes: Tensor, vocab: int
) -> None:
    """Overwrite `student` with the gradient of the sum of slopes[0] * divergence - slopes[1] *
    overlap. slopes: [2, N] float32. The gradient is 0 for ignored ids."""
    q, p = _log_probs(student, vocab)[0], _log_probs(target, vocab)[0][rows]
    mass = q.exp()
    gradient = slopes[0, :, None] * (mass - p.exp())
    gradient += slopes[1, :, None] * mass * (found.below[:, None] - (q < p).float())
    student[:, :vocab] = gradient.to(student.dtype)
    student[:, vocab:] = 0.0


def _log_probs(logits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    kept = logits[:, :vocab].float()
    norm = kept.logsumexp(-1)
    return kept - norm[:, None], norm


# Functions of single elements follow, with the same bits at every place of a tensor. On a CPU torch
# computes whole vectors in one way and the elements that are left over in another, which may
# differ in the last bit. Elements are left over at the end of each thread's part too. So the result
# for a token could depend on the width of a pass, and a draft could change a sample.


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return _in_vectors(functional.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return _in_vectors(torch.sigmoid, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the approximation of GELU by tanh (arXiv 1606.08415)."""
    return _in_vectors(lambda part: functional.gelu(part, approximate="tanh"), x)


def gelu(x: Tensor) -> Tensor:
    """Return x times the normal distribution function of x (GELU, arXiv 1606.08415). torch uses
    another library on a CPU if x is contiguous; its `erf` has the same bits everywhere."""
    if x.device.type != "cpu":
        return functional.gelu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def _in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) for a function of single elements. On a CPU no call has elements beyond
    whole vectors: all threads get equal shares of the first call, and one thread computes each of
    the others, of which the last is padded."""
    if x.device.type != "cpu":
        return function(x)
    flat, count = x.reshape(-1), x.numel()
    if count % _VECTORS:
        flat = functional.pad(flat, (0, -count % _VECTORS))
    if len(flat) <= _ALONE:
        return function(flat)[:count].view(x.shape)
    every = _SHARE * torch.get_num_threads()
    shared = len(flat) // every * every
    found = [function(flat[:shared])] if shared else []
    found += map(function, flat[shared:].split(_ALONE))
    return torch.cat(found)[:count].view(x.shape)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
