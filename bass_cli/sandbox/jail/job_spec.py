"""What the supervisor sends to a warden. At run time it is plain data, which travels as `marshal`
bytes.

Only the supervisor imports this file while running: `typing` would cost every program a few
milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Checked(NamedTuple):
    """A program and its tests, which run in a process of their own.

    Attributes:
        text: the program.
        tests: the tests. They pass if they run to their end without an exception.
        names: the program's global names that the tests use; each becomes a stand-in that calls
            into the program's process. They replace builtins and names of `setup`.
        setup: trusted text that runs in the tests' process first. It cannot use `names`.
    """

    text: str
    tests: str
    names: tuple[str, ...]
    setup: str = ""


# a text without tests passes if it runs to its end without an exception
Program = str | Checked


class JobSpec(TypedDict):
    """One program and how to hold it."""

    text: str
    # tests, setup, names of Checked; the program's process never holds them
    checks: tuple[str, str, tuple[str, ...]] | None
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
