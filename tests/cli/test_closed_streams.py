"""Standard streams that are closed or full: an error where something had to go there, nothing
where not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = "import stand_in; stand_in.install(); from bass_cli.__main__ import main; main()"
WRITES = (
    ["bench", "--help"],
    ["--version"],
    ["pairs"],
    ["generate", "p.txt", "--n", "1"],
    ["generate", "p.txt", "--n", "1", "--out", "o.jsonl", "--json"],
)


def run(
    folder: Path, redirected: str, arguments: list[str], **variables: str | None
) -> subprocess.CompletedProcess[str]:
    (folder / "p.txt").write_text("a\nb\n")
    paths = [str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [
        "sh",
        "-c",
        f'exec "$@" {redirected}',
        "sh",
        sys.executable,
        "-c",
        STAND_IN,
        *arguments,
    ]
    given = {name: value for name, value in (environment | variables).items() if value is not None}
    return subprocess.run(
        command, cwd=folder, env=given, text=True, capture_output=True, timeout=120, check=False
    )


@pytest.mark.parametrize("arguments", WRITES, ids=" ".join)
def test_standard_output_that_is_closed(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, ">&-", arguments)
    assert (done.returncode, done.stdout, done.stderr.count("bass: error: ")) == (3, "", 1)
    assert "tandard output" in done.stderr
    assert "Bad file descriptor" in done.stderr
    assert "Traceback" not in done.stderr
    if "o.jsonl" in arguments:  # only the summary had nowhere to go
        assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 2


def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    said = "bass: error: standard output: cannot write: No space left on device\n"
    for arguments in (["--version"], ["pairs", "--json"]):
        done = run(tmp_path, "> /dev/full", arguments)
        assert (done.returncode, done.stderr) == (3, said)


def test_streams_that_are_not_needed_may_be_closed(tmp_path: Path) -> None:
    """And no file of the job takes the number of one."""
    for redirected in (">&-", ">&- 2>&- <&-"):
        done = run(
            tmp_path,
            redirected,
            ["generate", "p.txt", "--n", "1", "--out", "o.jsonl", "--overwrite"],
        )
        assert done.returncode == 0, redirected
        assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 2
    closed = run(tmp_path, "2>&-", ["generate", "p.txt", "--n", "1"])
    assert (closed.returncode, closed.stdout.count("\n"), closed.stderr) == (0, 2, "")
    asked = run(tmp_path, "<&-", ["generate", "-", "--n", "1"])
    assert (asked.returncode, asked.stderr) == (
        2,
        "bass: error: stdin: cannot read it: Bad file descriptor\n",
    )


def test_without_a_home(tmp_path: Path) -> None:
    done = run(tmp_path, "", ["pairs"], HOME=None, XDG_CACHE_HOME=None)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
