"""The process of the tests: an interpreter in which the program has never run, and which gives the
verdict.

The program's names are stand-ins here, which call into the program's process (calls.py). Nothing
but plain data comes back.
"""

from __future__ import annotations

import os
import time

from .calls import START, Peer
from .program import PASSED, RAISED, compile_text, prepare, raised, tell
from .values import OBJECT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .job_spec import JobSpec

# until the warden has seen the program's end, and can say what it was
PATIENCE = 0.1
SILENT = b"the program does not answer"


def enter(
    order: JobSpec, checks: tuple[str, str, tuple[str, ...]], say: int, program: tuple[int, int]
) -> NoReturn:
    """Run the tests in this process, which is a fresh child of the warden's; never returns.

    `say` is a pipe to the warden, `program` are pipes from and to the program's process.
    """

    def leave() -> NoReturn:
        time.sleep(PATIENCE)
        os.write(say, RAISED + SILENT)
        os._exit(1)

    prepare(order, say, name="tests", hidden=True)
    peer = Peer(*program, describe=tell, leave=leave, wary=True)
    try:
        _run(order["text"].count("\n") + 1, checks, peer)
        word = PASSED
    except BaseException as error:  # SystemExit too: the tests did not come to their end
        word = raised(error)
    os.write(say, word)
    os._exit(0)


def _run(lines: int, checks: tuple[str, str, tuple[str, ...]], peer: Peer) -> None:
    """Run the program's text, then the tests, which begin after that many lines."""
    tests, setup, names = checks
    scope = {"__name__": "tests", "__builtins__": __builtins__}
    exec(compile_text(setup, "<setup>"), scope)
    code = compile_text("\n" * lines + tests, "<tests>")
    found = peer.find(OBJECT, START)(names)
    scope.update((name, found[name]) for name in names if name in found)
    exec(code, scope)
