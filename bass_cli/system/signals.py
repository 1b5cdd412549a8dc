"""What signals mean to the command: Ctrl-C and SIGTERM interrupt it, and a reader of its output
that has gone ends it.

The first module of the console script, so it imports nothing slow. Not here: what a command says
at its end (cli/exit_codes.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
READER_GONE = 141  # what a shell says of a tool that SIGPIPE has ended
_IMPORT = "<frozen importlib._bootstrap>"  # the file that frames name while something is imported
_PIPE = getattr(signal, "SIGPIPE", None)  # not on every system


def at_start() -> None:
    """While there is nothing to put in order, Ctrl-C and a reader that has gone end the process
    at once and quietly."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # not where the parent has it ignored
        signal.signal(signal.SIGINT, lambda *_: _leave())
    if _PIPE is not None:
        signal.signal(_PIPE, signal.SIG_DFL)


@contextlib.contextmanager
def in_command(say: Callable[[], None]) -> Iterator[None]:
    """While it lasts, SIGINT and SIGTERM raise KeyboardInterrupt, and a reader that has gone
    BrokenPipeError.

    An exception in the middle of an import may be swallowed or turned into another: there, the
    process says what it has to with `say` and ends at once. Afterwards everything is as before.
    In other threads than the main one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            say()
            _leave()
        raise KeyboardInterrupt

    handlers: dict[int, Callable[[int, FrameType | None], None] | int] = {signal.SIGTERM: interrupt}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        handlers[signal.SIGINT] = interrupt
    if _PIPE is not None:
        handlers[_PIPE] = signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _leave() -> NoReturn:
    with contextlib.suppress(Exception):  # what was printed before is kept, if that is possible
        sys.stdout.flush()
    os._exit(INTERRUPTED)
