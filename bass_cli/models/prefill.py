"""Passes over prompts: parts of several, one after the other, in one pass; as captured graphs where
there are any.

A prompt read alone is hundreds of launches and all weights for few tokens. Products run over the
tokens of all parts at once; attention takes tiles, each of one prompt. Not here: what a pass is
(decoder.py), where a prompt's keys stand (kv_cache.py), CUDA itself (models/capture.py).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from bass_cli.models.block_allocator import Sender
from bass_cli.models.capture import Recorder
from bass_cli.models.decoder import Decoder
from bass_cli.models.kv_cache import KVCache, Span
from bass_kernels import Group

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # tokens of a captured pass, padding included
# Tokens of a pass at most. Some 230 keep an H200's products as busy as reading their weights does;
# with twice as many reading hides behind them, and more only keeps running rows waiting.
PASS = SIZES[-1]
# A prompt of which so many tokens are left has passes of its own, not captured, of up to so many:
# 13 ms of launches are hidden by then, products run at their full rate, and attention reads the
# keys before them more rarely. An H200, 1.5B, 32,000 tokens, with torch's own attention: 0.70 s by
# 512, 0.50 by 2048, 0.44, 0.42 by 16,384; running rows would wait twice as long. Now 0.32.
LONG = {"cuda": (2048, 8192)}
# Tokens of a tile, all of one prompt: the queries that a kernel takes at once, for each of which
# some four heads share a key. In plain torch nothing is gained by more than 1, and nothing padded.
TILE = {"cuda": 16}
# Uncaptured passes that a capture takes, its own run included: 42 ms, an H200's host, for 20 to 26.
PATIENCE = 2
# Of an uncaptured pass, what a captured one of PASS tokens takes longer than one of few, at most:
# the 1.5B's operations there are 3 ms.
_PADDING = 0.15


def padded(tokens: int) -> int:
    """The tokens of a captured pass that takes so many (up to the largest of SIZES)."""
    return SIZES[bisect.bisect_left(SIZES, tokens)]


def alone(left: int, device: str) -> int:
    """How many of the tokens that are left of a prompt go into a pass of their own; 0: none, they
    share one of PASS tokens."""
    least, most = LONG.get(device, (left + 1, 0))
    return min(left, most) if left >= least else 0


class Part(NamedTuple):
    """Some tokens of a prompt, for positions from `first` on of its span; `behind`: the token
    that follows them."""

    tokens: Sequence[int]
    span: Span
    first: int
    behind: int = 0

    @property
    def end(self) -> int:
        """The position after them."""
        return self.first + len(self.tokens)


def tiled(tokens: int, tile: int) -> int:
    """The tokens of the tiles that so many take."""
    return -(-tokens // tile) * tile


class Table(NamedTuple):
    """A pass over parts as the device takes it: tokens, positions and slots in the store [W]; by
    tile [N] where its prompt starts and up to which position it is there; and the token behind
    each [W]. int64."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    ends: Tensor
    following: Tensor

    @classmethod
    def of(cls, numbers: Tensor, size: int, tile: int) -> Table:
        """Views of `numbers`, in which they stand one after the other."""
        tiles = size // tile
        return cls(*numbers[: _numbers(size, tile)].split([size] * 3 + [tiles] * 2 + [size]))


def _numbers(size: int, tile: int) -> int:
    """How many a Table of `size` tokens has."""
    return 4 * size + 2 * (size // tile)


def laid_out(
    parts: Iterable[Part], size: int, tile: int, scrap: int
) -> tuple[NDArray[numpy.int64], tuple[Group, ...]]:
    """The numbers of a Table of `size` tokens, and its tiles by prompt. What fills tiles and the
    pass up is stored at `scrap`, a slot that no prompt has."""
    tiles, at = size // tile, 0
    numbers = numpy.zeros(_numbers(size, tile), dtype=numpy.int64)
    tokens, positions, slots, starts, ends, following = numpy.split(
        numbers, [size, 2 * size, 3 * size, 3 * size + tiles, 3 * size + 2 * tiles]
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
        positions[at + count : behind] = part.end - 1  # sees nothing that is not there
        slots[at : at + count] = numpy.arange(part.first, part.end) + part.span.start
        starts[own], ends[own] = part.span.start, part.end
        groups.append(Group(part.span.start, part.end, own, count))
        at = behind
    return numbers, tuple(groups)


class Passes:
    """One model's passes over prompts. `scrap`: see laid_out; `record` captures them, if it is
    given."""

    def __init__(self, decoder: Decoder, cache: KVCache, record: Recorder | None):
        self._decoder, self._cache, self._sender = decoder, cache, Sender(decoder.device)
        self.tile = TILE.get(decoder.device.type, 1)
        self.graphs, scrap = None, 0
        if record is not None:
            self.graphs = PromptGraphs(self._run, record, decoder.device, tile=self.tile)
        if record is not None or self.tile > 1:
            scrap = cache.reserve(1).start
        self._scrap = scrap

    def run(self, parts: Sequence[Part], *, capture: bool) -> None:
        """Store these parts, whose tiles have up to PASS tokens together, or one part of more.
        `capture`: this may take longer, if later passes take less."""
        size = sum(tiled(len(part.tokens), self.tile) for part in parts)
        graphs = self.graphs
        if graphs is not None and size <= PASS:
            store = self._cache.positions
            serving = graphs.serving(padded(size), store=store, capture=capture)
            if serving is not None:
                graphs.feed(serving, laid_out(parts, serving, self.tile, self._scrap)[0])
                return
        numbers, groups = laid_out(parts, size, self.tile, self._scrap)
        self._run(Table.of(self._sender.send(numbers), size, self.tile), groups)

    def prepare(self) -> None:
        """Capture now what reads prompts, rather than when it has come often enough."""
        if self.graphs is not None:
            for size in SIZES:
                if not self.graphs.holds(size, store=self._cache.positions):
                    self.graphs.feed(size, laid_out((), size, self.tile, self._scrap)[0])

    def _run(self, table: Table, groups: tuple[Group, ...] | None = None) -> None:
        step = self._cache.fill(*table[1:], groups)
        self._decoder.forward(table.tokens[None], step, last=0)


class PromptGraphs:
    """The graphs of one model's passes, by their tokens. `run(table)` stores the keys and values
    of a Table on `device`, in tiles of `tile` tokens; `record` captures it.

    A pass is served by the smallest graph that it fits into. A size is captured when what it lost
    without comes to a capture (the ski-rental rule); its first run is an uncaptured one, which
    compiles and loads what the capture needs. `captures` counts them.
    """

    def __init__(
        self, run: Callable[[Table], None], record: Recorder, device: torch.device, *, tile: int
    ):
        self._run, self._record, self._tile = run, record, tile
        self._input = torch.zeros(_numbers(SIZES[-1], tile), dtype=torch.int64, device=device)
        self._held: dict[int, Callable[[], None]] = {}
        self._dropped: dict[int, Callable[[], None]] = {}  # not run any more, see _renew
        self._warm: set[int] = set()  # sizes that have been captured before
        self._lost: dict[int, float] = {}  # by size, in uncaptured passes
        self._store = 0
        self.captures = 0

    def holds(self, size: int, *, store: int) -> bool:
        """Whether there is a graph of this size for a store of so many positions; a store moves
        when that changes."""
        self._renew(store)
        return size in self._held

    def serving(self, size: int, *, store: int, capture: bool) -> int | None:
        """The size of the graph that is to take a pass of this size: one that is there, or this
        one if it is time to capture it, and `capture` allows that. None: it is to run
        uncaptured."""
        if self.holds(size, store=store):
            return size
        larger = min((held for held in self._held if held > size), default=None)
        loss = 1.0 if larger is None else _PADDING * (larger - size) / PASS
        self._lost[size] = self._lost.get(size, 0.0) + loss
        return size if capture and self._lost[size] >= PATIENCE else larger

    def feed(self, size: int, numbers: NDArray[numpy.int64]) -> None:
        """Run the pass of this size over what `numbers` say (see laid_out), captured if there is
        no graph yet. One copy that the host does not wait for."""
        given, pinned = torch.from_numpy(numbers), self._input.is_cuda
        self._input[: len(given)].copy_(
            given.pin_memory() if pinned else given, non_blocking=pinned
        )
        if size in self._held:
            self._held[size]()
            return
        function = functools.partial(self._run, Table.of(self._input, size, self._tile))
        warm = size in self._warm
        if not warm:
            function()
            self._warm.add(size)
        self._held[size] = self._record(function)
        self._dropped = {}
        self.captures += 1
        if warm:
            self._held[size]()

    def _renew(self, store: int) -> None:
        if store != self._store:
            # The memory that all of them share must not be without any: CUDA's allocator refuses
            # to capture into it then.
            self._store, self._dropped, self._held = store, self._held or self._dropped, {}
            # Sizes that were worth a capture are at the next pass that nothing serves.
            self._lost = dict.fromkeys(self._warm, PATIENCE - 1)
