"""Triton: choose which drafts of all rows to verify, and calibrate the draft's confidence
(selection.py). Three launches of one program a row, beside the library's top-k."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .segments import Packed
from .selection import BINS, Chosen, Known, most_likely

_BLOCK = 1024  # chosen drafts a step


def standing(scores: Tensor, known: Known, alive: Tensor) -> Tensor:
    """Do selection.standing."""
    rows, width = scores.shape
    found = torch.empty(rows, width, dtype=torch.float32, device=scores.device)
    _stand[(rows,)](
        scores.contiguous(),
        known.kept,
        known.trials,
        alive,
        found,
        width,
        BINS=BINS,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return found


def likeliest(chances: Tensor, total: int, tokens: Tensor, lengths: Tensor) -> Chosen:
    """Do selection.likeliest."""
    rows, width = chances.shape
    best = most_likely(chances, total)
    begin, counts = lengths.new_empty(rows + 1), lengths.new_empty(rows)
    # zeros, so that indices stay valid while kernels are only compiled (ahead.py)
    row, place, chosen, places = lengths.new_zeros(4, rows + total)
    _gather[(rows,)](
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
        BLOCK=_BLOCK,
        WIDE=triton.next_power_of_2(width + 1),
        num_warps=4,
    )
    return Chosen(counts, Packed(begin, row, place, width + 1), chosen, places)


def settle(
    drafts: Tensor,
    scores: Tensor,
    chosen: Chosen,
    targets: Tensor,
    target_scores: Tensor,
    known: Known,
    alive: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do selection.settle."""
    rows, width = drafts.shape
    accepted, table = drafts.new_empty(rows), drafts.new_empty(rows, 2 * width + 4)
    known.fade()
    _settle[(rows,)](
        drafts.contiguous(),
        scores.contiguous(),
        chosen.packed.begin,
        targets,
        target_scores,
        known.kept,
        known.trials,
        alive,
        accepted,
        table,
        width,
        BINS=BINS,
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
def _stand(
    score_ptr,
    kept_ptr,
    trials_ptr,
    alive_ptr,
    out_ptr,
    width,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = place < width, row * width + place
    doubt = _doubt(tl.load(score_ptr + at, mask=inside, other=0.0))
    spot = tl.minimum(tl.maximum(doubt * BINS - 0.5, 0.0), BINS - 1.0)
    low = tl.minimum(spot.to(tl.int32), BINS - 2)
    share = spot - low.to(tl.float32)
    left = tl.load(kept_ptr + low) / tl.load(trials_ptr + low)
    right = tl.load(kept_ptr + low + 1) / tl.load(trials_ptr + low + 1)
    chance = tl.where(inside, left * (1 - share) + right * share, 1.0)
    found = tl.exp(tl.cumsum(tl.log(chance), 0))
    found = tl.where(tl.load(alive_ptr + row) > 0, found, 0.0)
    tl.store(out_ptr + at, found, mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "total"])
def _gather(
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
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Count the chosen drafts that lie in this row's part of the chances, and those in earlier
    rows; write the row's part of the packed arrays."""
    row = tl.program_id(0)
    low = row * width
    before, mine = 0, 0
    for first in range(0, total, BLOCK):
        spot = first + tl.arange(0, BLOCK)
        best = tl.load(best_ptr + spot, mask=spot < total, other=2147483647).to(tl.int32)
        before += tl.sum((best < low).to(tl.int32), 0)
        mine += tl.sum(((best >= low) & (best < low + width)).to(tl.int32), 0)
    begin = before + row
    tl.store(begin_ptr + row, begin)
    tl.store(count_ptr + row, mine)
    if row == rows - 1:
        tl.store(begin_ptr + rows, begin + mine + 1)
    place = tl.arange(0, WIDE)
    there, at = place <= mine, begin + place
    tl.store(row_ptr + at, 0 * place + row, mask=there)
    tl.store(place_ptr + at, place, mask=there)
    tokens = tl.load(token_ptr + row * (width + 1) + place, mask=there, other=0)
    tl.store(chosen_ptr + at, tokens, mask=there)
    tl.store(places_ptr + at, tl.load(length_ptr + row) + place, mask=there)


@triton.jit(do_not_specialize=["width"])
def _settle(
    draft_ptr,
    score_ptr,
    begin_ptr,
    target_ptr,
    told_ptr,
    kept_ptr,
    trials_ptr,
    alive_ptr,
    accepted_ptr,
    table_ptr,
    width,
    BINS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, WIDE)
    begin = tl.load(begin_ptr + row)
    count = (tl.load(begin_ptr + row + 1) - begin - 1).to(tl.int32)
    drafted, inside = place < width, place <= width
    at = begin + tl.minimum(place, count)
    target = tl.load(target_ptr + at, mask=inside, other=0)
    score = tl.load(told_ptr + at, mask=inside, other=0.0)
    draft = tl.load(draft_ptr + row * width + place, mask=drafted, other=-1)
    falls = (place >= count) | (draft != target)
    accepted = tl.min(tl.where(falls, place, count), 0)
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
    spot = tl.minimum((_doubt(score) * BINS).to(tl.int32), BINS - 1)
    one = tl.full([WIDE], 1.0, tl.float32)
    tl.atomic_add(kept_ptr + spot, one, mask=place < accepted * alive)
    tl.atomic_add(trials_ptr + spot, one, mask=place < tl.minimum(accepted + 1, count) * alive)
