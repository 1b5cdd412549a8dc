"""Test that only regular files are written, and that foreign files are not replaced without
--overwrite; both are refused before any work."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from scored import Programs, Texts, adding, install, line, write
from test_cli import rows
from test_same_files import BENCH, EVAL, GENERATE, SCORE, SWEEP, place  # noqa: F401 - a fixture

from bass_cli.errors import UserError
from bass_cli.io import saving
from bass_cli.io.saving import check_chart, check_place, save_chart, write_file, write_json

ALLOW = "--allow-code-execution"


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the kind of every entry of a folder, and the content of regular files."""
    return {str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
            for path in sorted(folder.rglob("*"))}  # fmt: skip


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("command", "name"), [
    ([*GENERATE, "--out", "x.jsonl"], "x.jsonl"), ([*GENERATE, "--out", "x.jsonl"], "x.jsonl.manifest.json"),
    ([*EVAL, "--out", "x.jsonl"], "x.jsonl"), ([*EVAL, "--out", "x.jsonl"], "x.jsonl.verdicts.jsonl"),
    ([*EVAL, "--out", "x.jsonl"], "x.report.json"), ([*EVAL, "--report", "x.json"], "x.json"),
    ([*EVAL, "--out", "x.jsonl.zst"], "x.zst.report.json"), ([*EVAL, "--out", "x.parquet"], "x.parquet.report.json"),
    ([*SWEEP, "--report", "x.json"], "x.json"), ([*SWEEP, "--plot", "x.png"], "x.png"), (SWEEP, "o.sweep.json"),
    (SWEEP, "o.sweep.png"), (SWEEP, "o.plain-0.5s.jsonl"), (SWEEP, "o.plain-0.5s.report.json"),
    (SWEEP, "o.jsonl.verdicts.jsonl"), ([*SCORE, "--report", "x.json"], "x.json"), (SCORE, "f.jsonl.verdicts.jsonl"),
    ([*BENCH, "--plot", "x.png"], "x.png"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "link to a socket", "folder", "foreign"])
def test_output_that_cannot_be_replaced_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str, kind: str
) -> None:
    monkeypatch.setattr(
        saving.importlib.util, "find_spec", lambda name: name
    )  # as if matplotlib were installed
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "folder":
        Path(name).mkdir()
    elif kind == "foreign":
        Path(name).write_text("precious\n")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
        Path(name).symlink_to("s")
    before = tree(tmp_path)
    result = cli(*command)
    says = {"pipe": "this is a pipe", "folder": "this is a folder", "foreign": "it exists and "}
    assert says.get(kind, "this is a socket") in result.stderr
    assert result.exit_code == 2
    assert tree(tmp_path) == before


def test_devices_are_refused_as_outputs(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    for path in ("/dev/full", "/dev/null", tmp_path / "link"):
        with pytest.raises(UserError, match="this is a device"):
            check_place("--out", path)


def test_path_that_became_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.json")
    with pytest.raises(OSError, match="not a regular file"):
        write_file(tmp_path / "r.json", b"")
    assert (tmp_path / "r.json").is_fifo()


def test_unwritable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "away").symlink_to("nowhere/f")
    (tmp_path / "file").write_text("")
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path / "file" and access(path, mode)
    )
    for name, says in (("loop", "Too many levels"), ("away", "nowhere is not "
                                                             "there"), ("x" * 300, "too long"),
                       ("file", "write-protected"), ("file/f", "Not a directory")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            check_place("--out", tmp_path / name)
    check_place("--out", tmp_path / "new")


def test_names_of_standard_output_write_to_it(stand_in: Any, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for name in ("-", "/dev/stdout", "/dev/fd/1"):
        assert len(rows(cli("generate", "p.jsonl", "--n", "2", "--out", name, code=0).stdout)) == 4
        refused = cli("generate", "p.jsonl", "--out", name, "--json")
        assert (refused.exit_code, "--json needs --out FILE" in refused.stderr) == (2, True)
    assert tree(tmp_path) == before


def test_foreign_manifest_is_kept(stand_in: Any, tmp_path: Path) -> None:
    command, beside = (
        ("generate", "p.jsonl", "--n", "2", "--out", "o.jsonl"),
        tmp_path / "o.jsonl.manifest.json",
    )
    beside.write_text('{"name": "a web app"}')
    before = tree(tmp_path)
    refused = cli(*command, code=2)
    assert (
        "o.jsonl.manifest.json: it exists and is not the manifest of o.jsonl; use --overwrite"
        in refused.stderr
    )
    assert tree(tmp_path) == before
    cli(*command, "--overwrite", code=0)
    (tmp_path / "o.jsonl").unlink()
    cli(*command, code=0)  # a manifest of ours may be replaced


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        monkeypatch, tmp_path, Programs({f"HumanEval/{i}": adding(i) for i in range(2)}), Texts({})
    )
    for name in ("f.jsonl", "g.jsonl"):
        write(name, [line(0, 0, "+ 1")])


@pytest.mark.usefixtures("files")
def test_report_replaces_only_reports() -> None:
    def score(*arguments: str) -> Any:
        return cli("score", *arguments, ALLOW, "--report", "r.json")

    for _ in range(2):
        assert score("f.jsonl").exit_code == 0
    content = Path("r.json").read_bytes()
    other = score("g.jsonl")
    assert other.exit_code == 2
    assert (
        "--report r.json: it exists and is not a report on g.jsonl; use --overwrite to replace it"
        in other.stderr
    )
    for foreign in (b"precious", b"[" * 100_000, b'{"file": "f.jsonl"}', content[:-9]):
        Path("r.json").write_bytes(foreign)
        assert score("f.jsonl").exit_code == 2
        assert Path("r.json").read_bytes() == foreign
    assert score("g.jsonl", "--overwrite").exit_code == 0
    assert json.loads(Path("r.json").read_text())["file"] == "g.jsonl"


@pytest.mark.usefixtures("files")
def test_file_created_in_place_of_the_report_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from bass_cli.eval import scoring

    judged = scoring._judge_samples

    def judge(*arguments: Any, **named: Any) -> Any:
        Path("r.json").write_text("precious")
        return judged(*arguments, **named)

    monkeypatch.setattr(scoring, "_judge_samples", judge)
    result = cli("score", "f.jsonl", ALLOW, "--report", "r.json")
    assert (result.exit_code, Path("r.json").read_text()) == (2, "precious")
    assert "Pass@First" in result.stdout, "what was judged is shown all the same"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("flags", [[], ["--rejudge"]])
def test_foreign_file_in_place_of_verdicts_is_kept(flags: list[str]) -> None:
    Path("f.jsonl.verdicts.jsonl").write_text("precious\n")
    result = cli("score", "f.jsonl", ALLOW, *flags, code=2)
    assert (
        "f.jsonl.verdicts.jsonl: it exists and is not a file of verdicts; move it away"
        in result.stderr
    )
    assert Path("f.jsonl.verdicts.jsonl").read_text() == "precious\n"


def test_a_chart_replaces_charts_of_bass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Figure:
        def savefig(self, stream: Any, **settings: Any) -> None:
            [(key, value)] = settings["metadata"].items()
            stream.write(b"\x89PNG\r\n\x1a\n" + b"tEXt" + f"{key}\0{value}".encode())

    monkeypatch.setattr(saving.importlib.util, "find_spec", lambda name: name)
    chart = tmp_path / "c.png"
    for _ in range(2):
        check_chart(str(chart), overwrite=False)
        save_chart(Figure(), str(chart))
    chart.write_bytes(b"\x89PNG\r\n\x1a\n another's")
    check_chart(str(chart), overwrite=True)
    with pytest.raises(UserError, match=r"c\.png: it exists and is not a chart of bass"):
        check_chart(str(chart), overwrite=False)


def test_a_report_to_an_open_stream_adds_to_it(tmp_path: Path) -> None:
    with open(tmp_path / "r", "w+") as stream:
        stream.write("before\n")
        stream.flush()
        write_json(Path(f"/dev/fd/{stream.fileno()}"), {"a": 1}, "fault")
    assert (tmp_path / "r").read_text() == 'before\n{\n  "a": 1\n}\n'


@pytest.mark.parametrize("command", [[*SCORE, "--overwrite"], [*BENCH, "--overwrite"]])
def test_overwrite_without_a_file_is_an_error(place: Path, command: list[str]) -> None:
    assert "--overwrite (or BASS_OVERWRITE): " in cli(*command, code=2).stderr
