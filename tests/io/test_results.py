"""Test result files: lines, manifest, lock, resuming, and refusals that change nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import rows_in

from bass_cli.errors import MachineError, UserError
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import manifest_path

SAMPLE = Completion("a", 0, "text", "eos", 3, -0.5, -1.5, 0.1, 2, 8, 1, 0, 5, {"k": 1})
MANIFEST: dict[str, Any] = {"results": {"target": "t", "seed": 0, "n": 2, "limit": 5}}
KEYS = [
    "id", "sample", "text", "finish_reason", "tokens", "mean_logprob", "sum_logprob", "seconds", "rounds", "drafted",
    "accepted", "seed", "prompt_tokens", "meta",
]  # fmt: skip


def sample(prompt: str, number: int, reason: str = "eos") -> Completion:
    return replace(SAMPLE, id=prompt, sample=number, finish_reason=reason)


def manifest(**changes: Any) -> dict[str, Any]:
    return {"results": MANIFEST["results"] | changes}


def fill(path: Path, *completions: Completion) -> None:
    with open_output(str(path), MANIFEST) as writer:
        for completion in completions:
            writer.write(completion)


def keys(path: Path) -> list[tuple[str, int, str]]:
    rows = rows_in(path)
    return [(row["id"], row["sample"], row["finish_reason"]) for row in rows]


def test_a_line_has_the_fields_in_order() -> None:
    assert list(json.loads(SAMPLE.to_line())) == KEYS
    assert list(json.loads(replace(SAMPLE, token_ids=[1, 2]).to_line())) == [*KEYS, "token_ids"]
    failed = json.loads(Completion.failed("x", "too long", seed=3, meta={"m": 1}).to_line())
    assert list(failed) == [*KEYS, "error"]
    assert (failed["sample"], failed["finish_reason"], failed["error"], failed["meta"]) == (
        0,
        "error",
        "too long",
        {"m": 1},
    )


def test_a_line_is_strict_json_whatever_it_holds() -> None:
    odd = replace(
        SAMPLE,
        mean_logprob=math.nan,
        sum_logprob=-math.inf,
        text="é\u2028\n",
        meta={"x": [math.nan, "\ud800"]},
    )
    line = odd.to_line()
    row = json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert (row["mean_logprob"], row["sum_logprob"], row["meta"]) == (
        None,
        None,
        {"x": [None, "\ud800"]},
    )
    assert row["text"] == "é\u2028\n"
    assert b"\n" not in line.encode("utf-8")


def test_a_line_is_in_the_file_at_once_and_the_manifest_has_totals(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(str(path), MANIFEST | {"versions": {"bass": "0"}}) as writer:
        writer.write(sample("a", 0))
        assert keys(path) == [("a", 0, "eos")]
        assert json.loads(manifest_path(str(path)).read_text())["finished"] is False
        writer.write(sample("a", 1, "budget"))
    written = json.loads(manifest_path(str(path)).read_text())
    assert written["finished"] is True
    assert written["results"] == MANIFEST["results"]
    assert written["versions"] == {"bass": "0"}
    assert written["totals"]["samples"] == 2
    assert written["totals"]["tokens"] == 6
    assert written["totals"]["finish_reasons"] == {"eos": 1, "budget": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.manifest.json",
    ]


def test_overwrite_replaces_the_file_only_when_the_run_begins(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0), sample("b", 0))
    before = path.read_bytes()
    with (
        pytest.raises(RuntimeError, match="no model"),
        open_output(str(path), manifest(seed=1), overwrite=True),
    ):
        raise RuntimeError("no model")
    assert path.read_bytes() == before
    with open_output(str(path), manifest(seed=1), overwrite=True) as writer:
        assert writer.done == set()
        writer.write(sample("z", 0))
    assert keys(path) == [("z", 0, "eos")]
    assert json.loads(manifest_path(str(path)).read_text())["results"]["seed"] == 1


def test_manifest_has_the_dates_and_versions_of_the_runs_that_wrote_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"

    def run(day: int, *samples: Completion, **named: Any) -> list[Any]:
        monkeypatch.setattr("bass_cli.io.results.now", lambda: f"day {day}")
        given = manifest() | {"versions": {"bass": str(day)}, "origin": {"commit": str(day)}}
        with open_output(str(path), given, **named) as writer:
            for one in samples:
                writer.write(one)
        found = json.loads(manifest_path(str(path)).read_text())
        return [
            found["begun"],
            found["written"],
            found["versions"]["bass"],
            found["origin"]["commit"],
        ]

    assert run(1, sample("a", 0)) == ["day 1", "day 1", "1", "1"]
    assert run(2, sample("a", 1)) == ["day 1", "day 2", "2", "2"]
    assert run(3) == ["day 1", "day 2", "2", "2"], "a run that draws nothing wrote no line"
    assert run(4, sample("b", 0), overwrite=True) == ["day 4", "day 4", "4", "4"]
    old = json.loads(manifest_path(str(path)).read_text())
    del old["begun"], old["written"]
    manifest_path(str(path)).write_text(json.dumps(old))  # as older versions wrote it
    assert run(5, sample("b", 1)) == [None, "day 5", "5", "5"]


def test_a_run_that_never_begins_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no model"),
        open_output(str(tmp_path / "out.jsonl"), MANIFEST),
    ):
        raise RuntimeError("no model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_without_a_sound_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(UserError, match="has no manifest"):
        open_output(str(path), MANIFEST)
    manifest_path(str(path)).write_text("{")
    with pytest.raises(UserError, match="the manifest cannot be read"):
        open_output(str(path), MANIFEST)
    assert path.read_text() == "precious\n"
    path.write_text("")
    open_output(str(path), MANIFEST).close(finished=False)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the folder .*nowhere is not there"):
        open_output(str(tmp_path / "nowhere" / "out.jsonl"), MANIFEST)
    with pytest.raises(UserError, match="this is a folder"):
        open_output(str(tmp_path), MANIFEST)
    with pytest.raises(UserError, match="nothing to resume"):
        open_output(str(tmp_path / "out.jsonl"), MANIFEST, resume=True)
    with pytest.raises(UserError, match="contradict"):
        open_output(str(tmp_path / "out.jsonl"), MANIFEST, resume=True, overwrite=True)
    with pytest.raises(UserError, match=r"cannot write|not writable"):
        open_output("/proc/out.jsonl", MANIFEST)


def test_a_folder_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (Path(path) == tmp_path and mode == os.W_OK)
    )
    with pytest.raises(UserError, match=r"the folder .* is not writable"):
        open_output(str(tmp_path / "out.jsonl"), MANIFEST)


def test_full_disk_is_a_machine_error() -> None:
    with open("/dev/full", "wb") as full:
        name = f"/dev/fd/{full.fileno()}"
        with (
            pytest.raises(MachineError, match="No space left"),
            open_output(name, MANIFEST) as writer,
        ):
            writer.write(SAMPLE)


def test_streams_have_no_manifest(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "fd").mkdir()
    with open(tmp_path / "fd" / "samples", "ab") as stream:
        stream.write(b"before\n")
        stream.flush()
        with open_output(f"/dev/fd/{stream.fileno()}", MANIFEST) as writer:
            writer.write(SAMPLE)
    assert (tmp_path / "fd" / "samples").read_text() == f"before\n{SAMPLE.to_line()}\n"
    shutil.rmtree(tmp_path / "fd")
    code = "from bass_cli.io.results import *; w = open_output('-', {})\n"
    code += "w.write(Completion.failed('é', 'e', seed=0, meta={}))"
    subprocess.run(
        [sys.executable, "-c", code + "; w.close(finished=True)"], cwd=tmp_path, check=True
    )
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["é"]
    assert list(tmp_path.iterdir()) == []


def test_another_process_cannot_write_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    code = (
        "import sys; from bass_cli.io.results import *; open_output(sys.argv[1], {'results': {}})"
    )
    with open_output(str(path), MANIFEST) as writer:
        writer.write(SAMPLE)
        other = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )
        assert "another process is writing to this file" in other.stderr
    assert keys(path) == [("a", 0, "eos")]


@pytest.mark.parametrize(
    "how", ["deleted", "renamed", "replaced", "link deleted", "folder renamed", "folder deleted"]
)
@pytest.mark.parametrize("when", ["meanwhile", "at the end"])
def test_an_output_that_loses_its_name_is_saved_and_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "out.jsonl"
    if how == "link deleted":
        path.symlink_to("real.jsonl")

    def displace() -> None:
        if how in ("deleted", "link deleted"):
            path.unlink()
        elif how == "renamed":
            path.rename(folder / "other.jsonl")
        elif how == "replaced":
            (folder / "new").write_text("another's\n")
            (folder / "new").rename(path)
        elif how == "folder renamed":
            folder.rename(tmp_path / "other")
        else:
            shutil.rmtree(folder)

    def write() -> None:
        with open_output(str(path), MANIFEST) as writer:
            writer.write(sample("a", 0))
            if when == "meanwhile":
                displace()
            writer.write(sample("a", 1))
            if when == "at the end":
                displace()

    with pytest.raises(
        MachineError, match=r"deleted, renamed or replaced while .* they are in "
    ) as caught:
        write()
    saved = Path(str(caught.value).partition("they are in ")[2].partition(", and ")[0])
    assert saved.name == {"deleted": "out.saved.jsonl", "replaced": "out.saved.jsonl", "renamed": "other.jsonl",
                          "link deleted": "real.jsonl", "folder renamed": "out.jsonl",
                          "folder deleted": "out.saved.jsonl"}[how]  # fmt: skip
    assert keys(saved) == [("a", 0, "eos"), ("a", 1, "eos")]
    assert how != "replaced" or path.read_text() == "another's\n"
    with open_output(str(saved), MANIFEST) as writer:
        assert writer.done == {("a", 0), ("a", 1)}


def test_saved_copies_are_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.saved.jsonl").symlink_to("nowhere")

    def write() -> None:
        with open_output(str(path), MANIFEST) as writer:
            writer.write(sample("a", 0))
            path.unlink()

    for number in (2, 3):
        with pytest.raises(MachineError, match=rf"out\.saved-{number}\.jsonl"):
            write()
        assert keys(tmp_path / f"out.saved-{number}.jsonl") == [("a", 0, "eos")]
    assert not (tmp_path / "nowhere").exists()


def test_failed_save_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"

    def write() -> None:
        with open_output(str(path), MANIFEST) as writer:
            writer.write(sample("a", 0))
            path.unlink()
            monkeypatch.setattr(shutil, "copyfileobj", lambda *_: os.close(-1))

    with pytest.raises(MachineError, match="they could not be saved"):
        write()
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl.manifest.json"]


def test_truncated_output_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    def write() -> None:
        with open_output(str(path), MANIFEST) as writer:
            writer.write(sample("a", 0))
            path.write_text("")
            writer.write(sample("a", 1))

    with pytest.raises(MachineError, match="another program cut it short"):
        write()
    with open_output(str(path), MANIFEST) as writer:
        assert writer.done == {("a", 1)}
