"""Find texts that occurred before: exactly, or nearly by MinHash with locality-sensitive hashing.

Near duplicates are texts whose sets of 8-character shingles overlap (Jaccard similarity). MinHash:
Broder, On the resemblance and containment of documents, 1997. Bands: Leskovec et al., Mining of
Massive Datasets, section 3.4. The hashes are fixed, so a run gives the same result everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

Hashes = NDArray[numpy.uint64]
Signature = NDArray[numpy.uint32]
THRESHOLD = 0.8  # default similarity: about one changed word in twenty
SHINGLE = 8  # characters of a shingle: a word and a half of English
# Hashes of a signature. The estimate of a similarity s has the standard error
# sqrt(s (1 - s) / 128): 0.035 at 0.8.
PERMUTATIONS = 128
_RECALL = 0.99  # least probability that a pair at the threshold shares a band and is compared
_MULTIPLIER = numpy.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in splitmix64
_FIRST_ROOM = 1_024  # signatures that there is room for at first; it doubles


class ExactDuplicates:
    """Texts seen so far, as digests of 16 bytes; two texts share one with probability 2^-128."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, text: str, within: str = "") -> bool:
        """Add a text; return whether it was added before. Texts of another `within` are others."""
        digest = _digest(within) + _digest(text)
        known = digest in self._seen
        self._seen.add(digest)
        return known


class NearDuplicates:
    """Texts kept so far, as signatures; a text that is near to one of them is not kept.

    A text is near if the estimated similarity is at least the threshold. It is only estimated for
    texts that share a band: at the threshold 99 % of the pairs do, above it more.

    Args:
        threshold: Least Jaccard similarity of the sets of shingles, above 0 and up to 1.
    """

    def __init__(self, threshold: float = THRESHOLD):
        self._threshold = threshold
        self._rows = band_rows(threshold)
        self._bands = PERMUTATIONS // self._rows
        # The last text of each bucket, and for each text and band the text before it in its
        # bucket, -1 for none: half the memory of lists.
        self._last: dict[bytes, int] = {}
        self._before = numpy.empty((_FIRST_ROOM, self._bands), numpy.int32)
        self._signatures = numpy.empty((_FIRST_ROOM, PERMUTATIONS), numpy.uint32)
        self._count = 0

    def add(self, text: str, within: str = "") -> bool:
        """Return whether a near text was kept before; keep the text if not.

        `within`: Only texts with the same value are compared.
        """
        found = signature(text)
        keys = self._keys(found, _digest(within))
        last = [self._last.get(key, -1) for key in keys]
        near = sorted(self._in_buckets(last))
        if near:
            alike = (self._signatures[near] == found).mean(axis=1)
            if alike.max() >= self._threshold:
                return True
        if self._count == len(self._signatures):
            self._signatures = _doubled(self._signatures)
            self._before = _doubled(self._before)
        self._signatures[self._count], self._before[self._count] = found, last
        self._last.update(dict.fromkeys(keys, self._count))
        self._count += 1
        return False

    def _in_buckets(self, last: Sequence[int]) -> set[int]:
        """Return all texts of the buckets. `last`: the last text of each band's, or -1."""
        found = set[int]()
        for band, text in enumerate(last):
            while text >= 0:
                found.add(text)
                text = int(self._before[text, band])
        return found

    def _keys(self, found: Signature, within: bytes) -> list[bytes]:
        """Return the keys of the bands of a signature."""
        return [
            hashlib.blake2b(
                found[band * self._rows : (band + 1) * self._rows].tobytes(),
                digest_size=8,  # a collision only costs a comparison
                key=within,
                salt=band.to_bytes(2, "little"),
            ).digest()
            for band in range(self._bands)
        ]


def _doubled(rows: NDArray[Any]) -> NDArray[Any]:
    return numpy.concatenate([rows, numpy.empty_like(rows)])


def band_rows(threshold: float) -> int:
    """Return the hashes of a band: as many as leave _RECALL at the threshold.

    With r hashes in each of b bands, a pair of similarity s shares one with probability
    1 - (1 - s^r)^b.
    """
    fits = [
        rows
        for rows in range(1, PERMUTATIONS + 1)
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _RECALL
    ]
    return max(fits, default=1)


def signature(text: str) -> Signature:
    """Return the MinHash signature [PERMUTATIONS] of a text."""
    hashes = shingles(text)
    found = numpy.full(PERMUTATIONS, numpy.iinfo(numpy.uint32).max, numpy.uint32)
    step = 4_096  # shingles at a time: 4 MB for all permutations
    for start in range(0, len(hashes), step):
        mixed = _FACTORS[:, None] * hashes[None, start : start + step] + _TERMS[:, None]
        numpy.minimum(found, (mixed >> numpy.uint64(32)).min(axis=1), out=found, casting="unsafe")
    return found


def shingles(text: str) -> Hashes:
    """Return the distinct hashes of a text's shingles, with runs of blanks as one blank.

    A text of fewer characters than a shingle has is one shingle.
    """
    joined = " ".join(text.split())
    codes = numpy.frombuffer(joined.encode("utf-32-le", "surrogatepass"), numpy.uint32)
    width = min(SHINGLE, len(codes))
    hashes = numpy.full(max(len(codes) - width + 1, 1), width, numpy.uint64)
    for place in range(width):
        hashes = _mix(hashes + codes[place : place + len(hashes)])
    return numpy.unique(hashes)


def _mix(values: Hashes) -> Hashes:
    """Return a bijection of 64-bit numbers that changes half of the bits on average (splitmix64,
    Steele et al., Fast splittable pseudorandom number generators, 2014)."""
    values = values * _MULTIPLIER + _MULTIPLIER
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))


# Multiply-shift hashing (Dietzfelbinger et al., 1997): odd factors and terms of 64 bits
_NUMBERS = _mix(numpy.arange(2 * PERMUTATIONS, dtype=numpy.uint64))
_FACTORS, _TERMS = _NUMBERS[:PERMUTATIONS] | numpy.uint64(1), _NUMBERS[PERMUTATIONS:]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
