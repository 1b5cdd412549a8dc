"""Gated DeltaNet (arXiv 2412.06464) between the two projections of a layer, in plain torch: causal
convolution, gates, the gated delta rule, and the gated norm. The definition, the CPU path, and the
reference of the kernel tests. Rejected drafts cost nothing: see `DeltaState`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import reference

# Added to the sum of squares of a query or key, as in the published models' code.
UNIT_EPS = 1e-6
# Tokens of a chunk of `delta_prompt`. The paper's kernels use 64 too.
CHUNK = 64


class DeltaWeights(NamedTuple):
    """The weights of a layer between its projections.

    convolution: [C, kernel size], a causal filter for each of C channels, the weight of the newest
        token last. The channels are queries [K, Dk], keys [K, Dk], values [H, Dv], for K key heads
        and H value heads. Value head h reads key head h // (H / K).
    decay: [H], A_log of the published checkpoints.
    bias: [H], dt_bias of the published checkpoints.
    norm: [Dv], the weight of the gated norm.
    """

    convolution: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor


class DeltaState(NamedTuple):
    """The recurrent state of S sequences in one layer, by slot.

    state: [S, H, Dk, Dv] float32, after the tokens that were accepted before the last round.
    inputs: [S, R, C + 2H] in the model's dtype. Place p % R holds what the convolution and the
        gates of the token at position p take. R is `places(kernel size, W)` for rounds of up to W
        tokens.

    A round does not write the state after its own tokens, because drafts among them may be
    rejected. The next round first rolls the state forward by the tokens that were accepted. Their
    inputs are still in `inputs`: a round writes at its own positions, so it overwrites rejected
    drafts and nothing that is needed. Thus each round reads and writes the state once.
    """

    state: Tensor
    inputs: Tensor


def places(kernel_size: int, width: int) -> int:
    """Return the places R of `DeltaState.inputs` for rounds of up to `width` tokens: those that may
    be accepted, those of the next round, and what the convolution reads before."""
    return 2 * width + kernel_size - 1


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
) -> Tensor:
    """Roll each row's state forward by its accepted tokens, write it, then compute the outputs of W
    new tokens without writing the state.

    Args:
        qkv: [B, W, C], the input of the convolution.
        gates: [B, W, 2H]. The first half gives beta = sigmoid, the second half the decay
            exp(-exp(decay) softplus(gate + bias)).
        z: [B, W, H Dv], the gate of the norm. These three may be views of one projection.
        slots: [B] int64. A row whose slot is negative is padding: its outputs are 0, and nothing is
            read or written for it.
        positions: [B, W] int64, rising by one along a row.
        advance: [B] int64, the tokens right before `positions[:, 0]` that the state lacks. They
            were new tokens of earlier rounds. Together with W at most R - kernel size + 1.
        eps: of the gated norm.

    Returns:
        [B, W, H Dv] in the dtype of qkv: norm(S^T q) * silu(z) for each head, where
        S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)^T k_t))^T.
    """
    kernel_size, size = weights.convolution.shape[1], state.inputs.shape[1]
    out = torch.zeros_like(z, dtype=qkv.dtype)
    rows = (slots >= 0).nonzero()[:, 0]
    if not len(rows):
        return out
    given = torch.cat((qkv, gates), -1)[rows]
    slots, positions, advance = slots[rows], positions[rows], advance[rows]
    most = int(advance.max())
    before = positions[:, :1] + torch.arange(-most - kernel_size + 1, 0, device=qkv.device)
    past = state.inputs[slots[:, None], before % size].where((before >= 0)[..., None], 0)
    state.inputs[slots[:, None], positions % size] = given
    tokens = _prepared(torch.cat((past, given), 1), weights, state.state.shape)
    current = state.state[slots]
    for place in range(most):
        used = (place >= most - advance).nonzero()[:, 0]
        some = current if len(used) == len(rows) else current[used]
        _step(some, *(one[used, place] for one in tokens[1:]))
        if len(used) < len(rows):
            current[used] = some
    if most:
        state.state[slots] = current
    outputs = []
    for place in range(most, most + qkv.shape[1]):
        query, *token = (one[:, place] for one in tokens)
        _step(current, *token)
        outputs.append(_times(query, current))
    out[rows] = gated_norm(torch.stack(outputs, 1), z[rows], weights.norm, eps).to(out.dtype)
    return out


def delta_prompt(
    qkv: Tensor,
    gates: Tensor,
    z: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    *,
    parts: Tensor,
    eps: float,
) -> Tensor:
    """Compute the outputs of parts of prompts, and their states after all tokens of the parts.

    Args:
        qkv, gates, z: [M, C], [M, 2H], [M, H Dv], see `delta_round`.
        parts: [P, 4] int64, for each part its slot, its first token among the M, its number of
            tokens, and the position of its first token. A part at position 0 begins with an empty
            state; others continue that of their slot. A part without tokens does nothing. No two
            parts have the same slot.

    Returns:
        [M, H Dv] in the dtype of qkv; 0 for tokens of no part. The state of each slot then contains
        all tokens of its part, so its next round has advance 0.
    """
    kernel_size, size = weights.convolution.shape[1], state.inputs.shape[1]
    out = torch.zeros_like(z)
    for slot, begin, count, first in parts.tolist():
        if count == 0:
            continue
        own = slice(begin, begin + count)
        before = torch.arange(first - kernel_size + 1, first, device=qkv.device)
        past = state.inputs[slot, before % size].where((before >= 0)[:, None], 0)
        every = torch.cat((past, torch.cat((qkv[own], gates[own]), -1)))
        behind = first + count
        kept = torch.arange(max(first, behind - kernel_size + 1), behind, device=qkv.device)
        tokens = _prepared(every, weights, state.state.shape)
        initial = state.state[slot] if first else torch.zeros_like(state.state[slot])
        outputs, final = _chunked([one.movedim(0, 1) for one in tokens], initial)
        state.state[slot] = final
        state.inputs[slot, kept % size] = every[-len(kept) :]
        out[own] = gated_norm(outputs.movedim(0, 1), z[own], weights.norm, eps).to(out.dtype)
    return out


def _prepared(inputs: Tensor, weights: DeltaWeights, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return the tokens (see `delta_tokens`) of the last T tokens of inputs
    [..., T + kernel size - 1, C + 2H]."""
    heads, key_size, value_size = shape[1:]
    channels, kernel_size = weights.convolution.shape
    mixed, gates = inputs.float().split((channels, 2 * heads), -1)
    count = inputs.shape[-2] - kernel_size + 1
    filters = weights.convolution.float()
    total = sum(mixed[..., at : at + count, :] * filters[:, at] for at in range(kernel_size))
    return delta_tokens(total, gates[..., kernel_size - 1 :, :], weights, key_size, value_size)


def delta_tokens(
    convolved: Tensor, gates: Tensor, weights: DeltaWeights, key_size: int, value_size: int
) -> tuple[Tensor, ...]:
    """Return query and key [..., T, H, Dk], value [..., T, H, Dv], log of the decay, and beta
    [..., T, H], all float32. Gradients reach all inputs.

    Args:
        convolved: [..., T, C] float32, the output of the convolution.
        gates: [..., T, 2H], see `delta_round`.
    """
    heads = gates.shape[-1] // 2
    values = heads * value_size
    keys = (convolved.shape[-1] - values) // 2
    q, k, v = reference.silu(convolved).split((keys, keys, values), -1)
    group = heads * key_size // keys
    q, k = (one.unflatten(-1, (-1, key_size)).repeat_interleave(group, -2) for one in (q, k))
    # Gates are few, so float64 is cheap. In float32 torch's result for an element may differ in the
    # last bit by its place in a tensor, so by the width of a round.
    beta, gate = gates.double().chunk(2, -1)
    log_decay = -weights.decay.double().exp() * functional.softplus(gate + weights.bias.double())
    query, value = _unit(q) * key_size**-0.5, v.unflatten(-1, (heads, value_size))
    return query, _unit(k), value, log_decay.float(), beta.sigmoid().float()


def _unit(x: Tensor) -> Tensor:
    """Divide vectors [..., D] by their Euclidean norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def _step(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> None:
    """Add one more token to the state [B, H, Dk, Dv], in place."""
    state.mul_(log_decay.double().exp().float()[..., None, None])
    change = (value - _times(key, state)) * beta[..., None]
    state.addcmul_(key[..., None], change[..., None, :])


def _times(x: Tensor, state: Tensor) -> Tensor:
    """Return S^T x for x [B, H, Dk]: [B, H, Dv]."""
    return (x[..., None, :] @ state)[..., 0, :]


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of heads x [..., H, Dv], times silu(z [..., H Dv]): [..., H Dv]."""
    normed = functional.rms_norm(x, weight.shape, weight.float(), eps)
    return normed.flatten(-2) * reference.silu(z.float())


def _chunked(tokens: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of one sequence in chunks (arXiv 2412.06464, section 3.3).

    Args:
        tokens: query and key [H, T, Dk], value [H, T, Dv], log of the decay, and beta [H, T].
        state: [H, Dk, Dv], before the first token.

    Returns:
        Outputs [H, T, Dv], and the state after the last token.
    """
    outputs = []
    for q, k, v, log_a, b in zip(*(one.split(CHUNK, 1) for one in tokens), strict=True):
        total = log_a.cumsum(1)  # of the decays from the chunk's begin
        decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        # The changes U of the state solve (1 + strict lower part of (b K K^T decay)) U = right.
        system = (b[..., None] * k) @ k.mT * decay
        begun = total.exp()[..., None]
        right = b[..., None] * (v - begun * (k @ state))
        change = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(begun * (q @ state) + (q @ k.mT * decay) @ change)
        left = (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + (left * k).mT @ change
    return torch.cat(outputs, 1), state
