"""Triton: gate and up product of a transformer block with its activation, for 17 to 64 tokens, in
one launch. Definition: fused.py.

Weights are the left factor, so that their rows fill the 64-wide side of Hopper's tensor cores and
tokens take the other side. Tensor descriptors load both, with zeros out of bounds. For fewer tokens
see products.py, which includes the norm; for more, the library's product is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cuts import MOST_TOKENS as FEW
from .launch import card, processors
from .pointwise import KINDS, activate

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

MOST_TOKENS = 64
# Rows of a tile of each weight, depth a step, warps: the best of 49 cuts for the layers of a 7B on
# an H200 (67.2 us a layer; the library's product 74.9).
_LINES, _DEEP, _WARPS = 64, 64, 4


def serves(tokens: int, weight: Tensor) -> bool:
    """Return whether `gate_up` supports this number of tokens and weight [2 lines, depth]. It was
    measured on Hopper in 16 bits only, and its descriptors need rows aligned to 16 bytes."""
    return (
        FEW < tokens <= MOST_TOKENS
        and TensorDescriptor is not None
        and weight.element_size() == 2
        and card(weight.device).capability[0] == 9
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
    )


def gate_up(x: Tensor, weight: Tensor, *, activation: str) -> Tensor:
    """Return activation(x G^T) * (x U^T), [..., lines], for x [..., depth] of at most MOST_TOKENS
    tokens and weight [2 lines, depth], G above U, both 16 bits."""
    lines, depth = len(weight) // 2, weight.shape[1]
    flat = x.reshape(-1, depth)
    tokens = max(16, triton.next_power_of_2(len(flat)))
    out = x.new_empty(*x.shape[:-1], lines)
    programs = triton.cdiv(lines, _LINES)
    _gate_up[(programs,)](
        TensorDescriptor.from_tensor(flat, [tokens, _DEEP]),
        TensorDescriptor.from_tensor(weight, [_LINES, _DEEP]),
        out,
        len(flat),
        KIND=KINDS[activation],
        LINES=lines,
        DEPTH=depth,
        BLOCK=_LINES,
        TOKENS=tokens,
        DEEP=_DEEP,
        STAGES=_stages(programs, x.device),
        num_warps=_WARPS,
    )
    return out


def _stages(programs: int, device: torch.device) -> int:
    """Return the most pipeline stages with which all programs of a processor are resident at once.
    A 7B has 296 programs, three a processor of an H200 (132 processors). An 8B has 192, two a
    processor; with norm and down product they take 88.9 us with 3 stages and 87.1 with 4."""
    return 4 if programs <= 2 * processors(device) else 3


@triton.jit(do_not_specialize=["count"])
def _gate_up(
    x,
    weight,
    out_ptr,
    count,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    gates = tl.zeros([BLOCK, TOKENS], tl.float32)
    ups = tl.zeros([BLOCK, TOKENS], tl.float32)
    for start in tl.range(0, DEPTH, DEEP, num_stages=STAGES):
        w = weight.load([first, start])
        tokens = tl.trans(x.load([0, start]))
        gates = tl.dot(w, tokens, gates)
        # the last tile's gate rows may reach into the up rows; those are masked out at the store
        w = weight.load([first + LINES, start])
        ups = tl.dot(w, tokens, ups)
    line, token = first + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    tl.store(
        out_ptr + token[None, :] * LINES + line[:, None],
        (activate(gates, KIND) * ups).to(out_ptr.dtype.element_ty),
        mask=(token < count)[None, :] & (line < LINES)[:, None],
    )
