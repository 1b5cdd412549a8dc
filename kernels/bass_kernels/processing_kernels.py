"""Triton: logits processors, the log-probabilities of given tokens, the likeliest tokens of rows,
and the normalisers of processed distributions. Definitions: processing.py, sampling.py.

One launch finds the largest logit of each group of tokens, in one pass over the vocabulary. In
another one program a row takes the best groups one after the other, then the best of their tokens.
Rows that are not wanted are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import processing
from .processing import GROUP
from .sampling import Normaliser
from .truncation import LOWEST, edges, order

_BITS, _GENERATED = tl.constexpr(processing.BITS), tl.constexpr(processing.GENERATED)
_BLOCK = 4096  # tokens of a program
_ALONE = 8192  # tokens of a step where one program reads a whole line


def process_logits(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    drafts: Tensor,
    counts: Tensor | None,
    penalties: Tensor,
    allowed: Tensor | None,
    masks: Tensor | None,
) -> Tensor:
    """Do processing.process_logits."""
    logits = logits.contiguous()
    lines, vocab = logits.shape
    out = torch.empty(lines, vocab, dtype=torch.float32, device=logits.device)
    _process[(lines, triton.cdiv(vocab, _BLOCK))](
        logits,
        out,
        rows,
        places,
        drafts.contiguous(),
        counts,
        penalties,
        allowed,
        masks,
        vocab,
        drafts.shape[1],
        penalties.stride(0),
        vocab if counts is None else counts.shape[1],
        0 if allowed is None else allowed.shape[1],
        *((0, 0) if masks is None else masks.shape[1:]),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out


@triton.jit(do_not_specialize=["width", "penalty_stride", "most_places"])
def _process(
    logits_ptr,
    out_ptr,
    row_ptr,
    place_ptr,
    draft_ptr,
    count_ptr,
    penalty_ptr,
    allowed_ptr,
    mask_ptr,
    vocab,
    width,
    penalty_stride,
    counted,
    allowed_words,
    most_places,
    mask_words,
    BLOCK: tl.constexpr,
):
    """Programs: lines of logits by blocks of tokens. Each applies the penalties of the line's row,
    counting the drafts before the line's place; then the row's allowed tokens; then the mask of the
    place."""
    line, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    row, place = tl.load(row_ptr + line), tl.load(place_ptr + line)
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab
    x = tl.load(logits_ptr + line * vocab + tokens, mask=inside, other=0.0).to(tl.float32)
    if count_ptr is not None:
        repetition = tl.load(penalty_ptr + row)
        presence = tl.load(penalty_ptr + penalty_stride + row)
        frequency = tl.load(penalty_ptr + 2 * penalty_stride + row)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            count = tl.load(count_ptr + row * counted + tokens, mask=inside, other=0)
            for before in range(tl.minimum(place, width)):
                draft = tl.load(draft_ptr + row * width + before)
                if (draft >= first) & (draft < first + BLOCK):
                    count += tl.where(tokens == draft, _GENERATED, 0)
            repeated = tl.where(x > 0, x / repetition, x * repetition)
            x = tl.where(count > 0, repeated, x)
            generated = count // _GENERATED
            x = x - generated.to(tl.float32) * frequency
            x = x - tl.where(generated > 0, presence, 0.0)
    if allowed_ptr is not None:
        bits = tl.load(allowed_ptr + row * allowed_words + tokens // _BITS, mask=inside, other=0)
        x = tl.where(((bits >> (tokens % _BITS)) & 1) == 0, -float("inf"), x)
    if mask_ptr is not None:
        at = row * most_places + tl.minimum(place, most_places - 1)
        bits = tl.load(mask_ptr + at * mask_words + tokens // _BITS, mask=inside, other=0)
        x = tl.where(((bits >> (tokens % _BITS)) & 1) == 0, -float("inf"), x)
    tl.store(out_ptr + line * vocab + tokens, x, mask=inside)


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Do sampling.log_probability."""
    logits, tokens = logits.contiguous(), tokens.contiguous()
    out = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    vocab = logits.shape[-1]
    _log_probability[(tokens.numel(),)](
        logits, tokens, out, vocab, BLOCK=min(_ALONE, triton.next_power_of_2(vocab)), num_warps=16
    )
    return out


@triton.jit
def _log_probability(logits_ptr, token_ptr, out_ptr, vocab, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    peak, mass = tl.full([], LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, vocab, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = tl.load(
            logits_ptr + line * vocab + tokens, mask=tokens < vocab, other=-float("inf")
        ).to(tl.float32)
        top = tl.maximum(peak, tl.max(x, 0))
        mass = mass * tl.exp(peak - top) + tl.sum(tl.exp(x - top), 0)
        peak = top
    token = tl.load(token_ptr + line)
    found = tl.load(logits_ptr + line * vocab + token).to(tl.float32)
    tl.store(out_ptr + line, found - peak - tl.log(mass))


_GROUP, _GROUPS = tl.constexpr(GROUP), tl.constexpr(64)  # tokens of a group, groups of a program
_LOW = tl.constexpr((1 << 32) - 1)
_NONE = tl.constexpr(-(1 << 63))  # less than the key of any token


def likeliest_tokens(
    logits: Tensor, count: int, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do processing.likeliest_tokens without synchronising with the host."""
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
    """Programs: rows. Each takes the `count` best groups one after the other, and then the best of
    their tokens."""
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
