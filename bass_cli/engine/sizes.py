"""The batch sizes and draft lengths that CUDA graphs are captured for.

Not here: capturing (graphs.py).
"""

from __future__ import annotations

import bisect

from bass_cli.config.options import MOST_DRAFTS

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
LONGEST = MOST_DRAFTS


def bucket(rows: int, capacity: int) -> int:
    """Return how many rows, padding rows included, a graph for `rows` live rows takes."""
    at = bisect.bisect_left(ROWS, rows)
    return min(ROWS[at] if at < len(ROWS) else capacity, capacity)


def step_down(width: int) -> int:
    """Return the longest captured draft length up to `width`."""
    return WIDTHS[bisect.bisect_right(WIDTHS, width) - 1]


def step_up(width: int) -> int:
    """Return the shortest captured draft length from `width` up; the longest one if none is."""
    return WIDTHS[min(bisect.bisect_left(WIDTHS, width), len(WIDTHS) - 1)]


def cover(width: int) -> int:
    """Return `step_up(width)`, or `width` itself beyond the longest captured length."""
    return max(step_up(width), width)
