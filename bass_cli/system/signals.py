"""Signal handling of the command: Ctrl-C, SIGTERM and a closed output pipe.

The console script imports this module first, so it imports nothing slow. The final message of a
command: cli/running.py.
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
READER_GONE = 141  # the exit code that a shell shows after SIGPIPE
_IMPORT = "<frozen importlib._bootstrap>"  # the file of a frame that runs an import
_PIPE = getattr(signal, "SIGPIPE", None)  # not on every system
_LIMIT = 4.0  # seconds from the first signal to the end of the process
_MESSAGE = 0.3  # seconds for the last message, which a terminal or a lock may block
_OVER = 0  # tells the thread to stop; no signal has this number
_PR_SET_PDEATHSIG = 1


def at_start() -> None:
    """Let Ctrl-C and a closed output pipe end the process at once, until `in_command`."""
    # The parent process may have set SIGINT to be ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: _leave())
    if _PIPE is not None:
        signal.signal(_PIPE, signal.SIG_DFL)


@contextlib.contextmanager
def in_command(say: Callable[[], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt, and SIGPIPE into BrokenPipeError.

    Python runs a signal handler between two of its own instructions. A library call that waits
    for another process may return late or never. So a thread calls `say` and ends the process if
    it still runs 4 s after the first signal, or at a second signal.

    During an import an exception could be swallowed or replaced. So there the handler itself calls
    `say` and ends the process. At the end of the block the old handlers are restored. Outside the
    main thread nothing changes.

    Args:
        say: Writes the last message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:  # at a second signal the thread ends the process
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
    """Run `_watch` in a thread during the block.

    Python's C handler writes each signal's number to a pipe, even if the main thread is blocked.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reading, ending, say), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, bytes([_OVER]))  # forked children may hold the pipe open
        watcher.join()
        os.close(writing)
        os.close(reading)


def _watch(reading: int, ending: set[int], say: Callable[[], None]) -> None:
    """End the process after a second signal, or 4 s after the first. Return at `_OVER`."""
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
    """In a forked child, do not report signals to the parent's thread."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watch)


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, even if it is stopped.

    Does nothing on other systems.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end(say: Callable[[], None]) -> NoReturn:
    """End the process with exit code 130. `say` gets 0.3 s for the message."""

    def last_words() -> None:
        with contextlib.suppress(Exception):
            say()
        with contextlib.suppress(Exception):  # write buffered output, if possible
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
    with contextlib.suppress(Exception):  # write buffered output, if possible
        sys.stdout.flush()
    os._exit(INTERRUPTED)
