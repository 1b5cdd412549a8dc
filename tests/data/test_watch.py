"""`bass watch`: figures of files that grow, in all formats; when a run counts as ended; speeds."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from test_progress import Terminal

from bass_cli.data import watching
from bass_cli.data.watching import WatchedFile, lines_of, share_of
from bass_cli.io.results import Completion, Writer, open_output

pytestmark = pytest.mark.usefixtures("here")
RESULTS = {"n": 2, "prompts": {"count": 3}, "limit": None}


def begin(path: str, **more: Any) -> Writer:
    """Open an output as a job does; it is locked until it is closed."""
    return open_output(path, {"results": RESULTS, "expected": 6} | more)


def sample(number: int, tokens: int = 10, **more: Any) -> Completion:
    text, reason = f"text {number}", "length" if number == 3 else "eos"
    return Completion(
        str(number // 2),
        number % 2,
        text,
        reason,
        tokens,
        -0.5,
        -5.0,
        1.0,
        4,
        8,
        6,
        0,
        5,
        {},
        **more,
    )


def figures(one: WatchedFile, *keys: str) -> list[Any]:
    found = one.document()
    return [found[key] for key in keys]


@pytest.mark.parametrize("path", ["o.jsonl", "o.jsonl.gz", "o.jsonl.zst", "o.parquet"])
def test_a_file_is_followed_from_its_first_line_to_its_end(path: str) -> None:
    one = WatchedFile(path)
    one.read(0.0)
    assert (one.state, one.samples) == ("not begun", 0)
    with begin(path) as writer:
        one.read(1.0)
        for number in range(6):
            writer.write(sample(number))
            one.read(2.0 + number)
            assert (one.state, one.samples) == ("running", number + 1)
        assert one.document() == {
            "file": path, "state": "running", "samples": 6, "expected": 6, "prompts_complete": 3, "prompts": 3,
            "tokens": 60, "finish_reasons": {"eos": 5, "length": 1}, "tokens_per_second": 10.0, "seconds_left": 0.0,
            "accepted_per_round": 1.5, "last": {"id": "2", "sample": 1, "text": "text 5"},
        }  # fmt: skip
        writer.add_run(20.0, {})
    one.read(9.0)
    assert figures(one, "state", "samples", "tokens", "tokens_per_second") == [
        "finished",
        6,
        60,
        3.0,
    ]
    fresh = WatchedFile(path)
    fresh.read(0.0)
    assert fresh.document() == one.document()


def test_prompts_of_which_the_best_samples_are_kept_are_complete() -> None:
    results = RESULTS | {"n": 8, "best_of": 2, "rank_by": "logprob"}
    one = WatchedFile("o.jsonl")
    with begin("o.jsonl", results=results, expected=None) as writer:
        for number in range(3):
            writer.write(sample(number))
        one.read(1.0)
        assert figures(one, "expected", "prompts_complete", "prompts") == [None, 1, 3]


def test_a_job_that_is_not_running_has_no_speed_at_first() -> None:
    path = "o.jsonl"
    with begin(path, totals={"tokens": 0, "samples": 0}) as writer:
        writer.write(sample(0))
    manifest = Path(f"{path}.manifest.json")
    killed = json.loads(manifest.read_text()) | {"finished": False}
    killed["totals"] = {"tokens": 0, "samples": 0}
    manifest.write_text(json.dumps(killed))
    os.utime(manifest, (time.time() - 60, time.time() - 60))
    one = WatchedFile(path)
    one.read(0.0)
    assert figures(one, "state", "tokens", "tokens_per_second") == ["unknown", 10, None]


def test_filtered_files_have_no_complete_prompts_and_files_without_drafts_no_acceptance() -> None:
    one = WatchedFile("o.jsonl")
    with begin("o.jsonl", results=RESULTS | {"filter": [{"where": "tokens > 1"}]}) as writer:
        writer.write(replace(sample(0), drafted=0, accepted=0))
        one.read(1.0)
        assert figures(one, "prompts_complete", "accepted_per_round") == [None, None]
        shown = "\n".join(one.lines())
        assert "ended by: 1 eos" in shown
        assert "complete" not in shown
        assert "accepted" not in shown


def test_half_a_line_waits_for_its_end() -> None:
    one, line = WatchedFile("o.jsonl"), json.dumps(sample(0).row()).encode() + b"\n"
    with open("o.jsonl", "wb", buffering=0) as stream:
        stream.write(line + line[:30])
        one.read(0.0)
        assert one.samples == 1
        stream.write(line[30:50])
        one.read(1.0)
        assert one.samples == 1
        stream.write(line[50:] + b"{]\n" + line)
        one.read(2.0)
    assert (one.samples, one.tokens, one.state) == (3, 30, "unknown")


def test_a_file_that_was_replaced_or_cut_is_read_from_its_start() -> None:
    line = json.dumps(sample(0).row()).encode() + b"\n"
    Path("o.jsonl").write_bytes(3 * line)
    one = WatchedFile("o.jsonl")
    one.read(0.0)
    Path("new").write_bytes(2 * line)
    os.replace("new", "o.jsonl")
    one.read(1.0)
    assert (one.samples, one.rate()) == (2, None)
    os.truncate("o.jsonl", len(line))
    one.read(2.0)
    assert one.samples == 1


def test_a_run_that_ends_without_its_manifest_has_stopped() -> None:
    writer, one = begin("o.jsonl"), WatchedFile("o.jsonl")
    writer.write(sample(0))
    one.read(0.0)
    assert one.state == "running"
    writer._file.stream.close()  # as a kill does
    one.read(1.0)
    assert one.state == "running"  # the manifest may follow
    one.read(2.0)
    assert one.state == "stopped"
    late = WatchedFile("o.jsonl")  # begun to watch after the kill
    late.read(0.0)
    assert late.state == "unknown"
    with begin("o.jsonl") as writer:  # the job goes on
        one.read(3.0)
        assert one.state == "running"
        writer.write(sample(1))
    one.read(4.0)
    assert (one.state, one.samples) == ("finished", 2)


def test_the_speed_is_that_of_the_last_minute() -> None:
    with begin("o.jsonl", expected=1_000) as writer:
        one = WatchedFile("o.jsonl")
        one.read(0.0)
        for second in range(1, 31):  # one sample a second, then two
            writer.write(sample(second, tokens=10))
            one.read(float(second))
        assert one.rate() == (10.0, 1.0)
        assert one.left == 970.0
        for second in range(31, 121):
            writer.write(sample(2 * second, tokens=10))
            writer.write(sample(2 * second + 1, tokens=10))
            one.read(float(second))
        assert one.rate() == (20.0, 2.0)
        for second in range(121, 151):
            one.read(float(second))
        assert one.rate() == pytest.approx((10.0, 1.0))
        for second in range(151, 200):
            one.read(float(second))
        assert (one.rate(), one.left) == ((0.0, 0.0), None)


def test_the_first_look_has_the_mean_of_this_run() -> None:
    with begin("o.jsonl") as writer:
        for number in range(2):
            writer.write(sample(number))
    with begin("o.jsonl") as writer:
        for number in range(2, 5):
            writer.write(sample(number))
        began = time.time() - 60.0
        os.utime("o.jsonl.manifest.json", (began, began))
        one = WatchedFile("o.jsonl")
        one.read(0.0)
        assert one.rate() == pytest.approx((0.5, 0.05), rel=0.1)
        assert one.left == pytest.approx(20.0, rel=0.1)


def test_copies_and_lines_of_prompts_are_counted_as_in_the_totals() -> None:
    rows = [sample(0).row(), sample(1).row()]
    shared = {"id": "0", "seed": 0}
    group = {
        **shared,
        "samples": [{k: v for k, v in row.items() if k not in shared} for row in rows],
    }
    failed = {"id": "1", "samples": [], "error": "too long"}
    copy = sample(2).copied(1).row()
    Path("o.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (group, failed, copy)))
    one = WatchedFile("o.jsonl")
    one.read(0.0)
    assert (one.samples, one.tokens, dict(one.reasons)) == (4, 20, {"eos": 3, "error": 1})


def test_several_files_have_a_line_each_and_one_for_all() -> None:
    with begin("a.jsonl") as first, begin("b.jsonl", expected=4) as second:
        files = [WatchedFile("a.jsonl"), WatchedFile("b.jsonl")]
        for seconds in (0.0, 2.0, 4.0):
            first.write(sample(int(seconds)))
            second.write(sample(int(seconds)))
            for one in files:
                one.read(seconds)
        assert lines_of(files) == [
            "a.jsonl: running, 3 of 6 samples, 30 tokens, 5 a second, about 0:06 left",
            "b.jsonl: running, 3 of 4 samples, 30 tokens, 5 a second, about 0:02 left",
            "all 2: 6 of 10 samples, 60 tokens, 10 a second, about 0:06 left",
        ]
        assert share_of(files) == 0.6


def bass(*words: str, code: int = 0) -> Any:
    return cli("watch", *words, code=code)


def test_the_command_shows_the_figures_within_80_columns() -> None:
    with begin("o.jsonl") as writer:
        for number in range(6):
            writer.write(sample(number, error="a\x1b[31m" * 50 if number == 5 else None))
        writer.add_run(20.0, {})
    found = bass("o.jsonl")
    assert found.stdout.splitlines() == [
        "o.jsonl: finished",
        "  6 of 6 samples, 60 tokens, 3 a second",
        "  3 of 3 prompts complete; ended by: 5 eos, 1 length",
        "  drafts accepted: 1.50 a round",
        '  the last sample, 1 of "2": text 5',
    ]
    (document,) = json.loads(bass("o.jsonl", "--json").stdout)
    assert (document["state"], document["samples"]) == ("finished", 6)
    Path("long.jsonl").write_text(json.dumps(sample(0).row() | {"text": "a\n\x1b[31m" * 99}) + "\n")
    lines = bass("long.jsonl", "--once").stdout.splitlines()
    assert lines[0] == "long.jsonl: not finished; no process of this machine writes to it"
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in found.stdout
    assert "none.jsonl: there is no such file" in bass("none.jsonl", code=2).stderr


def test_the_command_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the figures change in place; a job that was killed gives exit code 1."""
    for killed in (False, True):
        path = f"{killed}.jsonl"
        writer, numbers = begin(path), iter(range(6))

        def step(
            _: float, writer: Writer = writer, numbers: Any = numbers, killed: bool = killed
        ) -> None:
            """Another moment of the job, instead of sleeping."""
            number = next(numbers, None)
            if number is None or (killed and number >= 3):
                writer._file.stream.close() if killed else writer.close(finished=True)
                return
            writer.write(sample(number))

        monkeypatch.setattr(watching.time, "sleep", step)
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        found, whole = watching.watch([path], watching.Screen(), once=False, document=False)
        assert (found[0]["state"], found[0]["samples"], whole) == (
            ("stopped", 3, False) if killed else ("finished", 6, True)
        )
        assert f"{path}: " in terminal.getvalue()
