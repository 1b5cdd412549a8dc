"""What signals mean to the command: Ctrl-C and SIGTERM interrupt it within a time limit, and a
closed pipe on its output ends it.

The first module of the console script, so it imports nothing slow. Not here: the message at a
command's end (cli/exit_codes.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
READER_GONE = 141  # what a shell says of a tool that SIGPIPE has ended
_IMPORT = "<frozen importlib._bootstrap>"  # the file that frames name while something is imported
_PIPE = getattr(signal, "SIGPIPE", None)  # not on every system
_LIMIT = 4.0  # seconds from the first signal to the end of the process
_MESSAGE = 0.3  # seconds for the last message, which may block on a terminal or on a lock
_OVER = 0  # no signal has this number
_PR_SET_PDEATHSIG = 1


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
    """While it lasts, SIGINT and SIGTERM raise KeyboardInterrupt, and a closed pipe
    BrokenPipeError.

    Python runs a signal's handler between two of its own instructions. A call into a library that
    waits for another process may return late or never. So a thread ends the process, after `say`,
    if it is still there 4 s after the first signal, and at once after a second one.

    An exception in the middle of an import may be swallowed or replaced. There the handler calls
    `say` and ends the process. Afterwards all handlers are as before. Outside the main thread
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:  # the thread ends the process
            return
        interrupted = True
        if _is_importing(frame):
            say()
            _leave()
        raise KeyboardInterrupt

    handlers: dict[int, Callable[[int, FrameType | None], None] | int] = {signal.SIGTERM: interrupt}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        handlers[signal.SIGINT] = interrupt
    ending = {int(number) for number in handlers}
    if _PIPE is not None:
        handlers[_PIPE] = signal.SIG_IGN
    with _watched(ending, say):
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _watched(ending: set[int], say: Callable[[], None]) -> Iterator[None]:
    """Run `_watch` beside the block. The system's handler writes each signal's number to a pipe,
    whatever the main thread is doing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reading, ending, say), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, bytes([_OVER]))  # closing it is not enough: forked children have it too
        watcher.join()
        os.close(writing)
        os.close(reading)


def _watch(reading: int, ending: set[int], say: Callable[[], None]) -> None:
    """Return when `_OVER` arrives. Otherwise end the process."""
    until: float | None = None
    while True:
        left = None if until is None else max(until - time.monotonic(), 0.0)
        if not select.select([reading], [], [], left)[0]:
            break
        numbers = os.read(reading, 64)
        if _OVER in numbers:
            return
        signals = sum(number in ending for number in numbers)
        if signals > 1 or (signals and until is not None):
            break
        if signals:
            until = time.monotonic() + _LIMIT
    _end(say)


def _forget_watch() -> None:
    """In a forked child: do not report its signals to the parent's thread."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watch)


def end_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends, also while this
    process is stopped. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end(say: Callable[[], None]) -> NoReturn:
    """End the process with the exit code of an interruption. The message is best effort."""

    def last_words() -> None:
        with contextlib.suppress(Exception):
            say()
        with contextlib.suppress(Exception):  # what was printed before is kept, if possible
            sys.stdout.flush()

    speaking = threading.Thread(target=last_words, daemon=True)
    speaking.start()
    speaking.join(_MESSAGE)
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _leave() -> NoReturn:
    with contextlib.suppress(Exception):  # what was printed before is kept, if that is possible
        sys.stdout.flush()
    os._exit(INTERRUPTED)
