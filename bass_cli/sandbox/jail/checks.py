"""The tests' process. The program never runs in it, and it alone sends the verdict.

The names that the tests take from the program are proxies for objects in the program's process
(calls.py). Only plain data comes back from there.
"""

from __future__ import annotations

import os
import time

from .calls import START, Peer
from .program import PASSED, RAISED, compile_text, describe, failure_message, prepare
from .values import OBJECT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .job_spec import JobSpec

# Seconds before this process reports that the program's pipe was closed. Meanwhile the supervisor
# sees how the program ended, which says more.
PATIENCE = 0.1
SILENT = b"the program does not answer"


def enter(
    spec: JobSpec, checks: tuple[str, str, tuple[str, ...]], outlet: int, program: tuple[int, int]
) -> NoReturn:
    """Run the tests in this process, a fresh child of the supervisor. Never returns.

    Args:
        spec: the program and its limits.
        checks: tests, setup and names of `Checked`.
        outlet: descriptor of the pipe to the supervisor.
        program: descriptors of the pipes from and to the program's process.
    """

    def leave() -> NoReturn:
        time.sleep(PATIENCE)
        os.write(outlet, RAISED + SILENT)
        os._exit(1)

    prepare(spec, outlet, name="tests", hidden=True)
    peer = Peer(*program, describe=describe, leave=leave, restricted=True)
    try:
        _run(spec["text"].count("\n") + 1, checks, peer)
        message = PASSED
    except BaseException as error:  # SystemExit too: then the tests did not run to their end
        message = failure_message(error)
    os.write(outlet, message)
    os._exit(0)


def _run(lines: int, checks: tuple[str, str, tuple[str, ...]], peer: Peer) -> None:
    """Run the program's text in its process, then the tests here.

    Args:
        lines: added to the tests' line numbers, so that program and tests count as one text.
        checks: tests, setup and names of `Checked`.
        peer: the connection to the program's process.
    """
    tests, setup, names = checks
    scope = {"__name__": "tests", "__builtins__": __builtins__}
    exec(compile_text(setup, "<setup>"), scope)
    code = compile_text("\n" * lines + tests, "<tests>")
    found = peer.find(OBJECT, START)(names)
    scope.update((name, found[name]) for name in names if name in found)
    exec(code, scope)
