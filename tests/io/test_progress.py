"""Test progress: phases have names, a line comes at least every 30 seconds, and the estimated time
is realistic."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli

from bass_cli.io import terminal
from bass_cli.io.console import Estimate, Screen
from bass_cli.io.results import Completion
from bass_cli.io.terminal import Display

DONE = Completion("a", 0, "", "eos", 30, None, None, 0.0, 10, 40, 20, 0, 1)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def seconds_left(line: str) -> int | None:
    found = re.search(r"about (?:(\d+):)?(\d+):(\d\d) left", line)
    return None if found is None else int(found[1] or 0) * 3600 + int(found[2]) * 60 + int(found[3])


def test_no_estimate_before_enough_items() -> None:
    estimate = Estimate(1000)
    assert estimate.left(5.0) is None
    for done in range(20):  # two of a hundred are too few, and so are two at all
        estimate.update(done, float(done))
        assert estimate.left(float(done)) is None
    estimate.update(20, 20.0)
    assert estimate.left(20.0) == pytest.approx(980.0)
    few = Estimate(4)
    few.update(0, 0.0)
    few.update(2, 2.0)
    assert few.left(2.0) is None
    unknown = Estimate(None)
    for done in range(50):
        unknown.update(done, float(done))
    assert unknown.left(50.0) is None


def test_items_of_earlier_runs_do_not_count_as_speed() -> None:
    estimate = Estimate(200)
    estimate.update(100, 0.0)  # verdicts of an earlier run
    estimate.update(110, 10.0)
    assert estimate.left(10.0) == pytest.approx(90.0)
    assert estimate.left(12.0) == pytest.approx(88.0)


def test_estimate_grows_while_nothing_finishes() -> None:
    """31 of 32 samples end, one a second; the last one takes three minutes."""
    estimate, short = Estimate(32), []
    estimate.update(0, 0.0)
    for done in range(1, 32):
        estimate.update(done, float(done))
    for second in range(31, 212):
        left = estimate.left(float(second))
        assert left is not None
        short += [second] * (left <= 1.5)
        assert left >= second - 31  # it has taken so long already
    assert len(short) <= 2


def test_phases_are_named_and_silence_ends_after_30_seconds(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen()
    screen.start(3)
    printed: dict[int, str] = {}

    def until(second: int) -> None:
        while now[0] < second:
            now[0] += 1.0
            screen._display.beat()
            printed.update({int(now[0]): line for line in capsys.readouterr().err.splitlines()})

    screen.phase("loading the weights")
    until(40)
    for second in range(41, 81):
        screen.bytes_read(second * 10**8, 12 * 10**9)
        until(second)
    screen.phase("warming up")
    until(83)  # too short to be worth a line
    screen.phase("reading the first prompts")
    until(100)
    screen.round(6, 2, 1.0)
    until(170)
    assert printed == {
        5: "loading the weights, 0:05 elapsed", 35: "loading the weights, 0:35 elapsed",
        **{second: f"loading the weights: {second / 10:.1f} GB of 12.0 GB, 0.1 GB/s, "
                   f"{(second - 1) // 60}:{(second - 1) % 60:02d} elapsed" for second in range(41, 80, 5)},
        88: "reading the first prompts, 0:05 elapsed", 130: "0/3 samples, 0 tokens/s, 3.00 "
                                                            "accepted a round, 2:10 elapsed",
        160: "0/3 samples, 0 tokens/s, 3.00 accepted a round, 2:40 elapsed",
    }  # fmt: skip
    screen.close()
    now[0] += 100.0
    screen._display.beat()
    assert capsys.readouterr().err == ""


def test_lines_are_printed_without_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SILENCE", 0.02)
    display, written = Display(), ""
    display.show(lambda: ["at work"], first=0.01)
    began = time.monotonic()
    while written.count("at work\n") < 3:
        assert time.monotonic() < began + 60
        time.sleep(0.01)
        written += capsys.readouterr().err
    display.hide()


def test_a_terminal_has_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(verbose=True)
    screen.phase("loading the weights")
    screen.note("a note")
    screen.start(8, rows=2)
    screen.round(6, 2, 1.0)
    screen.advance(DONE)
    screen.close(screen.summary("o.jsonl"))
    seen = terminal.getvalue()
    assert "loading the weights, 0:00 elapsed" in seen
    assert "a note" in seen
    assert seen.rstrip().splitlines()[-1].startswith("30 tokens in ")
    assert "rows busy: 100% of 2 (100% until " in seen
    results = Terminal()
    monkeypatch.setattr(sys, "stderr", results)
    screen = Screen()
    screen.start(8, live=False)  # the samples themselves go to the terminal
    screen.phase("reading the first prompts")
    screen.round(6, 2, 1.0)
    until_now = len(results.getvalue())
    assert "reading the first prompts" in results.getvalue()
    screen.advance(DONE)
    assert len(results.getvalue()) == until_now
    fetched = Terminal()
    monkeypatch.setattr(sys, "stderr", fetched)
    Screen().phase("checking the models", live=False)
    assert fetched.getvalue() == ""  # the hub's client writes there


@pytest.mark.parametrize("flags", [(), ("--budget", "60s")])
def test_phases_before_the_first_round_are_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    write_checkpoint("llama", here / "target", seed=0, shards=False)
    write_tokenizer(here / "target")
    (here / "p.txt").write_text("the cat sat\n")
    phases: list[Any] = []
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(Screen, "phase", lambda screen, name, **_: phases.append(name))
    monkeypatch.setattr(Screen, "round", lambda *_, **__: phases.append("round"))
    monkeypatch.setattr(Screen, "bytes_read", lambda screen, *seen: read.append(seen))
    options = ("--model", "target", "--n", "2", "--max-new-tokens", "4", "--device", "cpu")
    cli("generate", "p.txt", *options, *flags, code=0)
    (stored,) = (here / "target").glob("*.safetensors")
    assert read[-1][0] == read[-1][1]
    assert 0 < stored.stat().st_size - read[-1][1] < 10_000  # all but the header
    assert read == sorted(read)
    warming = ["warming up"] if flags else []
    assert list(dict.fromkeys(phases)) == ["reading the prompts", "importing torch",
                                           "checking the models", "loading the weights", *warming,
                                           "reading the first prompts", "round"]  # fmt: skip
