"""What bass sends to a supervisor. It is plain data, sent as `marshal` bytes.

Supervisors do not import this module at run time: `typing` would cost every program a few
milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Checked(NamedTuple):
    """A program with tests. The tests run in their own process.

    Attributes:
        text: the program.
        tests: the tests. They pass if they run to their end without an exception.
        names: global names of the program that the tests use. Plain data is copied; for other
            objects the tests get a proxy. These names replace builtins and names of `setup`.
        setup: trusted text that runs first in the tests' process. It cannot use `names`.
    """

    text: str
    tests: str
    names: tuple[str, ...]
    setup: str = ""


# A text without tests passes if it runs to its end without an exception.
Program = str | Checked


class JobSpec(TypedDict):
    """One program, its isolation and its limits."""

    text: str
    # tests, setup and names of Checked; the program's process never has them
    checks: tuple[str, str, tuple[str, ...]] | None
    layers: tuple[str, ...]  # of sandbox.LAYERS
    path: list[str]  # sys.path for the program
    places: list[tuple[str, str]]  # visible read-only paths: (place, real path)
    folder: str | None  # work folder if there is no mount namespace
    owner: tuple[int, int]  # uid and gid of the program
    seconds: float  # wall clock
    cpu_seconds: int
    memory_bytes: int
    processes: int
    open_files: int
    file_bytes: int
    folder_bytes: int
    output_bytes: int
