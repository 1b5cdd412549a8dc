"""`--log`: events of a run with a tiny model and of a made-up one, and files that are refused."""

from __future__ import annotations

import logging
import shlex
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli, rows_in

from bass_cli.errors import UserError
from bass_cli.io.console import Screen
from bass_cli.io.runlog import RunLog


def events(path: str = "run.log", kind: str | None = None) -> list[dict[str, Any]]:
    lines = rows_in(path)
    return [line for line in lines if kind in (None, line["event"])]


def test_a_run_logs_its_phases_rounds_notes_and_summary(here: Path) -> None:
    write_checkpoint("llama", here / "target", seed=0, shards=False)
    write_tokenizer(here / "target")
    Path("p.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "sat on"}\n')
    words = shlex.split("generate p.jsonl --model target --device cpu --n 3 --max-new-tokens 9")
    before = datetime.now(timezone.utc)
    for number in (1, 2):  # the log is appended to
        cli(*words, "--out", f"{number}.jsonl", "--log", "run.log", code=0)
    found = events()
    assert [line["event"] for line in found].count("start") == 2
    first = found[: 1 + [line["event"] for line in found].index("end")]
    assert first[0]["command"] == "generate"
    assert (first[-1]["event"], first[-1]["failed"]) == ("end", False)
    assert [line["at"] for line in first] == sorted(line["at"] for line in first)
    times = [datetime.fromisoformat(line["time"].replace("Z", "+00:00")) for line in first]
    assert times == sorted(times)
    assert abs((times[0] - before).total_seconds()) < 60
    names = [line["name"] for line in first if line["event"] == "phase"]
    assert names == [
        "reading the prompts",
        "importing torch",
        "checking the models",
        "loading the weights",
        "reading the first prompts",
    ]
    ended = {line["name"]: line["seconds"] for line in first if line["event"] == "phase ended"}
    assert list(ended) == names
    rows = rows_in("1.jsonl")
    rounds = [line for line in first if line["event"] == "rounds"]
    assert sum(line["tokens"] for line in rounds) == sum(row["tokens"] for row in rows)
    assert sum(line["accepted"] for line in rounds) == sum(row["accepted"] for row in rows)
    assert all(line["between"] >= 0 and 0 < line["rows"] <= 6 for line in rounds)
    (summary,) = [line for line in first if line["event"] == "summary"]
    assert (summary["samples"], summary["output"]) == (6, "1.jsonl")
    assert any("plain prompts" in line["text"] for line in first if line["event"] == "note")


def test_rounds_are_summed_over_a_second(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with RunLog("run.log", "generate") as log:
        screen = Screen(quiet=True)
        screen.log = log
        screen.detail("2 threads")
        now[0] = 101.0
        screen.phase("loading the weights")
        now[0] = 103.0
        screen.start(8, rows=4)
        for at in range(10):
            now[0] += 0.3
            screen.round(2, 4 - at // 5, 0.2, 0.05 if at == 0 else 0.0, drafted=12, waiting=0.01)
    assert [(line["name"], line["seconds"]) for line in events(kind="phase ended")] == [
        ("loading the weights", 2.3)
    ]
    assert [line["text"] for line in events(kind="note")] == ["2 threads"]
    rounds = events(kind="rounds")
    assert [line["rounds"] for line in rounds] == [4, 4, 2]
    assert rounds[0] == {
        "time": rounds[0]["time"], "at": 4.2, "event": "rounds", "rounds": 4, "rows": 4.0, "tokens": 24, "accepted": 8,
        "drafted": 48, "seconds": 0.8, "capturing": 0.05, "waiting": 0.04, "between": 0.26, "samples": 0,
    }  # fmt: skip
    assert rounds[1]["rows"] == 3.25
    assert sum(line["tokens"] for line in rounds) == 2 * 10 + 4 * 5 + 3 * 5


def test_rounds_of_other_processes_are_summed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with RunLog("run.log", "generate") as log:
        screen = Screen(quiet=True)
        screen.log = log
        screen.start(8, rows=4)
        for _ in range(5):
            now[0] += 0.4
            screen.rounds(20, 8, 12)
    numbers = [
        {key: line[key] for key in ("tokens", "accepted", "row_rounds")}
        for line in events(kind="rounds")
    ]
    assert numbers == [
        {"tokens": 60, "accepted": 36, "row_rounds": 24},
        {"tokens": 40, "accepted": 24, "row_rounds": 16},
    ]


def test_warnings_and_errors_are_logged_and_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = list[str]()
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    before = warnings.showwarning, list(logging.getLogger().handlers)
    log, screen = RunLog("run.log", "eval", render=str.upper), Screen()

    def fail() -> None:
        with log as screen.log:
            warnings.showwarning("old", DeprecationWarning, "a.py", 1)
            logging.getLogger("some.library").warning("low on %s", "memory")
            screen.note("a note\nof two lines")
            screen.error("3 prompts could not be run")
            raise UserError("a file is missing", "look for it")

    with pytest.raises(UserError):
        fail()
    assert (warnings.showwarning, list(logging.getLogger().handlers)) == before
    assert shown == ["old"]
    assert [(line["source"], line["text"]) for line in events(kind="warning")] == [
        ("DeprecationWarning", "old"),
        ("some.library", "low on memory"),
    ]
    assert events(kind="note")[0]["text"] == "a note\nof two lines"
    assert [line["text"] for line in events(kind="error")] == [
        "3 prompts could not be run",
        "A FILE IS MISSING; LOOK FOR IT",
    ]
    assert events()[-1]["failed"] is True
    assert "a note\\nof two lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("-", "--log (or BASS_LOG): name a file"),
        ("/dev/stderr", "--log (or BASS_LOG): name a file"),
        ("p.jsonl", "--log p.jsonl: this is --prompts, which would be lost"),
        ("o.jsonl", "--log o.jsonl: this is --out"),
        ("data.txt", "--log data.txt: it exists and is not a log of bass"),
        ("no/run.log", "the folder no is not there"),
        (".", "this is a folder"),
    ],
)
def test_a_file_that_is_no_log_is_refused(here: Path, log: str, message: str) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    Path("data.txt").write_text("my data\n")
    done = cli("generate", "p.jsonl", "--model", "none", "--out", "o.jsonl", "--log", log, code=2)
    assert message in done.stderr
    assert Path("data.txt").read_text() == "my data\n"
    assert not Path("o.jsonl").exists()
