"""Logits processors in plain torch: bias by token, penalties, forbidden and allowed tokens. They
come before temperature and truncation (sampling.py).

Logits are those of N places of B rows: line n belongs to row `rows[n]`, and `places[n]` of that
row's drafts come before it. A penalty there counts these drafts as if they had been generated, as
plain decoding would. Order and arithmetic are those of transformers, in float32: bias, repetition
penalty, then frequency and presence penalty (as vLLM has them), then forbidden tokens.
"""

import torch
from torch import Tensor

BITS = 32  # tokens in one number of a bit mask; token t is bit t % 32 of number t // 32
IN_PROMPT, GENERATED = 1, 2
"""In a count table [B, V] int32: 1 if a prompt holds the token, plus 2 for each time that the row
generated it."""


def process_logits(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    drafts: Tensor,
    counts: Tensor | None,
    penalties: Tensor,
    allowed: Tensor | None,
    masks: Tensor | None,
) -> Tensor:
    """Apply penalties and bit masks.

    Args:
        logits: [N, U].
        rows, places: [N] int64.
        drafts: [B, k] int64.
        counts: [B, V] int32 with V >= U; None for no penalties.
        penalties: [3, B] float32: repetition, presence and frequency.
        allowed: [B, ceil(V / 32)] int32, bits of the tokens that a row allows. None: all.
        masks: [B, W, ceil(V / 32)] int32, bits of the tokens that a place allows; places beyond
            W use the last. None: all.

    Returns: [N, U] float32; -inf for tokens that are not allowed.
    """
    vocab, found = logits.shape[1], logits.to(torch.float32, copy=True)
    if counts is not None:
        count, width = counts[rows, :vocab], drafts.shape[1]
        if width:
            at = drafts[rows]
            before = torch.arange(width, device=logits.device) < places[:, None]
            count.scatter_add_(
                1, at.clamp(max=vocab - 1), GENERATED * (before & (at < vocab)).int()
            )
        line, token = count.nonzero(as_tuple=True)  # few of them
        repetition, presence, frequency = penalties[:, rows[line]]
        x, generated = found[line, token], (count[line, token] // GENERATED).float()
        x = torch.where(x > 0, x / repetition, x * repetition)
        found[line, token] = x - generated * frequency - (generated > 0) * presence
    if allowed is not None:
        found.masked_fill_(~_unpacked(allowed, vocab)[rows], -torch.inf)
    if masks is not None:
        place = places.clamp(max=masks.shape[1] - 1)
        found.masked_fill_(~_unpacked(masks[rows, place], vocab), -torch.inf)
    return found


def _unpacked(bits: Tensor, vocab: int) -> Tensor:
    """Return the first `vocab` bits of each line [N, words] int32, [N, vocab] bool."""
    each = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.view(torch.uint8)[..., None] >> each) & 1).flatten(1)[:, :vocab].bool()


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return logits [N, U] in float32 with values [N, K] added at the tokens ids [N, K] int64, of
    which none occurs twice in a line with a value other than 0. Ids of U or more are ignored."""
    vocab = logits.shape[1]
    inside = torch.where(ids < vocab, values, 0.0)
    return logits.float().scatter_add(1, ids.clamp(max=vocab - 1), inside)


def forbid_words(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    drafts: Tensor,
    texts: Tensor,
    lengths: Tensor,
    words: Tensor,
) -> Tensor:
    """Return logits [N, U] in float32 with -inf at the last token of each word whose other tokens
    come just before the place.

    Args:
        texts: [B, C] int64, the rows' tokens, of which the first lengths [B] are valid.
        words: [B, M, S] int64, the token sequences to forbid, right-aligned; -1 in unused places,
            and in all places of unused lines.
        The others: as in `process_logits`.
    """
    vocab, size = logits.shape[1], words.shape[2]
    of_row, length = words[rows], lengths[rows, None]
    at = length + places[:, None] - torch.arange(size - 1, 0, -1, device=logits.device)
    known = texts[rows].gather(1, torch.minimum(at, length - 1).clamp(min=0))
    if drafts.shape[1]:
        drafted = drafts[rows].gather(1, (at - length).clamp(0, drafts.shape[1] - 1))
        known = torch.where(at < length, known, drafted)
    known = torch.where(at < 0, -2, known)[:, None]  # no token, which only an unused place matches
    matches = ((known == of_row[:, :, :-1]) | (of_row[:, :, :-1] < 0)).all(-1)
    last = of_row[:, :, -1]
    matches &= (last >= 0) & (last < vocab)
    # adding is independent of the order, although words may share their last token
    return logits.float().scatter_add(
        1, last.clamp(0, vocab - 1), torch.where(matches, -torch.inf, 0.0)
    )


def count_prompts(counts: Tensor, rows: Tensor, texts: Tensor, lengths: Tensor) -> None:
    """Begin the lines `rows` [R] of a count table, in place, with prompts texts [R, L] of lengths
    [R]. The table [B + 1, V] has one line more, for what is not counted."""
    vocab, spare = counts.shape[1], len(counts) - 1
    counts.index_fill_(0, rows, 0)
    valid = torch.arange(texts.shape[1], device=texts.device) < lengths[:, None]
    valid &= texts < vocab
    line = torch.where(valid, rows[:, None], spare)
    at = line * vocab + texts.clamp(max=vocab - 1)
    counts.view(-1).index_fill_(0, at.flatten(), IN_PROMPT)


def count_block(counts: Tensor, block: Tensor, accepted: Tensor, alive: Tensor) -> None:
    """Count the first accepted [B] + 1 tokens of block [B, W], in place, in rows where alive [B]
    is 1."""
    vocab, rows = counts.shape[1], torch.arange(len(block), device=block.device)
    places = torch.arange(block.shape[1], device=block.device)
    counted = (places <= accepted[:, None]) * alive[:, None]
    at = rows[:, None] * vocab + block.clamp(0, vocab - 1)
    counts.view(-1).scatter_add_(0, at.flatten(), (GENERATED * counted).int().flatten())
