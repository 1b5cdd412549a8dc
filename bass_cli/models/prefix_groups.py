"""Shared-prefix groups: tables on the device of the rows that read one prompt. They are at fixed
addresses, so that captured passes see rows that begin and end. Not here: the prompts' spans
(kv_cache.py), attention (kernels).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bass_kernels import Teams

SIZES = (2, 4, 8, 16, 32)  # maximum rows of a tile; a kernel takes what fills its tile of queries


def most_tiles(rows: int, size: int) -> int:
    """Return the maximum number of tiles of up to `size` rows that `rows` rows can need. A row that
    shares its prompt with no other is in no tile."""
    # the worst case: groups of three for tiles of two, otherwise pairs
    return 2 * rows // 3 if size == 2 else rows // 2


class TeamTable:
    """The groups of up to `rows` rows. For each of SIZES a table of tiles, filled up with -1."""

    def __init__(self, rows: int, device: torch.device):
        self._teams: list[list[int]] = []
        sizes = [rows, *(most_tiles(rows, size) * size for size in SIZES)]
        self._host = torch.cat(
            [
                torch.full((count,), -1 if i else 0, dtype=torch.int32)
                for i, count in enumerate(sizes)
            ]
        )
        self._parts = self._host.split(sizes)
        self._flat = self._host.to(device, copy=True)
        self._views = self._flat.split(sizes)
        self._of: dict[int, Teams] = {}

    def update(self, spans: Iterable[list[int]]) -> None:
        """Set the groups: the rows of each list read one span. Lists of one row are ignored."""
        teams = [rows for rows in spans if len(rows) > 1]
        if teams == self._teams:
            return
        self._teams = teams
        member, *tables = self._parts
        member.zero_()
        member[[row for rows in teams for row in rows]] = 1
        for size, table in zip(SIZES, tables, strict=True):
            entries: list[int] = []
            for rows in teams:
                entries += rows
                entries += [-1] * (-len(rows) % size)
            table[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
            table[len(entries) :] = -1
        host = self._host.pin_memory() if self._flat.is_cuda else self._host
        self._flat.copy_(host, non_blocking=True)  # the host does not wait for the device

    def of(self, rows: int) -> Teams:
        """Return the tables for a pass of rows 0 to `rows` - 1, which must be all live rows."""
        if rows not in self._of:
            member, *tables = self._views
            tiles = {
                size: table[: most_tiles(rows, size) * size].view(-1, size)
                for size, table in zip(SIZES, tables, strict=True)
            }
            self._of[rows] = Teams(member[:rows], tiles)
        return self._of[rows]
