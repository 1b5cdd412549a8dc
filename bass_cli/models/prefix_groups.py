"""Which rows read one prompt, as tables at fixed addresses on the device, so that captured
passes follow rows that come and go. Not here: the spans themselves (kv_cache.py), how they are
read (kernels).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bass_kernels import Teams

SIZES = (2, 4, 8, 16, 32)  # rows of a tile, at most: as many as fill a kernel's tile of queries


def most_tiles(rows: int, size: int) -> int:
    """The most tiles of up to `size` rows that `rows` rows can need, if only rows that are not
    alone are in one."""
    return (
        2 * rows // 3 if size == 2 else rows // 2
    )  # threes make two tiles of two; otherwise pairs are the worst


class TeamTable:
    """`rows` rows at most. For every size: a table of tiles, one after the other from the first
    on, then -1."""

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
        """From now on the rows of each of these read one span; those alone in theirs are left
        out."""
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
        self._flat.copy_(host, non_blocking=True)  # the host waits for no round

    def of(self, rows: int) -> Teams:
        """The tables for a pass of rows 0 to `rows` - 1, which must be all that there are."""
        if rows not in self._of:
            member, *tables = self._views
            tiles = {
                size: table[: most_tiles(rows, size) * size].view(-1, size)
                for size, table in zip(SIZES, tables, strict=True)
            }
            self._of[rows] = Teams(member[:rows], tiles)
        return self._of[rows]
