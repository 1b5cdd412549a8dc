"""How the products of a few tokens are dealt out to the programs of a launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .launch import processors

MOST_TOKENS = 16


class Cut(NamedTuple):
    """`columns` a tile in a block of `block`; the depth in `splits`, `deep` of it at a time, by `warps` in `stages`."""

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


def cut_for(lines: int, depth: int, device: torch.device, *, pair: bool = False, split: bool = False) -> Cut:
    """From measurements on an H200: at most 32 columns a program, dealt out evenly. Where sums may be completed later
    (`split`), the depth is split too: every program has to read all of the tokens' input to its part of the depth."""
    if split:
        return Cut(32, 32, max(1, min(4, depth // 128)), 128, 4, 5)
    programs = processors(device) * (2 if pair else 1)
    each = triton.cdiv(lines, programs * triton.cdiv(lines, programs * 32))
    block = max(16, triton.next_power_of_2(each))
    if pair:
        return Cut(each, block, 1, 128, 4, 5)
    return Cut(each, block, 1, 512, block // 8, 3)
