"""Triton: a round's bookkeeping, in one launch each with one program a row, beside the library's
top-k. In torch each op would take several launches, and every round waits for all of them.
Definitions: rounds.py, acceptance.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounds import BINS, ChosenDrafts, ConfidenceStats, most_likely
from .segments import Packed

_BLOCK = tl.constexpr(1024)  # chosen drafts a step
_BINS = tl.constexpr(BINS)


def _wide(count: int) -> int:
    """Return the places of a program. All but long drafts share one compiled form."""
    return max(16, triton.next_power_of_2(count))


def pending(texts: Tensor, lengths: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Do rounds.pending."""
    rows, width = drafts.shape
    tokens, positions = (drafts.new_empty(rows, width + 1) for _ in range(2))
    _pending[(rows,)](
        texts,
        lengths,
        drafts,
        tokens,
        positions,
        width,
        texts.stride(0),
        *drafts.stride(),
        WIDE=_wide(width + 1),
        num_warps=1,
    )
    return tokens, positions


def accept_shared(drafts: Tensor, targets: Tensor, most: Tensor | None = None) -> Tensor:
    """Do acceptance.accept_shared."""
    rows, width = drafts.shape
    accepted = drafts.new_empty(rows)
    _accept[(rows,)](
        drafts.contiguous(),
        targets.contiguous(),
        drafts if most is None else most,
        accepted,
        width,
        0 if most is None or not most.dim() else 1,
        MOST=most is not None,
        WIDE=_wide(width + 1),
        num_warps=1,
    )
    return accepted


def commit(texts: Tensor, lengths: Tensor, alive: Tensor, accepted: Tensor, block: Tensor) -> None:
    """Do rounds.commit."""
    _append(texts, lengths, alive, accepted, block, None)


def report(
    texts: Tensor, lengths: Tensor, alive: Tensor, accepted: Tensor, block: Tensor, scores: Tensor
) -> Tensor:
    """Do rounds.report."""
    rows, width = block.shape
    table = block.new_empty(rows, 2 * width + 1)
    _append(texts, lengths, alive, accepted, block, (scores.contiguous(), table))
    return table


def _append(
    texts: Tensor,
    lengths: Tensor,
    alive: Tensor,
    accepted: Tensor,
    block: Tensor,
    scored: tuple[Tensor, Tensor] | None,
) -> None:
    """Append the block. `scored`: scores and the report's table, or None for no report."""
    rows, width = block.shape
    _commit[(rows,)](
        texts,
        lengths,
        alive,
        accepted,
        block,
        *((block, block) if scored is None else scored),
        width,
        texts.shape[1],
        texts.stride(0),
        accepted.stride(0),
        *block.stride(),
        TABLE=scored is not None,
        WIDE=_wide(width),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["width", "text_row", "draft_row"])
def _pending(
    text_ptr,
    length_ptr,
    draft_ptr,
    token_ptr,
    position_ptr,
    width,
    text_row,
    draft_row,
    draft_place,
    WIDE: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, WIDE)
    inside, at = place <= width, row * (width + 1) + place
    first = tl.load(length_ptr + row) - 1
    last = tl.load(text_ptr + row.to(tl.int64) * text_row + first)
    drafts = tl.load(
        draft_ptr + row * draft_row + (place - 1) * draft_place, mask=(place > 0) & inside, other=0
    )
    tl.store(token_ptr + at, tl.where(place == 0, last, drafts), mask=inside)
    tl.store(position_ptr + at, first + place, mask=inside)


@triton.jit(do_not_specialize=["width"])
def _accept(
    draft_ptr,
    target_ptr,
    most_ptr,
    accepted_ptr,
    width,
    most_row,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, WIDE)
    inside = place < width
    draft = tl.load(draft_ptr + row * width + place, mask=inside, other=-1)
    target = tl.load(target_ptr + row * (width + 1) + place, mask=inside, other=-1)
    accepted = tl.min(tl.where(inside & (draft == target), width, place), 0).to(tl.int64)
    if MOST:
        accepted = tl.minimum(accepted, tl.load(most_ptr + row * most_row))
    tl.store(accepted_ptr + row, accepted)


@triton.jit(do_not_specialize=["width", "room", "text_row", "accepted_row", "block_row"])
def _commit(
    text_ptr,
    length_ptr,
    alive_ptr,
    accepted_ptr,
    block_ptr,
    score_ptr,
    table_ptr,
    width,
    room,
    text_row,
    accepted_row,
    block_row,
    block_place,
    TABLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Append a row's block to its text and raise its length. TABLE: also write the row's line of
    the report."""
    row, place = tl.program_id(0), tl.arange(0, WIDE)
    inside = place < width
    length, accepted = tl.load(length_ptr + row), tl.load(accepted_ptr + row * accepted_row)
    tokens = tl.load(block_ptr + row * block_row + place * block_place, mask=inside, other=0)
    at = length + place
    tl.store(text_ptr + row.to(tl.int64) * text_row + at, tokens, mask=inside & (at < room))
    tl.store(length_ptr + row, length + (accepted + 1) * tl.load(alive_ptr + row))
    if TABLE:
        line = table_ptr + row * (2 * width + 1)
        tl.store(line, accepted)
        tl.store(line + 1 + place, tokens, mask=inside)
        score = tl.load(score_ptr + row * width + place, mask=inside, other=0.0)
        bits = score.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(line + 1 + width + place, bits, mask=inside)


def prefix_chances(scores: Tensor, stats: ConfidenceStats, alive: Tensor) -> Tensor:
    """Do rounds.prefix_chances."""
    rows, width = scores.shape
    found = torch.empty(rows, width, dtype=torch.float32, device=scores.device)
    _prefix_chances[(rows,)](
        scores.contiguous(),
        stats.accepted,
        stats.trials,
        alive,
        found,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return found


def choose_drafts(chances: Tensor, total: int, tokens: Tensor, lengths: Tensor) -> ChosenDrafts:
    """Do rounds.choose_drafts."""
    rows, width = chances.shape
    best = most_likely(chances, total)
    begin, counts = lengths.new_empty(rows + 1), lengths.new_empty(rows)
    # zeros, so that indices stay valid while kernels are only compiled (launch.compile_ahead)
    row, place, chosen, places = lengths.new_zeros(4, rows + total)
    _choose_drafts[(rows,)](
        best,
        tokens.contiguous(),
        lengths,
        begin,
        counts,
        row,
        place,
        chosen,
        places,
        rows,
        width,
        total,
        WIDE=triton.next_power_of_2(width + 1),
        num_warps=4,
    )
    return ChosenDrafts(counts, Packed(begin, row, place, width + 1), chosen, places)


def accept_chosen(
    drafts: Tensor,
    scores: Tensor,
    chosen: ChosenDrafts,
    targets: Tensor,
    target_scores: Tensor,
    stats: ConfidenceStats,
    alive: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do rounds.accept_chosen."""
    rows, width = drafts.shape
    accepted, table = drafts.new_empty(rows), drafts.new_empty(rows, 2 * width + 4)
    stats.fade()
    _accept_chosen[(rows,)](
        drafts.contiguous(),
        scores.contiguous(),
        chosen.packed.begin,
        targets,
        target_scores,
        stats.accepted,
        stats.trials,
        alive,
        accepted,
        table,
        width,
        WIDE=triton.next_power_of_2(width + 1),
        num_warps=1,
    )
    return accepted, table


@triton.jit
def _doubt(score):
    """Return sqrt(1 - confidence) from log-confidence; 1 for NaN."""
    doubt = tl.sqrt(tl.minimum(tl.maximum(1.0 - tl.exp(score), 0.0), 1.0))
    return tl.where(score == score, doubt, 1.0)


@triton.jit(do_not_specialize=["width"])
def _prefix_chances(
    score_ptr, hits_ptr, trials_ptr, alive_ptr, out_ptr, width, BLOCK: tl.constexpr
):
    """Compute for each draft of a row the probability that it and all before it are accepted."""
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = place < width, row * width + place
    doubt = _doubt(tl.load(score_ptr + at, mask=inside, other=0.0))
    at_bin = tl.minimum(tl.maximum(doubt * _BINS - 0.5, 0.0), _BINS - 1.0)
    low = tl.minimum(at_bin.to(tl.int32), _BINS - 2)
    share = at_bin - low.to(tl.float32)
    left = tl.load(hits_ptr + low) / tl.load(trials_ptr + low)
    right = tl.load(hits_ptr + low + 1) / tl.load(trials_ptr + low + 1)
    chance = tl.where(inside, left * (1 - share) + right * share, 1.0)
    found = tl.exp(tl.cumsum(tl.log(chance), 0))
    found = tl.where(tl.load(alive_ptr + row) > 0, found, 0.0)
    tl.store(out_ptr + at, found, mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "total"])
def _choose_drafts(
    best_ptr,
    token_ptr,
    length_ptr,
    begin_ptr,
    count_ptr,
    row_ptr,
    place_ptr,
    chosen_ptr,
    places_ptr,
    rows,
    width,
    total,
    WIDE: tl.constexpr,
):
    """Count the chosen drafts that lie in this row's part of the chances, and those in earlier
    rows; write the row's part of the packed arrays."""
    row = tl.program_id(0)
    low = row * width
    before, chosen_here = 0, 0
    for first in range(0, total, _BLOCK):
        index = first + tl.arange(0, _BLOCK)
        best = tl.load(best_ptr + index, mask=index < total, other=2147483647).to(tl.int32)
        before += tl.sum((best < low).to(tl.int32), 0)
        chosen_here += tl.sum(((best >= low) & (best < low + width)).to(tl.int32), 0)
    begin = before + row
    tl.store(begin_ptr + row, begin)
    tl.store(count_ptr + row, chosen_here)
    if row == rows - 1:
        tl.store(begin_ptr + rows, begin + chosen_here + 1)
    place = tl.arange(0, WIDE)
    there, at = place <= chosen_here, begin + place
    tl.store(row_ptr + at, 0 * place + row, mask=there)
    tl.store(place_ptr + at, place, mask=there)
    tokens = tl.load(token_ptr + row * (width + 1) + place, mask=there, other=0)
    tl.store(chosen_ptr + at, tokens, mask=there)
    tl.store(places_ptr + at, tl.load(length_ptr + row) + place, mask=there)


@triton.jit(do_not_specialize=["width"])
def _accept_chosen(
    draft_ptr,
    score_ptr,
    begin_ptr,
    target_ptr,
    target_score_ptr,
    hits_ptr,
    trials_ptr,
    alive_ptr,
    accepted_ptr,
    table_ptr,
    width,
    WIDE: tl.constexpr,
):
    """Find how many of a row's chosen drafts are accepted, write its line of the report, and count
    accepted and tested drafts by confidence."""
    row, place = tl.program_id(0), tl.arange(0, WIDE)
    begin = tl.load(begin_ptr + row)
    count = (tl.load(begin_ptr + row + 1) - begin - 1).to(tl.int32)
    drafted, inside = place < width, place <= width
    at = begin + tl.minimum(place, count)
    target = tl.load(target_ptr + at, mask=inside, other=0)
    score = tl.load(target_score_ptr + at, mask=inside, other=0.0)
    draft = tl.load(draft_ptr + row * width + place, mask=drafted, other=-1)
    rejected = (place >= count) | (draft != target)
    accepted = tl.min(tl.where(rejected, place, count), 0)
    line = table_ptr + row * (2 * width + 4)
    tl.store(accepted_ptr + row, accepted)
    tl.store(line, accepted)
    tl.store(line + 1 + place, target, mask=inside)
    bits = score.to(tl.int32, bitcast=True)
    tl.store(line + width + 2 + place, bits.to(tl.int64), mask=inside)
    tl.store(line + 2 * width + 3, count)
    # the sums are of ones, so the order of additions makes no difference
    alive = tl.load(alive_ptr + row).to(tl.int32)
    score = tl.load(score_ptr + row * width + place, mask=drafted, other=0.0)
    bin_index = tl.minimum((_doubt(score) * _BINS).to(tl.int32), _BINS - 1)
    one = tl.full([WIDE], 1.0, tl.float32)
    tl.atomic_add(hits_ptr + bin_index, one, mask=place < accepted * alive)
    tl.atomic_add(trials_ptr + bin_index, one, mask=place < tl.minimum(accepted + 1, count) * alive)
