"""The code inside the sandbox. Each program gets a fresh interpreter that imports this package.

It uses little of the standard library and nothing else, because every program pays for the
imports. bass itself starts it from sandbox/process.py. `typing` alone would cost milliseconds, so
the types of what bass sends exist for type checkers only.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    # tests, setup and names of a Program, sent after its spec; the program's process has no copy
    Checks = tuple[str, str, tuple[str, ...]]

    class JobSpec(TypedDict):
        """One program, its isolation and its limits. It is plain data, sent as `marshal` bytes."""

        text: str
        layers: tuple[str, ...]  # of isolation.LAYERS
        path: list[str]  # sys.path for the program
        places: list[tuple[str, str]]  # visible read-only paths: (place, real path)
        folder: str | None  # work folder if there is no mount namespace
        owner: tuple[int, int]  # uid and gid of the program
        seconds: float  # wall clock; this and the rest are fields of programs.Limits
        cpu_seconds: int
        memory_bytes: int
        processes: int
        open_files: int
        file_bytes: int
        folder_bytes: int
        output_bytes: int
