"""Logits before and after sampling, in plain torch: processors (bias by token, penalties, forbidden
and allowed tokens), which come before temperature and truncation (sampling.py); and the likeliest
tokens of rows, for reports. The definitions, and the CPU path."""

import torch
from torch import Tensor

from .dispatch import by_device
from .sampling import normaliser

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

    Logits are those of N places of B rows: line n belongs to row `rows[n]`, and `places[n]` of that
    row's drafts come before it. A penalty there counts these drafts as if they had been generated,
    as plain decoding would. Order and arithmetic are those of transformers, in float32: bias,
    repetition penalty, then frequency and presence penalty (as vLLM has them), then forbidden
    tokens.

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


GROUP = 64
"""Tokens in a group. The square root of V / K makes both selections cheapest."""
_LOW = (1 << 32) - 1
_IMPOSSIBLE = 0xFF800000  # an entry of probability 0


def likeliest_tokens(
    logits: Tensor, count: int, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `count` tokens with the largest logits of each row, at most V, in order.

    The K largest logits of a row lie in the K groups of tokens with the largest maxima. So one pass
    over the vocabulary finds the maxima, and only K groups are read again. Equal logits come in the
    order of their ids, so the result does not depend on a device's sort.

    Args:
        logits: [N, V].
        wanted: [N] bool. The result of other rows is arbitrary.

    Returns: tokens [N, count] int64, and their logits [N, count] float32.
    """
    vocab = logits.shape[1]
    count = min(count, vocab)
    maxima = group_maxima(logits)
    every = torch.arange(maxima.shape[1], device=logits.device)
    groups = _places_of_largest(maxima, every, min(count, maxima.shape[1]))
    inside = torch.arange(GROUP, device=logits.device)
    tokens = (groups[:, :, None] * GROUP + inside).flatten(1)
    values = logits.gather(1, tokens.clamp(max=vocab - 1)).float()
    values = values.masked_fill(tokens >= vocab, -torch.inf)
    best = _places_of_largest(values, tokens, count)
    return tokens.gather(1, best), values.gather(1, best)


def group_maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each group of GROUP tokens, [N, V / GROUP rounded up] float32."""
    surplus = -logits.shape[1] % GROUP
    padded = torch.nn.functional.pad(logits, (0, surplus), value=-torch.inf) if surplus else logits
    return padded.unflatten(1, (-1, GROUP)).amax(-1).float()


_likeliest = by_device(likeliest_tokens, "bass_kernels.processing_kernels")


def _places_of_largest(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the places [N, count] of the largest of values [N, M] float32, in order; of equal ones
    those with the smaller ids, [M] or [N, M] int64, first."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 equals 0.0
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return ((rank << 32) + (_LOW - ids)).topk(count).indices


def report_entries(
    logits: Tensor, tokens: Tensor, scores: Tensor, count: int, wanted: Tensor | None = None
) -> Tensor:
    """Return the `count` likeliest tokens of each row with their log-probabilities, at temperature
    1 without truncation.

    Args:
        logits, wanted: as in `likeliest_tokens`.
        tokens: [N] int64, any token of each row with a finite logit.
        scores: [N] float32, its log-probability.

    Returns: entries [N, count] int64: the id in the high half, the bits of the float32
        log-probability in the low half. If there are fewer tokens, the last ones have probability
        0.
    """
    found, values = _likeliest(logits, count, wanted)
    above = values - logits.gather(1, tokens[:, None]).float()
    return _entries(found, scores[:, None] + above, count)


def processed_entries(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    tokens: Tensor,
    count: int,
    wanted: Tensor | None = None,
    *,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return entries [N, 1 + count] of the processed distributions (sampling.process): of `tokens`
    [N], then of the `count` likeliest ones. Otherwise as `report_entries`."""
    every, values = tokens[:, None], logits.gather(1, tokens[:, None]).float()
    if count:
        found, others = _likeliest(logits, count, wanted)
        every, values = torch.cat((every, found), 1), torch.cat((values, others), 1)
    scores = _normaliser(logits, temperature, top_k, top_p, min_p).log_probs(values, every)
    return _entries(every, scores, 1 + count)


_normaliser = by_device(normaliser, "bass_kernels.processing_kernels")


def _entries(tokens: Tensor, scores: Tensor, count: int) -> Tensor:
    """Pack tokens and scores [N, M] to entries [N, count]."""
    entries = (tokens << 32) | (scores.contiguous().view(torch.int32).long() & _LOW)
    missing = count - entries.shape[1]
    return torch.nn.functional.pad(entries, (0, missing), value=_IMPOSSIBLE) if missing else entries
