"""The tokens that the rows with a grammar may sample, at every place of a round.

The host follows each row's grammar over its drafts, while the device runs the target. A place's
mask is that after the drafts before it, so that the tokens are those of plain decoding. Not here:
the grammars (formats/grammars.py), how a mask changes the distribution (processors.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bass_cli.engine.batch import Batch
from bass_cli.engine.sizes import LONGEST
from bass_cli.formats.grammars import Matcher, fill

_FEWEST = 8  # drafts that there is room for at first


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

    def fill(self, drafts: Sequence[Sequence[int]]) -> None:
        """Write the masks of the live rows' next round. drafts: of each row, the same number."""
        places = len(drafts[0]) + 1 if drafts else 1
        make_room(self._batch, places - 1)
        masks = self._batch.processors.masks
        assert masks is not None
        shape = len(drafts), places, masks.shape[2]
        size = shape[0] * shape[1] * shape[2]
        if self._host.numel() < size:
            self._host = torch.full((2 * size,), -1, dtype=torch.int32)
            if masks.device.type == "cuda":
                self._host = self._host.pin_memory()
        host = self._host[:size].view(shape)
        if self._defined:
            host.fill_(-1)
        rows = zip(_matchers(self._batch), drafts, strict=True)
        fill([None if one[0] is None else (one[0], one[1]) for one in rows], host.numpy())
        masks[: shape[0], :places].copy_(host, non_blocking=True)


def make_room(batch: Batch, width: int) -> None:
    """Make room for the masks of rounds of up to `width` drafts."""
    masks = batch.processors.masks
    if masks is None or masks.shape[1] <= width:
        most = 1 << max(width - 1, _FEWEST - 1).bit_length()  # each growth captures graphs anew
        batch.processors.use_masks(min(most, LONGEST) + 1)


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
