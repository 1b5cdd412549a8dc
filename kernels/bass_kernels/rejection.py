"""Triton: the draws of maximal coupling (modified rejection sampling) straight from logits.
Definition: acceptance.py.

No law is written down: truncation.py finds each row's edges, and p(x), q(x) and max(p - q, 0)
are computed from logits and edges where they are needed. The test of a row's drafts and the draw
after them are one launch: every program of a row repeats the test, and looks for the best noisy
token of its chunk of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise
from .launch import counters
from .sampling import Law
from .truncation import BLOCK, CHUNK, FIELDS, edges
from .vocabulary import better, gumbel, lawful, nobody, philox, probability, read

_DRAFT, _TEST, _RESIDUAL, _BONUS = (
    tl.constexpr(s) for s in (noise.DRAFT, noise.TEST, noise.RESIDUAL, noise.BONUS)
)
_FOUND = 4  # of a chunk: best score and its token, by the law in question and by the target's


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    origins: Tensor,
) -> tuple[Tensor, Law]:
    """As acceptance.draft_sample, without asking the host anything; the law is logits with their
    edges."""
    logits = logits.contiguous()
    law = Law(logits, edges(logits, temperature, top_k, top_p))
    return draw(law, keys, positions, origins), law


def draw(law: Law, keys: Tensor, positions: Tensor, origins: Tensor) -> Tensor:
    """One token [N] int64 from each law (logits [N, V] with edges), by noise of the DRAFT
    stream."""
    rows, vocab = law.values.shape
    chunks = triton.cdiv(vocab, CHUNK)
    tokens = torch.empty(rows, dtype=torch.int64, device=law.values.device)
    found = torch.empty(rows, chunks, _FOUND, dtype=torch.float32, device=law.values.device)
    _draw[(rows, chunks)](
        law.values,
        law.edges,
        keys.contiguous(),
        positions.contiguous(),
        origins.contiguous(),
        found,
        tokens,
        counters(law.values.device, rows),
        vocab,
        chunks,
        **_shape(chunks),
    )
    return tokens


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
    found = torch.empty(rows, chunks, _FOUND, dtype=torch.float32, device=device)
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
        **_shape(chunks),
    )
    return accepted, following, block, scores


def _shape(chunks: int) -> dict[str, int]:
    return {
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(chunks),
        "FIELDS": FIELDS,
        "FOUND": _FOUND,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }


@triton.jit
def _address(row, key_ptr, position_ptr, origin_ptr):
    """The words that address a row's noise."""
    key_0, key_1 = (
        tl.load(key_ptr + 2 * row).to(tl.uint32),
        tl.load(key_ptr + 2 * row + 1).to(tl.uint32),
    )
    return (
        key_0,
        key_1,
        tl.load(position_ptr + row).to(tl.uint32),
        tl.load(origin_ptr + row).to(tl.uint32),
    )


@triton.jit
def _best(
    logits_ptr,
    at,
    edges_ptr,
    q_logits_ptr,
    q_at,
    q_edges_ptr,
    proposed,
    start,
    end,
    vocab,
    q_vocab,
    key_0,
    key_1,
    position,
    origin,
    stream,
    POINT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best noisy token of start to end by max(p - q, 0) and by p. p: the law of row `at`; q:
    that of row `q_at` with q_vocab tokens, or with POINT all of `proposed` (-1: none)."""
    divisor, threshold, peak, mass, only = lawful(edges_ptr, at, True, FIELDS)
    if POINT == 0:
        q_divisor, q_threshold, q_peak, q_mass, q_only = lawful(
            q_edges_ptr, q_at, q_vocab > 0, FIELDS
        )
    score, token, _value = nobody()
    own_score, own_token, _own = nobody()
    for first in range(start, end, BLOCK):
        tokens, _scaled, raw = read(logits_ptr, at, first, vocab, divisor, BLOCK)
        p = probability(raw, tokens, divisor, threshold, peak, mass, only)
        most = tl.max(p, 0)
        if most > 0:
            if tl.log(most) + 23.0 > score:  # no noise is larger
                if POINT:
                    rest = tl.where(tokens == proposed, 0.0, p)
                else:
                    _tokens, _scaled, q_raw = read(
                        q_logits_ptr, q_at, first, q_vocab, q_divisor, BLOCK
                    )
                    q = probability(q_raw, tokens, q_divisor, q_threshold, q_peak, q_mass, q_only)
                    rest = p - q
                drawn = gumbel(first, key_0, key_1, position, origin, stream, BLOCK)
                scores = tl.where(rest > 0, tl.log(rest) + drawn, -float("inf"))
                score, token, _value = better(score, token, score, scores, tokens, scores)
                scores = tl.where(p > 0, tl.log(p) + drawn, -float("inf"))
                own_score, own_token, _own = better(
                    own_score, own_token, own_score, scores, tokens, scores
                )
    return score, token, own_score, own_token


@triton.jit
def _note(at, score, token, own_score, own_token):
    tl.store(at, score)
    tl.store(at + 1, token.to(tl.float32))
    tl.store(at + 2, own_score)
    tl.store(at + 3, own_token.to(tl.float32))
    tl.debug_barrier()


@triton.jit
def _best_noted(at, chunks, vocab, CHUNKS: tl.constexpr, FOUND: tl.constexpr):
    """The token of a row: the best of the chunks' own, or by the target's law where the other
    has no mass; one of the vocabulary even where that is NaN."""
    index = tl.arange(0, CHUNKS)
    here, inside = at + index * FOUND, index < chunks
    scores = tl.load(here, mask=inside, other=-float("inf"), cache_modifier=".cg")
    tokens = tl.load(here + 1, mask=inside, other=16777216.0, cache_modifier=".cg").to(tl.int32)
    own_scores = tl.load(here + 2, mask=inside, other=-float("inf"), cache_modifier=".cg")
    own_tokens = tl.load(here + 3, mask=inside, other=16777216.0, cache_modifier=".cg").to(tl.int32)
    nothing, nobodys, _x = nobody()
    score, token, _x = better(nothing, nobodys, nothing, scores, tokens, scores)
    _score, own_token, _x = better(nothing, nobodys, nothing, own_scores, own_tokens, own_scores)
    return tl.minimum(tl.where(score > nothing, token, own_token), vocab - 1).to(tl.int64)


@triton.jit
def _draw(
    logits_ptr,
    edges_ptr,
    key_ptr,
    position_ptr,
    origin_ptr,
    found_ptr,
    token_ptr,
    arrived_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    key_0, key_1, position, origin = _address(row, key_ptr, position_ptr, origin_ptr)
    start, rows_at = chunk * CHUNK, found_ptr + row * chunks * FOUND
    score, token, own_score, own_token = _best(
        logits_ptr,
        row,
        edges_ptr,
        logits_ptr,
        row,
        edges_ptr,
        -1,
        start,
        tl.minimum(start + CHUNK, vocab),
        vocab,
        vocab,
        key_0,
        key_1,
        position,
        origin,
        _DRAFT,
        True,
        FIELDS,
        BLOCK,
    )
    _note(rows_at + chunk * FOUND, score, token, own_score, own_token)
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        tl.store(token_ptr + row, _best_noted(rows_at, chunks, vocab, CHUNKS, FOUND))


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
    key_0, key_1, length, _origin = _address(row, key_ptr, length_ptr, length_ptr)
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
    score, token, own_score, own_token = _best(
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
    _note(rows_at + chunk * FOUND, score, token, own_score, own_token)
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        following = _best_noted(rows_at, chunks, vocab, CHUNKS, FOUND)
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
