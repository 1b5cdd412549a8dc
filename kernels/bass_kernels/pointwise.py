"""Triton: embedding, residual + norm, gated activation, rope with the cache write, and a store of
hidden states. Definitions: reference.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .eight_bit_kernels import arguments, encode
from .launch import leading, let_next
from .segments import Segments, Store

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


def embed(tokens: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """Do reference.embed."""
    size = weight.shape[1]
    out = weight.new_empty(*tokens.shape, size)
    rounded = torch.tensor(scale, dtype=weight.dtype).item()
    _embed[(tokens.numel(), triton.cdiv(size, 1024))](
        tokens.contiguous(),
        weight,
        out,
        size,
        len(weight) - 1,
        rounded,
        SCALED=scale != 1.0,
        BLOCK=1024,
        num_warps=4,
    )
    return out


@triton.jit
def _embed(
    tokens_ptr, weight_ptr, out_ptr, size, last, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.minimum(tl.load(tokens_ptr + row), last)
    value = tl.load(weight_ptr + token * size + at, mask=at < size, other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out_ptr + row * size + at, value, mask=at < size)


def write_hidden(hidden: Tensor, slots: Tensor, store: Store) -> None:
    """Do reference.write_hidden."""
    first, second = store
    size, width = first.shape[-1], slots.shape[1]
    _write_hidden[(slots.numel(), triton.cdiv(size, 1024))](
        hidden.contiguous(),
        slots,
        first,
        second,
        size,
        width,
        slots.stride(0),
        slots.stride(1),
        first.stride(1),
        BLOCK=1024,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["width", "slot_row"])
def _write_hidden(
    x_ptr,
    slots_ptr,
    out_ptr,
    second_ptr,
    size,
    width,
    slot_row,
    slot_place,
    out_slot,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token // width * slot_row + token % width * slot_place)
    source, target, inside = token * 2 * size + at, slot * out_slot + at, at < size
    tl.store(out_ptr + target, tl.load(x_ptr + source, mask=inside), mask=inside)
    tl.store(second_ptr + target, tl.load(x_ptr + source + size, mask=inside), mask=inside)


def read_hidden(positions: Tensor, segments: Segments, own: Store, prompt: Store) -> Tensor:
    """Do reference.read_hidden."""
    size, width = own[0].shape[-1], positions.shape[1]
    out = own[0].new_empty(*positions.shape, 2 * size)
    _read_hidden[(positions.numel(), triton.cdiv(size, 1024))](
        positions,
        segments.base,
        segments.start,
        segments.own,
        *own,
        *prompt,
        out,
        size,
        width,
        positions.stride(0),
        positions.stride(1),
        own[0].stride(1),
        BLOCK=1024,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["width", "position_row"])
def _read_hidden(
    position_ptr,
    base_ptr,
    start_ptr,
    own_ptr,
    key_ptr,
    value_ptr,
    prompt_key_ptr,
    prompt_value_ptr,
    out_ptr,
    size,
    width,
    position_row,
    position_place,
    slot_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, place = token // width, token % width
    position = tl.load(position_ptr + row * position_row + place * position_place)
    base = tl.load(base_ptr + row)
    private = position >= base
    own = tl.load(own_ptr + row) - base
    slot = position + tl.where(private, own, tl.load(start_ptr + row))
    source, inside = slot * slot_size + at, at < tl.where(position >= 0, size, 0)
    first = tl.where(private, key_ptr, prompt_key_ptr)
    second = tl.where(private, value_ptr, prompt_value_ptr)
    target = out_ptr + token * 2 * size + at
    tl.store(target, tl.load(first + source, mask=inside, other=0.0), mask=at < size)
    tl.store(target + size, tl.load(second + source, mask=inside, other=0.0), mask=at < size)


def norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Do reference.norm, one program a row."""
    residual = residual.contiguous()
    size = residual.shape[-1]
    normed = torch.empty_like(residual)
    total = residual if x is None else torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    _norm[(residual.numel() // size,)](
        residual if x is None else x.contiguous(),
        residual,
        weight,
        weight if bias is None else bias,
        normed,
        total,
        eps,
        size,
        ADD=x is not None,
        LAYER=kind == "layer",
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return normed, total


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    total_ptr,
    eps,
    size,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(residual_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + at, value, mask=inside)
        value = value.to(tl.float32)
    out = normalise(value, at, size, weight_ptr, bias_ptr, eps, LAYER, BIAS)
    tl.store(normed_ptr + row + at, out.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalise(value, at, size, weight_ptr, bias_ptr, eps, LAYER: tl.constexpr, BIAS: tl.constexpr):
    """Return the norm of a row of float32 values at places `at`, which are 0 from `size` on."""
    inside = at < size
    if LAYER:
        value = tl.where(inside, value - tl.sum(value, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    out = value * scale * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return out


def activation(x: Tensor, kind: str, *, gated: bool) -> Tensor:
    """Do reference.activation."""
    x = x.contiguous()
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    out = x.new_empty(*x.shape[:-1], size)
    block = min(1024, triton.next_power_of_2(size))
    _activation[(out.numel() // size, triton.cdiv(size, block))](
        x, out, size, KIND=KINDS[kind], GATED=gated, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def activate(value, KIND: tl.constexpr):
    """Apply the activation KIND (a value of KINDS) to float32 values."""
    if KIND == 0:
        value = value * tl.sigmoid(value)
    elif KIND == 1:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == 2:
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    else:
        value = tl.maximum(value, 0.0)
        if KIND == 4:
            value = value * value
    return value


@triton.jit
def _activation(x_ptr, out_ptr, size, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    start = row * size * (2 if GATED else 1)
    gate = tl.load(x_ptr + start + at, mask=inside, other=0.0)
    value = gate.to(tl.float32)
    value = activate(value, KIND)
    if GATED:
        value = value.to(gate.dtype).to(tl.float32)
        value *= tl.load(x_ptr + start + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, value.to(out_ptr.dtype.element_ty), mask=inside)


def gate_outputs(x: Tensor, gate: Tensor) -> Tensor:
    """Do reference.gate_outputs."""
    size, rows = x.shape[-1], x.numel() // x.shape[-1]
    x = x.contiguous()
    gate = gate.flatten(0, -2) if gate.dim() > 2 else gate
    out = torch.empty_like(x)
    _gate_outputs[(rows, triton.cdiv(size, 1024))](
        x, gate, out, size, gate.stride(0), BLOCK=1024, num_warps=4
    )
    return out


@triton.jit
def _gate_outputs(x_ptr, gate_ptr, out_ptr, size, gate_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    found = value * tl.sigmoid(gate)
    tl.store(out_ptr + row * size + at, found.to(out_ptr.dtype.element_ty), mask=inside)


def angles(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Do reference.angles, one program a position."""
    half = len(inverse)
    cos, sin = (inverse.new_empty(*positions.shape, half) for _ in range(2))
    _angles[(positions.numel(),)](
        positions.contiguous(),
        inverse,
        cos,
        sin,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
    )
    return cos, sin


@triton.jit
def _angles(position_ptr, inverse_ptr, cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    one, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < HALF
    position = tl.load(position_ptr + one).to(tl.float32)
    radians = position * tl.load(inverse_ptr + at, mask=inside, other=0.0)
    tl.store(cos_ptr + one * HALF + at, tl.cos(radians), mask=inside)
    tl.store(sin_ptr + one * HALF + at, tl.sin(radians), mask=inside)


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
    """Do reference.rope_write, one program a token and tile of heads."""
    keys = own[0]
    kv_heads, _, size = keys.shape
    rows, width = slots.shape
    if qkv.stride(2) != 1 or qkv.stride(0) != width * qkv.stride(1):
        qkv = qkv.contiguous()  # a part of each line of a product is read where it is
    q = qkv.new_empty(rows, width, heads, size)
    cos, sin = angles if angles is not None else (qkv, qkv)
    half = cos.shape[-1] if angles is not None else 0
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    # heads a program, and warps. 64 / 512 tokens of 32 heads, 8 of keys, us on an H100: one head
    # 4.6 / 30.7; 4 heads 2.2 / 7.2; 8 heads in two warps 2.4 / 5.7
    tile, warps = (4, 1) if rows * width <= 256 else (8, 2)
    tile = min(tile, triton.next_power_of_2(max(heads, kv_heads)))  # a drafter has keys only
    tiles = triton.cdiv(heads, tile)
    _rope_write[(rows * width, tiles + triton.cdiv(kv_heads, tile))](
        qkv,
        cos,
        sin,
        slots,
        q_norm,
        k_norm,
        q,
        *arguments(own),
        eps,
        width,
        qkv.stride(1),
        slots.stride(0),
        slots.stride(1),
        keys.stride(0),
        keys.stride(1),
        H=heads,
        K=kv_heads,
        D=size,
        HALF=half,
        NORM=norms is not None,
        TILE=tile,
        TILES=tiles,
        BLOCK=triton.next_power_of_2(size),
        num_warps=warps,
        **leading(qkv.device),
    )
    return q


@triton.jit
def finite(values):
    """Replace values that are not finite by 0."""
    return tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)


@triton.jit(do_not_specialize=["width", "slot_row"])
def _rope_write(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    scale_head,
    eps,
    width,
    qkv_token,
    slot_row,
    slot_place,
    key_head,
    key_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Programs: tokens, by TILES tiles of TILE heads of queries, then tiles of heads of keys and
    values."""
    let_next(LEADS)
    token, tile = tl.program_id(0), tl.program_id(1)
    row, place = token // width, token % width
    lane, at = tl.arange(0, TILE), tl.arange(0, BLOCK)
    line = qkv_ptr + token.to(tl.int64) * qkv_token
    angle = token.to(tl.int64) * HALF
    if tile < TILES:
        head = tile * TILE + lane
        there = (head < H)[:, None]
        found = rotated_heads(
            line + (head * D)[:, None],
            there,
            cos_ptr + angle,
            sin_ptr + angle,
            q_norm_ptr,
            eps,
            D,
            HALF,
            NORM,
            BLOCK,
        )
        found = (found + found * 0).to(q_ptr.dtype.element_ty)
        target = q_ptr + (token.to(tl.int64) * H + head)[:, None] * D + at[None, :]
        tl.store(target, found, mask=there & (at < D)[None, :])
    else:
        head = (tile - TILES) * TILE + lane
        there = (head < K)[:, None]
        inside = there & (at < D)[None, :]
        source = line + ((H + head) * D)[:, None]
        keys = rotated_heads(
            source, there, cos_ptr + angle, sin_ptr + angle, k_norm_ptr, eps, D, HALF, NORM, BLOCK
        )
        values = tl.load(source + K * D + at[None, :], mask=inside, other=0.0)
        stored = values.to(tl.float32)
        # a key is NaN where its value is not finite and stored as 0
        keys = (keys + (keys * 0 + stored * 0)).to(values.dtype)
        values = finite(values)
        slot = tl.load(slots_ptr + row * slot_row + place * slot_place)
        spot = (head.to(tl.int64) * key_head)[:, None] + slot * key_slot + at[None, :]
        if key_scale_ptr is not None:
            keys, key_scales = encode(keys.to(tl.float32))
            values, value_scales = encode(values.to(tl.float32))
            one = (head.to(tl.int64) * scale_head + slot)[:, None]
            tl.store(key_scale_ptr + one, key_scales.to(tl.float16), mask=there)
            tl.store(value_scale_ptr + one, value_scales.to(tl.float16), mask=there)
        tl.store(keys_ptr + spot, keys, mask=inside)
        tl.store(values_ptr + spot, values, mask=inside)


@triton.jit
def rotated_heads(
    source,
    there,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load heads, apply norm and rope (both optional): [heads, BLOCK] float32.

    source: pointers to the heads, there: mask, both [heads, 1]. cos_ptr, sin_ptr: a pointer to the
    token's, or [heads, 1]. They are read for all heads.
    """
    at = tl.arange(0, BLOCK)
    raw = tl.load(source + at[None, :], mask=there & (at < D)[None, :], other=0.0)
    value = raw.to(tl.float32)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale * tl.load(norm_ptr + at, mask=at < D, other=0.0).to(tl.float32)[None, :]
        value = value.to(raw.dtype).to(tl.float32)
    if HALF > 0:
        rotated = at < 2 * HALF
        partner = tl.where(at < HALF, at + HALF, at - HALF)
        far = tl.load(source + partner[None, :], mask=there & rotated[None, :], other=0.0)
        far = far.to(tl.float32)
        if NORM:
            weights = tl.load(norm_ptr + partner, mask=rotated, other=0.0).to(tl.float32)
            far *= scale * weights[None, :]
            far = far.to(raw.dtype).to(tl.float32)
        angle = tl.where(at < HALF, at, at - HALF)[None, :]
        cos = tl.load(cos_ptr + angle, mask=rotated[None, :], other=1.0)
        sin = tl.load(sin_ptr + angle, mask=rotated[None, :], other=0.0)
        turned = value * cos + tl.where((at < HALF)[None, :], -far, far) * sin
        value = tl.where(rotated[None, :], turned, value)
    return value
