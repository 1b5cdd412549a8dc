"""Triton: prompts of Gated DeltaNet in chunks (arXiv 2412.06464, section 3.3). Definition:
delta_rule.py.

Four launches: the convolution; the gates and the inverse of each chunk's triangular system, for all
chunks at once; the state of each part through its chunks in order; and the gated norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_kernels import gated_norm, load_filter, log_decay_of, sizes_of
from .delta_rule import CHUNK, UNIT_EPS, DeltaState, DeltaWeights
from .launch import card, input_precision

_CHUNK = tl.constexpr(CHUNK)
_UNIT_EPS = tl.constexpr(UNIT_EPS)
# Value columns of a program of `_scan`, by the least shared memory of a program on the GPU. With 32
# columns and 16 bits it failed on an H100 with an illegal access (Triton 3.6; issue 11366
# of Triton is alike). With 64 it gave the definition's results.
_COLUMNS = {150 * 1024: 64, 0: 32}


def delta_prompt(
    qkv: Tensor,
    gates: Tensor,
    z: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    *,
    parts: Tensor,
    eps: float,
    columns: int | None = None,
) -> Tensor:
    """Do delta_rule.delta_prompt. `columns` of a program of `_scan`: for measurements."""
    (tokens, channels), (_, heads, _, value_size) = qkv.shape, state.state.shape
    chunks = tokens // CHUNK + len(parts)  # at most
    sizes = sizes_of(weights, state)
    parts = parts.contiguous()
    prepared = torch.empty(tokens, channels, dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty(2, tokens, heads, dtype=torch.float32, device=qkv.device)
    inverse = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=qkv.device)
    shared = (parts, state.state, state.inputs, state.inputs.shape[1], len(parts), tokens)
    options = sizes | {"BLOCK_P": triton.next_power_of_2(len(parts))}
    block = max(sizes["BLOCK_K"], triton.next_power_of_2(value_size))
    _convolve[(chunks, 2 * sizes["K"] + heads)](
        *(qkv, weights.convolution, prepared, *shared, qkv.stride(0)),
        **options,
        BLOCK=block,
        num_warps=8,
    )
    _solve[(chunks, heads)](
        *(gates, weights.decay, weights.bias, prepared, factors, inverse, *shared, gates.stride(0)),
        **options,
        WIDE=input_precision(qkv),
        num_warps=4,
    )
    out = torch.zeros(tokens, heads * value_size, dtype=qkv.dtype, device=qkv.device)
    shared_memory = card(qkv.device).shared
    block = columns or next(most for least, most in _COLUMNS.items() if shared_memory >= least)
    _scan[(len(parts), heads, triton.cdiv(value_size, block))](
        *(qkv, gates, prepared, factors, inverse, out, *shared),
        *(qkv.stride(0), gates.stride(0)),
        **options,
        WIDE=input_precision(qkv),
        BLOCK_V=block,
        num_warps=4,
        num_stages=1,
    )
    gated_norm(out, z, weights.norm, out, eps=eps, size=value_size)
    return out


@triton.jit
def _row(qkv_ptr, input_ptr, row, begin, first, places, at, inside, step, LINES: tl.constexpr):
    """Load channels `at` of rows of a part, in float32. Negative rows are inputs before the part, 0
    before the first position."""
    own, past = (row >= 0)[:, None] & inside, (row < 0) & (first + row >= 0)
    place = tl.where(past, first + row, 0) % places
    spot = qkv_ptr + (begin + row).to(tl.int64)[:, None] * step + at[None, :]
    found = tl.load(spot, mask=own, other=0.0).to(tl.float32)
    spot = input_ptr + place[:, None] * LINES + at[None, :]
    return found + tl.load(spot, mask=past[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def _times(x, y, total, WIDE: tl.constexpr):
    """Return total + x y, for x in the model's dtype and y in float32. With 16 bits x is exact, and
    y is the sum of two such numbers."""
    if x.dtype == tl.float32:
        return tl.dot(x, y, total, input_precision=WIDE)
    high = y.to(x.dtype)
    total = tl.dot(x, high, total)
    return tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), total)


@triton.jit
def _decay(total):
    """Return exp(total_i - total_j) for j <= i, else 0."""
    at = tl.arange(0, _CHUNK)
    lower = at[:, None] >= at[None, :]
    return tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def _find_part(parts_ptr, parts, chunk, BLOCK_P: tl.constexpr):
    """Return the part of a chunk, and the chunks of earlier parts. It is `parts` after the last."""
    place = tl.arange(0, BLOCK_P)
    counts = tl.load(parts_ptr + place * 4 + 2, mask=place < parts, other=0).to(tl.int32)
    chunks = tl.cdiv(counts, _CHUNK)
    part = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    return tl.minimum(part, parts), tl.sum(tl.where(place < part, chunks, 0), 0)


@triton.jit(do_not_specialize=["places", "parts", "tokens"])
def _convolve(
    qkv_ptr,
    filter_ptr,
    prepared_ptr,
    parts_ptr,
    state_ptr,
    input_ptr,
    places,
    parts,
    tokens,
    qkv_step,
    H: tl.constexpr,
    K: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one head of queries, keys or values for the tokens of a chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    part, earlier = _find_part(parts_ptr, parts, chunk, BLOCK_P)
    if part < parts:
        row = tl.arange(0, _CHUNK) + _CHUNK * (chunk - earlier)
        slot = tl.load(parts_ptr + part * 4)
        begin = tl.load(parts_ptr + part * 4 + 1).to(tl.int32)
        count = tl.load(parts_ptr + part * 4 + 2).to(tl.int32)
        first = tl.load(parts_ptr + part * 4 + 3).to(tl.int32)
        channels: tl.constexpr = 2 * K * DK + H * DV
        lines: tl.constexpr = channels + 2 * H
        i = tl.arange(0, BLOCK)
        known = i < tl.where(head < 2 * K, DK, DV)
        at = tl.where(head < 2 * K, head * DK, 2 * K * DK + (head - 2 * K) * DV) + i
        inside = (row < count)[:, None] & known[None, :]
        inputs = input_ptr + slot * places * lines
        total = tl.zeros([_CHUNK, BLOCK], tl.float32)
        for place in tl.static_range(4):
            weight = load_filter(filter_ptr, at, known, place, SIZE)
            shifted = row - 3 + place
            x = _row(qkv_ptr, inputs, shifted, begin, first, places, at, inside, qkv_step, lines)
            total += x * weight[None, :]
        total *= tl.sigmoid(total)
        if head < 2 * K:
            total *= tl.rsqrt(tl.sum(total * total, 1) + _UNIT_EPS)[:, None]
        if head < K:
            total *= DK**-0.5
        target = prepared_ptr + (begin + row).to(tl.int64)[:, None] * channels + at[None, :]
        tl.store(target, total.to(prepared_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["places", "parts", "tokens"])
def _solve(
    gate_ptr,
    decay_ptr,
    bias_ptr,
    prepared_ptr,
    factor_ptr,
    inverse_ptr,
    parts_ptr,
    state_ptr,
    input_ptr,
    places,
    parts,
    tokens,
    gate_step,
    H: tl.constexpr,
    K: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute the gates of a chunk for one head, and the inverse of its triangular system."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    part, earlier = _find_part(parts_ptr, parts, chunk, BLOCK_P)
    if part < parts:
        at, i = tl.arange(0, _CHUNK), tl.arange(0, BLOCK_K)
        row = at + _CHUNK * (chunk - earlier)
        begin = tl.load(parts_ptr + part * 4 + 1).to(tl.int32)
        real = row < tl.load(parts_ptr + part * 4 + 2).to(tl.int32)
        token = (begin + row).to(tl.int64)
        spot = gate_ptr + token * gate_step + head
        beta = tl.load(spot, mask=real, other=0.0).to(tl.float32)
        gate = tl.load(spot + H, mask=real, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(decay_ptr + head).to(tl.float32))
        log_decay = log_decay_of(gate, rate, tl.load(bias_ptr + head).to(tl.float32))
        total = tl.cumsum(tl.where(real, log_decay, 0.0), 0)
        beta = tl.where(real, tl.sigmoid(beta), 0.0)
        spot = factor_ptr + token * H + head
        tl.store(spot, total, mask=real)
        tl.store(spot + tokens.to(tl.int64) * H, beta, mask=real)
        channels: tl.constexpr = 2 * K * DK + H * DV
        k_at = (K + head // (H // K)) * DK + i
        line = prepared_ptr + token[:, None] * channels + k_at[None, :]
        key = tl.load(line, mask=real[:, None] & (i < DK)[None, :], other=0.0)
        below = tl.dot(key, tl.trans(key), input_precision=WIDE) * beta[:, None] * _decay(total)
        below = tl.where(at[:, None] > at[None, :], below, 0.0)
        # Forward substitution: row i of the inverse of 1 + below is e_i - sum of below_ij row_j.
        inverse = (at[:, None] == at[None, :]).to(tl.float32)
        for step in range(1, _CHUNK):
            weight = tl.sum(tl.where(at[:, None] == step, below, 0.0), 0)
            found = tl.sum(weight[:, None] * inverse, 0)
            inverse -= tl.where(at[:, None] == step, found[None, :], 0.0)
        matrix = inverse_ptr + (chunk.to(tl.int64) * H + head) * (_CHUNK * _CHUNK)
        tl.store(matrix + at[:, None] * _CHUNK + at[None, :], inverse)


@triton.jit(do_not_specialize=["places", "parts", "tokens"])
def _scan(
    qkv_ptr,
    gate_ptr,
    prepared_ptr,
    factor_ptr,
    inverse_ptr,
    out_ptr,
    parts_ptr,
    state_ptr,
    input_ptr,
    places,
    parts,
    tokens,
    qkv_step,
    gate_step,
    H: tl.constexpr,
    K: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Programs: parts, by heads, by blocks of BLOCK_V value columns. Each carries its part of the
    state, [DK, BLOCK_V], through the chunks in order, and stores the outputs before their norm.
    Then it stores the state, and the inputs that the convolution of the next tokens reads."""
    part, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(parts_ptr + part * 4)
    begin = tl.load(parts_ptr + part * 4 + 1).to(tl.int32)
    count = tl.load(parts_ptr + part * 4 + 2).to(tl.int32)
    first = tl.load(parts_ptr + part * 4 + 3).to(tl.int32)
    if count > 0:
        place = tl.arange(0, BLOCK_P)
        counts = tl.load(parts_ptr + place * 4 + 2, mask=place < part, other=0).to(tl.int32)
        chunk = tl.sum(tl.cdiv(counts, _CHUNK), 0)
        group: tl.constexpr = H // K
        channels: tl.constexpr = 2 * K * DK + H * DV
        lines: tl.constexpr = channels + 2 * H
        at, i = tl.arange(0, _CHUNK), tl.arange(0, BLOCK_K)
        j = block * BLOCK_V + tl.arange(0, BLOCK_V)
        q_at, k_at = head // group * DK + i, (K + head // group) * DK + i
        v_at = 2 * K * DK + head * DV + j
        keys, values = (i < DK)[None, :], (j < DV)[None, :]
        tile = state_ptr + (slot * H + head) * (DK * DV) + i[:, None] * DV + j[None, :]
        whole = (i < DK)[:, None] & values
        state = tl.load(tile, mask=whole, other=0.0)
        state = tl.where(first > 0, state, 0.0)
        for low in range(0, count, _CHUNK):
            token, real = (begin + low + at).to(tl.int64), (low + at < count)[:, None]
            line = prepared_ptr + token[:, None] * channels
            key = tl.load(line + k_at[None, :], mask=real & keys, other=0.0)
            query = tl.load(line + q_at[None, :], mask=real & keys, other=0.0)
            value = tl.load(line + v_at[None, :], mask=real & values, other=0.0).to(tl.float32)
            spot = factor_ptr + token * H + head
            last = factor_ptr + (begin + tl.minimum(low + _CHUNK, count) - 1).to(tl.int64) * H
            end = tl.load(last + head)
            total = tl.load(spot, mask=low + at < count, other=0.0)
            total = tl.where(low + at < count, total, end)
            spot += tokens.to(tl.int64) * H
            beta = tl.load(spot, mask=low + at < count, other=0.0)
            matrix = inverse_ptr + (chunk.to(tl.int64) * H + head) * (_CHUNK * _CHUNK)
            inverse = tl.load(matrix + at[:, None] * _CHUNK + at[None, :])
            begun = tl.exp(total)[:, None]
            nothing = tl.zeros([_CHUNK, BLOCK_V], tl.float32)
            right = beta[:, None] * (value - begun * _times(key, state, nothing, WIDE))
            change = tl.dot(inverse, right, input_precision=WIDE)
            within = tl.dot(query, tl.trans(key), input_precision=WIDE) * _decay(total)
            found = begun * _times(query, state, nothing, WIDE)
            found = tl.dot(within, change, found, input_precision=WIDE)
            target = out_ptr + token[:, None] * (H * DV) + head * DV + j[None, :]
            tl.store(target, found.to(out_ptr.dtype.element_ty), mask=real & values)
            change *= tl.exp(end - total)[:, None]
            state = _times(tl.trans(key), change, state * tl.exp(end), WIDE)
            chunk += 1
        tl.store(tile, state, mask=whole)
        # the inputs that the convolution of the next tokens reads
        for row in range(tl.maximum(count - SIZE + 1, 0), count):
            kept = input_ptr + (slot * places + (first + row) % places) * lines
            source = qkv_ptr + (begin + row).to(tl.int64) * qkv_step
            gate = gate_ptr + (begin + row).to(tl.int64) * gate_step + head
            tl.store(kept + v_at, tl.load(source + v_at, mask=j < DV), mask=j < DV)
            if block == 0:
                tl.store(kept + channels + head, tl.load(gate))
                tl.store(kept + channels + H + head, tl.load(gate + H))
                if head % group == 0:
                    tl.store(kept + q_at, tl.load(source + q_at, mask=i < DK), mask=i < DK)
                    tl.store(kept + k_at, tl.load(source + k_at, mask=i < DK), mask=i < DK)
