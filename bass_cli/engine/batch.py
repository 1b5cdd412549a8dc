"""The live rows: their tokens, lengths, sampling parameters and noise keys on the device, and what
the host knows.

Rows are dense: 0 to len(batch) - 1 are live; a row that ends is replaced by the last one. Not
here: keys and values (model/kv_cache.py), when a row ends (scheduler.py).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.graphs import WIDTHS, cover


def beyond(longest: int) -> int:
    """Places that a row may take behind its limit with drafts of up to `longest`: its last round
    may go beyond that, and a round that was launched meanwhile further."""
    return 2 * (cover(longest) + 1)


@dataclass(slots=True, eq=False)
class Row:
    """One sample as it grows: what the host knows of it. `tokens` holds the prompt and what was
    generated; its last token is pending (the target has not seen it). `limit`: how many tokens
    it may generate. `top_k` 0 and `top_p` 1 truncate nothing; `temperature` 0 is greedy.
    `broken`: how many tokens it had generated when the target's logits were not sound
    (bass_kernels/sampling.py); its tokens after them mean nothing, and it must be retired."""

    key: str  # the prompt's id
    sample: int
    seed: int
    tokens: list[int]
    limit: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prompt_length: int = field(init=False)
    log_probabilities: list[float] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    broken: int | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def room(self) -> int:
        """How many more tokens it may generate."""
        return self.limit - self.generated


def noise_key(seed: int, prompt: str, sample: int) -> tuple[int, int]:
    """The 64-bit key of a row's noise, as two unsigned 32-bit words: BLAKE2b of (seed, prompt
    id, sample)."""
    digest = hashlib.blake2b(f"{seed}\x00{sample}\x00{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class Laws:
    """The sampling parameters of B rows as tensors: temperature, top_p [B] float32, top_k [B],
    keys [B, 2] int64."""

    __slots__ = ("keys", "temperature", "top_k", "top_p")

    def __init__(self, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor):
        self.temperature, self.top_k, self.top_p, self.keys = temperature, top_k, top_p, keys

    def repeat(self, times: int) -> Laws:
        """Each row's parameters `times` times in a row."""
        if times == 1:
            return self
        return Laws(
            *(
                t.repeat_interleave(times, 0)
                for t in (self.temperature, self.top_k, self.top_p, self.keys)
            )
        )

    def at(self, temperature: float | None) -> Laws:
        """The same at another temperature, where it is not 0."""
        if temperature is None:
            return self
        changed = torch.where(self.temperature > 0, temperature, 0.0)
        return Laws(changed, self.top_k, self.top_p, self.keys)


class Batch:
    """Up to `rows` live rows. `tokens` [rows, context] and `lengths` [rows] are int64 on the
    device; beyond a row's length lies nothing that may be read. `hosts` lists the live Rows in
    order.

    The rows after the live ones are dummies: one token long, never advanced. `pad` lets the
    device's operations run over some of them too, so that a captured graph serves several
    numbers of live rows. `version` changes whenever `tokens` moves to another address.
    """

    def __init__(self, *, rows: int, context: int, device: torch.device):
        self.capacity, self.device = rows, device
        self.tokens = torch.zeros(rows, context, dtype=torch.int64, device=device)
        # A row's numbers stand together, so that one operation sets or moves all of one type.
        # _alive: 1 for live rows.
        self._dummy = (
            torch.tensor([1, 0, 0], device=device),
            torch.tensor([0.0, 1.0], device=device),
        )
        self._integers = self._dummy[0][:, None].repeat(1, rows)
        self._floats = self._dummy[1][:, None].repeat(1, rows)
        self._keys = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self.lengths, self._alive, self._top_k = self._integers
        self._temperature, self._top_p = self._floats
        self.hosts: list[Row] = []
        self.version = 0
        self._padded: int | None = None

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def rows(self) -> int:
        """How many rows the device's operations take: the live ones, or as many as `pad` said."""
        return len(self.hosts) if self._padded is None else self._padded

    def pad(self, rows: int | None) -> None:
        """From now on, device operations take the first `rows` rows; None: the live ones."""
        assert rows is None or len(self.hosts) <= rows <= self.capacity
        self._padded = rows

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While it lasts, no row advances, whatever is committed."""
        alive = self._alive.clone()
        self._alive.zero_()
        yield
        self._alive.copy_(alive)

    def ends(self, further: int) -> list[int] | None:
        """Each live row's length plus `further`, from the host; None while padded."""
        return (
            None if self._padded is not None else [len(row.tokens) + further for row in self.hosts]
        )

    def rooms(self) -> list[int]:
        """How many more tokens each live row may generate."""
        return [row.limit + row.prompt_length - len(row.tokens) for row in self.hosts]

    @property
    def laws(self) -> Laws:
        rows = self.rows
        return Laws(
            self._temperature[:rows], self._top_k[:rows], self._top_p[:rows], self._keys[:rows]
        )

    def admit(self, *rows: Row) -> range:
        """Make `rows` live; returns their indexes. One copy to the device, which the host does
        not wait for."""
        first = len(self.hosts)
        index = range(first, first + len(rows))
        assert index.stop <= self.capacity
        self._widen(max(len(row.tokens) + row.limit for row in rows) + beyond(WIDTHS[-1]))
        texts = [row.tokens for row in rows]
        texts = (
            texts[:1] if all(text == texts[0] for text in texts) else texts
        )  # a prompt's rows share one line
        longest = max(map(len, texts))
        lines = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        integers, floats, keys, tokens = _sent(
            (
                _integers_of(rows).flatten(),
                _floats_of(rows).flatten().view(torch.int64),
                _keys_of(rows).flatten(),
                lines.flatten(),
            ),
            self.device,
        )
        here = slice(first, index.stop)
        self._integers[:, here] = integers.view(3, -1)
        self._floats[:, here] = floats.view(torch.float32).view(2, -1)
        self._keys[here] = keys.view(-1, 2)
        self.tokens[here, :longest] = tokens.view(-1, longest)
        self.hosts += rows
        return index

    def _widen(self, context: int) -> None:
        """See to it that rows of up to `context` tokens have place."""
        if context > self.tokens.shape[1]:
            grown = self.tokens.new_zeros(self.capacity, max(context, 2 * self.tokens.shape[1]))
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown
            self.version += 1

    def retire(self, index: int) -> int | None:
        """End row `index`. The last row takes its place: its former index is returned if it
        moved."""
        last = len(self.hosts) - 1
        row = self.hosts.pop()
        if index != last:
            self.hosts[index] = row
            for column in (self._integers.t(), self._floats.t(), self._keys, self.tokens):
                column[index] = column[last]
        self._integers[:, last], self._floats[:, last] = self._dummy
        return last if index != last else None

    def commit(self, block: Tensor, accepted: Tensor) -> None:
        """Append block [B, W] (drafts, then the target's token) up to accepted [B] + 1 tokens a
        row, on the device.

        The whole block is written: what lies beyond a row's new length is written over by its
        next round.
        """
        rows, width = block.shape
        places = self.lengths[:rows, None] + torch.arange(width, device=self.device)
        places = places.clamp(
            max=self.tokens.shape[1] - 1
        )  # only a row at its end goes there, and it ends now
        self.tokens[:rows].scatter_(1, places, block)
        self.lengths[:rows] += (accepted + 1) * self._alive[:rows]

    def last(
        self, count: int, floor: Tensor | None = None, *, behind: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last `count` tokens of each row and their positions, [B, count] each; with
        `behind` (a number on the device, int64) the `count` tokens that begin so far before the
        row's end. Positions below floor [B] (0) are raised to it: the same token is then fed
        more than once, which writes the same key again."""
        rows = self.rows
        if behind is None:
            positions = self.lengths[:rows, None] + torch.arange(-count, 0, device=self.device)
        else:
            positions = self.lengths[:rows, None] - behind + torch.arange(count, device=self.device)
        positions = (
            positions.clamp(min=0) if floor is None else torch.maximum(positions, floor[:, None])
        )
        return self.tokens[:rows].gather(1, positions), positions


def _integers_of(rows: Sequence[Row]) -> Tensor:
    """[3, N] int64: the columns lengths, alive, top_k."""
    return torch.tensor(
        [[len(row.tokens) for row in rows], [1] * len(rows), [row.top_k for row in rows]]
    )


def _floats_of(rows: Sequence[Row]) -> Tensor:
    """[2, N] float32: the columns temperature, top_p."""
    warm = [row.temperature if row.temperature >= ops.COLDEST else 0.0 for row in rows]
    return torch.tensor([warm, [row.top_p for row in rows]], dtype=torch.float32)


def _keys_of(rows: Sequence[Row]) -> Tensor:
    """[N, 2] int64."""
    return torch.tensor([noise_key(row.seed, row.key, row.sample) for row in rows])


def _sent(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """These int64 vectors on the device, by one copy from pinned memory that nobody waits for."""
    whole = torch.cat(tuple(parts))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return whole.split([len(part) for part in parts])
