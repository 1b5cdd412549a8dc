"""Prefill: passes over parts of several prompts at once, as captured CUDA graphs where the device
has them.

A pass over a single short prompt takes hundreds of launches and reads all weights for few tokens.
Here matrix products run over the tokens of all parts, and attention over tiles, each of one
prompt. Not here: a pass itself (decoder.py), the store (kv_cache.py), CUDA (models/capture.py).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from bass_cli.models.block_allocator import Sender
from bass_cli.models.capture import Graphs, SkiRental
from bass_cli.models.decoder import Decoder
from bass_cli.models.kv_cache import KVCache, Span
from bass_kernels import Group, compiling, log_probability, report_entries

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # tokens of a captured pass, padding included
# Maximum tokens of a pass. On an H200, computing about 230 tokens takes as long as reading the
# weights. With 512 the reading is hidden; more would only delay the rows that are running.
PASS = SIZES[-1]
# (least, most): a prompt with at least `least` tokens left is read in passes of its own of up to
# `most` tokens, uncaptured. Such a pass hides its 13 ms of launches, runs products at full rate and
# reads earlier keys less often. An H200, 1.5B, 32,000 tokens, with torch's own attention: 0.70 s in
# passes of 512, 0.50 of 2048, 0.44 of 8192, 0.42 of 16,384, but then running rows would wait twice
# as long. Now 0.32 s.
LONG = {"cuda": (2048, 8192)}
# Tokens of a tile, all of one prompt: the queries that a kernel takes at once (about four heads
# share a key). In plain torch larger tiles gain nothing, and tiles of 1 need no padding.
TILE = {"cuda": 16}
# Cost of a capture, its own run included, in uncaptured passes: 42 ms against 20 to 26 on an H200's
# host.
PATIENCE = 2
# Maximum extra time of a captured pass of PASS tokens over one of few tokens, in uncaptured passes:
# 3 ms of operations for the 1.5B.
_PADDING = 0.15
# Logits that are computed at once where a text is scored, with float32 copies: 64 MB each.
SCORED_LOGITS = 1 << 24


def padded(tokens: int) -> int:
    """Return the size of the captured pass for so many tokens, at most the largest of SIZES."""
    return SIZES[bisect.bisect_left(SIZES, tokens)]


def own_pass_tokens(left: int, device: str) -> int:
    """Return the tokens of a prompt's next pass of its own, given how many are left; 0 if it shares
    a pass of PASS tokens with other prompts."""
    least, most = LONG.get(device, (left + 1, 0))
    return min(left, most) if left >= least else 0


class PromptPart(NamedTuple):
    """Some tokens of a prompt, at positions from `first` of its span. `behind`: the token after
    them."""

    tokens: Sequence[int]
    span: Span
    first: int
    behind: int = 0

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + len(self.tokens)


class PromptScores:
    """The target's log-probabilities of a prompt's tokens, as passes over the prompt find them.

    Args:
        top: how many likeliest tokens to find at each position.
    """

    def __init__(self, top: int):
        self.top = top
        self._scores, self._entries = list[Tensor](), list[Tensor]()

    @property
    def count(self) -> int:
        """The number of tokens that were scored."""
        return sum(map(len, self._scores))

    def add(self, decoder: Decoder, hidden: Tensor, following: Sequence[int]) -> None:
        """Score the tokens that follow those of a pass.

        Args:
            hidden: the final norm's output for the pass's tokens, [W, width].
            following: the token after each of them.
        """
        tokens = torch.tensor(following, device=hidden.device)
        each = max(SCORED_LOGITS // decoder.vocab, 1)
        for lines, wanted in zip(hidden.split(each), tokens.split(each), strict=True):
            logits = decoder.logits(lines)
            scores = log_probability(logits, wanted)
            self._scores.append(scores)
            if self.top:
                self._entries.append(report_entries(logits, wanted, scores, self.top))

    def found(self) -> tuple[NDArray[numpy.float32], NDArray[numpy.int64]]:
        """Return the log-probabilities of all tokens but the first, [T - 1], and the likeliest
        tokens at the position of each, [T - 1, top] (bass_kernels.report_entries)."""
        count = self.count
        scores = torch.cat(self._scores) if count else torch.zeros(0)
        entries = torch.cat(self._entries) if self._entries else torch.zeros(count, self.top).long()
        return scores.float().cpu().numpy(), entries.cpu().numpy()


def tiled(tokens: int, tile: int) -> int:
    """Return so many tokens rounded up to whole tiles."""
    return -(-tokens // tile) * tile


class PassInput(NamedTuple):
    """The inputs of a pass over parts, on the device, int64. See KVCache.prefill_pass.

    tokens, positions, slots, following: [W].
    starts, ends: [N], by tile.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    ends: Tensor
    following: Tensor

    @classmethod
    def of(cls, numbers: Tensor, size: int, tile: int) -> PassInput:
        """Return views of `numbers`, which holds the fields one after the other."""
        parts = _sizes(size, tile)
        return cls(*numbers[: sum(parts)].split(parts))


def _sizes(size: int, tile: int) -> list[int]:
    """Return the number of integers in each field of a PassInput of `size` tokens."""
    return [size] * 3 + [size // tile] * 2 + [size]


def lay_out(
    parts: Iterable[PromptPart], size: int, tile: int, scrap: int
) -> tuple[NDArray[numpy.int64], tuple[Group, ...]]:
    """Lay parts out as the integers of a PassInput of `size` tokens.

    Args:
        scrap: slot of the store for the keys of padding tokens; no prompt uses it.

    Returns:
        The integers, and the tiles by prompt.
    """
    at, sizes = 0, _sizes(size, tile)
    numbers = numpy.zeros(sum(sizes), dtype=numpy.int64)
    tokens, positions, slots, starts, ends, following = numpy.split(
        numbers, numpy.cumsum(sizes)[:-1]
    )
    slots[:], starts[:], ends[:] = scrap, scrap, 1
    groups = []
    for part in parts:
        count = len(part.tokens)
        behind = at + tiled(count, tile)
        own = slice(at // tile, behind // tile)
        tokens[at : at + count] = part.tokens
        following[at : at + count] = [*part.tokens[1:], part.behind]
        positions[at : at + count] = numpy.arange(part.first, part.end)
        positions[at + count : behind] = part.end - 1  # padding attends to stored keys only
        slots[at : at + count] = numpy.arange(part.first, part.end) + part.span.start
        starts[own], ends[own] = part.span.start, part.end
        groups.append(Group(part.span.start, part.end, own, count))
        at = behind
    return numbers, tuple(groups)


class PrefillPasses:
    """The passes of one model over prompts, captured by number of tokens in `graphs`; None: no
    captures.

    A captured pass is padded: it uses the smallest graph that is large enough.

    patience: uncaptured passes of a size that come before its capture, and 1.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, graphs: Graphs | None):
        self.patience = PATIENCE
        self._decoder, self._cache, self._sender = decoder, cache, Sender(decoder.device)
        self.tile = TILE.get(decoder.device.type, 1)
        self.graphs, self._rental = graphs, SkiRental[int]()
        self._scrap = 0
        if graphs is not None:
            most = sum(_sizes(SIZES[-1], self.tile))
            self._input = torch.zeros(most, dtype=torch.int64, device=decoder.device)
        if graphs is not None or self.tile > 1:
            self._scrap = cache.reserve(1).start

    def run(self, parts: Sequence[PromptPart], *, capture: bool) -> None:
        """Store the keys and values of these parts: up to PASS tokens in tiles, or one longer part.

        Args:
            capture: whether this pass may be captured, which takes longer now and less later.
        """
        size = sum(tiled(len(part.tokens), self.tile) for part in parts)
        if self.graphs is not None and size <= PASS and not compiling():
            serving = self._graph_size(self.graphs, padded(size), capture=capture)
            if serving is not None:
                self._run_captured(self.graphs, serving, parts)
                return
        numbers, groups = lay_out(parts, size, self.tile, self._scrap)
        self._run(PassInput.of(self._sender.send(numbers), size, self.tile), groups)

    def run_with_hidden(self, parts: Sequence[PromptPart]) -> list[Tensor]:
        """Do `run` without a graph. Return the final norm's output for each part's tokens, [W,
        width] each."""
        size = sum(tiled(len(part.tokens), self.tile) for part in parts)
        numbers, groups = lay_out(parts, size, self.tile, self._scrap)
        table = PassInput.of(self._sender.send(numbers), size, self.tile)
        hidden = self._decoder.final_hidden(
            table.tokens[None], self._cache.prefill_pass(*table[1:], groups)
        )
        assert hidden is not None
        sizes = [tiled(len(part.tokens), self.tile) for part in parts]
        found = hidden[0].split(sizes)
        return [lines[: len(part.tokens)] for lines, part in zip(found, parts, strict=True)]

    def prepare(self) -> None:
        """Capture passes of all sizes now, not when they have been frequent enough."""
        if self.graphs is None:
            return
        self.graphs.renew(self._cache.positions)
        for size in SIZES:
            if not self.graphs.holds(size):
                self._run_captured(self.graphs, size, ())

    def _graph_size(self, graphs: Graphs, size: int, *, capture: bool) -> int | None:
        """Return the size of the graph for a pass of this size: an existing one, or `size` itself
        if a capture is due and allowed. None if the pass should run uncaptured."""
        graphs.renew(self._cache.positions)  # a store that grows moves
        if graphs.holds(size):
            return size
        larger = next((one for one in SIZES if one > size and graphs.holds(one)), None)
        self._rental.lose(size, 1.0 if larger is None else _PADDING * (larger - size) / PASS)
        return size if capture and self._rental.pays(size, self.patience) else larger

    def _run_captured(self, graphs: Graphs, size: int, parts: Sequence[PromptPart]) -> None:
        """Run the pass of this size on `parts`. Capture it if there is no graph. The host does not
        wait for the copy."""
        given = torch.from_numpy(lay_out(parts, size, self.tile, self._scrap)[0])
        pinned = self._input.is_cuda
        self._input[: len(given)].copy_(
            given.pin_memory() if pinned else given, non_blocking=pinned
        )
        if graphs.holds(size):
            graphs.replay(size)
            return
        function = functools.partial(self._run, PassInput.of(self._input, size, self.tile))
        graphs.run(size, function)
        graphs.capture(size, function)
        # If the store moves, the next pass that has no graph of any size captures it again.
        self._rental.restart(size, self.patience - 1)

    def _run(self, table: PassInput, groups: tuple[Group, ...] | None = None) -> None:
        step = self._cache.prefill_pass(*table[1:], groups)
        self._decoder.forward(table.tokens[None], step, last=0)
