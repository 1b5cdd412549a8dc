"""Triton: the target's side of maximal coupling (modified rejection sampling) straight from logits.
Definition: acceptance.py.

The test of a row's drafts and the draw after them are one launch: every program of a row repeats
the test, and looks for the best noisy token of its chunk of the vocabulary (drawing.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise
from .drawing import FOUND_FIELDS, best, best_noted, note, shape_of
from .launch import counters
from .sampling import Law
from .truncation import CHUNK, FIELDS, edges
from .vocabulary import address, lawful, philox, probability

_TEST, _RESIDUAL, _BONUS = (tl.constexpr(s) for s in (noise.TEST, noise.RESIDUAL, noise.BONUS))


def rejection_sample(
    drafts: Tensor,
    draft_law: Law | None,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As acceptance.rejection_sample, without asking the host anything."""
    logits = logits.contiguous()
    found = edges(logits.flatten(0, 1), temperature, top_k, top_p)
    return judge(
        drafts, draft_law, Law(logits, found.view(*logits.shape[:2], FIELDS)), keys, lengths, most
    )


def judge(
    drafts: Tensor,
    draft_law: Law | None,
    law: Law,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rejection_sample` where the edges of the target's laws are known: logits [B, k + 1, V],
    edges [B, k + 1, FIELDS]."""
    rows, places, vocab = law.values.shape
    device, chunks = law.values.device, triton.cdiv(vocab, CHUNK)
    accepted, following = torch.empty(2, rows, dtype=torch.int64, device=device)
    block = torch.empty(rows, places, dtype=torch.int64, device=device)
    scores = torch.empty(rows, places, dtype=torch.float32, device=device)
    found = torch.empty(rows, chunks, FOUND_FIELDS, dtype=torch.float32, device=device)
    q = law if draft_law is None else draft_law
    assert law.edges is not None
    assert q.edges is not None
    _judge[(rows, chunks)](
        drafts.contiguous(),
        q.values.contiguous(),
        q.edges.contiguous(),
        law.values,
        law.edges,
        keys.contiguous(),
        lengths.contiguous(),
        lengths if most is None else most,
        found,
        accepted,
        following,
        block,
        scores,
        counters(device, rows),
        places - 1,
        vocab,
        q.values.shape[-1],
        chunks,
        POINT=draft_law is None,
        BOUNDED=most is not None,
        PLACES=triton.next_power_of_2(places),
        **shape_of(chunks),
    )
    return accepted, following, block, scores


@triton.jit
def _tested(
    row,
    draft_ptr,
    q_logits_ptr,
    q_edges_ptr,
    logits_ptr,
    edges_ptr,
    key_0,
    key_1,
    length,
    width,
    vocab,
    q_vocab,
    POINT: tl.constexpr,
    PLACES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """How many of a row's drafts stand: up to the first with u q(x) >= p(x)."""
    place = tl.arange(0, PLACES)
    drafted = place < width
    tokens = tl.load(draft_ptr + row * width + place, mask=drafted, other=0).to(tl.int32)
    zero = (place * 0).to(tl.uint32)
    word, _c1, _c2, _c3 = philox(
        zero, length + place.to(tl.uint32), zero + length, zero + _TEST, key_0, key_1
    )
    u = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
    at = row * (width + 1) + place
    divisor, threshold, peak, mass, only = lawful(edges_ptr, at, drafted, FIELDS)
    raw = tl.load(logits_ptr + at.to(tl.int64) * vocab + tokens, mask=drafted, other=0.0).to(
        tl.float32
    )
    p = probability(raw, tokens, divisor, threshold, peak, mass, only)
    if POINT == 0:
        at = row * width + place
        divisor, threshold, peak, mass, only = lawful(q_edges_ptr, at, drafted, FIELDS)
        raw = tl.load(
            q_logits_ptr + at.to(tl.int64) * q_vocab + tokens, mask=drafted, other=0.0
        ).to(tl.float32)
        u = u * probability(raw, tokens, divisor, threshold, peak, mass, only)
        drafted = drafted & (mass > 0)  # a law of NaN has none: what was drawn from it is rejected
    return tl.min(tl.where(drafted & (u < p), width, tl.minimum(place, width)), 0)


@triton.jit(do_not_specialize=["width"])
def _judge(
    draft_ptr,
    q_logits_ptr,
    q_edges_ptr,
    logits_ptr,
    edges_ptr,
    key_ptr,
    length_ptr,
    most_ptr,
    found_ptr,
    accepted_ptr,
    next_ptr,
    block_ptr,
    score_ptr,
    arrived_ptr,
    width,
    vocab,
    q_vocab,
    chunks,
    POINT: tl.constexpr,
    BOUNDED: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    key_0, key_1, length = address(row, key_ptr, length_ptr)
    accepted = _tested(
        row,
        draft_ptr,
        q_logits_ptr,
        q_edges_ptr,
        logits_ptr,
        edges_ptr,
        key_0,
        key_1,
        length,
        width,
        vocab,
        q_vocab,
        POINT,
        PLACES,
        FIELDS,
    )
    bound = width
    if BOUNDED:
        bound = tl.minimum(tl.load(most_ptr).to(tl.int32), width)
        accepted = tl.minimum(accepted, bound)
    complete = accepted == bound
    proposed = tl.load(draft_ptr + row * width + accepted, mask=accepted < bound, other=-1).to(
        tl.int32
    )
    if POINT == 0:  # nothing is taken off p after the last draft, nor where the draft's law is NaN
        q_mass = tl.load(
            q_edges_ptr + (row * width + accepted) * FIELDS + 3, mask=accepted < bound, other=0.0
        )
        q_vocab = tl.where(q_mass > 0, q_vocab, 0)
    start, rows_at = chunk * CHUNK, found_ptr + row * chunks * FOUND
    score, token, own_score, own_token = best(
        logits_ptr,
        row * (width + 1) + accepted,
        edges_ptr,
        q_logits_ptr,
        row * width + accepted,
        q_edges_ptr,
        proposed,
        start,
        tl.minimum(start + CHUNK, vocab),
        vocab,
        q_vocab,
        key_0,
        key_1,
        length + accepted.to(tl.uint32),
        length,
        tl.where(complete, _BONUS, _RESIDUAL).to(tl.uint32),
        POINT,
        FIELDS,
        BLOCK,
    )
    note(rows_at + chunk * FOUND, score, token, own_score, own_token)
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        following = best_noted(rows_at, chunks, vocab, CHUNKS, FOUND)
        tl.store(accepted_ptr + row, accepted.to(tl.int64))
        tl.store(next_ptr + row, following)
        place = tl.arange(0, PLACES)
        at, inside = row * (width + 1) + place, place <= width
        tokens = tl.load(draft_ptr + row * width + place, mask=place < width, other=0)
        tokens = tl.where(place == accepted, following, tokens)
        tl.store(block_ptr + at, tokens, mask=inside)
        divisor, _threshold, peak, _mass, _only = lawful(edges_ptr, at, inside, FIELDS)
        raw_mass = tl.load(edges_ptr + at * FIELDS + 5, mask=inside, other=1.0)
        raw = tl.load(logits_ptr + at.to(tl.int64) * vocab + tokens, mask=inside, other=0.0).to(
            tl.float32
        )
        tl.store(score_ptr + at, raw - peak * divisor - tl.log(raw_mass), mask=inside)
