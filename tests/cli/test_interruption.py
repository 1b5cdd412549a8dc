"""After an interruption or a kill, the same command continues, and its file equals that of an
undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import STAND_IN, Forked
from test_cli import result_keys

from bass_cli.system import signals

ROOT = Path(__file__).parents[2]


GENERATE = ("generate", "p.txt", "--n", "3", "--out", "o.jsonl")
# A package that says when it is imported, takes long, and swallows what is raised meanwhile, as
# some do.
SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            print("importing", flush=True)
            try:
                time.sleep(60)
            except BaseException:
                pass
sys.meta_path.insert(0, Slow())
from bass_cli.__main__ import main
main()
"""


def start(tmp_path: Path, delay: str, *arguments: str, **streams: Any) -> Forked:
    environment = os.environ | {"STAND_IN_DELAY": delay}
    streams = {"stderr": subprocess.PIPE, **streams}
    return Forked(STAND_IN, *(arguments or GENERATE), cwd=tmp_path, env=environment, **streams)


def wait_for_lines(process: Forked, output: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not (output.exists() and output.read_bytes().count(b"\n") >= count):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_continues_after_an_interruption(
    tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "p.txt").write_text("".join(f"prompt {number}\n" for number in range(10)))
    output = tmp_path / "o.jsonl"
    process = start(tmp_path, "0.05")
    wait_for_lines(process, output, 3)
    process.send_signal(how)
    _, messages = process.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert process.returncode == -how
    else:
        assert process.returncode == 130
        assert "run the same command again to continue" in messages
        assert "Traceback" not in messages
    assert 3 <= output.read_bytes().count(b"\n") < 30
    again = start(tmp_path, "0")
    _, messages = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "continuing" in messages
    expected = sorted(
        (str(i), number, f"prompt {i}/{number}/0") for i in range(10) for number in range(3)
    )
    assert result_keys(output.read_text()) == expected


INTERRUPTED = "bass: error: interrupted; run the same command again to continue\n"


@pytest.mark.parametrize(("name", "how", "says"), [
    ("typer", signal.SIGINT, ""),
    ("yaml", signal.SIGINT, INTERRUPTED),
    ("yaml", signal.SIGTERM, INTERRUPTED),
])  # fmt: skip
def test_an_interruption_during_imports_ends_the_command_at_once(
    tmp_path: Path, name: str, how: signal.Signals, says: str
) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT.format(name=name), *GENERATE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Where the tests themselves run in a shell's background, Ctrl-C is ignored, and children
        # would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(how)
    output, messages = process.communicate(timeout=30)  # the import alone would take twice as long
    assert (process.returncode, output, messages) == (130, "", says)
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]


def test_signals_ignored_by_the_parent_stay_ignored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        signals.at_start()
        with signals.in_command(lambda: None):
            found = [signal.getsignal(number) for number in numbers]
        after = [signal.getsignal(number) for number in numbers]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (found[0], found[2]) == (signal.SIG_IGN, signal.SIG_IGN)
    assert callable(found[1])  # SIGTERM has never been ignored
    assert after == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL]


# As other tools: SIGPIPE's end, or the number that a shell has for it.
READER_GONE = (141, -signal.SIGPIPE)


@pytest.mark.parametrize("arguments", [
    ["--help"], ["--version"], ["generate", "p.txt", "--n", "50"], ["generate", "p.txt", "--out", "o.jsonl", "--json"],
])  # fmt: skip
def test_a_closed_output_pipe_ends_the_command_quietly(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    read, write = os.pipe()
    os.close(read)
    process = start(
        tmp_path, "0", *arguments, *(["--quiet"] if "p.txt" in arguments else []), stdout=write
    )
    os.close(write)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode in READER_GONE
    if "o.jsonl" in arguments:  # only the summary found no reader
        assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 16


def test_a_closed_message_pipe_loses_no_samples(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    process = start(tmp_path, "0.1")
    wait_for_lines(process, tmp_path / "o.jsonl", 2)
    assert process.stderr is not None
    process.stderr.close()  # what is said at the end finds no reader
    assert process.wait(60) in READER_GONE
    assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 9
    assert json.loads((tmp_path / "o.jsonl.manifest.json").read_text())["totals"]["samples"] == 9


def test_exit_joins_threads_and_runs_atexit_functions():
    """Exit code and output are kept."""
    code = (
        "import atexit, sys, threading, time; from bass_cli.__main__ import main\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n"
        "sys.argv[0] = 'bass'; main()"
    )
    for argument, said, status in (("--version", 1, 0), ("--nothing", 0, 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True, timeout=60
        )
        lines = done.stdout.splitlines()
        assert (len(lines), lines[-1]) == (said + 2, "at exit"), done
        assert "thread" in lines
        assert done.returncode == status
        assert ("--nothing" in done.stderr) == bool(status)
