"""Triton: the edges of processed laws (temperature, top-k, top-p; definition: sampling.process),
without a sort.

A row's edges say what its law is without writing it down: exp(x - peak) / mass for x = logit / T
from the threshold on. The threshold is the largest value such that the tokens from it on have
top_p of the mass (or are top_k): its place among all values of the logits' type is searched with
16 pivots a look, each look spread over chunks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import counters
from .vocabulary import (
    best_found,
    everything,
    lawful,
    masses_found,
    order,
    probability,
    read,
    settled,
)

FIELDS = 8
"""Of a row's edges, float32: divisor, threshold, peak, mass, the only token (-1: many), raw mass
(of the logits as they are, relative to peak * divisor); then the search's goal and phase."""

BLOCK = 1024
CHUNK = 4 * BLOCK
_PIVOTS = 16
_SMALL = 512  # tokens at a time beside 16 pivots
# spread over chunks; the last one goes on by itself, one program a row, where more are needed
_LOOKS = 4
_FOUND = _PIVOTS + 4  # of a chunk: weights above the pivots; peak, its first token, mass, raw mass
# bits of a float32 that the type leaves 0
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# 0: the edges are found
_COUNT, _COUNT_ON, _WEIGH, _MASS, _MASS_ON = (tl.constexpr(phase) for phase in range(1, 6))
_LOWEST = tl.constexpr(-2139095041)  # order(-inf)


def edges(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The edges [N, FIELDS] float32 of the processed laws of logits [N, V], without asking the host
    anything.

    temperature, top_p [M] float32 and top_k [M] int64 belong to N / M rows each, in a row.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    out = torch.empty(rows, FIELDS, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, chunks, _FOUND, dtype=torch.float32, device=logits.device)
    search = torch.empty(rows, 3, dtype=torch.int64, device=logits.device)
    given = (
        logits,
        temperature.contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        found,
        out,
        search,
        counters(logits.device, rows),
        rows // len(temperature),
        vocab,
        chunks,
    )
    shape = {
        "SHIFT": _SHIFTS[logits.dtype],
        "PIVOTS": _PIVOTS,
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(chunks),
        "FIELDS": FIELDS,
        "FOUND": _FOUND,
        "num_warps": 4,
    }
    _survey[(rows, chunks)](*given, **shape, BLOCK=BLOCK)
    for look in range(_LOOKS):
        _narrow[(rows, chunks)](*given, **shape, BLOCK=_SMALL, LAST=look == _LOOKS - 1)
    return out


def process(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As sampling.process, without asking the host anything."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _dense[(rows, triton.cdiv(vocab, BLOCK))](
        logits, edges(logits, temperature, top_k, top_p), out, vocab, FIELDS=FIELDS, BLOCK=BLOCK
    )
    return out


@triton.jit
def _dense(logits_ptr, edges_ptr, out_ptr, vocab, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    divisor, threshold, peak, mass, only = lawful(edges_ptr, row, True, FIELDS)
    tokens, _x, raw = read(logits_ptr, row, first, vocab, divisor, BLOCK)
    p = probability(raw, tokens, divisor, threshold, peak, mass, only)
    tl.store(out_ptr + row.to(tl.int64) * vocab + tokens, p, mask=tokens < vocab)


@triton.jit
def _code(value, SHIFT: tl.constexpr):
    """A value's place in the order of all values of the logits' type, int64."""
    return (order(value) >> SHIFT).to(tl.int64)


@triton.jit
def _value(code, SHIFT: tl.constexpr):
    """The value at a place: `_code` backwards."""
    whole = code << SHIFT
    whole = tl.where(code < 0, whole | ((1 << SHIFT) - 1), whole).to(tl.int32)
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(
    phase, low, high, top, mass, top_p, divisor, vocab, SHIFT: tl.constexpr, PIVOTS: tl.constexpr
):
    """The places to look at next: between low and high. A search begins with values at equal
    distances."""
    step = tl.arange(0, PIVOTS)
    codes = low + 1 + (high - low - 1) * step // PIVOTS
    if (phase == _COUNT) | (phase == _MASS):
        # What lies `reach` below the peak has less than 1 - top_p of the mass, if it were the
        # whole vocabulary.
        reach = (
            tl.log(vocab / ((1.0 - tl.minimum(top_p, 0.9999)) * tl.maximum(mass, 1.0))) + 1.0
        ) * divisor
        most = _value(top, SHIFT)
        least = tl.maximum(most - tl.maximum(reach, divisor), _value(low, SHIFT))
        codes = _code(least + (most - least) * (step.to(tl.float32) / PIVOTS), SHIFT)
    codes = tl.minimum(tl.maximum(codes, low + 1), high - 1)
    return tl.where(phase == _WEIGH, low, codes)


@triton.jit
def _above(
    logits_ptr,
    row,
    start,
    end,
    vocab,
    divisor,
    peak,
    counting,
    pivots,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The number or the mass of those of the tokens start to end whose scaled logit reaches each
    of the pivots."""
    total = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        tokens, x, _raw = read(logits_ptr, row, first, vocab, divisor, BLOCK)
        weight = tl.where(counting, (tokens < vocab).to(tl.float32), tl.exp(x - peak))
        total += tl.where(x[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(total, 1)


@triton.jit
def _advance(phase, low, high, top, mass, goal, top_p, codes, weights):
    """The search after a look. low is the last place known to reach the goal, high the first
    known not to; `mass`: from low on, once mass is what is searched."""
    if phase == _WEIGH:
        mass = tl.max(weights, 0)
        goal = top_p * mass
        high = top + 1
        phase = tl.where((top_p < 1.0) & (high - low > 1), _MASS, 0)
    else:
        enough = weights >= goal
        reached = tl.maximum(low, tl.max(tl.where(enough, codes, low), 0))
        high = tl.min(tl.where(enough | (codes <= reached), high, codes), 0)
        if phase >= _MASS:
            if reached > low:
                mass = tl.max(tl.where(codes == reached, weights, 0.0), 0)
            phase = tl.where(high - reached > 1, _MASS_ON, 0)
        else:
            phase = tl.where(high - reached > 1, _COUNT_ON, _WEIGH)
        low = reached
    return phase, low, high, mass, goal


@triton.jit
def _survey(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    found_ptr,
    edges_ptr,
    search_ptr,
    arrived_ptr,
    each,
    vocab,
    chunks,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The peak and the mass of a chunk of a row; after the last chunk, of the row, and what is
    to be searched."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, divisor = settled(temperature_ptr, row // each)
    start = chunk * CHUNK
    _score, token, peak, _peak, mass, raw_mass = everything(
        logits_ptr, row, start, tl.minimum(start + CHUNK, vocab), vocab, 0, divisor, 0, 0, 0, BLOCK
    )
    at = found_ptr + (row * chunks + chunk) * FOUND + PIVOTS
    tl.store(at, peak)
    tl.store(at + 1, token.to(tl.float32))
    tl.store(at + 2, mass)
    tl.store(at + 3, raw_mass)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        index = tl.arange(0, CHUNKS)
        here, inside = found_ptr + (row * chunks + index) * FOUND + PIVOTS, index < chunks
        peak, token = best_found(here, inside)
        token = tl.minimum(token, vocab - 1)  # nobody's, in a row of NaN
        peaks = tl.load(here, mask=inside, other=-float("inf"), cache_modifier=".cg")
        mass, raw_mass = masses_found(here + 2, here + 3, inside, peaks, peak, divisor)
        top_k, top_p = tl.load(top_k_ptr + row // each), tl.load(top_p_ptr + row // each)
        top = _code(tl.load(logits_ptr + row.to(tl.int64) * vocab + token).to(tl.float32), SHIFT)
        counting = (top_k > 0) & (top_k < vocab)
        phase = tl.where(counting, _COUNT, tl.where(top_p < 1.0, _MASS, 0))
        edge = edges_ptr + row * FIELDS
        tl.store(edge, divisor)
        tl.store(edge + 1, -float("inf"))
        tl.store(edge + 2, peak)
        tl.store(edge + 3, mass)
        tl.store(edge + 4, tl.where(temperature > 0, -1.0, token.to(tl.float32)))
        tl.store(edge + 5, raw_mass)
        tl.store(edge + 6, tl.where(counting, top_k.to(tl.float32), top_p * mass))
        tl.store(edge + 7, tl.where(temperature > 0, phase, 0).to(tl.float32))
        tl.store(search_ptr + 3 * row, tl.full([], _LOWEST, tl.int64) >> SHIFT)
        tl.store(search_ptr + 3 * row + 1, top + 1)
        tl.store(search_ptr + 3 * row + 2, top)


@triton.jit
def _narrow(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    found_ptr,
    edges_ptr,
    search_ptr,
    arrived_ptr,
    each,
    vocab,
    chunks,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    """One look at a chunk of a row whose edges are not found yet; the row's last chunk to be
    done concludes."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    edge, place = edges_ptr + row * FIELDS, search_ptr + 3 * row
    phase = tl.load(edge + 7).to(tl.int32)
    if phase > 0:
        divisor, peak, mass, goal = (
            tl.load(edge),
            tl.load(edge + 2),
            tl.load(edge + 3),
            tl.load(edge + 6),
        )
        low, high, top = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        top_p = tl.load(top_p_ptr + row // each)
        codes = _pivots(phase, low, high, top, mass, top_p, divisor, vocab, SHIFT, PIVOTS)
        pivots = _value(codes, SHIFT) / divisor
        start, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab)
        at = found_ptr + (row * chunks + chunk) * FOUND
        if tl.load(at + PIVOTS) < tl.min(pivots, 0):  # nothing here reaches any
            end = start
        weights = _above(
            logits_ptr, row, start, end, vocab, divisor, peak, phase < _WEIGH, pivots, PIVOTS, BLOCK
        )
        tl.store(at + tl.arange(0, PIVOTS), weights)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
            tl.store(arrived_ptr + row, 0)
            index = tl.arange(0, CHUNKS)[:, None]
            parts = tl.load(
                found_ptr + (row * chunks + index) * FOUND + tl.arange(0, PIVOTS)[None, :],
                mask=index < chunks,
                other=0.0,
                cache_modifier=".cg",
            )
            phase, low, high, mass, goal = _advance(
                phase, low, high, top, mass, goal, top_p, codes, tl.sum(parts, 0)
            )
            if LAST:
                while phase > 0:
                    codes = _pivots(
                        phase, low, high, top, mass, top_p, divisor, vocab, SHIFT, PIVOTS
                    )
                    weights = _above(
                        logits_ptr,
                        row,
                        0,
                        vocab,
                        vocab,
                        divisor,
                        peak,
                        phase < _WEIGH,
                        _value(codes, SHIFT) / divisor,
                        PIVOTS,
                        BLOCK,
                    )
                    phase, low, high, mass, goal = _advance(
                        phase, low, high, top, mass, goal, top_p, codes, weights
                    )
            tl.store(edge + 1, _value(low, SHIFT) / divisor)
            tl.store(edge + 3, mass)
            tl.store(edge + 6, goal)
            tl.store(edge + 7, phase.to(tl.float32))
            tl.store(place, low)
            tl.store(place + 1, high)
