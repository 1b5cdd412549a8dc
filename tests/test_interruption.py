"""A run that is stopped or killed goes on with the same command, and ends with the lines of an undisturbed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import result_keys

ROOT = Path(__file__).parent.parent


def start(tmp_path: Path, delay: str) -> subprocess.Popen[str]:
    code = "import stand_in; stand_in.install(); from bass_cli.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", "p.txt", "--n", "3", "--out", "o.jsonl"]
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"STAND_IN_DELAY": delay, "PYTHONPATH": os.pathsep.join(paths)}
    # Where the tests themselves run in a shell's background, Ctrl-C is ignored, and children would inherit that.
    return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_goes_on_after_an_interruption(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "p.txt").write_text("".join(f"prompt {number}\n" for number in range(10)))
    output = tmp_path / "o.jsonl"
    process = start(tmp_path, "0.05")
    deadline = time.monotonic() + 60
    while not (output.exists() and output.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    _, messages = process.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert process.returncode == -how
    else:
        assert process.returncode == 130
        assert "the same command goes on" in messages
        assert "Traceback" not in messages
    assert 3 <= output.read_bytes().count(b"\n") < 30
    again = start(tmp_path, "0")
    _, messages = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "going on" in messages
    expected = sorted((str(i), number, f"prompt {i}/{number}/0") for i in range(10) for number in range(3))
    assert result_keys(output.read_text()) == expected
