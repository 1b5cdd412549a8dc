"""The document of `bass bench`, and its tables, intervals and sentences."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
from typing import Any

import pytest
from benches import SET, SMALL, bench, measured

from bass_cli.bench import document as documents
from bass_cli.bench import report
from bass_cli.bench.figures import Latency, Run, Step, interval
from bass_cli.bench.floor import Ceilings, FloorInputs, Sizes
from bass_cli.bench.runs import Key, Parts

CELL: dict[str, Any] = {
    "batch": int, "method": str, "draft_length": int, "ms_per_token": dict, "ms_per_token_spread": dict,
    "tokens_per_second": float, "speedup": float, "speedup_spread": list, "rounds": (int, float),
    "speedup_interval": (list, type(None)), "verdict": (str, type(None)), "text": (str, type(None)),
    "acceptance_rate": (float, type(None)), "acceptance_per_trial": (float, type(None)), "mean_accepted": float,
    "parts_ms": dict, "shares": (dict, type(None)), "flop_utilisation": float, "bandwidth_utilisation": float,
    "floor_ms_per_token": dict, "prefill_seconds": float, "captures_while_measured": int,
}  # fmt: skip


def test_the_document() -> None:
    result = bench(
        *shlex.split(
            "--shape tiny --draft-shape tiny --acceptance 0.6 --batch-sizes 3,1 --methods "
            "2,bass,auto"
        ),
        *SMALL,
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert list(document) == [
        "machine",
        "pair",
        "settings",
        "gate",
        "captures",
        "cells",
        "controllers",
        "repeats",
        "failures",
    ]
    assert [document["repeats"][key] for key in ("done", "missing", "missing_seconds")] == [
        2,
        [],
        0,
    ]
    assert document["pair"]["kind"] == "acceptance set"
    assert "acceptance set to 0.6" in document["pair"]["label"]
    assert document["gate"] == {
        "finite": True,
        "strict": True,
        "rows": None,
        "rows_equal": None,
        "tokens": None,
        "tokens_equal": None,
        "passed": True,
    }
    assert [(c["batch"], c["method"]) for c in document["cells"]] == [
        *itertools.product((1, 3), ("plain", "2", "bass", "auto"))
    ]
    for cell in document["cells"]:
        assert {key: isinstance(cell[key], kind) for key, kind in CELL.items()} == dict.fromkeys(
            CELL, True
        )
        assert set(cell) == set(CELL)
        ms = cell["ms_per_token"]
        assert 0 < ms["first"] <= ms["mean"] <= ms["last"] < 1e4
        for key, (least, most) in cell["ms_per_token_spread"].items():
            assert least <= ms[key] <= most
        assert set(cell["parts_ms"]) == {
            "draft",
            "draft_step",
            "verify",
            "accept",
            "verify_and_accept",
            "device",
            "host",
            "round",
        }
        shares = cell["shares"] or {"": 1.0}
        assert (min(shares.values()) >= 0, sum(shares.values())) == (True, pytest.approx(1.0))
        assert cell["method"] != "plain" or cell["speedup"] == 1.0
        assert cell["captures_while_measured"] == 0
    assert "repeat 2 of 2" in result.stderr


def test_the_seed_fixes_everything_but_the_times() -> None:
    def found(seed: int) -> list[tuple[Any, ...]]:
        cells = measured(
            **SET, batch_sizes="3", methods="2,bass", new_tokens=10, repeats=1, seed=seed
        )
        keys = ("rounds", "acceptance_rate", "mean_accepted", "draft_length")
        return [tuple(cell[key] for key in keys) for cell in cells.values()]

    assert found(0) == found(0)
    assert found(0) != found(1)


def test_table_and_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SHAPE": "tiny",
        "BATCH_SIZES": "2",
        "PROMPT_TOKENS": "9",
        "NEW_TOKENS": "4",
        "REPEATS": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"BASS_{name}", value)
    result = bench("--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "random weights, no draft" in lines[0]
    assert [line.split()[:2] for line in lines if "method" in line] == [["rows", "method"]] * 2
    assert [line.split()[:2] for line in lines if line.strip().startswith("2 ")] == [
        ["2", "plain"]
    ] * 2
    assert lines[-1].startswith("plain ")
    assert lines[-1].endswith(" ms a token at 2 rows")


def test_tables_fit_80_columns_and_end_in_one_sentence() -> None:
    result = bench(
        *shlex.split(
            "--shape tiny --draft-shape tiny --acceptance 0.9 --batch-sizes 1,16 --methods "
            "4,bass+table,auto"
        ),
        *SMALL[:2],
        "--new-tokens",
        "5",
        *SMALL[4:6],
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.split()[1:2] == ["bass+table"] for line in lines) == 4
    few = r"no verdict at (1 row|16 rows) \(fewer than 3 repeats\)"
    assert re.fullmatch(
        f"auto: {few}, {few}; fastest fixed length: 4, {few}, 4, {few}",
        " ".join(lines[-3:]).split("be chance ")[-1],
    ), lines[-3:]


def test_summary_claims_only_what_the_repeats_show() -> None:
    def cell(batch: int, method: str, *ms: float, text: str | None = None) -> dict[str, Any]:
        made = [Latency(one, one, one) for one in ms]
        plain = [8.0 + 0.1 * repeat for repeat in range(len(ms))]
        return documents.timing(Key(batch, method), made, [1.0], plain) | {"text": text}

    found = [
        cell(8, "plain", 8.0, 8.1, 8.2),
        cell(8, "2", 6.0, 6.1, 6.2),
        cell(8, "5", 5.0, 5.1, 5.0),
        cell(8, "auto", 4.9, 5.0, 4.9),
        cell(8, "vllm", 1.0, 1.0, 1.0),
    ]
    assert (
        report.verdict(found)
        == "auto: 1.63x plain at 8 rows; fastest fixed length: 5, 1.60x plain at 8 rows"
    )
    noisy = [
        cell(4, "plain", 8.0, 8.0, 8.0, text="chat"),
        cell(4, "auto", 6.0, 9.0, 8.2, text="chat"),
    ]
    assert re.fullmatch(
        r"auto: within noise of plain for chat at 4 rows \(0\.\d\d-1\.\d\dx\)",
        report.verdict(noisy),
    )
    one = [cell(8, "plain", 8.0), cell(8, "auto", 10.0)]
    assert report.verdict(one) == "auto: no verdict at 8 rows (fewer than 3 repeats)"
    assert report.speed_line(one[1] | {"draft_length": 4, "mean_accepted": 1.0})[4:6] == ["-", "-"]
    assert [one["verdict"] for one in found] == [None, *["faster"] * 4]


@pytest.mark.parametrize(("tokens", "expected"), [(31, "no verdict"), (64, "slower")])
def test_short_runs_of_a_controller_give_no_verdict(tokens: int, expected: str) -> None:
    """A controller starts without measurements, so a run of 31 tokens shows mostly learning."""

    def runs(second: float) -> list[Run]:
        steps = [Step((i + 1) * second, 0, (0,), (0,)) for i in range(tokens)]
        return [Run(tuple(steps), (10,), tokens, 1.0)] * 3

    inputs = FloorInputs(Sizes(10, 10, 4, 8, 8, (0,)), None, 1, Ceilings(1e9, 1e9, "known"))
    auto, fixed = (
        documents.cell(Key(4, method), runs(0.02), runs(0.01), parts=None, inputs=inputs)
        | {"text": None}
        for method in ("auto", "2")
    )
    assert (auto["verdict"], fixed["verdict"]) == (expected, "slower")
    few = "no verdict at 4 rows (fewer than 64 tokens a row)"
    said = {"no verdict": few, "slower": "0.50x plain at 4 rows"}[expected]
    assert report.verdict([auto]) == f"auto: {said}"


def test_an_interval_covers_the_truth_in_95_of_100_benches() -> None:
    """A known ratio, with normal noise in its logarithm."""
    chance, truth = random.Random(0), 1.04
    for repeats in (3, 5, 12):
        covered = 0
        for _ in range(2000):
            low, high = interval([truth * math.exp(chance.gauss(0, 0.1)) for _ in range(repeats)])
            covered += low <= truth <= high
        assert covered / 2000 == pytest.approx(0.95, abs=0.015)
    assert interval([1.5, 1.6]) is None


def test_shares_are_of_the_sum_of_the_parts() -> None:
    parts = Parts(4, draft=0.2, verify=0.5, accept=0.1, device=0.8)
    expected = {"draft": 0.25, "verify": 0.625, "accept": 0.125, "other": 0, "host": 0}
    assert documents._shares(parts, 400.0) == pytest.approx(expected)
    assert documents._shares(parts, 1000.0)["host"] == pytest.approx(0.2)
    assert documents._parts_ms(parts, 400.0)["host"] == 0.0
    assert documents._shares(parts, None) is None


def test_format_of_numbers_and_lines() -> None:
    assert [report.number(value) for value in (None, 0.01234, 3.0, 1234.5, 12.34)] == [
        "-",
        "0.0123",
        "3",
        "1234",
        "12.3",
    ]
