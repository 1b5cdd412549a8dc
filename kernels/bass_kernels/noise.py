"""Counter-based random numbers: the same numbers for the same counters on every device and in every
batch.

The generator is Philox4x32-10 (Salmon et al., SC 2011). A row has a 64-bit key. A number is
addressed by (token, position, origin, stream): word `token % 4` of the block with counter (token //
4, position, origin, stream). Different streams and origins are independent. Integers are exact; the
two logarithms of `gumbel` may differ in the last bit by device.
"""

import torch
from torch import Tensor

SHARED, DRAFT, TEST, RESIDUAL, BONUS = range(5)
"""The streams. SHARED: shared coupling. Under maximal coupling, DRAFT: the draft's tokens; TEST:
the acceptance test; RESIDUAL: recovered tokens; BONUS: bonus tokens. No stream may have two
purposes."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Philox4x32-10: return four words of 32 random bits for each counter. All tensors are int64
    with unsigned 32-bit values; their shapes broadcast together."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    rounds = torch.arange(10, device=key[0].device)
    keys = (
        (word[..., None] + weyl * rounds).unbind(-1) for word, weyl in zip(key, _WEYL, strict=True)
    )
    for k0, k1 in zip(*keys, strict=True):
        # The int64 product of two 32-bit words wraps modulo 2^64; both halves are right after
        # masking. c1, c3 and the keys are only XORed into values that are masked.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
    return c0, c1 & _MASK, c2, c3 & _MASK


def bits(
    keys: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    stream: Tensor | int,
    origin: Tensor | int = 0,
) -> Tensor:
    """Return 32 random bits in an int64 for each of N entries.

    Args:
        keys: [N, 2] int64.
        positions, tokens: [N] int64.
        stream, origin: [N] int64, or one number for all.
    """
    zero = torch.zeros_like(tokens)
    words = philox(
        (tokens >> 2, positions & _MASK, zero + origin, zero + stream), (keys[:, 0], keys[:, 1])
    )
    word = tokens & 3
    return torch.where(
        word < 2,
        torch.where(word == 0, words[0], words[1]),
        torch.where(word == 2, words[2], words[3]),
    )


def bits_all(
    keys: Tensor, positions: Tensor, vocab: int, *, stream: int, origin: Tensor | int = 0
) -> Tensor:
    """Return 32 random bits for every token of every row, [N, vocab] int64: as `bits`, at a quarter
    of the work."""
    blocks = torch.arange((vocab + 3) // 4, device=keys.device)
    zero = torch.zeros_like(positions)[:, None]
    start = origin[:, None] if isinstance(origin, Tensor) else zero + origin
    words = philox(
        (blocks[None, :], (positions & _MASK)[:, None], start, zero + stream),
        (keys[:, :1], keys[:, 1:]),
    )
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab]


def uniform(random: Tensor) -> Tensor:
    """Map 32 random bits (int64) to float32 in [0, 1), on a grid of 2^-24."""
    return (random >> 8).float() * 2.0**-24


def gumbel(random: Tensor) -> Tensor:
    """Map 32 random bits (int64) to standard Gumbel noise, float32, always finite.

    -log(-log1p(-v)) with v = (bits + 1/2) / 2^32 keeps full precision for large values, which come
    from small v.
    """
    v = ((random.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))
