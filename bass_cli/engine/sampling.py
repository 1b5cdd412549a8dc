"""How rows are sampled: the settings of one row, their tensors on the device for all rows, and the
logits processors: bias, penalties, bad words, allowed tokens and masks.

Processors change the target's logits before temperature, top-k, top-p and min-p. There is one hook
between logits and verdict: `Processors.process`, which Batch.process calls for both couplings, for
packed rounds, and for drafts. The arithmetic is in bass_kernels/processing.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

import bass_kernels as ops
from bass_cli.models.block_allocator import Sender


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

    def sample(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Sample under shared coupling, with the noise at `positions` [N], from logits [N, V]. Each
        row may serve several consecutive lines of them.

        Returns: the tokens [N], and the log-probability of each at temperature 1, [N] float32.
        """
        tokens, scores = ops.sample_scored(logits, *self[:4], positions, min_p=self.min_p)
        return tokens, scores

    def sample_tokens(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of `sample` only."""
        tokens: Tensor = ops.sample(logits, *self[:4], positions, min_p=self.min_p)
        return tokens

    def draft(
        self, logits: Tensor, positions: Tensor, origins: Tensor
    ) -> tuple[Tensor, ops.Distribution]:
        """Sample a draft's tokens under maximal coupling: see ops.draft_sample."""
        tokens, dist = ops.draft_sample(logits, *self[:4], positions, origins, min_p=self.min_p)
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
_WHOLE = 4 + _FLOATS // 2  # int64 numbers of a row in `HostParams.whole`
# Each column begins at a multiple of 16 bytes. Otherwise the compiled forms of kernels would depend
# on the number of rows, and a job with other rows would compile them again.
_ALIGNED = 4


def params_of(whole: Tensor, rows: int) -> tuple[Tensor, SamplingParams, Tensor]:
    """Return views of `HostParams.whole` on the device: alive [rows] int64, the parameters, and the
    repetition, presence and frequency penalties [3, rows] float32."""
    size = len(whole) // _WHOLE
    alive, top_k, keys, floats = whole.split([size, size, 2 * size, _FLOATS // 2 * size])
    numbers = floats.view(torch.float32).view(_FLOATS, size)[:, :rows]
    keys = keys.view(size, 2)[:rows]
    params = SamplingParams(numbers[0], top_k[:rows], numbers[1], keys, numbers[2])
    return alive[:rows], params, numbers[3:]


class HostParams:
    """The sampling parameters on the host, as parts of one array so that one copy sends all of
    them.

    `whole` int64 holds, for a multiple of 4 rows: alive (1 for live rows, 0 for padding rows),
    top_k, keys [rows, 2], and six float32 numbers of each row in half a column each: temperature,
    top_p, min_p, and the repetition, presence and frequency penalties.
    """

    __slots__ = ("_alive", "_floats", "_keys", "_top_k", "whole")

    def __init__(self, rows: int):
        size = -(-rows // _ALIGNED) * _ALIGNED
        self.whole: NDArray[numpy.int64] = numpy.zeros(_WHOLE * size, dtype=numpy.int64)
        parts = numpy.split(self.whole, [size, 2 * size, 4 * size])
        self._alive, self._top_k, self._keys = parts[0], parts[1], parts[2].reshape(size, 2)
        self._floats = parts[3].view(numpy.float32).reshape(_FLOATS, size)
        self.clear(slice(0, size))

    def set(self, index: int, sampling: RowSampling, key: tuple[int, int]) -> None:
        """Write the parameters of a live row."""
        self._alive[index], self._top_k[index], self._keys[index] = 1, sampling.top_k, key
        warm = sampling.temperature >= ops.COLDEST
        temperature = min(sampling.temperature, ops.HOTTEST) if warm else 0.0
        self._floats[:, index] = temperature, sampling.top_p, sampling.min_p, *sampling.penalties

    def clear(self, indices: slice) -> None:
        """Make the rows with these indices padding rows."""
        self._alive[indices] = self._top_k[indices] = self._keys[indices] = 0
        self._floats[:, indices] = numpy.array([[0.0], [1.0], [0.0], [1.0], [0.0], [0.0]])

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move rows from the indices `sources` to `targets`."""
        for column in (self._alive, self._top_k, self._keys):
            column[targets] = column[sources]
        self._floats[:, targets] = self._floats[:, sources]


class Processors:
    """The processors of up to `rows` rows.

    What rows ask for lies on the device at fixed addresses, so captured graphs serve any values. A
    table exists only from the first row on that needs it; then `version` changes, and the loop
    captures its graphs anew.

    A grammar sets which tokens a row allows after each of its drafts. It calls `use_masks` once,
    and writes `masks` for the live rows before each verdict. Bit t % 32 of number t // 32 is token
    t. Bits of rows without a grammar stay 1. Masks apply to the target's logits, never to those of
    a draft.

    Attributes:
        min_p: whether a row has had a min_p.
        masks: [rows, steps, ceil(V / 32)] int32: bits of the tokens that each step allows; -1 if
            all. Step j comes after j drafts. None before `use_masks`.
        version: changes when a table is made or moves.

    Args:
        sizes: the number of ids `vocab`, and of logits V of a position. Logits beyond `vocab` are
            -inf. 0 if unknown: then no row may ask for a table.
    """

    def __init__(self, rows: int, sizes: tuple[int, int], device: torch.device):
        self._rows, self._device = rows, device
        self.vocab, self._columns = sizes
        self.version = 0
        self.min_p = False
        self.masks: Tensor | None = None
        self._words_of_bits = 2 * -(-self._columns // (2 * ops.BITS))  # even, for copies as int64
        self._counts: Tensor | None = None  # [rows + 1, V] int32 (processing.count_prompts)
        self._allowed: Tensor | None = None  # [rows, numbers] int32
        self._bias_ids: Tensor | None = None  # [rows, K] int64, and the numbers [rows, K] float32
        self._bias: Tensor | None = None
        self._bad_words: Tensor | None = None  # [rows, M, S] int64

    def active(self, *, masked: bool) -> bool:
        """Whether logits change at all. masked: whether masks apply."""
        return (
            (masked and self.masks is not None)
            or self._counts is not None
            or bool(self._sent_tables())
        )

    def use_masks(self, steps: int) -> None:
        """Make room for masks of `steps` steps of each row, all of which allow everything."""
        if self.masks is None or self.masks.shape[1] < steps:
            shape = self._rows, steps, self._words_of_bits
            self.masks = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            self.version += 1

    def make_room(self, samplings: Sequence[RowSampling]) -> None:
        """Make the tables that rows with these settings need."""
        if all(one is PLAIN for one in samplings):
            return
        if not self.min_p and any(one.min_p > 0 for one in samplings):
            self.min_p = True
            self.version += 1
        if any(one.penalties != PLAIN.penalties for one in samplings) and self._counts is None:
            self._counts = self._table((self._rows + 1, self._columns), 0, torch.int32)
        if any(one.allowed_token_ids is not None for one in samplings) and self._allowed is None:
            self._allowed = self._table((self._rows, self._words_of_bits), -1, torch.int32)
        if most := max((len(one.logit_bias) for one in samplings), default=0):
            self._bias_ids = self._grown(self._bias_ids, (most,), 0, torch.int64)
            self._bias = self._grown(self._bias, (most,), 0, torch.float32)
        if most := max((len(one.bad_words) for one in samplings), default=0):
            size = max(len(word) for one in samplings for word in one.bad_words)
            self._bad_words = self._grown(self._bad_words, (most, size), -1, torch.int64)

    def _table(self, shape: Sequence[int], value: int, dtype: torch.dtype) -> Tensor:
        assert self.vocab, "the batch was made without the size of the vocabulary"
        self.version += 1
        return torch.full(tuple(shape), value, dtype=dtype, device=self._device)

    def _grown(
        self, table: Tensor | None, sizes: Sequence[int], value: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a table [rows, *sizes], or larger, with the content of `table`. Sequences are
        right-aligned in its last dimension if there are two."""
        if table is not None and all(map(int.__ge__, table.shape[1:], sizes)):
            return table
        old = (0,) * len(sizes) if table is None else table.shape[1:]
        powers = (1 << (size - 1).bit_length() for size in sizes)
        sizes = list(map(max, powers, old))
        new = self._table((self._rows, *sizes), value, dtype)
        if table is not None and len(sizes) == 1:
            new[:, : old[0]] = table
        elif table is not None:
            new[:, : old[0], sizes[1] - old[1] :] = table
        return new

    def move(self, old: Tensor, new: Tensor) -> None:
        """Move rows from the indices `old` [R] to `new` [R]."""
        for table in self._tables():
            if table is not None:
                table[new] = table[old]

    def begin(
        self,
        indices: Tensor,
        samplings: Sequence[RowSampling],
        texts: Tensor,
        lengths: Tensor,
        sender: Sender,
    ) -> None:
        """Set the tables of rows that begin at `indices` [R].

        Args:
            texts: [R, L] int64, their prompts, of which the first lengths [R] tokens are valid.
        """
        if self._counts is not None:
            ops.count_prompts(self._counts, indices, texts, lengths)
        if self.masks is not None:
            self.masks[indices] = -1
        distinct = {id(one): one for one in samplings}  # the rows of a prompt share theirs
        lines = [(table, self._lines(table, distinct.values())) for table in self._sent_tables()]
        if not lines:
            return
        order = {key: at for at, key in enumerate(distinct)}
        parts = [numpy.array([order[id(one)] for one in samplings], dtype=numpy.int64)]
        parts += [part.view(numpy.int64).ravel() for _, part in lines]
        which, *sent = sender.send(numpy.concatenate(parts)).split([len(part) for part in parts])
        for (table, part), flat in zip(lines, sent, strict=True):
            found = flat.view(_SENT.get(table.dtype, table.dtype)).view(part.shape)
            table[indices] = found[which].to(table.dtype)

    def process(
        self,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        drafts: Tensor,
        *,
        texts: Tensor,
        lengths: Tensor,
        penalties: Tensor,
        masked: bool,
    ) -> Tensor:
        """Return the processed logits [N, U] of logits [N, U]: see ops.process_logits.

        Args:
            texts, lengths: the rows' tokens [B, C] and their number [B].
            masked: whether `masks` apply.
        """
        if self._bias is not None and self._bias_ids is not None:
            logits = ops.add_bias(logits, self._bias_ids[rows], self._bias[rows])
        masks = self.masks if masked else None
        if self._counts is not None or self._allowed is not None or masks is not None:
            logits = ops.process_logits(
                logits, rows, steps, drafts, self._counts, penalties, self._allowed, masks
            )
        if self._bad_words is not None:
            logits = ops.forbid_words(logits, rows, steps, drafts, texts, lengths, self._bad_words)
        return logits

    def count(self, block: Tensor, accepted: Tensor, alive: Tensor) -> None:
        """Count the tokens that rows commit: see ops.count_block."""
        if self._counts is not None:
            ops.count_block(self._counts, block, accepted, alive)

    def _tables(self) -> tuple[Tensor | None, ...]:
        return self._counts, self.masks, *self._sent_tables()

    def _sent_tables(self) -> list[Tensor]:
        """The tables whose lines the host makes."""
        tables = self._allowed, self._bias_ids, self._bias, self._bad_words
        return [table for table in tables if table is not None]

    def _lines(self, table: Tensor, samplings: Iterable[RowSampling]) -> NDArray[numpy.generic]:
        """Return the lines of a table for these settings, 8 bytes a number or pairs of int32."""
        if table is self._allowed:
            return numpy.stack([self._allowed_line(one) for one in samplings])
        if table is self._bad_words:
            return numpy.stack([self._word_lines(one) for one in samplings])
        size, number = table.shape[1], int(table is self._bias)
        return numpy.stack(
            [_padded([entry[number] for entry in one.logit_bias], size) for one in samplings]
        ).astype(numpy.float64 if number else numpy.int64)

    def _allowed_line(self, sampling: RowSampling) -> NDArray[numpy.int32]:
        if sampling.allowed_token_ids is None:
            return numpy.full(self._words_of_bits, -1, dtype=numpy.int32)
        bits = numpy.zeros(self._words_of_bits * ops.BITS, dtype=numpy.uint8)
        bits[[id_ for id_ in sampling.allowed_token_ids if id_ < self.vocab]] = 1
        return numpy.packbits(bits, bitorder="little").view("<i4").astype(numpy.int32)

    def _word_lines(self, sampling: RowSampling) -> NDArray[numpy.int64]:
        assert self._bad_words is not None
        lines = numpy.full(self._bad_words.shape[1:], -1, dtype=numpy.int64)
        for line, word in zip(lines, sampling.bad_words, strict=False):
            line[len(line) - len(word) :] = word
        return lines


# the dtype in which the lines of a table are sent, if it differs from the table's
_SENT = {torch.float32: torch.float64}


def _padded(values: list[int | float], size: int) -> NDArray[numpy.generic]:
    """Return the values as an array of this size, filled up with 0."""
    return numpy.array([*values, *[0] * (size - len(values))])
