"""Triton: weights fetched into a GPU's second-level cache by the kernel before their product, whose
programs leave the memory idle as they end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import card

MOST_TOKENS = 64  # of a pass: beyond, products are bound by operations
# Of a weight, most bytes. One H200, 8B, 64 tokens, us of a pass: none 5,229, 16 MiB 5,222, 32 MiB
# 5,207; with contexts of some 4,000 6,404, 6,371, 6,345.
_MOST = 32 << 20
_PIECE = tl.constexpr(2048)  # bytes that a thread asks for at once
_LANES = tl.constexpr(128)


def fetches(device: torch.device) -> bool:
    """Whether a device has the instruction for it."""
    return device.type == "cuda" and card(device).capability >= (9, 0)


def pieces_of(weight: Tensor | None, tokens: int) -> int:
    """How many pieces of a weight a kernel over so many tokens fetches for what comes behind it: 0
    where that is not done, or not possible."""
    if weight is None or tokens > MOST_TOKENS or not fetches(weight.device):
        return 0
    if weight.data_ptr() % 16:
        return 0
    return min(_MOST, weight.numel() * weight.element_size()) // _PIECE.value


@triton.jit
def fetch(weight_ptr, pieces, program, programs):
    """Ask for this program's share of the first pieces of a weight, and do not wait."""
    share = tl.cdiv(pieces, programs)
    for first in range(0, share, _LANES):
        lane = first + tl.arange(0, _LANES)
        piece = program * share + lane
        inside = (lane < share) & (piece < pieces)
        at = weight_ptr.to(tl.int64) + piece.to(tl.int64) * _PIECE
        tl.inline_asm_elementwise(
            """{
            .reg .pred here;
            setp.ne.s32 here, $2, 0;
            @here cp.async.bulk.prefetch.L2.global [$1], 2048;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [at, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
