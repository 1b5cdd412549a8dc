"""Triton: sample a token from logits with temperature, top-k, top-p, min-p and Gumbel noise
(Gumbel-max), without a sort. Definition: sampling.py.

A first pass over the vocabulary finds the mass and the best score, logit / T + noise. That token is
the answer if truncation keeps it: less than top_p of the mass and fewer than top_k tokens lie above
its logit, and min_p allows it. If not, nothing at or below its logit is kept, and the best score
above it is next. The result is the argmax over the kept tokens, including ties with the last one.
With top_p 0.95 it takes 1.05 passes on average.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import after, counters, leading, let_next, overlap
from .truncation import (
    LOWEST,
    NO_TOKEN,
    better_candidate,
    gumbel,
    load_temperature,
    merge_masses,
    no_candidate,
    noise_address,
    order,
    read_block,
    scan,
)

# Tokens a program and pass, and warps. 1 / 8 / 64 / 512 rows of 151,936 tokens, us on an H200: 14 /
# 23 / 76 / 521. With 1024 tokens a step and 4096 a program 17 / 29 / 85 / 531, with 1024 a program
# 13 / 24 / 89 / 633.
_BLOCK, _WARPS = tl.constexpr(2048), 4
# Tokens a step where one program does a whole row (_finish_row), which is on the critical path.
_ALONE, _ALONE_WARPS = tl.constexpr(8192), 32
# 0: best score and mass. 1: mass above the candidate. 2: best score above it. 1: its mass again.
# Rows that are still open after these passes are left to _finish_row.
_PASSES = (0, 1, 2, 1)
# For each chunk: best score, its token, its scaled logit, mass (above), peak, raw mass, count
# above. For each row: candidate, its scaled logit, state, mass, peak, raw mass.
_FIELDS = tl.constexpr(8)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Do sampling.sample without synchronising with the host."""
    return sample_scored(logits, temperature, top_k, top_p, keys, positions, min_p)[0]


def sample_scored(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do sampling.sample_scored without synchronising with the host."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _BLOCK.value)
    found = torch.empty(rows, chunks + 1, _FIELDS.value, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, dtype=torch.float32, device=logits.device)
    given = (
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        keys.contiguous(),
        positions.contiguous(),
        found,
        tokens,
        scores,
    )
    arrived, sizes = counters(logits.device, rows), (rows // len(temperature), vocab, chunks)
    for step in _PASSES:
        _pass[(rows, chunks)](
            *given,
            arrived,
            *sizes,
            PASS=step,
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=_WARPS,
            **overlap(step > 0, logits.device),
            **leading(logits.device),
        )
    early = overlap(True, logits.device)
    _finish_row[(rows,)](*given, *sizes, num_warps=_ALONE_WARPS, **early)
    return tokens, scores


@triton.jit
def _fresh(pointer):
    """Load what the pass before has written, past this processor's L1 cache (launch.overlap)."""
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def _within(above, count, top_k, top_p, mass):
    """Return whether truncation keeps a token with `count` tokens of mass `above` above it."""
    return ((top_p >= 1.0) | (above < top_p * mass)) & ((top_k == 0) | (count < top_k))


@triton.jit
def _reaches(min_p_ptr, entry, x, peak):
    """Return whether min_p keeps a token with this scaled logit; None for min_p_ptr: always."""
    kept = x == x
    if min_p_ptr is not None:
        kept = x >= peak + tl.log(tl.load(min_p_ptr + entry))
    return kept


@triton.jit(do_not_specialize=["each"])
def _pass(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    key_ptr,
    position_ptr,
    found_ptr,
    token_ptr,
    score_ptr,
    arrived_ptr,
    each,
    vocab,
    chunks,
    PASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Do one pass over a chunk of a row. The last chunk to finish combines all chunks: it finds the
    row's candidate, or whether the candidate is kept, and in that case stores its token and score.

    State of a row: 0 if its candidate has to be checked, 1 if it is kept, 2 if it is not, 3 if
    top_p applies to the mass of the top_k, which _finish_row computes.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    entry = row // each
    at = found_ptr + (row * (chunks + 1) + chunk) * _FIELDS
    state = found_ptr + (row * (chunks + 1) + chunks) * _FIELDS
    let_next(LEADS)
    after(EARLY)
    needed = True
    if PASS == 1:
        needed = _fresh(state + 2) == 0
    if PASS == 2:
        needed = _fresh(state + 2) == 2
    if needed:
        temperature, divisor = load_temperature(temperature_ptr, entry)
        key_0, key_1, position = noise_address(entry, row, key_ptr, position_ptr)
        start, end = chunk * _BLOCK, tl.minimum(chunk * _BLOCK + _BLOCK, vocab)
        if PASS == 0:
            score, token, best_x, peak, mass, raw_mass = scan(
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
                _BLOCK,
            )
            tl.store(at + 4, peak)
            tl.store(at + 5, raw_mass)
        else:
            x = _fresh(state + 1)
            if _fresh(at + 4) <= x:  # no logit of this chunk is above the candidate's
                end = start
        if PASS == 1:
            mass, count = mass_above(
                logits_ptr, row, start, end, vocab, divisor, x, _fresh(state + 4), _BLOCK
            )
            tl.store(at + 6, count)
        else:
            if PASS == 2:
                score, token, best_x = best_above(
                    logits_ptr, row, start, end, vocab, divisor, key_0, key_1, position, x, _BLOCK
                )
            tl.store(at, score)
            tl.store(at + 1, token.to(tl.float32))
            tl.store(at + 2, best_x)
        if PASS != 2:
            tl.store(at + 3, mass)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
            tl.store(arrived_ptr + row, 0)
            index = tl.arange(0, CHUNKS)
            here = found_ptr + row * (chunks + 1) * _FIELDS + index * _FIELDS
            inside = index < chunks
            top_k, top_p = tl.load(top_k_ptr + entry), tl.load(top_p_ptr + entry)
            now = 0
            if PASS != 1:
                scores = tl.load(here, mask=inside, other=-float("inf"), cache_modifier=".cg")
                tokens = tl.load(here + 1, mask=inside, other=NO_TOKEN, cache_modifier=".cg").to(
                    tl.int32
                )
                xs = tl.load(here + 2, mask=inside, other=-float("inf"), cache_modifier=".cg")
                score, token, x = no_candidate()
                score, token, x = better_candidate(score, token, x, scores, tokens, xs)
                tl.store(state, token.to(tl.float32))
                tl.store(state + 1, x)
            if PASS == 0:
                peaks = tl.load(here + 4, mask=inside, other=LOWEST, cache_modifier=".cg")
                peak = tl.max(peaks, 0)
                mass, raw_mass = merge_masses(here + 3, here + 5, inside, peaks, peak, divisor)
                tl.store(state + 3, mass)
                tl.store(state + 4, peak)
                tl.store(state + 5, raw_mass)
                now = tl.where((top_k > 0) & (top_p < 1.0), 3, 0)
                untruncated = (top_k == 0) & (top_p >= 1.0)
                if min_p_ptr is not None:
                    untruncated = untruncated & (tl.load(min_p_ptr + entry) <= 0)
                now = tl.where((temperature == 0) | untruncated, 1, now)
            if PASS == 1:
                token = _fresh(state).to(tl.int32)
                mass, peak, raw_mass = (_fresh(state + 3), _fresh(state + 4), _fresh(state + 5))
                above = tl.sum(tl.load(here + 3, mask=inside, other=0.0, cache_modifier=".cg"), 0)
                count = tl.sum(tl.load(here + 6, mask=inside, other=0.0, cache_modifier=".cg"), 0)
                kept = _within(above, count, top_k, top_p, mass)
                kept = kept & _reaches(min_p_ptr, entry, _fresh(state + 1), peak)
                now = tl.where(kept, 1, 2)
            tl.store(state + 2, now)
            if PASS != 2:
                if now == 1:
                    _store_token(
                        logits_ptr, row, vocab, token, peak, divisor, raw_mass, token_ptr, score_ptr
                    )


@triton.jit
def _store_token(logits_ptr, row, vocab, token, peak, divisor, raw_mass, token_ptr, score_ptr):
    # a row of NaN has no best token: any token, with score NaN
    token = tl.minimum(token, vocab - 1)
    raw = tl.load(logits_ptr + row.to(tl.int64) * vocab + token).to(tl.float32)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(score_ptr + row, raw - peak * divisor - tl.log(raw_mass))


@triton.jit(do_not_specialize=["each"])
def _finish_row(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    key_ptr,
    position_ptr,
    found_ptr,
    token_ptr,
    score_ptr,
    each,
    vocab,
    chunks,
    EARLY: tl.constexpr,
):
    """Finish the rows that no pass has decided, one program a row."""
    row = tl.program_id(0)
    state = found_ptr + (row * (chunks + 1) + chunks) * _FIELDS
    after(EARLY)
    now = _fresh(state + 2)
    if now != 1:
        token, x = _fresh(state).to(tl.int32), _fresh(state + 1)
        mass, peak, raw_mass = (_fresh(state + 3), _fresh(state + 4), _fresh(state + 5))
        entry = row // each
        _temperature, divisor = load_temperature(temperature_ptr, entry)
        key_0, key_1, position = noise_address(entry, row, key_ptr, position_ptr)
        top_k, top_p = tl.load(top_k_ptr + entry), tl.load(top_p_ptr + entry)
        kept = now == 1
        if now == 3:
            mass = top_mass(logits_ptr, row, vocab, top_k, peak, divisor, _ALONE)
            above, count = mass_above(logits_ptr, row, 0, vocab, vocab, divisor, x, peak, _ALONE)
            kept = _within(above, count, top_k, top_p, mass) | (count == 0)
            kept = kept & _reaches(min_p_ptr, entry, x, peak)
        while kept == 0:
            _score, token, x = best_above(
                logits_ptr, row, 0, vocab, vocab, divisor, key_0, key_1, position, x, _ALONE
            )
            above, count = mass_above(logits_ptr, row, 0, vocab, vocab, divisor, x, peak, _ALONE)
            kept = _within(above, count, top_k, top_p, mass) & _reaches(min_p_ptr, entry, x, peak)
            kept = kept | (count == 0)
        _store_token(logits_ptr, row, vocab, token, peak, divisor, raw_mass, token_ptr, score_ptr)


@triton.jit
def mass_above(logits_ptr, row, start, end, vocab, divisor, x, peak, BLOCK: tl.constexpr):
    """Return mass and count of the tokens start to end whose scaled logit is larger than x."""
    mass, count = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(start, end, BLOCK):
        _tokens, values, _raw = read_block(logits_ptr, row, first, vocab, divisor, BLOCK)
        mass += tl.sum(tl.where(values > x, tl.exp(values - peak), 0.0), 0)
        count += tl.sum((values > x).to(tl.float32), 0)
    return mass, count


@triton.jit
def best_above(
    logits_ptr, row, start, end, vocab, divisor, key_0, key_1, position, x, BLOCK: tl.constexpr
):
    """Return the best candidate of the tokens start to end whose scaled logit is larger than x."""
    score, token, best_x = no_candidate()
    for first in range(start, end, BLOCK):
        tokens, values, _raw = read_block(logits_ptr, row, first, vocab, divisor, BLOCK)
        if tl.max(values, 0) > x:
            noisy = tl.where(
                values > x,
                values + gumbel(first, key_0, key_1, position, 0, 0, BLOCK),
                -float("inf"),
            )
            score, token, best_x = better_candidate(score, token, best_x, noisy, tokens, values)
    return score, token, best_x


@triton.jit
def top_mass(logits_ptr, row, vocab, top_k, peak, divisor, BLOCK: tl.constexpr):
    """Return the mass of the top_k largest and of ties with the last of them, by bisection on the
    bits."""
    low, high = tl.full([], -2147483648, tl.int64), tl.full([], 2147483647, tl.int64)
    for _step in range(32):  # find the largest value that at least top_k tokens reach
        middle = (low + high + 1) >> 1
        count = tl.full([], 0, tl.int32)
        for first in range(0, vocab, BLOCK):
            tokens, x, _raw = read_block(logits_ptr, row, first, vocab, divisor, BLOCK)
            count += tl.sum(((order(x) >= middle) & (tokens < vocab)).to(tl.int32), 0)
        low, high = (
            tl.where(count >= top_k, middle, low),
            tl.where(count >= top_k, high, middle - 1),
        )
    mass = tl.full([], 0.0, tl.float32)
    for first in range(0, vocab, BLOCK):
        _tokens, x, _raw = read_block(logits_ptr, row, first, vocab, divisor, BLOCK)
        mass += tl.sum(tl.where(order(x) >= low, tl.exp(x - peak), 0.0), 0)
    return mass
