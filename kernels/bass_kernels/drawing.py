"""Triton: sample tokens from processed distributions, straight from logits. This is the draft's
side of maximal coupling, and the search for the best noisy token that the target's side
(rejection.py) shares. Definition: acceptance.py.

No distribution is written to memory. truncation.py finds each row's edges; p(x), q(x) and max(w p -
q, 0) are computed from logits and edges where they are needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import counters
from .noise import DRAFT
from .sampling import Distribution
from .truncation import BLOCK, CHUNK, FIELDS, edges
from .vocabulary import (
    address,
    best_found,
    better,
    gumbel,
    load_edges,
    no_candidate,
    probability,
    read,
)

_DRAFT = tl.constexpr(DRAFT)
FOUND_FIELDS = 4  # for each chunk: best score and token by max(w p - q, 0), then by the target's p


def draft_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    origins: Tensor,
) -> tuple[Tensor, Distribution]:
    """Do acceptance.draft_sample without synchronising with the host. The returned distribution is
    the logits with their edges."""
    logits = logits.contiguous()
    dist = Distribution(logits, edges(logits, temperature, top_k, top_p))
    return draw(dist, keys, positions, origins), dist


def draw(dist: Distribution, keys: Tensor, positions: Tensor, origins: Tensor) -> Tensor:
    """Sample one token [N] int64 from each distribution (logits [N, V] with edges), with noise of
    the DRAFT stream."""
    rows, vocab = dist.values.shape
    chunks = triton.cdiv(vocab, CHUNK)
    tokens = torch.empty(rows, dtype=torch.int64, device=dist.values.device)
    found = torch.empty(rows, chunks, FOUND_FIELDS, dtype=torch.float32, device=dist.values.device)
    _draw[(rows, chunks)](
        dist.values,
        dist.edges,
        keys.contiguous(),
        positions.contiguous(),
        origins.contiguous(),
        found,
        tokens,
        counters(dist.values.device, rows),
        vocab,
        chunks,
        **shape_of(chunks),
    )
    return tokens


def shape_of(chunks: int) -> dict[str, int]:
    """Return the launch options shared by all kernels that sample from distributions with edges."""
    return {
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(chunks),
        "FIELDS": FIELDS,
        "FOUND": FOUND_FIELDS,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }


@triton.jit
def best(
    logits_ptr,
    at,
    edges_ptr,
    q_logits_ptr,
    q_at,
    q_edges_ptr,
    proposed,
    weight,
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
    """Find the best noisy token of start to end by max(w p - q, 0), and by p.

    p is the distribution of row `at`. q is that of row `q_at` with q_vocab tokens, or with POINT a
    point mass on `proposed` (-1: none). w is `weight`, at most 1.
    """
    divisor, threshold, peak, mass, only = load_edges(edges_ptr, at, True, FIELDS)
    if POINT == 0:
        q_divisor, q_threshold, q_peak, q_mass, q_only = load_edges(
            q_edges_ptr, q_at, q_vocab > 0, FIELDS
        )
    score, token, _value = no_candidate()
    own_score, own_token, _own = no_candidate()
    for first in range(start, end, BLOCK):
        tokens, _scaled, raw = read(logits_ptr, at, first, vocab, divisor, BLOCK)
        p = probability(raw, tokens, divisor, threshold, peak, mass, only)
        most = tl.max(p, 0)
        if most > 0:
            if tl.log(most) + 23.0 > score:  # 23 bounds the noise
                if POINT:
                    rest = tl.where(tokens == proposed, 0.0, p)
                else:
                    _tokens, _scaled, q_raw = read(
                        q_logits_ptr, q_at, first, q_vocab, q_divisor, BLOCK
                    )
                    q = probability(q_raw, tokens, q_divisor, q_threshold, q_peak, q_mass, q_only)
                    rest = weight * p - q
                drawn = gumbel(first, key_0, key_1, position, origin, stream, BLOCK)
                scores = tl.where(rest > 0, tl.log(rest) + drawn, -float("inf"))
                score, token, _value = better(score, token, score, scores, tokens, scores)
                scores = tl.where(p > 0, tl.log(p) + drawn, -float("inf"))
                own_score, own_token, _own = better(
                    own_score, own_token, own_score, scores, tokens, scores
                )
    return score, token, own_score, own_token


@triton.jit
def note(at, score, token, own_score, own_token):
    """Store a chunk's result of `best` for `best_noted`."""
    tl.store(at, score)
    tl.store(at + 1, token.to(tl.float32))
    tl.store(at + 2, own_score)
    tl.store(at + 3, own_token.to(tl.float32))
    tl.debug_barrier()


@triton.jit
def best_noted(at, chunks, vocab, CHUNKS: tl.constexpr, FOUND: tl.constexpr):
    """Return the token of a row: the best of its chunks, or the best by the target's distribution
    if max(w p - q, 0) has no mass. The token is within the vocabulary even if the scores are NaN.
    """
    index = tl.arange(0, CHUNKS)
    here, inside = at + index * FOUND, index < chunks
    score, token = best_found(here, inside)
    _score, own_token = best_found(here + 2, inside)
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
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    key_0, key_1, position = address(row, row, key_ptr, position_ptr)
    origin = tl.load(origin_ptr + row).to(tl.uint32)
    start, rows_at = chunk * CHUNK, found_ptr + row * chunks * FOUND
    score, token, own_score, own_token = best(
        logits_ptr,
        row,
        edges_ptr,
        logits_ptr,
        row,
        edges_ptr,
        -1,
        1.0,
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
    note(rows_at + chunk * FOUND, score, token, own_score, own_token)
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        tl.store(token_ptr + row, best_noted(rows_at, chunks, vocab, CHUNKS, FOUND))
