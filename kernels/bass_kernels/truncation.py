"""Triton: passes of one program over a part of a row's vocabulary, with Gumbel noise; and with them
the edges of processed distributions (temperature, top-k, top-p, min-p; definition:
sampling.process), without a sort.

A row's edges describe its distribution without writing it to memory: exp(x - peak) / mass for x =
logit / T at or above a threshold. The threshold is the largest value such that the tokens from it
on have top_p of the mass (or number top_k), or more if min_p raises it (see `edges`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import counters
from .sampling import COLDEST, HOTTEST

_COLDEST, _HOTTEST = tl.constexpr(COLDEST), tl.constexpr(HOTTEST)
# the smallest finite float32: the peak before any logit was read
LOWEST = tl.constexpr(-3.4028234663852886e38)
# In place of a token if there is none. Chunks store tokens as float32, which holds all whole
# numbers up to this one.
NO_TOKEN = tl.constexpr(1 << 24)


@triton.jit
def philox(c0, c1, c2, c3, key_0, key_1):
    """Philox4x32-10 (noise.py): return four words for each counter, all uint32."""
    factor_0, factor_1 = c0 * 0 + 0xD2511F53, c2 * 0 + 0xCD9E8D57
    for _ in tl.static_range(10):
        low_0, high_0 = c0 * factor_0, tl.umulhi(c0, factor_0)
        low_1, high_1 = c2 * factor_1, tl.umulhi(c2, factor_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(first, key_0, key_1, position, origin, stream, BLOCK: tl.constexpr):
    """Return Gumbel noise of a stream for tokens first to first + BLOCK; first is a multiple of 4
    (noise.py)."""
    block = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = block * 0
    c0, c1, c2, c3 = philox(block, zero + position, zero + origin, zero + stream, key_0, key_1)
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [BLOCK])
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v / 6)))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(1.0 - v)))


@triton.jit
def load_temperature(temperature_ptr, row):
    """Return a row's temperature, clamped as in sampling.py, and its divisor."""
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature < _COLDEST, 0.0, tl.minimum(temperature, _HOTTEST))
    return temperature, tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def noise_address(entry, row, key_ptr, position_ptr):
    """Return the words that address a row's noise: the key of its entry, and its position."""
    key_0 = tl.load(key_ptr + 2 * entry).to(tl.uint32)
    key_1 = tl.load(key_ptr + 2 * entry + 1).to(tl.uint32)
    return key_0, key_1, tl.load(position_ptr + row).to(tl.uint32)


@triton.jit
def no_candidate():
    """Return an empty candidate: score, token and scaled logit."""
    nothing = tl.full([], -float("inf"), tl.float32)
    return nothing, tl.full([], NO_TOKEN, tl.int32), nothing


@triton.jit
def better_candidate(score, token, x, scores, tokens, xs):
    """Return the better of a candidate and a block of others; the first token on ties."""
    top = tl.max(scores, 0)
    first = tl.min(tl.where(scores == top, tokens, NO_TOKEN), 0)
    value = tl.max(tl.where(tokens == first, xs, -float("inf")), 0)
    wins = (top > score) | ((top == score) & (first < token))
    return tl.where(wins, top, score), tl.where(wins, first, token), tl.where(wins, value, x)


@triton.jit
def merge_best(at, inside):
    """Return the best score among the candidates that a row's chunks stored, and its token, which
    is stored after it."""
    scores = tl.load(at, mask=inside, other=-float("inf"), cache_modifier=".cg")
    tokens = tl.load(at + 1, mask=inside, other=NO_TOKEN, cache_modifier=".cg").to(tl.int32)
    nothing, no_token, _x = no_candidate()
    score, token, _x = better_candidate(nothing, no_token, nothing, scores, tokens, scores)
    return score, token


@triton.jit
def merge_masses(mass_at, raw_at, inside, peaks, peak, divisor):
    """Return a row's mass relative to its peak, processed and raw, from its chunks' masses relative
    to their own peaks."""
    masses = tl.load(mass_at, mask=inside, other=0.0, cache_modifier=".cg")
    raws = tl.load(raw_at, mask=inside, other=0.0, cache_modifier=".cg")
    mass = tl.sum(masses * tl.exp(peaks - peak), 0)
    return mass, tl.sum(raws * tl.exp((peaks - peak) * divisor), 0)


@triton.jit
def read_block(logits_ptr, row, first, vocab, divisor, BLOCK: tl.constexpr):
    """Load a block of a row's tokens. Returns token ids, scaled and raw logits; -inf beyond the
    vocabulary."""
    tokens = first + tl.arange(0, BLOCK)
    raw = tl.load(
        logits_ptr + row.to(tl.int64) * vocab + tokens, mask=tokens < vocab, other=-float("inf")
    ).to(tl.float32)
    return tokens, raw / divisor, raw


@triton.jit
def scan(
    logits_ptr,
    row,
    start,
    end,
    vocab,
    temperature,
    divisor,
    key_0,
    key_1,
    position,
    BLOCK: tl.constexpr,
):
    """Return the best candidate of tokens start to end, their peak, and their mass relative to it,
    processed and raw."""
    score, token, best_x = no_candidate()
    peak = tl.full([], LOWEST, tl.float32)
    mass, raw_mass = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(start, end, BLOCK):
        tokens, x, raw = read_block(logits_ptr, row, first, vocab, divisor, BLOCK)
        most = tl.max(x, 0)
        top = tl.maximum(peak, most)
        mass = mass * tl.exp(peak - top) + tl.sum(tl.exp(x - top), 0)
        # while all logits are -inf the product may exceed float32, and -inf - -inf is NaN
        raw_top = tl.where(top > LOWEST, top * divisor, 0.0)
        raw_mass = raw_mass * tl.exp((peak - top) * divisor) + tl.sum(tl.exp(raw - raw_top), 0)
        peak = top
        scores = x
        if temperature > 0:
            if most + 23.0 > score:  # 23 bounds the noise
                scores = x + gumbel(first, key_0, key_1, position, 0, 0, BLOCK)
        score, token, best_x = better_candidate(score, token, best_x, scores, tokens, x)
    return score, token, best_x, peak, mass, raw_mass


@triton.jit
def order(x):
    """Map float32 to int32, keeping the order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


FIELDS = 8
"""Number of float32 fields of a row's edges: divisor, threshold, peak, mass, the only token (-1 if
there are several), raw mass (of unprocessed logits, relative to peak * divisor); then goal and
phase of the search."""

_FIELDS = tl.constexpr(FIELDS)

BLOCK = 1024
_BLOCK = tl.constexpr(BLOCK)
CHUNK = 4 * BLOCK
_PIVOTS = tl.constexpr(16)
_SMALL = tl.constexpr(512)  # tokens a step with 16 pivots
# passes spread over chunks; rows that need more continue in the last one, one program a row
_PASSES = 4
# for each chunk: weights above the pivots; peak, its first token, mass, raw mass
_FOUND = tl.constexpr(_PIVOTS.value + 4)
# number of low float32 bits that are 0 in each dtype
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# phases of the search; 0: the edges are found
_COUNT, _COUNT_ON, _WEIGH, _MASS, _MASS_ON, _FLOOR = (tl.constexpr(phase) for phase in range(1, 7))
_LOWEST = tl.constexpr(-2139095041)  # order(-inf)


def edges(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """Compute the edges [N, FIELDS] float32 of the processed distributions of logits [N, V],
    without synchronising with the host.

    The threshold is searched among all values of the logits' dtype, with 16 pivots a pass; each
    pass is spread over chunks of the vocabulary.

    temperature, top_p, min_p [M] float32 and top_k [M] int64 belong to N / M consecutive rows each.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    out = torch.empty(rows, FIELDS, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, chunks, _FOUND.value, dtype=torch.float32, device=logits.device)
    search = torch.empty(rows, 3, dtype=torch.int64, device=logits.device)
    given = (
        logits,
        temperature.contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        None if min_p is None else min_p.contiguous(),
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
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(chunks),
        "num_warps": 4,
    }
    _survey[(rows, chunks)](*given, **shape)
    for step in range(_PASSES):
        _narrow[(rows, chunks)](*given, **shape, LAST=step == _PASSES - 1)
    return out


@triton.jit
def load_edges(edges_ptr, row, inside):
    """Load the edges of a distribution, by row(s): divisor, threshold, peak, mass, the only token
    or -1."""
    at = edges_ptr + row * _FIELDS
    divisor = tl.load(at, mask=inside, other=1.0)
    threshold = tl.load(at + 1, mask=inside, other=0.0)
    peak, mass = tl.load(at + 2, mask=inside, other=0.0), tl.load(at + 3, mask=inside, other=1.0)
    return divisor, threshold, peak, mass, tl.load(at + 4, mask=inside, other=-1.0).to(tl.int32)


@triton.jit
def probability(raw, tokens, divisor, threshold, peak, mass, only):
    """Return the processed probability of tokens with these logits. Sampling, tests and residuals
    all use this arithmetic."""
    x = raw / divisor
    kept = tl.where(x >= threshold, tl.exp(x - peak) / mass, 0.0)
    return tl.where(only < 0, kept, (tokens == only).to(tl.float32))


@triton.jit
def _code(value, SHIFT: tl.constexpr):
    """Return a value's rank among all values of the logits' dtype, int64."""
    return (order(value) >> SHIFT).to(tl.int64)


@triton.jit
def _value(code, SHIFT: tl.constexpr):
    """Return the value of a rank, the inverse of `_code`."""
    whole = code << SHIFT
    whole = tl.where(code < 0, whole | ((1 << SHIFT) - 1), whole).to(tl.int32)
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(phase, low, high, top, mass, top_p, divisor, vocab, SHIFT: tl.constexpr):
    """Return the ranks to test next, between low and high. A search begins with values at equal
    distances."""
    step = tl.arange(0, _PIVOTS)
    codes = low + 1 + (high - low - 1) * step // _PIVOTS
    if (phase == _COUNT) | (phase == _MASS):
        # All tokens `reach` or more below the peak have less than 1 - top_p of the mass together,
        # even if they were the whole vocabulary.
        reach = (
            tl.log(vocab / ((1.0 - tl.minimum(top_p, 0.9999)) * tl.maximum(mass, 1.0))) + 1.0
        ) * divisor
        most = _value(top, SHIFT)
        least = tl.maximum(most - tl.maximum(reach, divisor), _value(low, SHIFT))
        codes = _code(least + (most - least) * (step.to(tl.float32) / _PIVOTS), SHIFT)
    codes = tl.minimum(tl.maximum(codes, low + 1), high - 1)
    return tl.where((phase == _WEIGH) | (phase == _FLOOR), low, codes)


@triton.jit
def _above(logits_ptr, row, start, end, vocab, divisor, peak, counting, pivots):
    """Return the number, or the mass, of the tokens start to end whose scaled logit reaches each
    pivot."""
    total = tl.zeros([_PIVOTS, _SMALL], tl.float32)
    for first in range(start, end, _SMALL):
        tokens, x, _raw = read_block(logits_ptr, row, first, vocab, divisor, _SMALL)
        weight = tl.where(counting, (tokens < vocab).to(tl.float32), tl.exp(x - peak))
        total += tl.where(x[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(total, 1)


@triton.jit
def _floor(min_p_ptr, entry, peak):
    """Return the smallest scaled logit that min_p keeps; -inf without min_p."""
    floor = peak - float("inf")
    if min_p_ptr is not None:
        floor = peak + tl.log(tl.load(min_p_ptr + entry))
    return floor


@triton.jit
def _advance(
    phase, low, high, top, mass, goal, top_p, codes, weights, divisor, floor, SHIFT: tl.constexpr
):
    """Advance the search after a pass. low: the last rank known to reach the goal. high: the first
    known not to. mass: from low on, once the search is over mass; in the end from `floor` on if
    that is higher."""
    ends = phase == _FLOOR
    if (phase == _WEIGH) | ends:
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
    raises = (phase == 0) & (floor > _value(low, SHIFT) / divisor)
    phase = tl.where(ends, 0, tl.where(raises, _FLOOR, phase))
    return phase, low, high, mass, goal


@triton.jit
def _survey(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    found_ptr,
    edges_ptr,
    search_ptr,
    arrived_ptr,
    each,
    vocab,
    chunks,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Compute the peak and mass of a chunk of a row. The last chunk combines them and sets up the
    row's search."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, divisor = load_temperature(temperature_ptr, row // each)
    start = chunk * CHUNK
    _score, token, peak, _peak, mass, raw_mass = scan(
        logits_ptr, row, start, tl.minimum(start + CHUNK, vocab), vocab, 0, divisor, 0, 0, 0, _BLOCK
    )
    at = found_ptr + (row * chunks + chunk) * _FOUND + _PIVOTS
    tl.store(at, peak)
    tl.store(at + 1, token.to(tl.float32))
    tl.store(at + 2, mass)
    tl.store(at + 3, raw_mass)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
        tl.store(arrived_ptr + row, 0)
        index = tl.arange(0, CHUNKS)
        here, inside = found_ptr + (row * chunks + index) * _FOUND + _PIVOTS, index < chunks
        peak, token = merge_best(here, inside)
        token = tl.minimum(token, vocab - 1)  # a row of NaN has no best token
        peaks = tl.load(here, mask=inside, other=-float("inf"), cache_modifier=".cg")
        mass, raw_mass = merge_masses(here + 2, here + 3, inside, peaks, peak, divisor)
        top_k, top_p = tl.load(top_k_ptr + row // each), tl.load(top_p_ptr + row // each)
        top = _code(tl.load(logits_ptr + row.to(tl.int64) * vocab + token).to(tl.float32), SHIFT)
        counting = (top_k > 0) & (top_k < vocab)
        phase = tl.where(counting, _COUNT, tl.where(top_p < 1.0, _MASS, 0))
        if min_p_ptr is not None:
            has_floor = (phase == 0) & (tl.load(min_p_ptr + row // each) > 0)
            phase = tl.where(has_floor, _FLOOR, phase)
        edge = edges_ptr + row * _FIELDS
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
    min_p_ptr,
    found_ptr,
    edges_ptr,
    search_ptr,
    arrived_ptr,
    each,
    vocab,
    chunks,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LAST: tl.constexpr,
):
    """Do one pass over a chunk of a row whose edges are not found yet. The last chunk to finish
    advances the search."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    edge, place = edges_ptr + row * _FIELDS, search_ptr + 3 * row
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
        floor = _floor(min_p_ptr, row // each, peak)
        codes = _pivots(phase, low, high, top, mass, top_p, divisor, vocab, SHIFT)
        pivots = tl.where(phase == _FLOOR, floor, _value(codes, SHIFT) / divisor)
        start, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab)
        at = found_ptr + (row * chunks + chunk) * _FOUND
        if tl.load(at + _PIVOTS) < tl.min(pivots, 0):  # no logit of this chunk reaches a pivot
            end = start
        weights = _above(logits_ptr, row, start, end, vocab, divisor, peak, phase < _WEIGH, pivots)
        tl.store(at + tl.arange(0, _PIVOTS), weights)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
            tl.store(arrived_ptr + row, 0)
            index = tl.arange(0, CHUNKS)[:, None]
            parts = tl.load(
                found_ptr + (row * chunks + index) * _FOUND + tl.arange(0, _PIVOTS)[None, :],
                mask=index < chunks,
                other=0.0,
                cache_modifier=".cg",
            )
            phase, low, high, mass, goal = _advance(
                phase,
                low,
                high,
                top,
                mass,
                goal,
                top_p,
                codes,
                tl.sum(parts, 0),
                divisor,
                floor,
                SHIFT,
            )
            if LAST:
                while phase > 0:
                    codes = _pivots(phase, low, high, top, mass, top_p, divisor, vocab, SHIFT)
                    pivots = tl.where(phase == _FLOOR, floor, _value(codes, SHIFT) / divisor)
                    weights = _above(
                        logits_ptr, row, 0, vocab, vocab, divisor, peak, phase < _WEIGH, pivots
                    )
                    phase, low, high, mass, goal = _advance(
                        phase,
                        low,
                        high,
                        top,
                        mass,
                        goal,
                        top_p,
                        codes,
                        weights,
                        divisor,
                        floor,
                        SHIFT,
                    )
            tl.store(edge + 1, tl.maximum(_value(low, SHIFT) / divisor, floor))
            tl.store(edge + 3, mass)
            tl.store(edge + 6, goal)
            tl.store(edge + 7, phase.to(tl.float32))
            tl.store(place, low)
            tl.store(place + 1, high)
