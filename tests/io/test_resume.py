"""Test resuming a result file: torn lines, failed prompts, other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_results import MANIFEST, fill, keys, manifest, sample

from bass_cli.errors import UserError
from bass_cli.io.results import Completion, open_output
from bass_cli.io.resume import manifest_path


@pytest.mark.parametrize(
    "torn",
    [
        b'{"id": "b", "sam',
        b'{"id": "b", "sam\n',
        sample("b", 1).to_line().encode(),
        b"\0\0\0",
        b"[]\n",
    ],
)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0), sample("b", 0, "budget"))
    path.write_bytes(path.read_bytes() + torn)
    with open_output(str(path), MANIFEST) as writer:
        assert writer.done == {("a", 0), ("b", 0)}
        assert any("torn" in note for note in writer.notes)
        writer.write(sample("b", 1))
    assert keys(path) == [("a", 0, "eos"), ("b", 0, "budget"), ("b", 1, "eos")]
    assert json.loads(manifest_path(str(path)).read_text())["totals"]["samples"] == 3


def test_torn_line_is_removed_from_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id"')
    fill(path)
    assert path.read_bytes() == whole


def test_failed_prompts_are_tried_again_and_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0), Completion.failed("b", "e", seed=0, meta={}), sample("c", 0))
    path.write_bytes(path.read_bytes() + b'{"torn')
    with open_output(str(path), MANIFEST) as writer:
        assert writer.done == {("a", 0), ("c", 0)}
        writer.write(Completion.failed("b", "again", seed=0, meta={}))
        writer.write(sample("c", 1))
        with pytest.raises(UserError, match="another process"):
            open_output(str(path), MANIFEST)
    assert keys(path) == [("a", 0, "eos"), ("c", 0, "eos"), ("b", 0, "error"), ("c", 1, "eos")]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.manifest.json",
    ]


def test_the_rewritten_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    fill(real, sample("a", 0), Completion.failed("b", "e", seed=0, meta={}))
    real.chmod(0o640)
    link.symlink_to(real)
    (tmp_path / "link.jsonl.manifest.json").write_bytes(manifest_path(str(real)).read_bytes())
    fill(link)
    assert link.is_symlink()
    assert (keys(real), real.stat().st_mode & 0o777) == ([("a", 0, "eos")], 0o640)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"id": "b", "sam', "out.jsonl:2: the line is broken"),
        ("{}", 'out.jsonl:2: this is not a result line: field "id": a text is needed, not None'),
        ("[" * 10**5, "out.jsonl:2: the line is broken"),
        (sample("a", 0).to_line(), 'out.jsonl:2: sample 0 of "a" occurs twice'),
    ],
)
def test_a_broken_line_in_the_middle_is_refused(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0))
    path.write_text(path.read_text() + line + "\n" + sample("c", 0).to_line() + "\n")
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        open_output(str(path), MANIFEST)
    assert expected in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("change", "fault"), [
    ({"sample": True}, '"sample": a whole number from 0 on is needed, not True'),
    ({"sample": -1}, '"sample": a whole number from 0 on is needed, not '
                     '-1'), ({"sample": 1.0}, '"sample": a whole number'),
    ({"finish_reason": ["eos"]}, '"finish_reason": a text is '
                                 'needed'), ({"finish_reason": None}, '"finish_reason": a text'),
    ({"id": 3}, '"id": a text is needed, not 3'), ({"tokens": "3"}, '"tokens": a whole number '
                                                                    'from 0 on is needed, not .3'),
    ({"rounds": [1]}, '"rounds": a whole '
                      'number'), ({"drafted": 10**400}, '"drafted": a whole number'),
    ({"accepted": float("nan")}, '"accepted": a whole '
                                 'number'), ({"copy_of": "a"}, '"copy_of": a whole number'),
])  # fmt: skip
def test_a_line_of_other_types_is_refused(
    tmp_path: Path, change: dict[str, object], fault: str
) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0), sample("b", 0))
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(UserError, match=rf"out\.jsonl:2: this is not a result line: field {fault}"):
        open_output(str(path), MANIFEST)


@pytest.mark.parametrize(
    "value", ["2", [2], {"a": 2}, True, 2.5, None, float("inf"), 10**400, [[[[[]]]]]]
)
def test_settings_of_other_types_are_refused(tmp_path: Path, value: object) -> None:
    """This includes settings that may grow."""
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0))
    file = manifest_path(str(path))
    before = json.loads(file.read_text())
    file.write_text(
        json.dumps(before | {"results": before["results"] | {"n": value}, "totals": value})
    )
    with pytest.raises(
        UserError, match=r"out\.jsonl: it was begun with other settings;.*; n: .* before, 2 now"
    ):
        open_output(str(path), MANIFEST)


@pytest.mark.parametrize("totals", [
    "null", "[]", '{"samples": 1}', '{"samples": 1, "seconds": "1"}', '{"samples": 1, "seconds": '
                                                                      'NaN}',
    f'{{"samples": 1, "seconds": {10**400}}}', '{"samples": [], "seconds": '
                                               '1}', '{"samples": 1, "seconds": -1}',
])  # fmt: skip
def test_invalid_totals_are_ignored(tmp_path: Path, totals: str) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0))
    file = manifest_path(str(path))
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"totals": "?"}).replace('"?"', totals)
    )
    with open_output(str(path), MANIFEST) as writer:
        assert (writer.done, writer.totals["seconds"]) == ({("a", 0)}, None)


def test_other_settings_are_refused_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0))
    before = path.read_bytes(), manifest_path(str(path)).read_bytes()
    with pytest.raises(UserError) as caught:
        open_output(str(path), manifest(seed=1, target="u", chat=True))
    assert "; seed: 0 before, 1 now" in str(caught.value)
    assert '; target: "t" before, "u" now' in str(caught.value)
    assert "; chat: not given before, true now" in str(caught.value)
    assert "`overwrite`" in str(caught.value)
    assert (path.read_bytes(), manifest_path(str(path)).read_bytes()) == before
    open_output(str(path), MANIFEST).close(finished=True)


@pytest.mark.parametrize(("key", "value", "allowed"), [
    ("n", 3, True), ("n", 1, False), ("limit", 9, True), ("limit", None, True), ("limit", 4, False),
])  # fmt: skip
def test_n_and_limit_may_only_grow(
    tmp_path: Path, key: str, value: int | None, allowed: bool
) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, sample("a", 0))
    if not allowed:
        with pytest.raises(UserError, match=f"; {key}: "):
            open_output(str(path), manifest(**{key: value}))
        return
    with open_output(str(path), manifest(**{key: value})) as writer:
        assert any(f"{key} grows" in note for note in writer.notes)
    assert json.loads(manifest_path(str(path)).read_text())["results"][key] == value


def test_file_can_be_resumed_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    completions = [sample(prompt, number) for prompt in "ab" for number in range(2)]
    fill(whole, *completions)
    content = whole.read_bytes()
    for end in range(0, len(content) + 1, 7):
        cut.write_bytes(content[:end])
        manifest_path(str(cut)).write_bytes(manifest_path(str(whole)).read_bytes())
        with open_output(str(cut), MANIFEST) as writer:
            for completion in completions:
                if (completion.id, completion.sample) not in writer.done:
                    writer.write(completion)
        assert cut.read_bytes() == content, end
