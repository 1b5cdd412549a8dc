"""Limits on tokenizers and chat templates, which come with models and are not trusted.

CPU time and memory: functions run in a child process. Either may loop for ever or fill the memory
inside one call of C or Rust code, which no signal handler or thread can interrupt, and the process
with the model cannot have a memory limit. Length: how many characters a text may have, and how much
a tokenizer may multiply it. Tokenising 50 MB takes minutes and gigabytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import re
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from bass_cli.errors import UserError
from bass_cli.reading import parse_object

IN_CHILD = sys.platform == "linux"  # whether functions run in a child process, which has limits
_BRIEF = 1000  # most characters of an error message from the child
# Bytes of the allocations that use up free memory, and how many there are at most. Each writes to
# one or two pages, which the two processes then do not share: at most 128 MB and 0.1 s. Pieces of
# less than 64 KB are not used up: a heap may have millions.
_LENGTHS = tuple(1 << bits for bits in range(34, 15, -3))
_MOST_ALLOCATIONS = 1 << 14
_VALUE, _REFUSAL, _MISTAKE = b"+", b"-", b"!"
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_ALWAYS = 1 << 20  # characters that a text may have for any context
_FOR_EACH_TOKEN = 128  # characters per token of the context; the longest known token is 128 spaces
_MOST_GROWTH = 1000  # characters out of one; published tokenizers reach 3


class RefusalError(Exception):
    """Raised if a limited function exceeded a limit or raised an error; the text is the reason."""


class Limited:
    """Call a function in a fork of this process.

    The child starts at the first call and serves all later calls. A child that exceeds a limit is
    killed and replaced at the next call. It has no threads, keeps only its pipe open, and ends
    when this process ends. On other systems than Linux the function runs in this process without
    limits.
    """

    def __init__(self, function: Callable[[Any], bytes], *, seconds: float, memory: int):
        """Set the function and its limits.

        Args:
            function: the function to call. Modules that it imports in the child count as memory.
            seconds: CPU seconds of one call. CPU time does not depend on how busy the machine is.
            memory: bytes that the child may add to the memory of the process at the fork.
        """
        self._function, self._seconds, self._memory = function, seconds, memory
        self._lock = threading.Lock()
        self._child: tuple[Connection, weakref.finalize[..., Limited]] | None = None

    def __call__(self, argument: Any) -> bytes:
        """Call the function and return its result.

        Raises:
            UserError: the function raised a UserError.
            RefusalError: the function exceeded a limit, or raised another error.
        """
        if not IN_CHILD:
            kind, value = _answer(self._function, argument, self._memory)
        else:
            with self._lock:
                kind, value = self._call_child(argument)
        if kind == _VALUE:
            return value
        reason = value.decode("utf-8", "surrogatepass")
        raise UserError(reason) if kind == _MISTAKE else RefusalError(reason)

    def _call_child(self, argument: Any) -> tuple[bytes, bytes]:
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
            if status == -signal.SIGABRT:  # native libraries abort if an allocation fails
                return _REFUSAL, f"it takes more than {self._memory >> 20} MB of memory".encode()
            return _REFUSAL, f"its process ended ({status})".encode()
        except BaseException:  # Ctrl-C: the pipe would still hold the answer to this call
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
        except MemoryError:  # for the argument or the result: end as native libraries do
            os.abort()
        finally:
            os._exit(1)
    theirs.close()
    return ours, pid


def _serve(pipe: Connection, function: Callable[[Any], bytes], seconds: float, memory: int) -> None:
    """Answer calls until the pipe is closed.

    A timer kills the child when a call takes too long, in any state and without the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
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
    """Close all files except one.

    An inherited pipe would not report its end to other processes, and an inherited lock would
    stay locked.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        elif descriptor != kept:
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed
                os.close(descriptor)


def _limit_memory(memory: int) -> None:
    """Let this process add `memory` bytes to what it has.

    The limit is one of address space. Large pieces of memory that the parent had freed before the
    fork would not count, so they are allocated first, and not written to.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size, hard = pages * resource.getpagesize(), resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_AS, (min(size, allowed), hard))
    allocate = ctypes.CDLL(None).malloc  # gives free memory only now
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    left = _MOST_ALLOCATIONS
    for length in _LENGTHS:
        while left and allocate(length):
            left -= 1
    resource.setrlimit(resource.RLIMIT_AS, (min(size + memory, allowed), hard))


def _answer(function: Callable[[Any], bytes], argument: Any, memory: int) -> tuple[bytes, bytes]:
    """Return the kind of the answer, and the function's value or the reason of its failure."""
    try:
        return _VALUE, function(argument)
    except UserError as error:
        return _MISTAKE, str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        return _REFUSAL, f"it takes more than {memory >> 20} MB of memory".encode()
    except Exception as error:  # any kind: the function runs code that comes with a model
        return _REFUSAL, str(error)[:_BRIEF].encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def refusals(fault: str) -> Iterator[None]:
    """Turn every error of the tokenizer libraries into a UserError that begins with `fault`.

    BaseException is caught, because panics of `tokenizers` are not Exceptions.
    """
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [repr(error)]
        reason = " ".join(lines) if lines[0].endswith(":") else lines[0]  # a list follows
        raise UserError(f"{fault}: {reason[:400]}") from None


# The length of a text


def most_characters(context: int) -> int:
    """Return the most characters that a text may have for a context of so many tokens."""
    return max(_ALWAYS, _FOR_EACH_TOKEN * context)


def check_growth(content: bytes) -> None:
    """Refuse a tokenizer whose replacements can turn one character into too many.

    Only steps count that can be chained without a bound: replacements, the byte alphabet (two
    characters for one), and the template of a post-processor. Unicode normal forms are bounded.

    Args:
        content: the tokenizer in the format of tokenizer.json, or of a SentencePiece model.

    Raises:
        ValueError: one character can become more than _MOST_GROWTH.
    """
    found = parse_object(content)
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    into = _product(step for part in parts for step in _inner(found.get(part)))
    growth = max(into, _product(_inner(found.get("decoder"))))
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its replacements can turn one character into {growth:.2g}; the limit is "
            f"{_MOST_GROWTH}"
        )


def _product(steps: Iterable[Mapping[str, Any]]) -> float:
    return math.prod(map(_growth, steps), start=1.0)


def _growth(step: Mapping[str, Any]) -> float:
    if step.get("type") == "ByteLevel":
        return 2.0
    if step.get("type") == "TemplateProcessing":  # it may repeat the text
        return float(max(1, sum("Sequence" in one for one in step["single"])))
    if step.get("type") != "Replace":
        return 1.0
    old, new = step["pattern"].get("String"), len(step["content"])
    if old is not None:
        return max(1.0, new / len(old)) if old else 1.0 + new
    try:
        empty = re.match(step["pattern"].get("Regex", ""), "") is not None
    except (re.error, RecursionError, OverflowError):  # another dialect of regular expressions
        empty = True
    return 1.0 + new if empty else max(1.0, new)


def _inner(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the single steps of a part of tokenizer.json, with nested sequences flattened."""
    waiting = [part] if isinstance(part, dict) else []
    while waiting:
        step = waiting.pop()
        lists = [step[name] for name in _LISTS if isinstance(step.get(name), list)]
        if lists:
            waiting += [one for one in reversed(lists[0]) if isinstance(one, dict)]
        else:
            yield step
