"""The live rows: their tokens, lengths, sampling parameters and noise keys on the device, and the
host's record of them.

Rows are dense: rows 0 to len(batch) - 1 are live. A row that ends is replaced by a new one or by
the last one. Not here: keys and values (models/kv_cache.py), when a row ends (run/tasks.py).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

import bass_kernels as ops
from bass_cli.engine.host_state import LENGTH, LIMIT, NO_REPORT, PROMPT, HostState, Row, covering
from bass_cli.engine.sampling import HostParams, Processors, SamplingParams, noise_key, params_of
from bass_cli.engine.sizes import WIDTHS, cover
from bass_cli.models.block_allocator import BlockAllocator, BlockCopy, BlockLayout, Change, Sender

__all__ = ["Batch", "Change", "Row", "beyond"]


def beyond(longest: int) -> int:
    """Return how many positions beyond its limit a row may use with up to `longest` drafts. Its
    last round may go past the limit, and a round launched meanwhile further still."""
    return 2 * (cover(longest) + 1)


class Batch:
    """Up to `rows` live rows.

    tokens: [rows, context] int64 on the device. Places from a row's length on hold no valid data.
    lengths: [rows] int64 on the device.
    live_rows: the live Rows, by index.
    processors: what changes the rows' logits before they are sampled.
    changes: how often the live rows have changed.
    reports: what rounds report; it covers the reports of all live rows (of the last ones if none is
        live).
    masked: whether a live row has a grammar (one of the last rows if none is live).
    early: [steps, rows] int64 on the host, the drafts of a round with grammars as they come, -1
        where they have not come. None: not needed.

    Rows after the live ones are padding rows: one token long, never advanced. `pad` includes some
    of them in device operations, so that a captured graph serves several numbers of live rows.
    Rounds use tensors that are on the device already, because creating a number there is a kernel
    launch.

    Args:
        vocab: the number of the target's ids; only rows with logits processors need it.
        columns: the number of its logits at a position. Default: vocab.
    """

    def __init__(
        self,
        *,
        rows: int,
        context: int,
        device: torch.device,
        blocks: BlockLayout | None = None,
        vocab: int = 0,
        columns: int = 0,
    ):
        self.capacity, self.device = rows, device
        self._sender = Sender(device)
        self.allocator = BlockAllocator(rows, blocks or BlockLayout(rows))
        self.tokens = torch.zeros(rows, context, dtype=torch.int64, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self._steps = torch.arange(-context, context, device=device)
        # Everything that only the host changes is sent as one copy, whatever has changed.
        self._host = HostParams(rows)
        self._fixed = torch.from_numpy(self._host.whole.copy()).to(device)
        self._alive, self._params, self._penalties = params_of(self._fixed, rows)
        self.processors = Processors(rows, (vocab, columns or vocab), device)
        self.host_state = HostState(rows)
        self.live_rows: list[Row] = []
        self._moves = 0  # of `tokens` to another address
        self.changes = 0
        self.reports = NO_REPORT
        self.masked = False
        self.early: Tensor | None = None
        self._padded: int | None = None

    def __len__(self) -> int:
        return len(self.live_rows)

    @property
    def version(self) -> tuple[int, int]:
        """Changes when memory that device operations read moves to another address, or when they
        have more to do (sampling.py)."""
        return self._moves, self.processors.version

    @property
    def rows(self) -> int:
        """Rows that device operations take: the live ones, or the number set by `pad`."""
        return len(self.live_rows) if self._padded is None else self._padded

    def announce(self, step: int, drafts: Tensor) -> None:
        """Send the drafts [B] of a step to the host before the round's other ones are made, if a
        grammar needs them there."""
        if self.early is not None and self.masked:
            self.early[step, : len(drafts)].copy_(drafts, non_blocking=True)

    def pad(self, rows: int | None) -> None:
        """Let device operations take the first `rows` rows; None: the live ones."""
        assert rows is None or len(self.live_rows) <= rows <= self.capacity
        self._padded = rows

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Let no row advance inside this context, whatever is committed."""
        alive = self._alive.clone()
        self._alive.zero_()
        try:
            yield
        finally:
            self._alive.copy_(alive)

    def ends(self, further: int) -> list[int] | None:
        """Return each live row's length plus `further`, by the host's record. None while padded."""
        if self._padded is not None:
            return None
        ends: list[int] = (self._live(LENGTH) + further).tolist()
        return ends

    def rooms(self) -> list[int]:
        """Return how many more tokens each live row may generate."""
        rooms: list[int] = (self._live(LIMIT) + self._live(PROMPT) - self._live(LENGTH)).tolist()
        return rooms

    def most_room(self) -> int:
        """Return the largest of `rooms`."""
        return int((self._live(LIMIT) + self._live(PROMPT) - self._live(LENGTH)).max())

    def generated(self) -> NDArray[numpy.int64]:
        """Return how many tokens each live row has generated, by the host's record."""
        return self._live(LENGTH) - self._live(PROMPT)

    def known(self) -> NDArray[numpy.int64]:
        """Return each live row's length, by the host's record."""
        return self._live(LENGTH)

    def _live(self, column: int) -> NDArray[numpy.int64]:
        return self.host_state.numbers[: len(self.live_rows), column]

    @property
    def alive(self) -> Tensor:
        """[B] int64: 1 for each row that advances, 0 for the others."""
        return self._alive[: self.rows]

    @property
    def params(self) -> SamplingParams:
        params = self._params.of(slice(self.rows))
        return params if self.processors.min_p else params._replace(min_p=None)

    def swap_rows(self, ended: Sequence[int], rows: Sequence[Row]) -> Change:
        """End the rows with the indices `ended` and make `rows` live.

        New rows take the indices of ended ones; if there are fewer, the last rows move to the free
        ones. It takes one copy to the device, and the host does not wait for it.
        """
        leaving, old = sorted(ended), len(self.live_rows)
        count = old - len(leaving) + len(rows)
        assert count <= self.capacity
        indices = [*leaving, *range(old, count)][: len(rows)]
        free = [index for index in leaving[len(rows) :] if index < count]
        gone = set(leaving)
        sources = [index for index in range(count, old) if index not in gone]
        for index in leaving:
            self.live_rows[index].leave()
        self._write(indices, rows, sources, free, count)
        self._send(indices, rows, sources, free, slice(count, max(count, old)))
        self.changes += 1
        if self.live_rows:
            self.reports = covering(row.report for row in self.live_rows)
            self.masked = any(row.matcher is not None for row in self.live_rows)
        begun = (
            (tuple(index for index, _ in group), key)
            for key, group in itertools.groupby(
                zip(indices, rows, strict=True), key=lambda pair: pair[1].key
            )
        )
        moved = tuple(zip(sources, free, strict=True))
        self.allocator.swap_rows(leaving, moved, indices)
        return Change(tuple(leaving), moved, tuple(begun), self.allocator.runs.copy())

    def room(self, tokens: float, *, ended: Sequence[int] = ()) -> int:
        """Return how many more rows fit if all live rows grow to `tokens` tokens (or are longer
        already). At least 1 if no row is live.

        Args:
            ended: indices of rows that have ended and are not counted.
        """
        live = numpy.ones(len(self.live_rows), dtype=bool)
        live[list(ended)] = False
        blocks, sizes = self.allocator.blocks, self.allocator.runs[1, : len(self.live_rows)][live]
        free = self.capacity - len(sizes)
        if blocks.most == 1:
            return free
        each = int(blocks.needed(numpy.array([math.ceil(tokens)]))[0])
        left = (blocks.total - int(numpy.maximum(sizes, each).sum())) // each
        return min(free, max(left, int(not len(sizes))))

    def grow(self) -> tuple[Change | None, int | None]:
        """Give the rows, longest first, as many cache blocks as two more rounds may need.

        Returns: the change, None if there is none; and the index of the first row that did not get
            enough contiguous blocks, None if all did.
        """
        allocator = self.allocator
        if allocator.blocks.most == 1:
            return None, None
        generated, copied = self.generated(), list[BlockCopy]()
        needed, fails = allocator.blocks.needed(generated), None
        (growing,) = numpy.nonzero(needed > allocator.runs[1, : len(needed)])
        for index in growing[numpy.argsort(-generated[growing], kind="stable")].tolist():
            found = allocator.grow(index, int(needed[index]))
            if found is None:
                fails = index
                break
            copied.append(found)
        if not copied:
            return None, fails
        return Change((), (), (), allocator.runs.copy(), tuple(copied)), fails

    def surplus(self, index: int) -> list[int]:
        """Return the rows to put back so that the row at `index` can grow; possibly that row
        itself.

        They are the rows with the fewest tokens among those whose blocks lie where it must grow,
        and never the longest row, so that one row always finishes.
        """
        generated = self.generated()
        value = generated.astype(numpy.float64)
        value[longest := int(generated.argmax())] = numpy.inf
        size = int(self.allocator.blocks.needed(generated[index : index + 1])[0])
        others = self.allocator.rows_to_evict(size, value, grows=index)
        return others if index == longest or value[others].sum() <= value[index] else [index]

    def _write(
        self,
        indices: list[int],
        rows: Sequence[Row],
        sources: list[int],
        free: list[int],
        count: int,
    ) -> None:
        """Swap rows in the host's record.

        Args:
            indices: of the new `rows`.
            sources, free: the indices from which rows move, and those to which they move.
            count: live rows afterwards.
        """
        live_rows, host_state = self.live_rows, self.host_state
        host_state.move(sources, free)
        self._host.move(sources, free)
        changed = [*zip(free, (live_rows[source] for source in sources), strict=True)]
        changed += zip(indices, rows, strict=True)
        old = len(live_rows)
        del live_rows[count:]
        live_rows += rows[len(rows) - max(count - old, 0) :]
        for index, row in changed:
            live_rows[index] = row
        host_state.widen(max((row.limit for row in rows), default=0))
        for index, row in changed:
            row.write_to(host_state, index)
        self._host.clear(slice(count, max(count, old)))
        for index, row in zip(indices, rows, strict=True):
            self._host.set(index, row.sampling, noise_key(row.seed, row.noise_id, row.sample))

    def _send(
        self,
        indices: list[int],
        rows: Sequence[Row],
        sources: list[int],
        free: list[int],
        padding: slice,
    ) -> None:
        """Swap rows on the device. `padding`: rows that are no longer live; see also `_write`."""
        texts: list[list[int]] = []  # one for all rows of a prompt
        which = []
        for row in rows:
            if not texts or (row.prompt is not texts[-1] and row.prompt != texts[-1]):
                texts.append(row.prompt)
            which.append(len(texts) - 1)
        lines = numpy.zeros((len(texts), max(map(len, texts), default=0)), dtype=numpy.int64)
        for line, text in zip(lines, texts, strict=True):
            line[: len(text)] = text
        if rows:
            of_rows = self.host_state.numbers[indices]
            longest = int((of_rows[:, LENGTH] + of_rows[:, LIMIT]).max())
            self._widen(longest + beyond(WIDTHS[-1]))
        sent = [*sources, *free, *indices, *which, *(len(row.prompt) for row in rows)]
        parts = [self._host.whole, numpy.array(sent, dtype=numpy.int64), lines.ravel()]
        fixed, numbers, flat = self._sender.send(numpy.concatenate(parts)).split(
            [len(part) for part in parts]
        )
        self._fixed.copy_(fixed)
        if sources:
            old, new = numbers[: 2 * len(sources)].view(2, -1)
            self.lengths[new] = self.lengths[old]
            self.tokens[new] = self.tokens[old]
            self.processors.move(old, new)
        self.lengths[padding] = 1
        if rows:
            new, text, lengths = numbers[2 * len(sources) :].view(3, -1)
            self.lengths[new] = lengths
            prompts = flat.view(lines.shape)[text]
            self.tokens[new, : lines.shape[1]] = prompts
            samplings = [row.sampling for row in rows]
            self.processors.make_room(samplings)
            self.processors.begin(new, samplings, prompts, lengths, self._sender)

    def _widen(self, context: int) -> None:
        """Make room for rows of up to `context` tokens."""
        if context > self.tokens.shape[1]:
            grown = self.tokens.new_zeros(self.capacity, max(context, 2 * self.tokens.shape[1]))
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown
            self._steps = torch.arange(-grown.shape[1], grown.shape[1], device=self.device)
            self._moves += 1

    def steps(self, first: int, count: int) -> Tensor:
        """Return first, first + 1, ..., as [count] int64."""
        start = self.tokens.shape[1] + first
        assert 0 <= start <= start + count <= len(self._steps)
        return self._steps[start : start + count]

    def positions(self, first: int, count: int) -> Tensor:
        """Return `count` positions of each row, beginning `first` after its end (before it if
        negative), [B, count]."""
        return self.lengths[: self.rows, None] + self.steps(first, count)

    def commit(self, block: Tensor, accepted: Tensor) -> None:
        """Append the first accepted [B] + 1 tokens of block [B, W] (drafts, then the target's
        token) to each row, on the device."""
        ops.commit(*self._texts, self.alive, accepted, block)
        self.processors.count(block, accepted, self.alive)

    def report(self, block: Tensor, accepted: Tensor, scores: Tensor) -> Tensor:
        """Commit, and return the table for the host: see ops.report."""
        self.processors.count(block, accepted, self.alive)
        return ops.report(*self._texts, self.alive, accepted, block, scores)

    def process(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Return the target's logits [B, k + 1, V] of the positions after each row's end, as the
        rows' processors change them. drafts: [B, k]. They are the same tensor if none does."""
        if not self.processors.active(masked=self.masked):
            return logits
        (rows, width), device = logits.shape[:2], self.device
        index = torch.arange(rows, device=device).repeat_interleave(width)
        steps = torch.arange(width, device=device).repeat(rows)
        return self.process_packed(logits.flatten(0, 1), index, steps, drafts).view(logits.shape)

    def process_packed(
        self, logits: Tensor, rows: Tensor, steps: Tensor, drafts: Tensor, *, masked: bool = True
    ) -> Tensor:
        """Do `process` for logits [N, V] of any rows [N], each after the first steps [N] of the
        row's drafts.

        Args:
            masked: whether the masks of each step apply, if a row has a grammar; not to a draft's
                logits.
        """
        masked = masked and self.masked
        if not self.processors.active(masked=masked):
            return logits
        texts, lengths = self._texts
        return self.processors.process(
            logits,
            rows,
            steps,
            drafts,
            texts=texts,
            lengths=lengths,
            penalties=self._penalties,
            masked=masked,
        )

    def pending(self, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that the target must read: each row's last token and its drafts [B, k],
        and their positions, [B, k + 1] each."""
        return ops.pending(*self._texts, drafts)

    @property
    def _texts(self) -> tuple[Tensor, Tensor]:
        """The rows' tokens and lengths."""
        return self.tokens[: self.rows], self.lengths[: self.rows]

    def last(
        self, count: int, floor: Tensor | None = None, *, behind: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the last `count` tokens of each row and their positions, [B, count] each.

        Args:
            floor: [B], the lowest position (default 0). Lower positions are raised to it, so that a
                token is fed more than once and its key is written again.
            behind: [] int64 on the device. If given, the tokens begin this far before the row's
                end.
        """
        if behind is None:
            positions = self.positions(-count, count)
        else:
            positions = self.lengths[: self.rows, None] - behind + self.steps(0, count)
        if floor is not None:
            positions = torch.maximum(positions, floor[:, None])
        elif behind is not None or count > 1:  # a row has at least one token
            positions = positions.clamp(min=0)
        return self.tokens[: self.rows].gather(1, positions), positions

    def following(
        self, starts: Tensor, count: int, after: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the `count` tokens of each row from its position `starts` [B] on, and their
        positions, [B, count] each.

        Args:
            after: [B, N], tokens after a row's end. Default: arbitrary ones.
        """
        positions = starts[:, None] + self.steps(0, count)
        tokens = self.tokens[: self.rows].gather(1, positions)
        if after is not None:
            beyond = positions - self.lengths[: self.rows, None]
            drafts = after.gather(1, beyond.clamp(0, after.shape[1] - 1))
            tokens = torch.where(beyond < 0, tokens, drafts)
        return tokens, positions
