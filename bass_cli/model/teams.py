"""Which rows read one prompt, as tables at fixed addresses on the device, so that captured passes follow rows that come
and go. Not here: the spans themselves (cache.py), how they are read (kernels).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bass_kernels import Teams

SIZES = (2, 4, 8, 16, 32)  # rows of a tile, at most: as many as fill a kernel's tile of queries


def most_tiles(rows: int, size: int) -> int:
    """The most tiles of up to `size` rows that `rows` rows can need, if only rows that are not alone are in one."""
    return 2 * rows // 3 if size == 2 else rows // 2  # threes make two tiles of two; otherwise pairs are the worst


class TeamTable:
    """`rows` rows at most. For every size: a table of tiles, one after the other from the first on, then -1."""

    def __init__(self, rows: int, device: torch.device):
        self._rows = rows
        self._held = self._listed(())
        self._flat = torch.tensor(self._held, dtype=torch.int32, device=device)
        self._of: dict[int, Teams] = {}

    def update(self, spans: Iterable[Sequence[int]]) -> None:
        """From now on the rows of each of these read one span; those alone in theirs are left out."""
        values = self._listed([rows for rows in spans if len(rows) > 1])
        if values != self._held:
            self._held = values
            self._flat.copy_(torch.tensor(values, dtype=torch.int32))

    def of(self, rows: int) -> Teams:
        """The tables for a pass of rows 0 to `rows` - 1, which must be all that there are."""
        if rows in self._of:
            return self._of[rows]
        tiles: dict[int, Tensor] = {}
        at = self._rows
        for size in SIZES:
            tiles[size] = self._flat[at : at + most_tiles(rows, size) * size].view(-1, size)
            at += most_tiles(self._rows, size) * size
        self._of[rows] = Teams(self._flat[:rows], tiles)
        return self._of[rows]

    def _listed(self, teams: Sequence[Sequence[int]]) -> list[int]:
        member = [0] * self._rows
        for rows in teams:
            for row in rows:
                member[row] = 1
        for size in SIZES:
            entries: list[int] = []
            for rows in teams:
                count = -(-len(rows) // size)
                for tile in range(count):  # nearly equal parts
                    part = rows[tile * len(rows) // count : (tile + 1) * len(rows) // count]
                    entries += [*part, *[-1] * (size - len(part))]
            member += entries + [-1] * (most_tiles(self._rows, size) * size - len(entries))
        return member
