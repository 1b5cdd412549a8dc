"""Triton: maximal coupling, straight from logits: the draft's tokens, and the target's side (block
verification). Definition: acceptance.py.

No distribution is written to memory. truncation.py finds each row's edges; p(x), q(x) and max(w p -
q, 0) are computed from logits and edges where they are needed. Two launches verify: one computes
the masses of the residuals after each accepted draft but the last, spread over the vocabulary. In
the other every program of a row tests its drafts, and finds the best noisy token of its chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise
from .launch import counters
from .sampling import Distribution
from .truncation import (
    BLOCK,
    CHUNK,
    FIELDS,
    better_candidate,
    edges,
    gumbel,
    load_edges,
    merge_best,
    no_candidate,
    noise_address,
    philox,
    probability,
    read_block,
)

_DRAFT, _TEST, _RESIDUAL, _BONUS = (
    tl.constexpr(stream) for stream in (noise.DRAFT, noise.TEST, noise.RESIDUAL, noise.BONUS)
)
# for each chunk: best score and token by max(w p - q, 0), then by the target's p
_FOUND = tl.constexpr(4)
_BLOCK, _FIELDS = tl.constexpr(BLOCK), tl.constexpr(FIELDS)


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    origins: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Distribution]:
    """Do acceptance.draft_sample without synchronising with the host. The returned distribution is
    the logits with their edges."""
    logits = logits.contiguous()
    dist = Distribution(logits, edges(logits, temperature, top_k, top_p, min_p))
    (rows, vocab), device = logits.shape, logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    found = torch.empty(rows, chunks, _FOUND.value, dtype=torch.float32, device=device)
    _draw[(rows, chunks)](
        *dist,
        keys.contiguous(),
        positions.contiguous(),
        origins.contiguous(),
        found,
        tokens,
        counters(device, rows),
        vocab,
        chunks,
        **_shape(chunks),
    )
    return tokens, dist


def _shape(chunks: int) -> dict[str, int]:
    return {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks), "num_warps": 4}


@triton.jit
def _store_best(
    logits_ptr,
    at,
    edges_ptr,
    q_logits_ptr,
    q_at,
    q_edges_ptr,
    proposed,
    weight,
    chunk,
    vocab,
    q_vocab,
    key_0,
    key_1,
    position,
    origin,
    stream,
    found_at,
    POINT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the best noisy token of a chunk by max(w p - q, 0), and by p, for `_load_best`.

    p is the distribution of row `at`. q is that of row `q_at` with q_vocab tokens, or with POINT a
    point mass on `proposed` (-1: none). w is `weight`, at most 1.
    """
    start = chunk * CHUNK
    divisor, threshold, peak, mass, only = load_edges(edges_ptr, at, True)
    if POINT == 0:
        q_divisor, q_threshold, q_peak, q_mass, q_only = load_edges(q_edges_ptr, q_at, q_vocab > 0)
    score, token, _value = no_candidate()
    own_score, own_token, _own = no_candidate()
    for first in range(start, tl.minimum(start + CHUNK, vocab), _BLOCK):
        tokens, _x, raw = read_block(logits_ptr, at, first, vocab, divisor, _BLOCK)
        p = probability(raw, tokens, divisor, threshold, peak, mass, only)
        most = tl.max(p, 0)
        if most > 0:
            if tl.log(most) + 23.0 > score:  # 23 bounds the noise
                if POINT:
                    rest = tl.where(tokens == proposed, 0.0, p)
                else:
                    _tokens, _x, q_raw = read_block(
                        q_logits_ptr, q_at, first, q_vocab, q_divisor, _BLOCK
                    )
                    q = probability(q_raw, tokens, q_divisor, q_threshold, q_peak, q_mass, q_only)
                    rest = weight * p - q
                drawn = gumbel(first, key_0, key_1, position, origin, stream, _BLOCK)
                scores = tl.where(rest > 0, tl.log(rest) + drawn, -float("inf"))
                score, token, _value = better_candidate(score, token, score, scores, tokens, scores)
                scores = tl.where(p > 0, tl.log(p) + drawn, -float("inf"))
                own_score, own_token, _own = better_candidate(
                    own_score, own_token, own_score, scores, tokens, scores
                )
    found_at += chunk * _FOUND
    tl.store(found_at, score)
    tl.store(found_at + 1, token.to(tl.float32))
    tl.store(found_at + 2, own_score)
    tl.store(found_at + 3, own_token.to(tl.float32))
    tl.debug_barrier()


@triton.jit
def _load_best(at, chunks, vocab, CHUNKS: tl.constexpr):
    """Return the token of a row: the best of its chunks, or the best by the target's distribution
    if max(w p - q, 0) has no mass. The token is within the vocabulary even if the scores are NaN.
    """
    index = tl.arange(0, CHUNKS)
    here, inside = at + index * _FOUND, index < chunks
    score, token = merge_best(here, inside)
    _score, own_token = merge_best(here + 2, inside)
    return tl.minimum(tl.where(score > -float("inf"), token, own_token), vocab - 1).to(tl.int64)


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
):
    """Programs: rows by chunks of the vocabulary. Each finds the best noisy token of its chunk. The
    last chunk of a row to finish stores the row's token."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    key_0, key_1, position = noise_address(row, row, key_ptr, position_ptr)
    origin = tl.load(origin_ptr + row).to(tl.uint32)
    rows_at = found_ptr + row * chunks * _FOUND
    _store_best(
        logits_ptr,
        row,
        edges_ptr,
        logits_ptr,
        row,
        edges_ptr,
        -1,
        1.0,
        chunk,
        vocab,
        vocab,
        key_0,
        key_1,
        position,
        origin,
        _DRAFT,
        rows_at,
        True,
        CHUNK,
    )
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        tl.store(token_ptr + row, _load_best(rows_at, chunks, vocab, CHUNKS))


def rejection_sample(
    drafts: Tensor,
    draft_dist: Distribution | None,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do acceptance.rejection_sample without synchronising with the host."""
    logits = logits.contiguous()
    found = edges(logits.flatten(0, 1), temperature, top_k, top_p, min_p)
    return verify(
        drafts,
        draft_dist,
        Distribution(logits, found.view(*logits.shape[:2], FIELDS)),
        keys,
        lengths,
        most,
    )


def verify(
    drafts: Tensor,
    draft_dist: Distribution | None,
    dist: Distribution,
    keys: Tensor,
    lengths: Tensor,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do `rejection_sample` with known edges of the target's distributions: logits [B, k + 1, V],
    edges [B, k + 1, FIELDS]."""
    rows, places, vocab = dist.values.shape
    device, chunks = dist.values.device, triton.cdiv(vocab, CHUNK)
    accepted, following = torch.empty(2, rows, dtype=torch.int64, device=device)
    block = torch.empty(rows, places, dtype=torch.int64, device=device)
    scores = torch.empty(rows, places, dtype=torch.float32, device=device)
    found = torch.empty(rows, chunks, _FOUND.value, dtype=torch.float32, device=device)
    q = dist if draft_dist is None else draft_dist
    assert dist.edges is not None
    assert q.edges is not None
    given = (
        drafts.contiguous(),
        q.values.contiguous(),
        q.edges.contiguous(),
        dist.values,
        dist.edges,
    )
    sizes = places - 1, vocab, q.values.shape[-1], chunks
    shape = _shape(chunks) | {"PLACES": triton.next_power_of_2(places)}
    point = draft_dist is None
    masses = found
    if places > 2 and not point:
        masses = torch.empty(rows, places - 2, chunks, dtype=torch.float32, device=device)
        _residual_masses[(rows, places - 2, chunks)](*given, masses, *sizes, **shape)
    _verify[(rows, chunks)](
        *given,
        masses,
        keys.contiguous(),
        lengths.contiguous(),
        lengths if most is None else most,
        found,
        accepted,
        following,
        block,
        scores,
        counters(device, rows),
        *sizes,
        POINT=point,
        BOUNDED=most is not None,
        **shape,
    )
    return accepted, following, block, scores


@triton.jit
def _draft_probs(
    row,
    draft_ptr,
    q_logits_ptr,
    q_edges_ptr,
    logits_ptr,
    edges_ptr,
    width,
    vocab,
    q_vocab,
    POINT: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Return the probabilities of a row's drafts by the target's distributions and by the draft's,
    [PLACES] each."""
    place = tl.arange(0, PLACES)
    drafted = place < width
    tokens = tl.load(draft_ptr + row * width + place, mask=drafted, other=0).to(tl.int32)
    at = row * (width + 1) + place
    divisor, threshold, peak, mass, only = load_edges(edges_ptr, at, drafted)
    raw = tl.load(logits_ptr + at.to(tl.int64) * vocab + tokens, mask=drafted, other=0.0)
    p = probability(raw.to(tl.float32), tokens, divisor, threshold, peak, mass, only)
    q = tl.full([PLACES], 1.0, tl.float32)
    if POINT == 0:
        at = row * width + place
        divisor, threshold, peak, mass, only = load_edges(q_edges_ptr, at, drafted)
        raw = tl.load(q_logits_ptr + at.to(tl.int64) * q_vocab + tokens, mask=drafted, other=0.0)
        q = probability(raw.to(tl.float32), tokens, divisor, threshold, peak, mass, only)
        q = tl.where(mass > 0, q, 0.0)  # a draft from a distribution with NaN is rejected
    return p, q


@triton.jit
def _element(values, here):
    """Return the element of values [PLACES] at which `here` is true."""
    return tl.sum(tl.where(here, values, 0.0), 0)


@triton.jit
def _next_weight(weight, p, q):
    """Return the weight w after one more draft."""
    weighted = weight * p
    return tl.where((weighted >= q) & (q > 0), 1.0, tl.where(weighted < q, weighted / q, 0.0))


@triton.jit(do_not_specialize=["width"])
def _residual_masses(
    draft_ptr,
    q_logits_ptr,
    q_edges_ptr,
    logits_ptr,
    edges_ptr,
    mass_ptr,
    width,
    vocab,
    q_vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Compute the mass of max(w p - q, 0) in a chunk, after 1 to width - 1 drafts of a row. At w =
    0 and w = 1 the mass is not needed, and nothing is read."""
    row, before, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ps, qs = _draft_probs(
        row,
        draft_ptr,
        q_logits_ptr,
        q_edges_ptr,
        logits_ptr,
        edges_ptr,
        width,
        vocab,
        q_vocab,
        False,
        PLACES,
    )
    place = tl.arange(0, PLACES)
    weight = tl.full([], 1.0, tl.float32)
    for step in range(before + 1):
        weight = _next_weight(weight, _element(ps, place == step), _element(qs, place == step))
    total = tl.zeros([_BLOCK], tl.float32)
    if (weight > 0) & (weight < 1):
        at, q_at = row * (width + 1) + before + 1, row * width + before + 1
        divisor, threshold, peak, mass, only = load_edges(edges_ptr, at, True)
        q_divisor, q_threshold, q_peak, q_mass, q_only = load_edges(q_edges_ptr, q_at, True)
        q_given = tl.where(q_mass > 0, q_vocab, 0)  # if q has NaN, subtract nothing
        start = chunk * CHUNK
        for first in range(start, tl.minimum(start + CHUNK, vocab), _BLOCK):
            tokens, _x, raw = read_block(logits_ptr, at, first, vocab, divisor, _BLOCK)
            p = probability(raw, tokens, divisor, threshold, peak, mass, only)
            _tokens, _x, raw = read_block(q_logits_ptr, q_at, first, q_given, q_divisor, _BLOCK)
            q = probability(raw, tokens, q_divisor, q_threshold, q_peak, q_mass, q_only)
            rest = weight * p - q
            total += tl.where(rest <= 0, 0.0, rest)  # NaN stays NaN
    tl.store(mass_ptr + (row * (width - 1) + before) * chunks + chunk, tl.sum(total, 0))


@triton.jit
def _test_drafts(
    row,
    ps,
    qs,
    mass_ptr,
    key_0,
    key_1,
    length,
    width,
    bound,
    chunks,
    POINT: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return the number of accepted drafts of a row, of the first `bound`, and the weight there."""
    place = tl.arange(0, PLACES)
    zero = (place * 0).to(tl.uint32)
    word, _c1, _c2, _c3 = philox(
        zero, length + place.to(tl.uint32), zero + length, zero + _TEST, key_0, key_1
    )
    us = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
    if POINT == 0:
        chunk = tl.arange(0, CHUNKS)
        lines = (row * (width - 1) + place) * chunks
        inside = (place < width - 1)[:, None] & (chunk < chunks)[None, :]
        masses = tl.load(mass_ptr + lines[:, None] + chunk[None, :], mask=inside, other=0.0)
        masses = tl.sum(masses, 1)
    weight = tl.full([], 1.0, tl.float32)
    kept = tl.full([], 1.0, tl.float32)
    accepted = bound * 0
    for step in range(bound):
        here = place == step
        weight = _next_weight(weight, _element(ps, here), _element(qs, here))
        if POINT:
            mass = weight - weight * _element(ps, place == step + 1)
        else:
            mass = _element(masses, here)
        chance = tl.where(weight < 1, mass / (mass + (1.0 - weight)), 1.0)
        chance = tl.where((step + 1 == bound) | (mass != mass), weight, chance)
        accepts = _element(us, here) < chance
        kept = tl.where(accepts, weight, kept)
        accepted = tl.where(accepts, step + 1, accepted)
    return accepted, kept


@triton.jit(do_not_specialize=["width"])
def _verify(
    draft_ptr,
    q_logits_ptr,
    q_edges_ptr,
    logits_ptr,
    edges_ptr,
    mass_ptr,
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
):
    """Programs: rows by chunks of the vocabulary. Each tests all drafts of its row, so all know how
    many are accepted. Then it finds the best noisy token of its chunk for the place after them. The
    last chunk of a row to finish stores the row's results."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    key_0, key_1, length = noise_address(row, row, key_ptr, length_ptr)
    ps, qs = _draft_probs(
        row,
        draft_ptr,
        q_logits_ptr,
        q_edges_ptr,
        logits_ptr,
        edges_ptr,
        width,
        vocab,
        q_vocab,
        POINT,
        PLACES,
    )
    bound = width
    if BOUNDED:
        bound = tl.minimum(tl.load(most_ptr).to(tl.int32), width)
    accepted, weight = _test_drafts(
        row, ps, qs, mass_ptr, key_0, key_1, length, width, bound, chunks, POINT, PLACES, CHUNKS
    )
    complete = accepted == bound
    proposed = tl.load(draft_ptr + row * width + accepted, mask=accepted < bound, other=-1).to(
        tl.int32
    )
    if POINT == 0:  # subtract nothing from p after the last draft, nor where q has NaN
        q_mass = tl.load(
            q_edges_ptr + (row * width + accepted) * _FIELDS + 3, mask=accepted < bound, other=0.0
        )
        q_vocab = tl.where(q_mass > 0, q_vocab, 0)
    rows_at = found_ptr + row * chunks * _FOUND
    _store_best(
        logits_ptr,
        row * (width + 1) + accepted,
        edges_ptr,
        q_logits_ptr,
        row * width + accepted,
        q_edges_ptr,
        proposed,
        weight,
        chunk,
        vocab,
        q_vocab,
        key_0,
        key_1,
        length + accepted.to(tl.uint32),
        length,
        tl.where(complete, _BONUS, _RESIDUAL).to(tl.uint32),
        rows_at,
        POINT,
        CHUNK,
    )
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        following = _load_best(rows_at, chunks, vocab, CHUNKS)
        tl.store(accepted_ptr + row, accepted.to(tl.int64))
        tl.store(next_ptr + row, following)
        place = tl.arange(0, PLACES)
        at, inside = row * (width + 1) + place, place <= width
        tokens = tl.load(draft_ptr + row * width + place, mask=place < width, other=0)
        tokens = tl.where(place == accepted, following, tokens)
        tl.store(block_ptr + at, tokens, mask=inside)
        divisor, _threshold, peak, _mass, _only = load_edges(edges_ptr, at, inside)
        raw_mass = tl.load(edges_ptr + at * _FIELDS + 5, mask=inside, other=1.0)
        raw = tl.load(logits_ptr + at.to(tl.int64) * vocab + tokens, mask=inside, other=0.0).to(
            tl.float32
        )
        tl.store(score_ptr + at, raw - peak * divisor - tl.log(raw_mass), mask=inside)
