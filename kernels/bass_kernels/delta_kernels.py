"""Triton: rounds of Gated DeltaNet. Definition: delta_rule.py.

A program has some value columns of one head of one row. It keeps their state in registers, reads
and writes it once, and computes the convolution of the tokens that it needs. Meanwhile other
programs read `inputs`, but no place that this round writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_rule import UNIT_EPS, DeltaState, DeltaWeights
from .launch import scratch

FILTER = 4
"""Largest kernel size of the convolution. Shorter filters are padded with zeros."""
_FILTER = tl.constexpr(FILTER)
_UNIT_EPS = tl.constexpr(UNIT_EPS)
_FEW = 48  # states of one row of the 27B, which was measured with 1, 8 and 64 rows
_TOKENS = tl.constexpr(4)  # tokens that are normed at once


def delta_round(
    qkv: Tensor,
    gates: Tensor,
    z: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    *,
    slots: Tensor,
    positions: Tensor,
    advance: Tensor,
    eps: float,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """Do delta_rule.delta_round. `tile`: see `tile_for`; for tests and measurements."""
    rows, width, _ = qkv.shape
    heads, value_size = state.state.shape[1], state.state.shape[3]
    columns, warps = tile or tile_for(rows * heads, width)
    block = min(columns, triton.next_power_of_2(value_size))
    blocks = triton.cdiv(value_size, block)
    out = torch.empty(rows, width, heads * value_size, dtype=qkv.dtype, device=qkv.device)
    _round[(rows * heads * blocks,)](
        *(qkv, gates, z, out, *weights, *state, slots, positions, advance),
        *scratch(out, blocks, rows * heads, out.numel()),
        *(width, *qkv.stride()[:2], *gates.stride()[:2], *z.stride()[:2], positions.stride(0)),
        *(state.inputs.shape[1], eps),
        **sizes_of(weights, state),
        BLOCK_V=block,
        BLOCKS=blocks,
        BLOCK_N=triton.next_power_of_2(value_size),
        num_warps=warps,
    )
    return out


def tile_for(states: int, width: int) -> tuple[int, int]:
    """Return the value columns of a program, and its warps. On an H100 with heads of 128 x 128, so
    many states (rows times heads) and `width` tokens, these were the fastest of (16, 1), (32, 1),
    (32, 2), (64, 2), (64, 4) and (128, 4). A single warp needs no barrier."""
    if states <= 2 * _FEW:
        return 16, 1
    return (128, 4) if width == 1 and states >= 8 * _FEW else (32, 1)


def gated_norm(
    found: Tensor, z: Tensor, norm: Tensor, out: Tensor, *, eps: float, size: int
) -> None:
    """Write norm(found) * silu(z) for heads of this size to `out`, which may be `found`. All are
    [..., H size] with one or two dimensions of tokens."""
    width = z.shape[-2]
    _gated_norm[(z.numel() // z.shape[-1], z.shape[-1] // size)](
        *(found, z, norm, out, width, 0 if z.dim() == 2 else z.stride(0), z.stride(-2), eps),
        DV=size,
        BLOCK_N=triton.next_power_of_2(size),
        num_warps=1,
    )


def sizes_of(weights: DeltaWeights, state: DeltaState) -> dict[str, int]:
    """Return the sizes of a layer as constants of its kernels. Raises ValueError if the filters are
    longer than the kernels allow."""
    channels, size = weights.convolution.shape
    if size > FILTER:
        raise ValueError(f"The kernel size of the convolution is {size}; the most is {FILTER}.")
    _, heads, key_size, value_size = state.state.shape
    key_heads = (channels - heads * value_size) // (2 * key_size)
    sizes = {"H": heads, "K": key_heads, "DK": key_size, "DV": value_size, "SIZE": size}
    # a product of matrices has at least 16 inner dimensions
    return sizes | {"BLOCK_K": max(16, triton.next_power_of_2(key_size))}


@triton.jit
def load_filter(filter_ptr, at, inside, PLACE: tl.constexpr, SIZE: tl.constexpr):
    """Load the weight of the token PLACE places after the first one of the window, for channels."""
    place: tl.constexpr = PLACE - _FILTER + SIZE
    if place < 0:
        return at * 0.0
    return tl.load(filter_ptr + at * SIZE + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _stored(input_ptr, position, places, at, inside, LINES: tl.constexpr):
    """Load the inputs at a position, in float32: 0 before the first position."""
    line = input_ptr + (tl.maximum(position, 0) % places) * LINES
    found = tl.load(line + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(position >= 0, found, 0.0)


@triton.jit
def _convolved(x0, x1, x2, x3, f0, f1, f2, f3):
    """Return the convolution of four inputs, the oldest first, after SiLU."""
    total = x0 * f0 + x1 * f1 + x2 * f2 + x3 * f3
    return total * tl.sigmoid(total)


@triton.jit
def unit(x):
    """Divide a vector by its Euclidean norm."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + _UNIT_EPS)


@triton.jit
def log_decay_of(gate, rate, bias):
    """Return -rate softplus(gate + bias)."""
    gate += bias
    return -rate * (tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate))))


@triton.jit
def gate_output(found, spot, norm_ptr, n, inside, eps, DV: tl.constexpr):
    """Return norm(found) * silu(z) for one head of T tokens, [T, N]. `spot`: where z is."""
    scale = tl.rsqrt(tl.sum(found * found, 1) / DV + eps)[:, None]
    z = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + n, mask=n < DV, other=0.0).to(tl.float32)[None, :]
    return found * scale * weight * (z * tl.sigmoid(z))


@triton.jit(do_not_specialize=["width", "places", "position_row"])
def _round(
    qkv_ptr,
    gate_ptr,
    z_ptr,
    out_ptr,
    filter_ptr,
    decay_ptr,
    bias_ptr,
    norm_ptr,
    state_ptr,
    input_ptr,
    slots_ptr,
    position_ptr,
    advance_ptr,
    found_ptr,
    arrived_ptr,
    width,
    qkv_row,
    qkv_step,
    gate_row,
    gate_step,
    z_row,
    z_step,
    position_row,
    places,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs: rows, by heads, by blocks of BLOCK_V value columns. Each does this in order:

    1. It loads its part of the state, [DK, BLOCK_V]. A row without a slot gives zeros and ends
       here.
    2. The state goes through the tokens that the last round accepted, whose inputs are in
       input_ptr. It is stored.
    3. It goes on through the `width` tokens of this round. Their inputs and their outputs are
       stored, but not the state, because the next round may reject tokens.
    4. The last block of a head to finish norms the outputs of all blocks.

    k0 to k3 are the inputs of a key's convolution, the oldest first, and kf0 to kf3 its weights.
    Queries and values have the same names with q and v.
    """
    # the programs of a state run side by side: each reads a part of the same pages of memory
    unit_at, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    row, head = (unit_at // H).to(tl.int64), unit_at % H
    i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    keys, values = i < DK, j < DV
    slot = tl.load(slots_ptr + row)
    own = row * width * (H * DV) + head * DV
    out_ptr += own
    if slot < 0:
        for step in range(width):
            nothing = tl.zeros([BLOCK_V], tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + step * (H * DV) + j, nothing, mask=values)
    else:
        group: tl.constexpr = H // K
        channels: tl.constexpr = 2 * K * DK + H * DV
        lines: tl.constexpr = channels + 2 * H
        q_at, k_at = head // group * DK + i, (K + head // group) * DK + i
        v_at = 2 * K * DK + head * DV + j
        first = tl.load(position_ptr + row * position_row).to(tl.int32)
        advance = tl.load(advance_ptr + row).to(tl.int32)
        input_ptr += slot * places * lines
        tile = state_ptr + (slot * H + head) * (DK * DV) + i[:, None] * DV + j[None, :]
        real = keys[:, None] & values[None, :]
        # no later launch of this pass reads the state, so it need not stay in the L2 cache
        state = tl.load(tile, mask=real, other=0.0, eviction_policy="evict_first")
        rate = tl.exp(tl.load(decay_ptr + head).to(tl.float32))
        bias = tl.load(bias_ptr + head).to(tl.float32)
        kf0 = load_filter(filter_ptr, k_at, keys, 0, SIZE)
        kf1 = load_filter(filter_ptr, k_at, keys, 1, SIZE)
        kf2 = load_filter(filter_ptr, k_at, keys, 2, SIZE)
        kf3 = load_filter(filter_ptr, k_at, keys, 3, SIZE)
        vf0 = load_filter(filter_ptr, v_at, values, 0, SIZE)
        vf1 = load_filter(filter_ptr, v_at, values, 1, SIZE)
        vf2 = load_filter(filter_ptr, v_at, values, 2, SIZE)
        vf3 = load_filter(filter_ptr, v_at, values, 3, SIZE)
        # accepted tokens of the last round
        at = first - advance
        k0 = _stored(input_ptr, at - 3, places, k_at, keys, lines)
        k1 = _stored(input_ptr, at - 2, places, k_at, keys, lines)
        k2 = _stored(input_ptr, at - 1, places, k_at, keys, lines)
        v0 = _stored(input_ptr, at - 3, places, v_at, values, lines)
        v1 = _stored(input_ptr, at - 2, places, v_at, values, lines)
        v2 = _stored(input_ptr, at - 1, places, v_at, values, lines)
        q0 = _stored(input_ptr, first - 3, places, q_at, keys, lines)
        q1 = _stored(input_ptr, first - 2, places, q_at, keys, lines)
        q2 = _stored(input_ptr, first - 1, places, q_at, keys, lines)
        # what a token needs is loaded while the one before is computed
        line = input_ptr + tl.maximum(at, 0) % places * lines
        k3 = tl.load(line + k_at, mask=keys, other=0.0).to(tl.float32)
        v3 = tl.load(line + v_at, mask=values, other=0.0).to(tl.float32)
        raw_beta = tl.load(line + channels + head).to(tl.float32)
        raw_gate = tl.load(line + channels + H + head).to(tl.float32)
        qkv_ptr += row * qkv_row
        gate_ptr += row * gate_row + head
        z_ptr += row * z_row + head * DV
        new_q = tl.load(qkv_ptr + q_at, mask=keys, other=0.0)
        new_k = tl.load(qkv_ptr + k_at, mask=keys, other=0.0)
        new_v = tl.load(qkv_ptr + v_at, mask=values, other=0.0)
        new_beta = tl.load(gate_ptr)
        new_gate = tl.load(gate_ptr + H)
        for step in range(advance):
            line = input_ptr + (at + tl.minimum(step + 1, advance - 1)) % places * lines
            k4 = tl.load(line + k_at, mask=keys, other=0.0).to(tl.float32)
            v4 = tl.load(line + v_at, mask=values, other=0.0).to(tl.float32)
            next_beta = tl.load(line + channels + head).to(tl.float32)
            next_gate = tl.load(line + channels + H + head).to(tl.float32)
            decay = tl.exp(log_decay_of(raw_gate, rate, bias))
            key = unit(_convolved(k0, k1, k2, k3, kf0, kf1, kf2, kf3))
            value = _convolved(v0, v1, v2, v3, vf0, vf1, vf2, vf3)
            seen = tl.sum(state * key[:, None], 0)
            change = tl.sigmoid(raw_beta) * (value - decay * seen)
            state = decay * state + key[:, None] * change[None, :]
            k0, k1, k2, k3 = k1, k2, k3, k4
            v0, v1, v2, v3 = v1, v2, v3, v4
            raw_beta, raw_gate = next_beta, next_gate
        if advance > 0:
            tl.store(tile, state, mask=real, eviction_policy="evict_first")
        # new tokens
        qf0 = load_filter(filter_ptr, q_at, keys, 0, SIZE)
        qf1 = load_filter(filter_ptr, q_at, keys, 1, SIZE)
        qf2 = load_filter(filter_ptr, q_at, keys, 2, SIZE)
        qf3 = load_filter(filter_ptr, q_at, keys, 3, SIZE)
        for step in range(width):
            q, k, v, b, g = new_q, new_k, new_v, new_beta, new_gate
            following = tl.minimum(step + 1, width - 1)
            line = qkv_ptr + following * qkv_step
            new_q = tl.load(line + q_at, mask=keys, other=0.0)
            new_k = tl.load(line + k_at, mask=keys, other=0.0)
            new_v = tl.load(line + v_at, mask=values, other=0.0)
            new_beta = tl.load(gate_ptr + following * gate_step)
            new_gate = tl.load(gate_ptr + following * gate_step + H)
            line = input_ptr + (first + step) % places * lines
            tl.store(line + v_at, v, mask=values)
            if block == 0:
                tl.store(line + channels + head, b)
                tl.store(line + channels + H + head, g)
                if head % group == 0:
                    tl.store(line + q_at, q, mask=keys)
                    tl.store(line + k_at, k, mask=keys)
            q3, k3, v3 = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
            beta = tl.sigmoid(b.to(tl.float32))
            decay = tl.exp(log_decay_of(g.to(tl.float32), rate, bias))
            query = unit(_convolved(q0, q1, q2, q3, qf0, qf1, qf2, qf3)) * (DK**-0.5)
            key = unit(_convolved(k0, k1, k2, k3, kf0, kf1, kf2, kf3))
            value = _convolved(v0, v1, v2, v3, vf0, vf1, vf2, vf3)
            # S_t^T q = a S^T q + (k^T q) change: both products with the state before it changes
            seen = tl.sum(state * key[:, None], 0)
            found = tl.sum(state * query[:, None], 0)
            change = beta * (value - decay * seen)
            found = decay * found + tl.sum(key * query, 0) * change
            if step + 1 < width:
                state = decay * state + key[:, None] * change[None, :]
            place = step * (H * DV) + j
            if BLOCKS > 1:
                tl.store(found_ptr + own + place, found, mask=values)
            else:
                spot = z_ptr + step * z_step + j[None, :]
                normed = gate_output(found[None, :], spot, norm_ptr, j, values[None, :], eps, DV)
                normed = normed.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + place[None, :], normed, mask=values[None, :])
            q0, q1, q2 = q1, q2, q3
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
        if BLOCKS > 1:  # the last program of a head to finish norms what all have found
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + unit_at, 1) == BLOCKS - 1:
                n = tl.arange(0, BLOCK_N)
                for low in range(0, width, _TOKENS):
                    t = low + tl.arange(0, _TOKENS)
                    inside = (t < width)[:, None] & (n < DV)[None, :]
                    target = t[:, None] * (H * DV) + n[None, :]
                    all_found = tl.load(
                        found_ptr + own + target, mask=inside, other=0.0, cache_modifier=".cg"
                    )
                    gate = z_ptr + t[:, None] * z_step + n[None, :]
                    normed = gate_output(all_found, gate, norm_ptr, n, inside, eps, DV)
                    tl.store(out_ptr + target, normed.to(out_ptr.dtype.element_ty), mask=inside)
                tl.store(arrived_ptr + unit_at, 0)


@triton.jit(do_not_specialize=["width"])
def _gated_norm(
    found_ptr,
    z_ptr,
    norm_ptr,
    out_ptr,
    width,
    z_row,
    z_step,
    eps,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs: tokens by heads. See gated_norm."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCK_N)[None, :]
    at = (token * tl.num_programs(1) + head) * DV + n
    found = tl.load(found_ptr + at, mask=n < DV, other=0.0).to(tl.float32)
    z_ptr += token // width * z_row + token % width * z_step + head * DV
    found = gate_output(found, z_ptr + n, norm_ptr, tl.arange(0, BLOCK_N), n < DV, eps, DV)
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=n < DV)
