"""Sampling in plain torch: temperature, top-k, top-p, min-p, and Gumbel-max (the argmax of noisy
log-probabilities).

The processed distribution is softmax(logits / T) over the tokens kept by top-k, then top-p, then
min-p (at least min_p times the largest probability); one-hot at the first maximum for T = 0. Tokens
that tie with the last kept one are kept too. A logit of -inf is a token of probability 0. A row
with NaN, +inf, or only -inf has no distribution: its token is arbitrary, its log-probability is NaN
or -inf."""

from typing import NamedTuple

import torch
from torch import Tensor

from .noise import SHARED, bits, bits_all, gumbel


class Distribution(NamedTuple):
    """Processed distributions over V tokens, passed from one op to another. values [..., V]: the
    probabilities in float32 if `edges` is None. Otherwise the logits; with edges [..., FIELDS]
    (truncation.py) any probability can be computed from them."""

    values: Tensor
    edges: Tensor | None = None


class Normaliser(NamedTuple):
    """What gives the processed log-probability of any logit x of a row: x / divisor - log_mass
    where x / divisor >= threshold, [N] float32 each. only: [N] int64, the one token of probability
    1 at T = 0, else -1."""

    divisor: Tensor
    threshold: Tensor
    log_mass: Tensor
    only: Tensor

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [N, K] float32 of tokens [N, K] with these logits [N, K]."""
        divisor, threshold, log_mass, only = (part[:, None] for part in self)
        scaled = logits.float() / divisor
        found = torch.where(scaled >= threshold, scaled - log_mass, -torch.inf)
        return torch.where(only < 0, found, torch.where(tokens == only, 0.0, -torch.inf))


COLDEST, HOTTEST = 1e-30, 1e30
"""Temperatures below COLDEST count as 0: logits of some hundreds divided by 1e-36 are infinite in
float32, and noise changes nothing below 1e-9. Temperatures above HOTTEST count as HOTTEST: a GPU's
division by more than 8e37 gives 0, and at either all kept tokens are equally likely."""
_FIRST_SORTED = 128  # number of largest logits sorted first
_BLOCK = 128  # logits whose maximum is taken first: about the root of a vocabulary's size


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Sample one token for each row of logits: argmax of log p + Gumbel noise of the SHARED stream,
    with p the processed distribution.

    Args:
        logits: [N, V].
        temperature, top_p, min_p: [M] float32. None for min_p: 0.
        top_k: [M] int64; 0 for no limit.
        keys: [M, 2] int64. Each entry of these M belongs to N / M consecutive rows.
        positions: [N] int64.

    Returns: tokens [N] int64.
    """
    each = len(logits) // len(temperature)
    if each > 1:
        temperature, top_k, top_p, keys = (
            given.repeat_interleave(each, 0) for given in (temperature, top_k, top_p, keys)
        )
        min_p = None if min_p is None else min_p.repeat_interleave(each)
    temperature = _settled(temperature)
    if not bool((temperature > 0).any()):
        return _first_largest(logits)
    scaled = _scale(logits, temperature)
    limited = (top_k > 0) | (top_p < 1.0) | (temperature == 0)
    if not bool((limited if min_p is None else limited | (min_p > 0)).any()):
        return (scaled + gumbel(bits_all(keys, positions, scaled.shape[1], stream=SHARED))).argmax(
            -1
        )
    threshold, top = _limits(scaled, temperature, top_k, top_p, min_p)
    if bool((top.values[:, -1] < threshold).all()):  # all kept tokens are among the largest
        most = int((top.values >= threshold[:, None]).sum(-1).max())
        values, tokens = (part[:, : max(most, 1)] for part in top)
        rows = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens.shape[1])
        random = bits(keys[rows], positions[rows], tokens.flatten(), stream=SHARED)
        noise = gumbel(random).view(tokens.shape)
        scores = values + torch.where(temperature[:, None] > 0, noise, 0.0)
        scores = torch.where(values >= threshold[:, None], scores, -torch.inf)
        best = scores == scores.amax(-1, keepdim=True)
        return torch.where(best, tokens, scaled.shape[1] - 1).amin(-1)
    kept = scaled >= threshold[:, None]
    rows, tokens = kept.nonzero(as_tuple=True)
    noise = gumbel(bits(keys[rows], positions[rows], tokens, stream=SHARED))
    scores = scaled[rows, tokens] + torch.where(temperature[rows] > 0, noise, 0.0)
    found = scores.new_full(temperature.shape, -torch.inf).scatter_reduce(0, rows, scores, "amax")
    first = torch.where(scores == found[rows], tokens, scaled.shape[1])
    found = torch.full_like(positions, scaled.shape[1]).scatter_reduce(0, rows, first, "amin")
    return found.clamp(max=scaled.shape[1] - 1)  # rows without a distribution have no best token


def _first_largest(logits: Tensor) -> Tensor:
    """Return the first index of the largest of logits [N, V]: [N] int64.

    On a CPU the maxima of blocks, and then the indices in one block of each row, take a tenth of
    the time of argmax.
    """
    whole = logits.shape[1] // _BLOCK
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or whole < _BLOCK:
        return logits.argmax(-1)
    blocks = logits[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK))
    largest, block = blocks.amax(-1).max(-1)
    if not bool(largest.isfinite().all()):
        return logits.argmax(-1)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0].argmax(-1)
    found = block * _BLOCK + inside
    if whole * _BLOCK == logits.shape[1]:
        return found
    tail, place = logits[:, whole * _BLOCK :].max(-1)
    return torch.where((tail > largest) | tail.isnan(), whole * _BLOCK + place, found)


def sample_scored(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `sample`'s tokens [N] with their `log_probability` [N]."""
    tokens = sample(logits, temperature, top_k, top_p, keys, positions, min_p)
    return tokens, log_probability(logits, tokens)


def process(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """Return the processed distributions [N, V] float32 of logits [N, V]. Parameters as in
    `sample`."""
    temperature = _settled(temperature)
    scaled = _scale(logits, temperature)
    kept = scaled >= _threshold(scaled, temperature, top_k, top_p, min_p)[:, None]
    probs = torch.softmax(scaled.masked_fill(~kept, -torch.inf), dim=-1)
    greedy = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
    return torch.where(temperature[:, None] > 0, probs, greedy)


def normaliser(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Normaliser:
    """Return the normaliser of the processed distributions of logits [N, V]. Parameters as in
    `sample`."""
    each = len(logits) // len(temperature)
    if each > 1:
        temperature, top_k, top_p = (
            given.repeat_interleave(each, 0) for given in (temperature, top_k, top_p)
        )
        min_p = None if min_p is None else min_p.repeat_interleave(each, 0)
    temperature = _settled(temperature)
    scaled = _scale(logits, temperature)
    threshold = _threshold(scaled, temperature, top_k, top_p, min_p)
    log_mass = logsumexp(scaled.masked_fill(scaled < threshold[:, None], -torch.inf))
    warm = temperature > 0
    only = torch.where(warm, -1, logits.argmax(-1))
    return Normaliser(torch.where(warm, temperature, 1.0), threshold, log_mass, only)


def draw(
    probs: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    stream: Tensor | int,
    origin: Tensor | int = 0,
) -> Tensor:
    """Sample one token [N] int64 from each distribution [N, V], which need not be normalised, by
    Gumbel noise of `stream`."""
    start = origin if isinstance(origin, Tensor) else torch.full_like(positions, origin)
    which = stream if isinstance(stream, Tensor) else torch.full_like(positions, stream)
    rows, tokens = (probs > 0).nonzero(as_tuple=True)
    noise = gumbel(
        bits(keys[rows], positions[rows], tokens, stream=which[rows], origin=start[rows])
    )
    scores = torch.full_like(probs, -torch.inf).index_put(
        (rows, tokens), probs[rows, tokens].log() + noise
    )
    return scores.argmax(-1)


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log softmax(logits)[tokens], [...] float32, for logits [..., V] and tokens [...]: at T
    = 1, without truncation."""
    wide = logits.float()
    return wide.gather(-1, tokens[..., None]).squeeze(-1) - logsumexp(wide)


def logsumexp(x: Tensor) -> Tensor:
    """Return torch.logsumexp(x, -1) of x [..., V] float32.

    The largest log-softmax is the largest x less the result. On a CPU torch computes that in half
    of the time, and a third where most terms underflow.
    """
    most = x.amax(-1)
    found = most - torch.log_softmax(x, -1).amax(-1)
    return torch.where(most.isinf(), most, found)


def _settled(temperature: Tensor) -> Tensor:
    """Clamp temperatures to what float32 can divide by, or 0."""
    return torch.where(temperature < COLDEST, 0.0, temperature.clamp(max=HOTTEST))


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits / T in float32; unchanged at T = 0, where only their maximum matters."""
    return logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]


def _threshold(
    scaled: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """Return the smallest kept value [N] of each row of scaled logits [N, V]; -inf keeps all."""
    return _limits(scaled, temperature, top_k, top_p, min_p)[0]


class _Largest(NamedTuple):
    """The largest logits of each row in falling order, [N, K], and their tokens."""

    values: Tensor
    tokens: Tensor


def _limits(
    scaled: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None
) -> tuple[Tensor, _Largest]:
    """Return `_threshold`, and the largest logits that were sorted for it."""
    if min_p is not None:
        least, largest = _limits(scaled, temperature, top_k, top_p, None)
        return torch.maximum(least, largest.values[:, 0] + min_p.log()), largest
    vocab = scaled.shape[1]
    count = min(vocab, max(_FIRST_SORTED, int(top_k.max())))
    rest = logsumexp(scaled)
    while True:
        largest = _Largest(*scaled.topk(count, dim=-1))
        top = largest.values
        least = torch.where(
            top_k > 0, top.gather(1, (top_k.clamp(1, count) - 1)[:, None])[:, 0], -torch.inf
        )
        least = torch.where(temperature > 0, least, top[:, 0])
        limited = least > -torch.inf
        mass = rest
        if bool(limited.any()):
            kept = logsumexp(scaled.masked_fill(scaled < least[:, None], -torch.inf))
            mass = torch.where(limited, kept, rest)
        cumulative = torch.exp(top - mass[:, None]).cumsum(-1)
        reached = cumulative >= top_p[:, None]
        nucleus = top.gather(1, reached.int().argmax(-1, keepdim=True))[:, 0]
        open_ended = (top_p < 1.0) & ~reached[:, -1]
        if count == vocab or not bool(open_ended.any()):
            wanted = (top_p < 1.0) & reached[:, -1]
            return torch.maximum(least, torch.where(wanted, nucleus, -torch.inf)), largest
        count = min(vocab, count * 8)
