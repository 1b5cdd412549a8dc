"""Triton: a round's bookkeeping of tokens and counts, in one launch each with one program a row. In
torch each would take several launches, and every round waits for all of them. Definitions:
rounds.py, acceptance.py."""

import triton
import triton.language as tl
from torch import Tensor


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
