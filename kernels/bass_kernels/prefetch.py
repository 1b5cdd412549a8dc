"""Triton: prefetch the weights of the next product into the L2 cache.

Attention does so, because the programs of that product leave the memory idle as they end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import card

_MOST_TOKENS = 64  # in a pass; with more tokens products are compute-bound
# Maximum bytes of a weight to prefetch. One H200, 8B model, 64 tokens, us a pass: none 5,229, 16
# MiB 5,222, 32 MiB 5,207. With contexts of some 4,000 tokens: 6,404, 6,371, 6,345.
_MOST = 32 << 20
_PREFETCH_BYTES = tl.constexpr(2048)  # bytes a thread prefetches with one instruction
_LANES = tl.constexpr(128)


def can_prefetch(device: torch.device) -> bool:
    """Return whether a device has the bulk prefetch instruction."""
    return device.type == "cuda" and card(device).capability >= (9, 0)


def prefetch_blocks(weight: Tensor | None, tokens: int) -> int:
    """Return how many blocks of _PREFETCH_BYTES of a weight to prefetch in a pass over so many
    tokens; 0 if prefetching does not pay or is not possible."""
    if weight is None or tokens > _MOST_TOKENS or not can_prefetch(weight.device):
        return 0
    if weight.data_ptr() % 16:
        return 0
    return min(_MOST, weight.numel() * weight.element_size()) // _PREFETCH_BYTES.value


@triton.jit
def prefetch_weight(weight_ptr, blocks, program, programs):
    """Prefetch this program's share of the first `blocks` of a weight, without waiting."""
    share = tl.cdiv(blocks, programs)
    for first in range(0, share, _LANES):
        lane = first + tl.arange(0, _LANES)
        block = program * share + lane
        inside = (lane < share) & (block < blocks)
        at = weight_ptr.to(tl.int64) + block.to(tl.int64) * _PREFETCH_BYTES
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
