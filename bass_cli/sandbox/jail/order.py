"""What the supervisor asks of a warden. At run time an order is a plain dictionary, which travels
as `marshal` bytes.

Only the supervisor imports this file while running: `typing` would cost every program a few
milliseconds.
"""

from __future__ import annotations

from typing import TypedDict

# a text, or two, each whole by itself: the second, tests, runs in the module of the first
Program = str | tuple[str, str]


class Order(TypedDict):
    """One program and how to hold it."""

    texts: tuple[str, str]  # the program and its tests, of which one may be empty
    layers: tuple[str, ...]  # of sandbox.LAYERS
    path: list[str]  # sys.path for the program
    places: list[tuple[str, str]]  # what stays visible, read-only: (place, real path)
    folder: str | None  # the work folder where there is no mount namespace
    owner: tuple[int, int]  # uid and gid of the program
    seconds: float  # wall clock
    cpu_seconds: int
    memory_bytes: int
    processes: int
    open_files: int
    file_bytes: int
    folder_bytes: int
    output_bytes: int
