"""Triton: gate and up product of a transformer block for 17 to 64 tokens, with the activation, in
one launch. Definition: fused.py.

Weights are the left factor, so that their lines fill the side of 64 that Hopper's tensor cores want
and the tokens take the other; tensor descriptors bring both in, with zeros for what is beyond
them. Not here: products of fewer tokens, norm included (products.py), and of more, the library's.
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
# Lines of a tile of each weight, of the depth at a time, warps: the best of 49 cuts for a 7B's
# layers (docs/LOG.md).
_LINES, _DEEP, _WARPS = 64, 64, 4


def serves(tokens: int, weight: Tensor) -> bool:
    """Whether `gate_up` is made for that many tokens and weight [2 lines, depth]: it was measured
    on Hopper in 16 bits, and its descriptors want lines that begin at multiples of 16 bytes."""
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
    """activation(x G^T) * (x U^T): [..., lines] for x [..., depth] of at most MOST_TOKENS tokens
    and weight [2 lines, depth], G over U, of 16 bits."""
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
    """As many as let all programs that share a processor be there at once: three do of a 7B's 296
    (an H200 has 132), two of an 8B's 192, which with norm and down take 88.9 us by 3 stages, 87.1
    by 4."""
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
        # the last tile's gates may reach into the ups: such lines are not stored
        w = weight.load([first + LINES, start])
        ups = tl.dot(w, tokens, ups)
    line, token = first + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    tl.store(
        out_ptr + token[None, :] * LINES + line[:, None],
        (activate(gates, KIND) * ups).to(out_ptr.dtype.element_ty),
        mask=(token < count)[None, :] & (line < LINES)[:, None],
    )
