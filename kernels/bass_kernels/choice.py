"""Triton: a token from logits by temperature, top-k, top-p and shared noise, without a sort.
Definition: sampling.py.

A first pass over the vocabulary finds the mass and the best score (logit / T + noise). The best
token is the answer if it is kept: if what lies above its logit has less than top_p of the mass,
and fewer than top_k tokens. Otherwise nothing as small as it is kept, and the best score among
the larger logits is next. That is the argmax over the kept tokens, ties with the last one
included, and with top_p 0.95 it takes 1.05 looks on average.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import after, counters, leading, let_next, overlap
from .vocabulary import (
    LOWEST,
    address,
    best_above,
    better,
    everything,
    mass_above,
    masses_found,
    nobody,
    settled,
    top_mass,
)

# Tokens of a program's look, and its warps. 1 / 8 / 64 / 512 rows of 151,936 tokens, us on an H200:
# 14 / 23 / 76 / 521; 1024 at a time of 4096 17 / 29 / 85 / 531, of 1024 13 / 24 / 89 / 633.
_BLOCK, _WARPS = 2048, 4
# Tokens at a time where one program goes through a whole row, which everything waits for.
_ALONE, _ALONE_WARPS = 8192, 32
# everything; the mass above the candidate; the best above it; its mass. The rest is _decide's
_LOOKS = (0, 1, 2, 1)
# of a chunk: best score, its token, its scaled logit, mass (above), peak, raw mass, count above
_FIELDS = 8
# and of a row: candidate, its scaled logit, the row's state, mass, peak, raw mass


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> Tensor:
    """As sampling.sample, without asking the host anything."""
    return sample_scored(logits, temperature, top_k, top_p, keys, positions)[0]


def sample_scored(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """As sampling.sample_scored, without asking the host anything."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _BLOCK)
    found = torch.empty(rows, chunks + 1, _FIELDS, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, dtype=torch.float32, device=logits.device)
    given = (
        logits,
        temperature,
        top_k,
        top_p,
        keys.contiguous(),
        positions.contiguous(),
        found,
        tokens,
        scores,
    )
    spread = {"CHUNKS": triton.next_power_of_2(chunks), "FIELDS": _FIELDS}
    arrived, sizes = counters(logits.device, rows), (rows // len(temperature), vocab, chunks)
    for look in _LOOKS:
        _look[(rows, chunks)](
            *given,
            arrived,
            *sizes,
            LOOK=look,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **spread,
            **overlap(look > 0, logits.device),
            **leading(logits.device),
        )
    early = overlap(True, logits.device)
    _decide[(rows,)](*given, *sizes, BLOCK=_ALONE, FIELDS=_FIELDS, num_warps=_ALONE_WARPS, **early)
    return tokens, scores


@triton.jit
def _past(pointer):
    """What the look before has left: read past the processor's own cache (launch.overlap)."""
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def _within(above, count, top_k, top_p, mass):
    """Whether a token with mass `above` and `count` tokens above it is kept."""
    return ((top_p >= 1.0) | (above < top_p * mass)) & ((top_k == 0) | (count < top_k))


@triton.jit(do_not_specialize=["each"])
def _look(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    key_ptr,
    position_ptr,
    found_ptr,
    token_ptr,
    score_ptr,
    arrived_ptr,
    each,
    vocab,
    chunks,
    LOOK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
    LEADS: tl.constexpr,
):
    """One look at a chunk of a row. The last chunk to be done draws the conclusion for the row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    law = row // each
    at = found_ptr + (row * (chunks + 1) + chunk) * FIELDS
    state = found_ptr + (row * (chunks + 1) + chunks) * FIELDS
    let_next(LEADS)
    after(EARLY)
    due = True
    if LOOK == 1:
        due = _past(state + 2) == 0
    if LOOK == 2:
        due = _past(state + 2) == 2
    if due:
        temperature, divisor = settled(temperature_ptr, law)
        key_0, key_1, position = address(law, row, key_ptr, position_ptr)
        start, end = chunk * BLOCK, tl.minimum(chunk * BLOCK + BLOCK, vocab)
        if LOOK == 0:
            score, token, best_x, peak, mass, raw_mass = everything(
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
                BLOCK,
            )
            tl.store(at + 4, peak)
            tl.store(at + 5, raw_mass)
        else:
            x = _past(state + 1)
            if _past(at + 4) <= x:  # nothing here is above
                end = start
        if LOOK == 1:
            mass, count = mass_above(
                logits_ptr, row, start, end, vocab, divisor, x, _past(state + 4), BLOCK
            )
            tl.store(at + 6, count)
        else:
            if LOOK == 2:
                score, token, best_x = best_above(
                    logits_ptr, row, start, end, vocab, divisor, key_0, key_1, position, x, BLOCK
                )
            tl.store(at, score)
            tl.store(at + 1, token.to(tl.float32))
            tl.store(at + 2, best_x)
        if LOOK != 2:
            tl.store(at + 3, mass)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1) == chunks - 1:
            tl.store(arrived_ptr + row, 0)
            _conclude(
                logits_ptr,
                row,
                vocab,
                found_ptr + row * (chunks + 1) * FIELDS,
                state,
                token_ptr,
                score_ptr,
                chunks,
                temperature,
                divisor,
                tl.load(top_k_ptr + law),
                tl.load(top_p_ptr + law),
                LOOK,
                CHUNKS,
                FIELDS,
            )


@triton.jit
def _conclude(
    logits_ptr,
    row,
    vocab,
    at,
    state,
    token_ptr,
    score_ptr,
    chunks,
    temperature,
    divisor,
    top_k,
    top_p,
    LOOK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """After all looks at a row: its candidate, or whether the candidate is kept, and then its token
    and score.

    A row's state is 0 while its candidate must be checked, 1 when it is kept, 2 when it is not,
    and 3 where top_p is of the mass of the top_k, which is left to _decide.
    """
    chunk = tl.arange(0, CHUNKS)
    here, inside = at + chunk * FIELDS, chunk < chunks
    now = 0
    if LOOK != 1:
        scores = tl.load(here, mask=inside, other=-float("inf"), cache_modifier=".cg")
        tokens = tl.load(here + 1, mask=inside, other=16777216.0, cache_modifier=".cg").to(tl.int32)
        xs = tl.load(here + 2, mask=inside, other=-float("inf"), cache_modifier=".cg")
        score, token, x = nobody()
        score, token, x = better(score, token, x, scores, tokens, xs)
        tl.store(state, token.to(tl.float32))
        tl.store(state + 1, x)
    if LOOK == 0:
        peaks = tl.load(here + 4, mask=inside, other=LOWEST, cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        mass, raw_mass = masses_found(here + 3, here + 5, inside, peaks, peak, divisor)
        tl.store(state + 3, mass)
        tl.store(state + 4, peak)
        tl.store(state + 5, raw_mass)
        now = tl.where((top_k > 0) & (top_p < 1.0), 3, 0)
        now = tl.where((temperature == 0) | ((top_k == 0) & (top_p >= 1.0)), 1, now)
    if LOOK == 1:
        token = _past(state).to(tl.int32)
        mass, peak, raw_mass = _past(state + 3), _past(state + 4), _past(state + 5)
        above = tl.sum(tl.load(here + 3, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        count = tl.sum(tl.load(here + 6, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        now = tl.where(_within(above, count, top_k, top_p, mass), 1, 2)
    tl.store(state + 2, now)
    if LOOK != 2:
        if now == 1:
            _write(logits_ptr, row, vocab, token, peak, divisor, raw_mass, token_ptr, score_ptr)


@triton.jit
def _write(logits_ptr, row, vocab, token, peak, divisor, raw_mass, token_ptr, score_ptr):
    token = tl.minimum(token, vocab - 1)  # nobody's token, in a row of NaN; its score is NaN
    raw = tl.load(logits_ptr + row.to(tl.int64) * vocab + token).to(tl.float32)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(score_ptr + row, raw - peak * divisor - tl.log(raw_mass))


@triton.jit(do_not_specialize=["each"])
def _decide(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    key_ptr,
    position_ptr,
    found_ptr,
    token_ptr,
    score_ptr,
    each,
    vocab,
    chunks,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What no look has settled: one program a row goes on until it is."""
    row = tl.program_id(0)
    state = found_ptr + (row * (chunks + 1) + chunks) * FIELDS
    after(EARLY)
    now = _past(state + 2)
    if now != 1:
        token, x = _past(state).to(tl.int32), _past(state + 1)
        mass, peak, raw_mass = _past(state + 3), _past(state + 4), _past(state + 5)
        law = row // each
        _temperature, divisor = settled(temperature_ptr, law)
        key_0, key_1, position = address(law, row, key_ptr, position_ptr)
        top_k, top_p = tl.load(top_k_ptr + law), tl.load(top_p_ptr + law)
        kept = now == 1
        if now == 3:
            mass = top_mass(logits_ptr, row, vocab, top_k, peak, divisor, BLOCK)
            above, count = mass_above(logits_ptr, row, 0, vocab, vocab, divisor, x, peak, BLOCK)
            kept = _within(above, count, top_k, top_p, mass) | (count == 0)
        while kept == 0:
            _score, token, x = best_above(
                logits_ptr, row, 0, vocab, vocab, divisor, key_0, key_1, position, x, BLOCK
            )
            above, count = mass_above(logits_ptr, row, 0, vocab, vocab, divisor, x, peak, BLOCK)
            kept = _within(above, count, top_k, top_p, mass) | (count == 0)
        _write(logits_ptr, row, vocab, token, peak, divisor, raw_mass, token_ptr, score_ptr)
