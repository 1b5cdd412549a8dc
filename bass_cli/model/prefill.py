"""Passes over a prompt as captured graphs: padded to one of a few numbers of tokens, at any place
of the prompt store.

A prompt read once is hundreds of launches that the host makes one by one; a graph makes them
itself. Not here: what a pass is (decoder.py), where a prompt's keys stand (kv_cache.py), CUDA
itself (model/capture.py).
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bass_cli.model.capture import Recorder

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # tokens of a pass, padding included
PATIENCE = 8  # a capture takes as long as so many uncaptured passes


def padded(tokens: int) -> int:
    """The tokens of a captured pass that takes so many (up to the largest of SIZES)."""
    return SIZES[bisect.bisect_left(SIZES, tokens)]


class PromptGraphs:
    """The graphs of one model's prompts. `run(tokens [1, W], place [2])` writes the keys and values
    of the tokens for positions from place[1] on into the store, whose slot for position 0 is
    place[0] (all int64, on `device`); `record` captures it. A pass writes up to `padded` positions:
    what stands beyond its tokens is never to be seen.

    A size is captured when it was wished so often that captures would have paid by then (the
    ski-rental rule); then, as always, its first run is an uncaptured one, which compiles and
    loads what the capture needs. `captures` counts them.
    """

    def __init__(
        self, run: Callable[[Tensor, Tensor], None], record: Recorder, device: torch.device
    ):
        self._run, self._record = run, record
        # the place, then the tokens
        self._input = torch.zeros(2 + SIZES[-1], dtype=torch.int64, device=device)
        self._held: dict[int, Callable[[], None]] = {}
        self._dropped: dict[int, Callable[[], None]] = {}  # not run any more, see _renew
        self._wished: Counter[int] = Counter()
        self._store = 0
        self.captures = 0

    def feed(
        self, tokens: Sequence[int], *, start: int, first: int, store: int, capture: bool
    ) -> bool:
        """Take in `tokens` (as many as the largest of SIZES) for positions from `first` on of a
        prompt at `start` of a store with `store` positions; a store moves when that changes.
        False: nothing was done, since there is no graph and either it is not time for one, or
        `capture` forbids it."""
        self._renew(store)
        size = padded(len(tokens))
        if size not in self._held:
            self._wished[size] += 1
            if not capture or self._wished[size] <= PATIENCE:
                return False
        self._put(tokens, start, first)
        if size in self._held:
            self._held[size]()
        else:
            self._capture(size)
        return True

    def prepare(self, *, start: int, store: int) -> None:
        """Capture all sizes now. What stands at `start` and up to the largest size behind it is
        lost."""
        self._renew(store)
        for size in SIZES:
            if size not in self._held:
                self._put([0] * size, start, 0)
                self._capture(size)

    def _renew(self, store: int) -> None:
        if store != self._store:
            # The memory that all of them share must not be without any: CUDA's allocator refuses
            # to capture into it then.
            self._store, self._dropped, self._held = store, self._held or self._dropped, {}
            self._wished.clear()

    def _put(self, tokens: Sequence[int], start: int, first: int) -> None:
        """One copy that the host does not wait for. Tokens of an earlier pass may stay behind
        these: they are padding."""
        pinned = self._input.is_cuda
        given = torch.tensor([start, first, *tokens], pin_memory=pinned)
        self._input[: len(given)].copy_(given, non_blocking=pinned)

    def _capture(self, size: int) -> None:
        function = functools.partial(self._run, self._input[None, 2 : 2 + size], self._input[:2])
        function()
        self._held[size] = self._record(function)
        self._dropped = {}
        self.captures += 1
