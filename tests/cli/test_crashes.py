"""Short runs of the scripts that kill jobs and cut the power: no sample is lost, duplicated or
changed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from thinned import thinned

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "count", "times"),
    thinned([("power_cuts", "--cuts", 1), ("kills", "--kills", 3), ("power_cuts", "--cuts", 3)], 3),
)
def test_kills_and_power_cuts_lose_and_duplicate_no_sample(
    tmp_path: Path, script: str, count: str, times: int
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    path = str(ROOT / "benchmarks")
    code = (
        f"import runpy, sys; sys.path.insert(0, {path!r}); "
        f"runpy.run_path({path + '/' + script + '.py'!r}, run_name='__main__')"
    )
    found = run_forked(
        code, count, str(times), "--json", cwd=tmp_path, env=environment, timeout=280
    )
    assert found.stdout, found.stderr
    figures = json.loads(found.stdout)
    assert (found.returncode, figures["faults"]) == (0, [])
    assert {key: figures[key] for key in (count[2:], "lost", "doubled", "changed")} == {
        count[2:]: times,
        "lost": 0,
        "doubled": 0,
        "changed": 0,
    }


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import power_cuts

    return power_cuts


def test_a_simulated_disk_keeps_what_was_synced_and_may_lose_the_rest(cuts: Any) -> None:
    done = [
        ("name", "a", 1),
        ("write", 1, 0, b"old\n"),
        ("sync", 1),
        ("sync names",),
        ("write", 1, 4, b"new\n"),
        ("name", "draft", 2),
        ("write", 2, 0, b"other\n"),
        ("rename", "draft", "a", 2),
    ]
    disk = cuts.Disk({})
    for operation in done:
        disk.do(*operation)
    assert disk.certain("a") == b"old\n"
    states = [disk.after_cut(random.Random(seed)) for seed in range(300)]
    contents = {state["a"][0] for state in states}
    assert {b"old\n", b"old\nnew\n", b"old\nne", b"other\n", b"", b"\0" * 6} <= contents
    assert all(
        content.startswith(b"old\n") or b"other\n".startswith(content.rstrip(b"\0"))
        for content in contents
    )
    assert {frozenset(state) for state in states} == {frozenset({"a"}), frozenset({"a", "draft"})}
    disk.do("sync", 2)
    disk.do("sync names")
    assert [disk.after_cut(random.Random(seed)) for seed in range(20)] == [
        {"a": (b"other\n", {})}
    ] * 20


def test_all_writes_to_the_folder_are_recorded(cuts: Any, tmp_path: Path) -> None:
    """Replaying the operations gives the same files."""
    folder, trace = tmp_path / "folder", tmp_path / "trace"
    folder.mkdir()
    (folder / "before").write_bytes(b"1234567")
    start = cuts.files_in(folder)
    code = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import power_cuts
os.chdir({str(folder)!r})
power_cuts.Recorder(".", {str(trace)!r}).install()
from bass_cli.io.saving import replace_file, write_file
with open("before", "a+b") as stream:
    stream.truncate(3)
    stream.write(b"89")
pathlib.Path("text").write_text("é" * 5000)
write_file("text", b"replaced")
with replace_file("made", lambda stream: stream.write(b"x" * 9000)) as stream:
    stream.write(b"more")
open("gone", "w").close()
os.unlink("gone")
open(os.path.join("..", "elsewhere"), "w").write("not this one")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    disk = cuts.Disk(start)
    for operation in cuts.operations_in(trace):
        disk.do(*operation)
    kinds = {operation[0] for operation in cuts.operations_in(trace)}
    assert kinds == {"there", "truncate", "write", "name", "sync", "rename", "sync names", "remove"}
    for file in disk.files.values():
        file.sync()
    disk.do("sync names")
    assert {name: disk.certain(name) for name in disk.names} == {
        name: content for name, (content, _) in cuts.files_in(folder).items()
    }
    assert disk.certain("before") == b"12389"
