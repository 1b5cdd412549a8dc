"""Test files that are replaced atomically: order of syncs, drafts, full disks, damage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from test_cli import result_keys
from test_interruption import start
from test_results import MANIFEST, fill, keys, manifest, sample

from bass_cli.errors import MachineError
from bass_cli.eval.stores import Verdict, VerdictStore
from bass_cli.io import results as outputs
from bass_cli.io import saving
from bass_cli.io.resume import ATTRIBUTE, manifest_path
from bass_cli.io.saving import save_chart, write_json

DRAFT = r"\.f\.json\.[0-9a-f]{16}\.new"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Record system calls: ("open" of a draft | "fsync" | "replace", name, size or flags)."""
    made: list[tuple[str, str, int]] = []
    sync, replace, open_ = os.fsync, os.replace, os.open

    def fsync(descriptor: int) -> None:
        made.append(
            (
                "fsync",
                Path(os.readlink(f"/proc/self/fd/{descriptor}")).name,
                os.fstat(descriptor).st_size,
            )
        )
        sync(descriptor)

    def rename(source: Any, target: Any) -> None:
        made.append(("replace", Path(target).name, 0))
        replace(source, target)

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".new"):
            made.append(("open", Path(path).name, flags))
        return open_(path, flags, *rest, **named)

    for name, function in (("fsync", fsync), ("replace", rename), ("open", opened)):
        monkeypatch.setattr(os, name, function)
    return made


def test_content_then_name_then_folder_reach_the_disk(
    tmp_path: Path, calls: list[tuple[str, str, int]]
) -> None:
    for content in (b"old", b"newer"):
        saving.write_file(tmp_path / "f.json", content)
    assert [what for what, _, _ in calls] == ["open", "fsync", "replace", "fsync"] * 2
    draft, content, name, folder = calls[4:]
    assert re.fullmatch(DRAFT, draft[1])
    assert draft[1] != calls[0][1]
    assert draft[2] & os.O_EXCL
    assert draft[2] & os.O_NOFOLLOW
    assert (content[1:], name[1], folder[1]) == ((draft[1], 5), "f.json", tmp_path.name)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f.json", b"newer")]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "f.json"
    saving.write_file(path, b"old")
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(MachineError, match="fault: No space left on device"):
        write_json(path, {"a": 1}, "fault")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f.json", b"old")]


def test_the_mode_of_a_file_and_the_link_to_it_stay(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("old")
    (tmp_path / "f.json").chmod(0o640)
    (tmp_path / "link").symlink_to("f.json")
    saving.write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert ((tmp_path / "f.json").read_bytes(), (tmp_path / "f.json").stat().st_mode & 0o777) == (
        b"new",
        0o640,
    )


def test_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    left = [f".{name}.0123456789abcdef.new" for name in (path.name, manifest_path(path.name).name)]
    others = [".x.0123456789abcdef.new", ".o.jsonl.new", ".o.jsonl.0123456789abcdeX.new"]
    for name in left + others:
        (tmp_path / name).write_text("draft")
    fill(path, sample("a", 0))
    assert {file.name for file in tmp_path.iterdir()} == {
        *others,
        path.name,
        manifest_path(path.name).name,
    }


def test_drafts_in_use_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    (tmp_path / ".report.json.0123456789abcdef.new").write_text("left")
    os.mkfifo(tmp_path / ".report.json.0123456789abcdee.new")

    def write_meanwhile(stream: Any) -> None:
        stream.write(b"slow")
        saving.write_file(path, b"quick")

    saving.replace_file(path, write_meanwhile).close()
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [
        ("report.json", b"slow")
    ]


def test_draft_removed_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, removed = tmp_path / "f.json", saving.fcntl.flock, []

    def remove_first(stream: Any, how: int) -> None:
        if not removed:
            removed.append(Path(stream.name).unlink())
        lock(stream, how)

    monkeypatch.setattr(saving.fcntl, "flock", remove_first)
    saving.write_file(path, b"new")
    assert removed
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f.json", b"new")]


def test_lines_are_synced_by_time_and_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, str, int]]
) -> None:
    now = [0.0]
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now[0])
    path = tmp_path / "o.jsonl"
    with outputs.open_output(str(path), MANIFEST) as writer:
        writer.write(sample("a", 0))
        begun, size = len(calls), path.stat().st_size
        assert ("fsync", "o.jsonl", 0) in calls[
            : calls.index(("replace", "o.jsonl.manifest.json", 0))
        ]
        for second, lines in ((1.0, 1), (outputs.SYNC_SECONDS, 2)):
            now[0] = second
            writer.write(sample("a", lines))
        assert calls[begun:] == [("fsync", "o.jsonl", 3 * size)]
    assert [call[0] for call in calls[begun + 1 :]] == [
        "fsync",
        "open",
        "fsync",
        "replace",
        "fsync",
    ]
    assert calls[begun + 1] == ("fsync", "o.jsonl", 3 * size)


def test_old_lines_never_have_a_new_manifest(
    tmp_path: Path, calls: list[tuple[str, str, int]]
) -> None:
    path = tmp_path / "o.jsonl"
    fill(path, sample("a", 0), sample("b", 0))
    calls.clear()
    with outputs.open_output(str(path), manifest(seed=1), overwrite=True) as writer:
        writer.write(sample("a", 0))
    assert calls[0] == ("fsync", "o.jsonl", 0)
    assert keys(path) == [("a", 0, "eos")]


@contextlib.contextmanager
def longest_file(size: int) -> Iterator[None]:
    """Limit the size of files, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_run_can_be_resumed_after_a_full_disk(stand_in: Any, tmp_path: Path) -> None:
    command = ("generate", "p.txt", "--n", "3", "--out", "o.jsonl")
    (tmp_path / "p.txt").write_text("".join(f"prompt {number}\n" for number in range(10)))
    output = tmp_path / "o.jsonl"
    before = b""
    for most, what in ((100, "the manifest"), (4500, "the results"), (6000, "the results")):
        with longest_file(most):
            full = cli(*command)
        assert full.exit_code == 3, full.stderr
        assert f"cannot write {what}: File too large" in full.stderr
        content = output.read_bytes()
        assert content.startswith(before[: before.rfind(b"\n") + 1])
        before = content
    assert before.count(b"\n") > 5
    cli(*command, code=0)
    expected = sorted(
        (str(i), number, f"prompt {i}/{number}/0") for i in range(10) for number in range(3)
    )
    assert result_keys(output.read_text()) == expected
    assert {path.name for path in tmp_path.glob("*o.jsonl*")} == {
        "o.jsonl",
        "o.jsonl.manifest.json",
    }


DAMAGE = ["", "{", "\0" * 900, "null", "[]", '{"results": null}', '{"results": []}']


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_same_command_rebuilds_a_damaged_manifest(
    stand_in: Any, tmp_path: Path, damage: str
) -> None:
    command = ("generate", "p.jsonl", "--n", "2", "--out", "o.jsonl")
    cli(*command, code=0)
    output, beside = tmp_path / "o.jsonl", tmp_path / "o.jsonl.manifest.json"
    whole, settings = output.read_bytes(), json.loads(beside.read_text())["results"]
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    beside.write_text(damage)
    again = cli(*command, code=0)
    assert "o.jsonl.manifest.json: it is damaged and is written again" in again.stderr
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert json.loads(beside.read_text())["results"] == settings


@pytest.mark.parametrize(("change", "says"), [
    (("--seed", "1"), "seed: 0 before, 1 now"), (("--n", "1"), "sample 1 before, --n 1 now"),
    (("--limit", "1"), 'there is no prompt '
                       '"b"'), (("--max-new-tokens", "2"), "3 tokens before, --max-new-tokens 2 "
                                                           "now"),
    (("--token-ids",), "token_ids: without before, with "
                       "now"), (("--model", "other"), None), (("--top-p", "0.5"), None),
])  # fmt: skip
def test_another_command_is_refused_where_the_manifest_is_damaged(
    stand_in: Any, tmp_path: Path, change: tuple[str, ...], says: str | None
) -> None:
    """Lines show some differences; file attributes, where they exist, show the others."""
    command = ("generate", "p.jsonl", "--n", "2", "--out", "o.jsonl")
    cli(*command, code=0)
    output, beside = tmp_path / "o.jsonl", tmp_path / "o.jsonl.manifest.json"
    beside.write_text("")
    content = output.read_bytes()
    if ATTRIBUTE in os.listxattr(output):
        result = cli(*command, *change, code=2)
        assert (
            says if says and change[0] in ("--n", "--limit") else "it was begun with other settings"
        ) in result.stderr
        os.removexattr(output, ATTRIBUTE)
    if says is not None:
        assert says in cli(*command, *change, code=2).stderr
    assert (output.read_bytes(), beside.read_bytes()) == (content, b"")


def test_hole_of_a_power_cut_loses_only_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    lines = [sample("a", number).to_line().encode() + b"\n" for number in range(4)]
    fill(path, *(sample("a", number) for number in range(4)))
    content = path.read_bytes()
    begin, end = len(lines[0]) + 10, len(lines[0]) + len(lines[1]) + 10
    path.write_bytes(content[:begin] + bytes(end - begin) + content[end:])
    with outputs.open_output(str(path), MANIFEST) as writer:
        assert writer.done == {("a", 0), ("a", 3)}
        assert any("a power cut damaged" in note for note in writer.notes)
        for number in (1, 2):
            writer.write(sample("a", number))
    assert path.read_bytes() == b"".join([lines[0], lines[3], lines[1], lines[2]])


def test_a_full_disk_keeps_the_old_chart_and_the_verdicts(tmp_path: Path) -> None:
    class Figure:
        def savefig(self, stream: Any, **_: Any) -> None:
            stream.write(b"picture" * 100)

    chart, verdicts = tmp_path / "c.png", tmp_path / "v.jsonl"
    chart.write_bytes(b"old")
    verdict = Verdict("a", 0, "0" * 64, "passed", "", 0.1, {})
    with (
        longest_file(250),
        pytest.raises(MachineError, match=r"c\.png: cannot write the chart: File too large"),
    ):
        save_chart(Figure(), str(chart))

    def judge() -> None:
        with VerdictStore(str(verdicts)) as store:
            for number in range(2):
                store.add(verdict._replace(sample=number))

    with (
        longest_file(250),
        pytest.raises(MachineError, match="cannot write the verdicts: File too large"),
    ):
        judge()
    assert (chart.read_bytes(), [path.name for path in tmp_path.glob(".*")]) == (b"old", [])
    with VerdictStore(str(verdicts)) as store:
        assert list(store.verdicts.values()) == [verdict]


def test_verdicts_and_saved_copies_reach_the_disk(
    tmp_path: Path, calls: list[tuple[str, str, int]]
) -> None:
    verdicts, path = tmp_path / "v.jsonl", tmp_path / "o.jsonl"
    with VerdictStore(str(verdicts)) as store:
        store.add(Verdict("a", 0, "0", "passed", "", 0.1, {}))
    assert ("fsync", "v.jsonl", verdicts.stat().st_size) in calls

    def lose_name() -> None:
        with outputs.open_output(str(path), MANIFEST) as writer:
            writer.write(sample("a", 0))
            path.unlink()

    with pytest.raises(MachineError, match="saved"):
        lose_name()
    saved = tmp_path / "o.saved.jsonl"
    assert ("fsync", saved.name, saved.stat().st_size) in calls
    assert calls[-1][:2] == ("fsync", tmp_path.name)


def test_hole_in_the_verdicts_loses_only_its_lines(tmp_path: Path) -> None:
    path, verdict = tmp_path / "v.jsonl", Verdict("a", 0, "0", "passed", "", 0.1, {})
    with VerdictStore(str(path)) as store:
        for number in range(4):
            store.add(verdict._replace(sample=number, sha256=str(number)))
    size = path.stat().st_size // 4
    content = path.read_bytes()
    for begin, end, left in (
        (size + 9, 2 * size + 9, {"0", "3"}),
        (3 * size + 9, 4 * size, {"0", "1", "2"}),
    ):
        path.write_bytes(content[:begin] + bytes(end - begin) + content[end:])
        with VerdictStore(str(path)) as store:
            assert set(store.verdicts) == left
            store.add(verdict._replace(sample=9, sha256="9"))
        with VerdictStore(str(path)) as store:
            assert set(store.verdicts) == left | {"9"}


def test_a_full_disk_behind_a_summary_is_exit_code_3(tmp_path: Path) -> None:
    arguments = ("generate", "p.txt", "--out", "o.jsonl", "--json")
    (tmp_path / "p.txt").write_text("a\n")
    with open("/dev/full", "w") as full:
        process = start(tmp_path, "0", *arguments, stdout=full)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 3, messages
    assert messages.endswith(
        "bass: error: standard output: cannot write: No space left on device\n"
    )
    assert "Traceback" not in messages
