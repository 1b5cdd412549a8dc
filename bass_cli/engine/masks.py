"""The tokens that the rows with a grammar may sample, at every place of a round.

The host follows each row's grammar over its drafts, while the device runs the target. A place's
mask is that after the drafts before it, so that the tokens are those of plain decoding. Not here:
the grammars (formats/grammars.py), how a mask changes the distribution (sampling.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from bass_cli.engine.batch import Batch
from bass_cli.engine.sizes import LONGEST
from bass_cli.formats.grammars import DraftMasks, Matcher, fill

_FEWEST = 8  # drafts that there is room for at first
_PAUSE = 2e-5  # seconds between looks for a draft; a step of a draft model takes 1 ms


class TokenMasks:
    """Sends the masks of one loop's rounds to `batch.processors`.

    Args:
        defined: whether places after a forbidden draft, or after the end, must allow all tokens.
            Else their masks are arbitrary. Block verification (maximal coupling) looks one place
            beyond a draft, so there samples would depend on the masks of earlier rounds.
    """

    def __init__(self, batch: Batch, *, defined: bool):
        self._batch, self._defined = batch, defined
        self._host = torch.zeros(0, dtype=torch.int32)  # where masks are made, line by line
        self._made: Collection[int] = ()  # lines of the next round that `follow` has made

    def follow(self, width: int, is_over: Callable[[], bool]) -> None:
        """Make masks while a graph makes `width` drafts one after the other (Batch.announce).

        Only for rows in their answer; `fill` does the others. is_over: whether the graph has ended.
        """
        early, count = self._batch.early, len(self._batch)
        if early is None:
            return
        rows = {
            line: matcher
            for line, matcher in enumerate(_matchers(self._batch))
            if matcher is not None and matcher.is_in_answer
        }
        masks = DraftMasks(rows, self._lines(count, width + 1).numpy())
        try:
            for drafts in early[:width, :count].numpy():
                while (drafts < 0).any():
                    if is_over() and (drafts < 0).any():
                        return
                    time.sleep(_PAUSE)
                masks.take(drafts.tolist())
            self._made = rows.keys()
        finally:
            masks.close()

    def fill(self, drafts: Sequence[Sequence[int]]) -> None:
        """Write the masks of the live rows' next round. drafts: of each row, the same number."""
        made, self._made = self._made, ()
        host = self._lines(len(drafts), len(drafts[0]) + 1 if drafts else 1, begin=not made)
        rows = zip(_matchers(self._batch), drafts, strict=True)
        given = [None if one[0] is None else (one[0], one[1]) for one in rows]
        fill(given, host.numpy(), made)
        masks = self._batch.processors.masks
        assert masks is not None
        masks[: len(drafts), : host.shape[1]].copy_(host, non_blocking=True)
        if self._batch.early is not None:
            self._batch.early.fill_(-1)

    def _lines(self, rows: int, places: int, *, begin: bool = True) -> Tensor:
        """Return where the host makes masks, [rows, places, words]; defined if that is needed."""
        make_room(self._batch, places - 1)
        masks = self._batch.processors.masks
        assert masks is not None
        size = rows * places * masks.shape[2]
        if self._host.numel() < size:
            self._host = torch.full((2 * size,), -1, dtype=torch.int32)
            if masks.device.type == "cuda":
                self._host = self._host.pin_memory()
        host = self._host[:size].view(rows, places, masks.shape[2])
        if self._defined and begin:
            host.fill_(-1)
        return host


def make_room(batch: Batch, width: int) -> None:
    """Make room for the masks of rounds of up to `width` drafts."""
    masks = batch.processors.masks
    if masks is None or masks.shape[1] <= width:
        most = 1 << max(width - 1, _FEWEST - 1).bit_length()  # each growth captures graphs anew
        batch.processors.use_masks(min(most, LONGEST) + 1)
    if batch.early is None and batch.device.type == "cuda":
        batch.early = torch.full((LONGEST, batch.capacity), -1).pin_memory()


def allowed(batch: Batch, drafts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many drafts of each live row its grammar allows, one after the other."""
    return tuple(
        len(tokens) if matcher is None else matcher.allowed(tokens)
        for matcher, tokens in zip(_matchers(batch), drafts, strict=True)
    )


def _matchers(batch: Batch) -> list[Matcher | None]:
    """Return the matcher of each live row, after all of its tokens."""
    for row in batch.hosts:
        if row.matcher is not None:
            row.matcher.advance(row.since(row.matcher.seen))
    return [row.matcher for row in batch.hosts]
