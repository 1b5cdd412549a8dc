"""The sampling parameters and noise keys of rows, as tensors and as columns on the host. Not here:
the rows (batch.py), sampling (kernels)."""

from __future__ import annotations

import hashlib

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

import bass_kernels as ops


def noise_key(seed: int, prompt: str, sample: int) -> tuple[int, int]:
    """Return the 64-bit key of a row's noise as two unsigned 32-bit words: BLAKE2b of (seed, sample
    number, prompt id)."""
    digest = hashlib.blake2b(f"{seed}\x00{sample}\x00{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class SamplingParams:
    """The sampling parameters of B rows as tensors: temperature and top_p [B] float32, top_k [B]
    and keys [B, 2] int64."""

    __slots__ = ("keys", "temperature", "top_k", "top_p")

    def __init__(self, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor):
        self.temperature, self.top_k, self.top_p, self.keys = temperature, top_k, top_p, keys

    def repeat(self, times: int) -> SamplingParams:
        """Repeat each row's parameters `times` times, side by side."""
        if times == 1:
            return self
        return SamplingParams(
            *(
                t.repeat_interleave(times, 0)
                for t in (self.temperature, self.top_k, self.top_p, self.keys)
            )
        )

    def of(self, rows: Tensor) -> SamplingParams:
        """Return the parameters of rows [N] int64; a row may occur several times."""
        return SamplingParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.keys[rows]
        )

    def first(self, rows: int) -> SamplingParams:
        """Return the parameters of the first rows."""
        return SamplingParams(
            self.temperature[:rows], self.top_k[:rows], self.top_p[:rows], self.keys[:rows]
        )

    def at(self, temperature: float | None, factor: float = 1.0) -> SamplingParams:
        """Return the same at another temperature, except where it is 0. None: at `factor` times its
        own temperature."""
        if temperature is not None:
            changed = torch.where(self.temperature > 0, min(temperature, ops.HOTTEST), 0.0)
        elif factor != 1:
            changed = self.temperature * factor
        else:
            return self
        return SamplingParams(changed, self.top_k, self.top_p, self.keys)


def params_of(whole: Tensor, rows: int) -> tuple[Tensor, SamplingParams]:
    """Return views of `Columns.whole` on the device: alive [rows] int64, and the parameters."""
    alive, top_k, keys, floats = whole.split([rows, rows, 2 * rows, rows])
    temperature, top_p = floats.view(torch.float32).view(2, rows)
    return alive, SamplingParams(temperature, top_k, top_p, keys.view(rows, 2))


class Columns:
    """The sampling parameters on the host, as parts of one array so that one copy sends all of
    them.

    `whole` [5 x rows] int64 holds: alive (1 for live rows, 0 for padding rows), top_k, keys [rows,
    2], and temperature and top_p as float32 in half a column each.
    """

    __slots__ = ("_alive", "_keys", "_temperature", "_top_k", "_top_p", "whole")

    def __init__(self, rows: int):
        self.whole: NDArray[numpy.int64] = numpy.zeros(5 * rows, dtype=numpy.int64)
        parts = numpy.split(self.whole, [rows, 2 * rows, 4 * rows])
        self._alive, self._top_k, self._keys = parts[0], parts[1], parts[2].reshape(rows, 2)
        self._temperature, self._top_p = parts[3].view(numpy.float32).reshape(2, rows)
        self.clear(slice(0, rows))

    def set(
        self, place: int, *, temperature: float, top_k: int, top_p: float, key: tuple[int, int]
    ) -> None:
        """Write the parameters of a live row."""
        self._alive[place], self._top_k[place], self._top_p[place] = 1, top_k, top_p
        self._keys[place] = key
        warm = temperature >= ops.COLDEST
        self._temperature[place] = min(temperature, ops.HOTTEST) if warm else 0.0

    def clear(self, places: slice) -> None:
        """Make these places padding rows."""
        self._alive[places] = self._top_k[places] = self._keys[places] = 0
        self._temperature[places], self._top_p[places] = 0.0, 1.0

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move rows to other places."""
        for column in (self._alive, self._top_k, self._keys, self._temperature, self._top_p):
            column[targets] = column[sources]
