"""How a process ends while libraries are loaded in the background."""

from __future__ import annotations

import subprocess
import sys

import pytest


def ended(code: str) -> tuple[int, str]:
    """The exit code and standard output of a program."""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stdout


def test_an_ordinary_end_waits_until_libraries_are_loaded() -> None:
    code = """
import sys, time
from bass_cli.system.host import start_awaited
def load():
    time.sleep(0.2)
    print('loaded', flush=True)
start_awaited(load, 'loading')
sys.exit(2)
"""
    assert ended(code) == (2, "loaded\n")


def test_an_ordinary_end_while_torch_is_loaded_keeps_its_exit_code() -> None:
    code = "import sys; from bass_cli.system.threads import begin; begin(1); sys.exit(2)"
    assert ended(code) == (2, "")


@pytest.mark.parametrize("work", [
    "start_awaited(threading.Event().wait, 'loading')",  # never loaded
    "pool.submit(print, 'done', flush=True).result()",  # an idle pool that was not shut down
])  # fmt: skip
def test_the_command_ends_without_waiting_for_libraries_or_idle_pools(work: str) -> None:
    code = f"""
import threading
from concurrent.futures import ThreadPoolExecutor
from bass_cli.__main__ import _leave
from bass_cli.system.host import start_awaited
pool = ThreadPoolExecutor(1)
{work}
_leave(3)
"""
    assert ended(code)[0] == 3
