"""Triton: passes of one program over a part of a row's vocabulary, for sampling_kernels.py,
truncation.py and acceptance_kernels.py."""

import triton
import triton.language as tl

from .sampling import COLDEST, HOTTEST

_COLDEST, _HOTTEST = tl.constexpr(COLDEST), tl.constexpr(HOTTEST)
# the smallest finite float32: the peak before any logit was read
LOWEST = tl.constexpr(-3.4028234663852886e38)


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
    return nothing, tl.full([], 16777216, tl.int32), nothing


@triton.jit
def better_candidate(score, token, x, scores, tokens, xs):
    """Return the better of a candidate and a block of others; the first token on ties."""
    top = tl.max(scores, 0)
    first = tl.min(tl.where(scores == top, tokens, 16777216), 0)
    value = tl.max(tl.where(tokens == first, xs, -float("inf")), 0)
    wins = (top > score) | ((top == score) & (first < token))
    return tl.where(wins, top, score), tl.where(wins, first, token), tl.where(wins, value, x)


@triton.jit
def merge_best(at, inside):
    """Return the best score among the candidates that a row's chunks stored, and its token, which
    is stored after it."""
    scores = tl.load(at, mask=inside, other=-float("inf"), cache_modifier=".cg")
    tokens = tl.load(at + 1, mask=inside, other=16777216.0, cache_modifier=".cg").to(tl.int32)
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
