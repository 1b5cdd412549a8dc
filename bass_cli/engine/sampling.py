"""How rows are sampled: the settings of one row, their tensors on the device for all rows, and the
columns in which the host sends them.

Only numbers that every row has are here. Settings of any size, such as a bias by token, are in
processors.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

import bass_kernels as ops


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling settings of one row. The defaults change nothing.

    temperature: 0 is greedy.
    top_k: 0 truncates nothing.
    top_p: 1 truncates nothing.
    min_p: tokens below this share of the largest probability are dropped, after top_p; 0 drops
        none.
    repetition_penalty: divides (positive) or multiplies the logits of tokens that occur in the
        prompt or in the generated tokens; 1 changes nothing.
    presence_penalty: is subtracted from the logits of generated tokens.
    frequency_penalty: is subtracted from the logits of generated tokens, once for each occurrence.
    logit_bias: (id, number) pairs; the number is added to the logit, before the penalties.
    bad_words: sequences of ids. The last id of a sequence has probability 0 after the ids before
        it.
    allowed_token_ids: all other ids have probability 0. None: all are allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The repetition, presence and frequency penalties."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty


PLAIN = RowSampling()


def noise_key(seed: int, prompt: str, sample: int) -> tuple[int, int]:
    """Return the 64-bit key of a row's noise as two unsigned 32-bit words: BLAKE2b of (seed, sample
    number, prompt id)."""
    digest = hashlib.blake2b(f"{seed}\x00{sample}\x00{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class SamplingParams(NamedTuple):
    """The sampling parameters of B rows as tensors: temperature, top_p and min_p [B] float32, top_k
    [B] and keys [B, 2] int64. min_p is None if it is 0 in all rows."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor
    min_p: Tensor | None = None

    def sample(self, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Sample under shared coupling, with the noise at `places` [N], from logits [N, V]. Each
        row may serve several consecutive lines of them.

        Returns: the tokens [N], and the log-probability of each at temperature 1, [N] float32.
        """
        tokens, scores = ops.sample_scored(logits, *self[:4], places, min_p=self.min_p)
        return tokens, scores

    def sample_tokens(self, logits: Tensor, places: Tensor) -> Tensor:
        """Return the tokens of `sample` only."""
        tokens: Tensor = ops.sample(logits, *self[:4], places, min_p=self.min_p)
        return tokens

    def draft(
        self, logits: Tensor, places: Tensor, origins: Tensor
    ) -> tuple[Tensor, ops.Distribution]:
        """Sample a draft's tokens under maximal coupling: see ops.draft_sample."""
        tokens, dist = ops.draft_sample(logits, *self[:4], places, origins, min_p=self.min_p)
        return tokens, dist

    def verify(
        self,
        drafts: Tensor,
        draft_dist: ops.Distribution | None,
        logits: Tensor,
        lengths: Tensor,
        most: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Verify drafts under maximal coupling: see ops.rejection_sample.

        Returns: accepted [B], block [B, k + 1] and its scores [B, k + 1].
        """
        accepted, _following, block, scores = ops.rejection_sample(
            drafts, draft_dist, logits, *self[:4], lengths, most, min_p=self.min_p
        )
        return accepted, block, scores

    def entries(self, logits: Tensor, tokens: Tensor, count: int, wanted: Tensor) -> Tensor:
        """Return the entries of the processed distributions: see ops.processed_entries."""
        entries: Tensor = ops.processed_entries(
            logits, *self[:3], tokens, count, wanted, min_p=self.min_p
        )
        return entries

    def repeat(self, times: int) -> SamplingParams:
        """Repeat each row's parameters `times` times, side by side."""
        if times == 1:
            return self
        return SamplingParams(
            *(None if part is None else part.repeat_interleave(times, 0) for part in self)  # type: ignore[arg-type]
        )

    def of(self, rows: Tensor | slice) -> SamplingParams:
        """Return the parameters of these rows ([N] int64); a row may occur several times."""
        return SamplingParams(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def at(self, temperature: float | None, factor: float = 1.0) -> SamplingParams:
        """Return the same at another temperature, except where it is 0. None: at `factor` times its
        own temperature."""
        if temperature is not None:
            changed = torch.where(self.temperature > 0, min(temperature, ops.HOTTEST), 0.0)
        elif factor != 1:
            changed = self.temperature * factor
        else:
            return self
        return self._replace(temperature=changed)


_FLOATS = 6  # temperature, top_p, min_p and three penalties: float32 numbers of a row
WHOLE = 4 + _FLOATS // 2  # int64 numbers of a row in `Columns.whole`


def params_of(whole: Tensor, rows: int) -> tuple[Tensor, SamplingParams, Tensor]:
    """Return views of `Columns.whole` on the device: alive [rows] int64, the parameters, and the
    repetition, presence and frequency penalties [3, rows] float32."""
    alive, top_k, keys, floats = whole.split([rows, rows, 2 * rows, _FLOATS // 2 * rows])
    numbers = floats.view(torch.float32).view(_FLOATS, rows)
    params = SamplingParams(numbers[0], top_k, numbers[1], keys.view(rows, 2), numbers[2])
    return alive, params, numbers[3:]


class Columns:
    """The sampling parameters on the host, as parts of one array so that one copy sends all of
    them.

    `whole` [WHOLE x rows] int64 holds: alive (1 for live rows, 0 for padding rows), top_k, keys
    [rows, 2], and six float32 numbers of each row in half a column each: temperature, top_p, min_p,
    and the repetition, presence and frequency penalties.
    """

    __slots__ = ("_alive", "_floats", "_keys", "_top_k", "whole")

    def __init__(self, rows: int):
        self.whole: NDArray[numpy.int64] = numpy.zeros(WHOLE * rows, dtype=numpy.int64)
        parts = numpy.split(self.whole, [rows, 2 * rows, 4 * rows])
        self._alive, self._top_k, self._keys = parts[0], parts[1], parts[2].reshape(rows, 2)
        self._floats = parts[3].view(numpy.float32).reshape(_FLOATS, rows)
        self.clear(slice(0, rows))

    def set(self, place: int, sampling: RowSampling, key: tuple[int, int]) -> None:
        """Write the parameters of a live row."""
        self._alive[place], self._top_k[place], self._keys[place] = 1, sampling.top_k, key
        warm = sampling.temperature >= ops.COLDEST
        temperature = min(sampling.temperature, ops.HOTTEST) if warm else 0.0
        self._floats[:, place] = temperature, sampling.top_p, sampling.min_p, *sampling.penalties

    def clear(self, places: slice) -> None:
        """Make these places padding rows."""
        self._alive[places] = self._top_k[places] = self._keys[places] = 0
        self._floats[:, places] = numpy.array([[0.0], [1.0], [0.0], [1.0], [0.0], [0.0]])

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move rows to other places."""
        for column in (self._alive, self._top_k, self._keys):
            column[targets] = column[sources]
        self._floats[:, targets] = self._floats[:, sources]
