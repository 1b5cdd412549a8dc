"""A function that runs in a child process with limits of CPU time and memory.

Chat templates and tokenizers come from other people. Both may loop for ever or fill the memory,
inside one call into C or Rust that no signal handler and no thread can interrupt. A process that
holds a model has no memory limit of its own. Not here: what the functions do (template.py,
tokenizer.py, tokenizer_files.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from bass_cli.errors import UserError

_BRIEF = 1000  # characters of an error that a function raises
_VALUE, _REFUSAL, _MISTAKE = b"+", b"-", b"!"


class RefusalError(Exception):
    """The reason why a limited function has no result: a limit, or an error that it raised."""


class Limited:
    """Call a function in a fork of this process.

    The child starts at the first call and serves all later ones. A child that had to be ended is
    replaced at the next call. It has no threads, keeps only its pipe open, and ends with this
    process. Without Linux the function runs in this process, without limits.
    """

    def __init__(self, function: Callable[[Any], bytes], *, seconds: float, memory: int):
        """Prepare the limits.

        Args:
            function: what to call; its modules are imported before the fork.
            seconds: CPU time of one call, so that a busy machine refuses nothing.
            memory: bytes beyond what the process has at the fork.
        """
        self._function, self._seconds, self._memory = function, seconds, memory
        self._lock = threading.Lock()
        self._child: tuple[Connection, weakref.finalize[..., Limited]] | None = None

    def __call__(self, argument: Any) -> bytes:
        """Return what the function returns.

        Raises:
            UserError: the function raised it.
            RefusalError: the function exceeded a limit, or raised another error.
        """
        if sys.platform != "linux":
            kind, value = _answer(self._function, argument, self._memory)
        else:
            with self._lock:
                kind, value = self._ask(argument)
        if kind == _VALUE:
            return value
        reason = value.decode("utf-8", "surrogatepass")
        raise UserError(reason) if kind == _MISTAKE else RefusalError(reason)

    def _ask(self, argument: Any) -> tuple[bytes, bytes]:
        if self._child is None:
            pipe, pid = _start(self._function, self._seconds, self._memory)
            # a finalizer is called when the process ends too
            self._child = (pipe, weakref.finalize(self, _end, pipe, pid))
        pipe, end = self._child
        try:
            pipe.send_bytes(pickle.dumps(argument))
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            self._child, status = None, end()
            if status == -signal.SIGPROF:
                return _REFUSAL, f"it takes more than {self._seconds:g} s".encode()
            if status == -signal.SIGABRT:  # so end libraries that get no memory
                return _REFUSAL, f"it takes more than {self._memory >> 20} MB of memory".encode()
            return _REFUSAL, f"its process ended ({status})".encode()
        except BaseException:  # Ctrl-C: the next answer would belong to this call
            self._child = None
            end()
            raise
        return answer[:1], answer[1:]


def _end(pipe: Connection, pid: int) -> int:
    """End a child and return its exit code, negative for a signal."""
    pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _start(function: Callable[[Any], bytes], seconds: float, memory: int) -> tuple[Connection, int]:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _serve(theirs, function, seconds, memory)
        finally:
            os._exit(1)
    theirs.close()
    return ours, pid


def _serve(pipe: Connection, function: Callable[[Any], bytes], seconds: float, memory: int) -> None:
    """Answer calls until the pipe is closed. The alarm ends the child in any state, also without
    its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    for number in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    _close_files(pipe.fileno())
    _limit_memory(memory)
    while True:
        argument = pickle.loads(pipe.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind, value = _answer(function, argument, memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(kind + value)


def _close_files(kept: int) -> None:
    """Close all files but one: other processes wait for the ends of pipes, and a lock is held as
    long as its file is open anywhere."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        elif descriptor != kept:
            with contextlib.suppress(OSError):  # the one that the list itself was read with
                os.close(descriptor)


def _limit_memory(memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most, hard = pages * resource.getpagesize() + memory, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def _answer(function: Callable[[Any], bytes], argument: Any, memory: int) -> tuple[bytes, bytes]:
    """The value, or the reason why there is none."""
    try:
        return _VALUE, function(argument)
    except UserError as error:
        return _MISTAKE, str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        return _REFUSAL, f"it takes more than {memory >> 20} MB of memory".encode()
    except Exception as error:  # of any kind: the function runs what other people wrote
        return _REFUSAL, str(error)[:_BRIEF].encode("utf-8", "surrogatepass")
