"""A chat template rendered in a child process: it is a program of the model's, which may loop for
ever or build gigabytes.

Neither ends in another way: one step of a template may be a call in C that no signal handler and
no thread interrupts, and memory has no limit of its own in a process that holds a model. Not
here: what the text's tokens are (tokenizer.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from bass_cli.errors import UserError

Messages = Sequence[Mapping[str, Any]]
# of CPU time, so that a busy machine refuses nothing; a long conversation takes some milliseconds
SECONDS = 10.0
_MEMORY = 2**30  # bytes beyond what the process has when it begins
_LARGEST = 2**26  # characters of a text; more fit no model's context
_BRIEF = 1000  # characters of what a template says when it refuses
_TEXT, _REFUSAL = b"+", b"-"


class Template:
    """Messages to text, by `render`, which runs in a fork of this process: everything it needs
    is there at once. One child serves one conversation after the other, and is replaced if it
    had to be ended. It has no threads, whatever this process has, keeps nothing open but its
    pipe, and ends with this process. Where there is no Linux, `render` is called here."""

    def __init__(self, render: Callable[[Messages], str]):
        self._render = render
        self._child: tuple[Connection, weakref.finalize[..., Template]] | None = None

    def __call__(self, messages: Messages) -> str:
        """The text; UserError if the template refuses the messages, or takes more time or memory
        than any should."""
        kind, text = (
            self._ask(messages) if sys.platform == "linux" else _answer(self._render, messages)
        )
        if kind == _REFUSAL:
            raise UserError(f"the chat template refuses the messages: {text}")
        return text

    def _ask(self, messages: Messages) -> tuple[bytes, str]:
        if self._child is None:
            pipe, pid = _start(self._render)
            # a finalizer is called when the process ends too
            self._child = (pipe, weakref.finalize(self, _end, pipe, pid))
        pipe, end = self._child
        try:
            pipe.send_bytes(pickle.dumps(messages))
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            self._child, status = None, end()
            too_long = status == -signal.SIGPROF
            return (
                _REFUSAL,
                f"it takes more than {SECONDS:g} s"
                if too_long
                else f"its process ended ({status})",
            )
        except BaseException:  # Ctrl-C: what comes next would be the answer to these
            self._child = None
            end()
            raise
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")


def _end(pipe: Connection, pid: int) -> int:
    """End a child; its exit code, negative for the signal that it died of."""
    pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _start(render: Callable[[Messages], str]) -> tuple[Connection, int]:
    """A child that renders what comes through the pipe."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _serve(theirs, render)
        finally:
            os._exit(1)
    theirs.close()
    return ours, pid


def _serve(pipe: Connection, render: Callable[[Messages], str]) -> None:
    """What the child does, until the pipe is closed. The alarm ends it in whatever it is, and
    without its parent too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    for number in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    _let_go(pipe.fileno())
    _limit_memory()
    while True:
        messages = pickle.loads(pipe.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        kind, text = _answer(render, messages)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(kind + text.encode("utf-8", "surrogatepass"))


def _let_go(kept: int) -> None:
    """Close all files but one: others wait for their ends, and locks are held as long as a file
    is open anywhere."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        elif descriptor != kept:
            with contextlib.suppress(OSError):  # the one that the list itself was read with
                os.close(descriptor)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most, hard = pages * resource.getpagesize() + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def _answer(render: Callable[[Messages], str], messages: Messages) -> tuple[bytes, str]:
    """The text, or why there is none."""
    try:
        text = render(messages)
    except MemoryError:
        return _REFUSAL, f"it takes more than {_MEMORY >> 20} MB of memory"
    except Exception as error:  # the template is a program: jinja's errors, or any that it provokes
        return _REFUSAL, str(error)[:_BRIEF]
    if len(text) > _LARGEST:
        return _REFUSAL, f"it makes {len(text)} characters of them"
    return _TEXT, text
