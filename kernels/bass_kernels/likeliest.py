"""The likeliest tokens of rows of logits, for reports: the definition, and the CPU path.

The K largest logits of a row lie in the K groups of tokens with the largest maxima. So one pass
over the vocabulary finds the maxima, and only K groups are read again. Equal logits come in the
order of their ids, so the result does not depend on a device's sort.
"""

import torch
from torch import Tensor

from .dispatch import by_device
from .sampling import normaliser

GROUP = 64
"""Tokens in a group. The square root of V / K makes both selections cheapest."""
_LOW = (1 << 32) - 1
_IMPOSSIBLE = 0xFF800000  # an entry of probability 0


def likeliest_tokens(
    logits: Tensor, count: int, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `count` tokens with the largest logits of each row, at most V, in order.

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


_likeliest = by_device(likeliest_tokens, "bass_kernels.likeliest_kernels")


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


_normaliser = by_device(normaliser, "bass_kernels.likeliest_kernels")


def _entries(tokens: Tensor, scores: Tensor, count: int) -> Tensor:
    """Pack tokens and scores [N, M] to entries [N, count]."""
    entries = (tokens << 32) | (scores.contiguous().view(torch.int32).long() & _LOW)
    missing = count - entries.shape[1]
    return torch.nn.functional.pad(entries, (0, missing), value=_IMPOSSIBLE) if missing else entries
