"""Closed or full standard streams: an error if output is lost, otherwise none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import ROOT, STAND_IN, run_forked

WRITES = (
    ["bench", "--help"],
    ["--version"],
    ["pairs"],
    ["generate", "p.txt", "--n", "1"],
    ["generate", "p.txt", "--n", "1", "--out", "o.jsonl", "--json"],
)


def run(
    folder: Path, arguments: list[str], *, without: tuple[str, ...] = (), **streams: Any
) -> subprocess.CompletedProcess[str]:
    """Run bass with the named standard streams closed."""
    (folder / "p.txt").write_text("a\nb\n")
    return run_forked(STAND_IN, *arguments, cwd=folder, **streams, **dict.fromkeys(without))


@pytest.mark.parametrize("arguments", WRITES, ids=" ".join)
def test_standard_output_that_is_closed(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, arguments, without=("stdout",))
    assert (done.returncode, done.stdout, done.stderr.count("bass: error: ")) == (3, "", 1)
    assert "tandard output" in done.stderr
    assert "Bad file descriptor" in done.stderr
    assert "Traceback" not in done.stderr
    if "o.jsonl" in arguments:  # only the summary had nowhere to go
        assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 2


def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    said = "bass: error: standard output: cannot write: No space left on device\n"
    for arguments in (["--version"], ["pairs", "--json"]):
        with open("/dev/full", "w") as full:
            done = run(tmp_path, arguments, stdout=full)
        assert (done.returncode, done.stderr) == (3, said)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("generate p.txt --n 1 --out o.jsonl", 0),
        ("generate missing.txt", 2),
        ("generate p.txt --temprature 1", 2),
        ("pairs missing", 2),
    ],
)
def test_a_full_disk_behind_standard_error_changes_no_result(
    tmp_path: Path, arguments: str, code: int
) -> None:
    with open("/dev/full", "w") as full:
        done = run(tmp_path, arguments.split(), stderr=full)
    assert done.returncode == code
    if code == 0:
        assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 2


def test_unused_standard_streams_may_be_closed(tmp_path: Path) -> None:
    """No file of the job may get the number of a closed stream."""
    arguments = ["generate", "p.txt", "--n", "1"]
    without_output = run(tmp_path, [*arguments, "--out", "o.jsonl"], without=("stdout",))
    # as a shell starts it: Python and all imports find none
    start = ("sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", sys.executable, "-c", STAND_IN)
    without_any = subprocess.run(
        [*start, *arguments, "--out", "a.jsonl"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}"},
        timeout=120,
        check=False,
    )
    for done, name in ((without_output, "o.jsonl"), (without_any, "a.jsonl")):
        assert done.returncode == 0
        assert (tmp_path / name).read_bytes().count(b"\n") == 2
    closed = run(tmp_path, arguments, without=("stderr",))
    assert (closed.returncode, closed.stdout.count("\n"), closed.stderr) == (0, 2, "")
    asked = run(tmp_path, ["generate", "-", "--n", "1"], without=("stdin",))
    assert (asked.returncode, asked.stderr) == (
        2,
        "bass: error: stdin: cannot read it: Bad file descriptor\n",
    )


def test_without_a_home(tmp_path: Path) -> None:
    homes = ("HOME", "XDG_CACHE_HOME")
    given = {name: value for name, value in os.environ.items() if name not in homes}
    done = run(tmp_path, ["pairs"], env=given)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
