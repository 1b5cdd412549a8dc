"""Triton: the largest logit of each group of tokens, in one pass over the rows that are wanted, and
the normalisers of processed distributions. Definitions: likeliest.py, sampling.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .likeliest import GROUP
from .sampling import Normaliser
from .truncation import edges

_GROUP, _GROUPS = tl.constexpr(GROUP), tl.constexpr(64)  # tokens of a group, groups of a program


def group_maxima(logits: Tensor, wanted: Tensor | None) -> Tensor:
    """Do likeliest.group_maxima. Rows that are not wanted are not read."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP)
    maxima = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    _group_maxima[(rows, triton.cdiv(groups, _GROUPS.value))](
        logits,
        logits if wanted is None else wanted.contiguous().view(torch.uint8),
        maxima,
        vocab,
        groups,
        SOME=wanted is not None,
        num_warps=4,
    )
    return maxima


def normaliser(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Normaliser:
    """Do sampling.normaliser without synchronising with the host."""
    divisor, threshold, peak, mass, only = edges(logits, temperature, top_k, top_p, min_p)[:, :5].T
    return Normaliser(divisor, threshold, peak + mass.log(), only.long())


@triton.jit
def _group_maxima(logits_ptr, wanted_ptr, maxima_ptr, vocab, groups, SOME: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    needed = True
    if SOME:
        needed = tl.load(wanted_ptr + row) > 0
    if needed:
        group = part * _GROUPS + tl.arange(0, _GROUPS)
        tokens = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        found = tl.load(
            logits_ptr + row.to(tl.int64) * vocab + tokens, mask=tokens < vocab, other=-float("inf")
        )
        most = tl.max(found.to(tl.float32), 1)
        tl.store(maxima_ptr + row * groups + group, most, mask=group < groups)
