"""Ragged attention over a shared prompt and a row's own span, in Triton (reference.attention).

A row's queries that share a key/value head are stacked into one matrix, its keys cut into pieces of
one unit of work each, so that a short row costs little. Rows that share a prompt form teams, which
read its keys once. Everything that varies by row is read on the device, so a captured launch serves
any lengths. Here: shapes, launches, schedules; the kernel: ragged_kernel.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import dispatch
from .launch import SPARE, card, counters, fitting, processors
from .ragged_kernel import attend
from .reference import Segments

_BLOCK_M = 64
_KEYS = 256  # keys that make a further piece worth its merge


class Cut(NamedTuple):
    """How many pieces the keys of a row (or of a team's prompt) are cut into: `few` at least,
    `most` if it is long."""

    few: int
    most: int


def attention(
    q: Tensor,
    own: tuple[Tensor, Tensor],
    prompt: tuple[Tensor, Tensor],
    segments: Segments,
    *,
    scale: float,
    window: int = 0,
    splits: int | Cut | None = None,
    tile: tuple[int, int, int] | None = None,
    members: int | None = None,
    team_splits: int | Cut | None = None,
) -> Tensor:
    """As reference.attention, by the schedule that `attention_schedule` set. Chosen by the shape
    where None: `splits` and `team_splits`, into how many pieces the keys of a row and of a team
    are cut; `tile`, keys at a time, warps and stages; `members`, rows in a team: a power of two
    in `segments.teams`, 1 for no teams."""
    if dispatch.schedule() == "split" and len(q) > 1:
        one = [slice(row, row + 1) for row in range(len(q))]
        return torch.cat(
            [
                attention(
                    q[r],
                    (own[0][r], own[1][r]),
                    prompt,
                    _rows(segments, r),
                    scale=scale,
                    window=window,
                    splits=splits,
                    tile=tile,
                )
                for r in one
            ]
        )
    rows, width, heads, size = q.shape
    keys, values = own
    kv_heads = keys.shape[1]
    lines, device = width * (heads // kv_heads), q.device
    if dispatch.schedule() != "ragged" or segments.teams is None:
        members = 1
    elif members is None:
        members = _members(lines, rows)
    members, block_m, fitted = _fitted(lines, members, size, q)
    tiles = triton.cdiv(lines, block_m)
    units, team_units, teamed, table, team = (
        rows * kv_heads * tiles,
        0,
        segments.base,
        segments.base,
        Cut(0, 0),
    )
    cut = _cut(splits, units, device) if splits is not None or members == 1 else Cut(1, 2)
    if members > 1:
        assert segments.teams is not None
        teamed, table = segments.teams.member, segments.teams.tiles[members]
        team_units = len(table) * kv_heads
        pieces = max(4, min(8, 2 * processors(device) // (triton.cdiv(rows, members) * kv_heads)))
        team = _cut(pieces if team_splits is None else team_splits, 1, device)
    block_n, warps, stages = tile or fitted
    out = q.new_empty(rows, width, heads * size)
    parts, peaks, masses, arrived = out, out, out, out
    pieces = cut.most + team.most
    if pieces > 1:
        cells = units * pieces * min(lines, block_m)
        parts = q.new_empty(cells * size, dtype=torch.float32)
        peaks, masses = (q.new_empty(cells, dtype=torch.float32) for _ in range(2))
        arrived = counters(device, units)
    positions = segments.positions
    attend[(team_units * team.most + units * cut.most,)](
        q.contiguous(),
        keys,
        values,
        *prompt,
        positions,
        segments.base,
        segments.start,
        teamed,
        table,
        out,
        parts,
        peaks,
        masses,
        arrived,
        scale * 1.4426950408889634,
        window,
        rows,
        width,
        positions.stride(0),
        positions.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        prompt[0].stride(0),
        prompt[0].stride(1),
        keys.shape[2],
        tiles,
        cut.few,
        max(1, _KEYS // block_n),
        cut.most,
        team.few,
        team.most,
        team_units,
        H=heads,
        K=kv_heads,
        D=size,
        SIZE=members,
        PIECES=1 if pieces == 1 else max(16, triton.next_power_of_2(pieces)),
        PAD=triton.next_power_of_2(rows * width) if dispatch.schedule() == "pad" else 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(size)),
        WIDE="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _rows(segments: Segments, rows: slice) -> Segments:
    """What these rows of a pass may attend to, without teams."""
    return segments._replace(
        positions=segments.positions[rows],
        base=segments.base[rows],
        start=segments.start[rows],
        groups=(),
        teams=None,
    )


def _members(lines: int, rows: int) -> int:
    """Rows in a team. On an H200 with prompts of 3800 tokens teams gain at width 1 (16 rows: 1.2
    times as fast, 64: 1.6) and lose at width 8, where the second-level cache shares a prompt's
    keys well enough."""
    return 4 if lines <= 16 and rows >= 8 else 1


def _cut(wanted: int | Cut | None, units: int, device: torch.device) -> Cut:
    """`units` programs of one piece each would be launched. More pieces for long rows gained
    nothing."""
    if wanted is not None:
        return wanted if isinstance(wanted, Cut) else Cut(wanted, wanted)
    few = max(1, min(8 if units <= 16 else 4, 2 * processors(device) // units))
    return Cut(few, few)


def _fitted(
    lines: int, members: int, size: int, like: Tensor
) -> tuple[int, int, tuple[int, int, int]]:
    """Rows in a team (`members`, or 1 where that is too much), lines a program, and its `_tile`:
    what was measured to be best, or as much of it as fits; Triton's OutOfResources if nothing
    does."""
    here, width = card(like.device), max(16, triton.next_power_of_2(size))
    spare = 0 if here.reads_shared and like.element_size() == 2 else 1  # stages that take no buffer

    def options() -> Iterator[tuple[int, int, tuple[int, int, int]]]:
        for rows in dict.fromkeys((members, 1)):
            most = max(16, triton.next_power_of_2(lines * rows))
            for block_m in (
                (most,)
                if rows > 1
                else (m for m in (64, 32, 16) if m <= max(16, min(most, _BLOCK_M)))
            ):
                block_n, warps, stages = _tile(block_m, size, teams=rows > 1)
                yield from (
                    (rows, block_m, (n, warps, s))
                    for n in (64, 32, 16)
                    if n <= block_n
                    for s in range(stages, 1, -1)
                )

    def needs(option: tuple[int, int, tuple[int, int, int]]) -> int:
        _rows, block_m, (block_n, _warps, stages) = option
        return (
            like.element_size()
            * (2 * (stages - spare) * block_n * width + block_m * (width + block_n))
            + SPARE
        )

    return fitting(options(), needs, here.shared)


def _tile(block_m: int, size: int, *, teams: bool) -> tuple[int, int, int]:
    """Keys at a time, warps and stages, from measurements on an H200."""
    return 64 if block_m == 16 or teams else 32, 8 if block_m > 64 else 4, 3 if size <= 128 else 2
