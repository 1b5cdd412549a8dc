"""Signals end a command in time, even while its main thread is inside a library."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

# Locks a mutex of the C library twice: the call never returns, and no signal interrupts it.
_BLOCKED = """
import ctypes, sys
from bass_cli.system import signals
mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)
with signals.in_command(lambda: print("interrupted", file=sys.stderr, flush=True)):
    print("begun", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
# Does not end after KeyboardInterrupt.
_CLEANING = """
import sys, time
from bass_cli.system import signals
with signals.in_command(lambda: print("interrupted", file=sys.stderr, flush=True)):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        time.sleep(60)
"""
# Says nothing, because a thread holds what the message needs.
_SILENT = _BLOCKED.replace('lambda: print("interrupted", file=sys.stderr, flush=True)',
                           "lambda: libc.pthread_mutex_lock(mutex)")  # fmt: skip


# A shell's background jobs ignore SIGINT, and so would these programs.
_LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def ended(code: str, numbers: list[int]) -> tuple[int, str, float]:
    """Return exit code, standard error, and seconds from the first signal to the end."""
    process = subprocess.Popen([sys.executable, "-c", _LISTEN + code], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.2)
    since = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    _, text = process.communicate(timeout=30)
    return process.returncode, text, time.monotonic() - since


@pytest.mark.parametrize(
    "code",
    [_BLOCKED, pytest.param(_CLEANING, marks=pytest.mark.slow)],
    ids=["blocked", "cleaning up"],
)
def test_the_first_signal_ends_the_command_within_5_s(code: str) -> None:
    returned, text, seconds = ended(code, [signal.SIGTERM])
    assert (returned, text) == (130, "interrupted\n")
    assert 3 < seconds < 5


@pytest.mark.parametrize(
    ("code", "says"),
    [(_BLOCKED, "interrupted\n"), (_CLEANING, "interrupted\n"), (_SILENT, "")],
    ids=["blocked", "cleaning up", "no message"],
)
def test_the_second_signal_ends_the_command_at_once(code: str, says: str) -> None:
    returned, text, seconds = ended(code, [signal.SIGINT, signal.SIGTERM])
    assert (returned, text) == (130, says)
    assert seconds < 2


def test_other_signals_do_not_end_a_command() -> None:
    code = """
import os, signal, sys, time
from bass_cli.system import signals
signal.signal(signal.SIGUSR1, lambda *_: None)
with signals.in_command(lambda: None):
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGUSR1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))  # Python's handler, as the parent's
        time.sleep(30)
        os._exit(4)
    time.sleep(0.2)
    for _ in range(2):
        os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    time.sleep(0.2)
print("done")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("done\n", 0), found.stderr
