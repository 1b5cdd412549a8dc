"""Triton: the likeliest tokens of rows, and the normalisers of processed distributions.
Definitions: likeliest.py, sampling.py.

One launch finds the largest logit of each group of tokens, in one pass over the vocabulary. In
another one program a row takes the best groups one after the other, then the best of their tokens.
Rows that are not wanted are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .likeliest import GROUP
from .sampling import Normaliser
from .truncation import edges
from .vocabulary import order

_GROUP, _GROUPS = tl.constexpr(GROUP), tl.constexpr(64)  # tokens of a group, groups of a program
_LOW = tl.constexpr((1 << 32) - 1)
_NONE = tl.constexpr(-(1 << 63))  # less than the key of any token


def likeliest_tokens(
    logits: Tensor, count: int, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do likeliest.likeliest_tokens without synchronising with the host."""
    logits = logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    count, groups = min(count, vocab), triton.cdiv(vocab, GROUP)
    needed = logits if wanted is None else wanted.contiguous().view(torch.uint8)
    maxima = torch.empty(rows, groups, dtype=torch.float32, device=device)
    _group_maxima[(rows, triton.cdiv(groups, _GROUPS.value))](
        logits, needed, maxima, vocab, groups, SOME=wanted is not None, num_warps=4
    )
    # zeros, so that ids stay valid while kernels are only compiled (launch.compile_ahead)
    best, tokens = torch.zeros(2, rows, count, dtype=torch.int64, device=device)
    values = torch.empty(rows, count, dtype=torch.float32, device=device)
    _select[(rows,)](
        logits,
        needed,
        maxima,
        best,
        tokens,
        values,
        vocab,
        groups,
        count,
        SOME=wanted is not None,
        GROUPS=triton.next_power_of_2(groups),
        WIDE=triton.next_power_of_2(count) * GROUP,
        num_warps=8,
    )
    return tokens, values


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


@triton.jit
def _key(x, ids):
    """Return keys that order logits, and equal ones by id, smaller ids first."""
    return (order(x + 0.0).to(tl.int64) << 32) + (ids.to(tl.int64) ^ _LOW)


@triton.jit(do_not_specialize=["count"])
def _select(
    logits_ptr,
    wanted_ptr,
    maxima_ptr,
    best_ptr,
    token_ptr,
    found_ptr,
    vocab,
    groups,
    count,
    SOME: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0)
    needed = True
    if SOME:
        needed = tl.load(wanted_ptr + row) > 0
    if needed:
        at = row * count
        group = tl.arange(0, GROUPS)
        maxima = tl.load(maxima_ptr + row * groups + group, mask=group < groups, other=0.0)
        keys = tl.where(group < groups, _key(maxima, group), _NONE)
        for step in range(count):
            key = tl.max(keys, 0)
            tl.store(best_ptr + at + step, (key & _LOW) ^ _LOW)
            keys = tl.where(keys == key, _NONE, keys)
        tl.debug_barrier()
        slot = tl.arange(0, WIDE)
        place = slot // _GROUP
        chosen = tl.load(best_ptr + at + place, mask=place < count, other=0, cache_modifier=".cg")
        tokens = chosen * _GROUP + slot % _GROUP
        inside = (place < count) & (tokens < vocab)
        here = logits_ptr + row.to(tl.int64) * vocab
        x = tl.load(here + tokens, mask=inside, other=0.0).to(tl.float32)
        keys = tl.where(inside, _key(x, tokens), _NONE)
        for step in range(count):
            key = tl.max(keys, 0)
            token = (key & _LOW) ^ _LOW
            tl.store(token_ptr + at + step, token)
            tl.store(found_ptr + at + step, tl.load(here + token).to(tl.float32))
            keys = tl.where(keys == key, _NONE, keys)
