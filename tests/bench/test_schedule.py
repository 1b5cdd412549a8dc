"""`bass bench` with a time limit: the order of runs, fewer tokens, and what the summary says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import SCALED, bench, settings

from bass_cli.bench import grid, report
from bass_cli.bench.figures import Run, Step
from bass_cli.bench.runs import LEAST_TOKENS, Key, Schedule
from bass_cli.io.console import Screen

KEYS = [Key(1, "plain"), Key(1, "auto"), Key(2, "plain"), Key(2, "auto")]


def run(tokens: int = 8, *, second: float = 1.0, prefill: float = 1.0) -> Run:
    """Make a run of one row with one token in each round."""
    return Run(
        tuple(Step((i + 1) * second, 0, (0,), (0,)) for i in range(tokens)), (10,), tokens, prefill
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(schedule: Schedule, clock: Clock, seconds: float) -> list[Any]:
    """Let every run take `seconds`; return the order of the cells."""
    order = []
    while (following := schedule.next()) is not None:
        order.append(following)
        clock.now += seconds
        schedule.add(following[1], run(), seconds)
    return order


def test_every_cell_runs_before_any_is_repeated() -> None:
    schedule = Schedule(KEYS, repeats=2, limit=None, now=Clock())
    assert schedule.tokens(dict.fromkeys(KEYS, run()), 128, least=0) == 128
    assert drive(schedule, Clock(), 1.0) == [(repeat, key) for repeat in (0, 1) for key in KEYS]
    assert (
        schedule.report()["done"],
        schedule.report()["missing"],
        schedule.report()["missing_seconds"],
    ) == (2, [], 0)


def test_tokens_follow_from_the_time_limit() -> None:
    clock = Clock()
    schedule = Schedule(KEYS, repeats=5, limit=100.0, now=clock)
    warm = dict.fromkeys(KEYS, run(second=0.25, prefill=2.0))
    # Of 80 s for runs, 8 s for prompts in each repeat: five repeats leave 8 tokens of each of the
    # four cells, three leave 18.
    assert schedule.tokens(warm, 128, least=0) == 18
    fast = dict.fromkeys(KEYS, run(second=0.03125, prefill=0.25))
    assert schedule.tokens(fast, 256, least=0) == 120, "five repeats of (16 - 1) / 0.125 tokens"
    assert schedule.seconds_left() == pytest.approx(80.0)
    assert schedule.tokens(warm, 10, least=0) == 10
    assert schedule.tokens(warm, 128, least=128) == 128
    clock.now = 79.0
    assert schedule.tokens(warm, 128, least=0) == LEAST_TOKENS


def test_no_run_starts_that_would_end_late() -> None:
    clock = Clock()
    schedule = Schedule(KEYS, repeats=5, limit=100.0, now=clock)
    schedule.tokens(dict.fromkeys(KEYS, run(second=0.25, prefill=2.0)), 40, least=40)
    order = drive(schedule, clock, 12.0)
    assert order == [*((0, key) for key in KEYS), (1, KEYS[0]), (1, KEYS[1])]
    about = schedule.report()
    assert (about["done"], about["repeats"], about["missing"], about["widest_spread"]) == (
        1,
        5,
        [],
        0.0,
    )
    assert about["missing_seconds"] == pytest.approx(14 * 12.0)
    assert schedule.in_time()
    clock.now = 100.0
    assert not schedule.in_time()


def test_missing_cells_are_named_and_the_first_cell_always_runs() -> None:
    clock = Clock()
    schedule = Schedule(KEYS, repeats=5, limit=10.0, now=clock)
    schedule.tokens(dict.fromkeys(KEYS, run(second=9.0)), 128, least=0)
    assert drive(schedule, clock, 60.0) == [(0, KEYS[0])]
    assert schedule.report()["missing"] == [[1, "auto"], [2, "plain"], [2, "auto"]]


def test_summary_of_a_limited_bench_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = settings(
        **SCALED, methods="2,auto", batch_sizes="2", repeats="4", new_tokens=None, time_limit="10s"
    )
    assert (wanted.time_limit, wanted.tokens_given, wanted.repeats) == (10.0, False, 4)
    clock = Clock()
    monkeypatch.setattr(grid, "Schedule", lambda keys, **given: Schedule(keys, **given, now=clock))
    monkeypatch.setattr(
        Schedule,
        "add",
        lambda self, key, run, seconds, add=Schedule.add: (
            setattr(clock, "now", clock.now + 2.0),
            add(self, key, run, 2.0),
        ),
    )
    screen = Screen()
    [document] = grid.measure(wanted, screen)
    screen.close()
    assert document["repeats"]["done"] == 1
    assert {cell["method"] for cell in document["cells"]} == {"plain", "2", "auto"}
    assert "left: ms per token plain" in capsys.readouterr().err
    text = " ".join(report.closing(document))
    assert "1 of 4 repeats" in text
    assert "set the time limit to 1m" in text


def test_default_on_a_cpu_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {
        "repeats": None,
        "methods": None,
        "batch_sizes": None,
        "prompt_tokens": None,
        "new_tokens": None,
    }
    default = settings(**SCALED | nothing)
    assert default.time_limit is not None
    assert default.time_limit < 120
    assert (default.tokens_given, default.methods[-1]) == (False, "auto")
    assert settings(**SCALED | nothing, time_limit="5m").time_limit == 300.0
    assert settings(**SCALED | nothing | {"repeats": "3"}).time_limit is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    on_gpu = settings(**SCALED | nothing, device="auto")
    assert (on_gpu.time_limit, on_gpu.prompt_tokens) == (None, 300)
    result = bench("--shape", "tiny", "--time-limit", "soon")
    assert (result.exit_code, "--time-limit (or BASS_TIME_LIMIT)" in result.stderr) == (2, True)
