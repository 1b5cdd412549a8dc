"""Tests that fail before the program runs, and tests that limit a program's time themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bass_cli.sandbox.programs import Limits, Program, Sandbox

# an alarm of the tests' own: `f` may take this many seconds
LIMITED = """
import _signal
class Slow(Exception):
    limit = 0.3
def stop(*_):
    raise Slow("f took more than 0.3 s")
_signal.signal(_signal.SIGALRM, stop)
def limited(function):
    _signal.setitimer(_signal.ITIMER_REAL, 0.3)
    try:
        return function()
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
"""


@pytest.fixture(scope="module")
def sandbox(sandbox_folders: Path) -> Iterator[Sandbox]:
    with Sandbox(workers=2, limits=Limits(seconds=20.0, cpu_seconds=5)) as made:
        yield made


def test_setup_that_fails_is_unusable_and_the_program_does_not_run(sandbox: Sandbox) -> None:
    text = "print('ran', flush=True)\ndef f(): return 1"
    [(_, ending)] = sandbox.run([(0, Program(text, "assert f() == 1", ("f",), "1 / 0"))])
    assert (ending.status, ending.output) == ("unusable", "")
    assert "ZeroDivisionError" in ending.detail


def test_limit_of_the_tests_ends_a_program_that_waits(sandbox: Sandbox) -> None:
    programs = {
        "asleep": "import time\ndef f(): time.sleep(60)",
        "spinning": "def f():\n    while True: pass",
        "catches everything": "def f():\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass",
        "right": "def f(): return 1",
        "wrong": "def f(): return 2",
    }
    tests = "assert limited(f) == 1"
    endings = dict(
        sandbox.run(
            (name, Program(text, tests, ("f",), LIMITED)) for name, text in programs.items()
        )
    )
    slow = {name for name, ending in endings.items() if ending.status == "timed out"}
    assert slow == {"asleep", "spinning", "catches everything"}, endings
    assert endings["asleep"].detail.endswith("f took more than 0.3 s")
    assert endings["asleep"].seconds < 10
    assert endings["right"].passed
    assert endings["wrong"].status == "failed"


def test_program_cannot_claim_to_be_out_of_time(sandbox: Sandbox) -> None:
    """An exception of the program has no limit, whatever its class has."""
    text = "class Slow(Exception):\n    limit = 0.0\ndef f():\n    raise Slow('slow')"
    [(_, ending)] = sandbox.run([(0, Program(text, "f()", ("f",)))])
    assert ending.status == "failed"


def test_program_cannot_read_an_iterator_whose_transfer_was_measured(sandbox: Sandbox) -> None:
    setup = "expected = iter([41, 42])\ntransfer_seconds([expected])"
    text = """
def f():
    import gc
    for one in gc.get_objects():
        if type(one).__name__ == "Peer":
            return one.request("next", one.find(b"o", 0))
"""
    tests = "assert f() == 41"
    [(_, ending)] = sandbox.run([(0, Program(text, tests, ("f",), setup))])
    assert ending.status == "failed"
    assert "IndexError" in ending.detail, "the request arrived, and there is no such object"
