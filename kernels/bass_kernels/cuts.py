"""How the products of a few tokens are split over the programs of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import triton
from torch import Tensor

from .launch import SPARE, card, fitting, processors

MOST_TOKENS = 16


class Cut(NamedTuple):
    """A tiling: `columns` a tile within a block of `block`; the depth in `splits` (split-K), `deep`
    of it a step, with `warps` and `stages`."""

    columns: int
    block: int
    splits: int
    deep: int
    warps: int
    stages: int = 4

    def tiles(self, lines: int) -> int:
        return triton.cdiv(lines, self.columns)

    def grid(self, lines: int) -> tuple[int, int]:
        return self.tiles(lines), self.splits

    def smaller(self) -> Iterator[Cut]:
        """Yield this cut, then cuts that take less and less shared memory."""
        cut = self
        while True:
            yield cut
            if cut.deep > 128 or (cut.stages == 2 and cut.deep > 16):
                cut = cut._replace(deep=cut.deep // 2)
            elif cut.stages > 2:
                cut = cut._replace(stages=cut.stages - 1)
            else:
                return


def cut_for(
    lines: int, depth: int, weight: Tensor, *, pair: bool = False, split: bool = False
) -> Cut:
    """Return the cut for a weight's dtype and device: the one that was fastest on an H200, or the
    nearest that fits."""
    lots = MOST_TOKENS + (2 if pair else 1) * 32  # rows of both matrices that a program holds
    lot = lots * weight.element_size()
    return fitting(
        _measured(lines, depth, weight, pair=pair, split=split).smaller(),
        lambda cut: lot * cut.deep * (cut.stages - 1) + SPARE,
        card(weight.device).shared,
    )


def _measured(lines: int, depth: int, weight: Tensor, *, pair: bool, split: bool) -> Cut:
    """Return the fastest cut on an H200: at most 32 columns a program, spread evenly. With `split`
    the depth is split too, because every program reads the whole input of its part of the depth.
    Then the sums are completed by the last program of a tile."""
    if split:
        return Cut(32, 32, max(1, min(4, depth // 128)), 128, 4, 5)
    programs = processors(weight.device) * (2 if pair else 1)
    each = triton.cdiv(lines, programs * triton.cdiv(lines, programs * 32))
    block = max(16, triton.next_power_of_2(each))
    if pair:
        return Cut(each, block, 1, 128, 4, 5)
    return Cut(each, block, 1, 512, block // 8, 3)
