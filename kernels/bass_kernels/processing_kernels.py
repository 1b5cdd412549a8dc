"""Triton: logits processors in one pass over the vocabulary (definition: processing.py), and the
log-probabilities of given tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import processing
from .vocabulary import LOWEST

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
        penalties.shape[1],
        vocab if counts is None else counts.shape[1],
        0 if allowed is None else allowed.shape[1],
        *((0, 0) if masks is None else masks.shape[1:]),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out


@triton.jit(do_not_specialize=["width", "most_rows", "most_places"])
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
    most_rows,
    counted,
    allowed_words,
    most_places,
    mask_words,
    BLOCK: tl.constexpr,
):
    line, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    row, place = tl.load(row_ptr + line), tl.load(place_ptr + line)
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab
    x = tl.load(logits_ptr + line * vocab + tokens, mask=inside, other=0.0).to(tl.float32)
    if count_ptr is not None:
        repetition = tl.load(penalty_ptr + row)
        presence = tl.load(penalty_ptr + most_rows + row)
        frequency = tl.load(penalty_ptr + 2 * most_rows + row)
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
