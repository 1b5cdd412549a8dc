"""Triton: the router of a mixture of experts. Definition: experts.route. Logits are one launch, and
the choice of each token's experts is the next."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import after, input_precision, leading, let_next, overlap, stages_that_fit

_TOKENS = 16  # of a tile, the fewest of a tensor core's product
_LINES = 64  # rows of a tile of the router's matrix, if there are many tokens
_DEPTH = 64  # inputs of a step
# Up to so many tokens, inputs are split over programs. One program would read the
# whole matrix of few tokens.
_SPLIT_TOKENS = 256
_SPLIT_DEPTH = 256  # inputs of a split
_MOST_SPLITS = 16


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, *, chosen: int, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Do experts.route."""
    (tokens, width), experts = x.shape, len(router)
    few = tokens <= _SPLIT_TOKENS
    splits = min(_MOST_SPLITS, triton.cdiv(width, _SPLIT_DEPTH)) if few else 1
    lines = 16 if few else _LINES
    parts = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    _logits[(triton.cdiv(tokens, _TOKENS), triton.cdiv(experts, lines), splits)](
        x.contiguous(),
        router,
        parts,
        tokens,
        width,
        experts,
        SPLITS=splits,
        TOKENS=_TOKENS,
        LINES=lines,
        BLOCK_K=_DEPTH,
        WIDE=input_precision(x),
        **leading(x.device),
        num_warps=4,
        num_stages=stages_that_fit((lines + _TOKENS) * _DEPTH * x.element_size(), x),
    )
    ids = torch.empty(tokens, chosen, dtype=torch.int64, device=x.device)
    shares = torch.empty(tokens, chosen, dtype=torch.float32, device=x.device)
    _choose[(tokens,)](
        parts,
        x if bias is None else bias,
        ids,
        shares,
        x,
        tokens,
        experts,
        SPLITS=splits,
        BIAS=bias is not None,
        CHOSEN=chosen,
        NORMALISED=normalised,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_C=triton.next_power_of_2(chosen),
        num_warps=1,
        **overlap(True, x.device),
    )
    return ids, shares


@triton.jit(do_not_specialize=["tokens"])
def _logits(
    x_ptr,
    router_ptr,
    part_ptr,
    tokens,
    width,
    experts,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Write the sums of one split of the inputs, for a tile of tokens and experts."""
    let_next(LEADS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * LINES + tl.arange(0, LINES)
    share = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLITS) * BLOCK_K
    low = tl.program_id(2) * share
    high = tl.minimum(low + share, width)
    real, known = token < tokens, expert < experts
    x_lines = x_ptr + token.to(tl.int64)[:, None] * width
    lines = router_ptr + expert[:, None] * width
    logits = tl.zeros([TOKENS, LINES], tl.float32)
    for start in range(low, high, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = (at < high)[None, :]
        x = tl.load(x_lines + at[None, :], mask=real[:, None] & inside, other=0.0)
        w = tl.load(lines + at[None, :], mask=known[:, None] & inside, other=0.0)
        logits = tl.dot(x, tl.trans(w), logits, input_precision=WIDE)
    place = (tl.program_id(2) * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(part_ptr + place, logits, mask=real[:, None] & known[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    part_ptr,
    bias_ptr,
    ids_ptr,
    share_ptr,
    x_ptr,
    tokens,
    experts,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Choose the experts of one token."""
    after(EARLY)
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    known = expert < experts
    logits = tl.zeros([BLOCK_E], tl.float32)
    for split in tl.static_range(SPLITS):
        line = part_ptr + (split * tokens + token) * experts
        logits += tl.load(line + expert, mask=known, other=0.0)
    if BIAS:
        logits += tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)
    # the definition's logits have the dtype of x
    logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    logits = tl.where(known, logits, float("-inf"))
    peak = tl.max(logits, 0)
    mass = tl.sum(tl.exp(logits - peak), 0)
    ids = tl.zeros([BLOCK_C], tl.int32)
    shares = tl.zeros([BLOCK_C], tl.float32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(logits, 0)
        found = tl.min(tl.where(logits == best, expert, experts - 1), 0)
        ids = tl.where(choice == place, found, ids)
        shares = tl.where(choice == place, tl.exp(best - peak), shares)
        logits = tl.where(expert == found, float("-inf"), logits)
    if NORMALISED:
        mass = tl.sum(shares, 0)
    places = token * CHOSEN + choice
    tl.store(ids_ptr + places, ids.to(tl.int64), mask=choice < CHOSEN)
    tl.store(share_ptr + places, shares / mass, mask=choice < CHOSEN)
