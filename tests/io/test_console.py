"""Test help, progress, and the tables of `bass pairs` and `bass doctor`."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import cli

from bass_cli.cli.doctor import parameters_in, place_of
from bass_cli.io.console import Screen
from bass_cli.io.results import Completion

ROOT = Path(__file__).parents[2]


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    seconds = []
    while (
        len(seconds) < 30 and min(seconds, default=1.0) >= 0.3
    ):  # of processor time: other work on the machine
        began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # may slow some down even so
        result = subprocess.run(
            [sys.executable, "-m", "bass_cli.cli.commands", "--help"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        seconds.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began)
    assert b"generate" in result.stdout
    assert min(seconds) < 0.3
    code = "import sys, bass_cli.cli.commands; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["torch", "pydantic", "yaml", "rich", "transformers", "datasets", "numpy", "pyarrow"]
    found = subprocess.run(
        [sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_pairs_and_doctor_show_available_models() -> None:
    known = {row["name"]: row for row in json.loads(cli("pairs", "--json").stdout)}
    assert known["smollm2"]["here"] == "ready" or "not installed" in known["smollm2"]["here"]
    assert known["local-files"]["ready"] is False
    assert known["qwen2.5-coder-7b"]["weight_bytes"] == 15e9
    table = cli("pairs")
    assert (table.exit_code, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if line[0] != " "]
    assert [line.split()[0] for line in heads] == ["pair", *sorted(known)]
    for line in heads[1:]:  # the state begins in the line of the name, for grep
        row = known[line.split()[0]]
        assert row["here"].startswith(line.split(row["weights"], 1)[1].strip())
        assert row["target"] in table.stdout
    facts = json.loads(cli("doctor", "--json").stdout)
    assert facts["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert (facts["device"] in ("cpu", "cuda"), facts["memory_bytes"] > 0, facts["cores"] >= 1) == (
        True,
        True,
        True,
    )
    assert set(facts["ready"]) <= set(facts["fits"]) <= set(known)
    assert "transformers" in cli("doctor").stdout


def test_parameters_are_read_from_model_names(here: Path) -> None:
    names = {
        "Qwen/Qwen2.5-Coder-7B-Instruct": 7e9,
        "Qwen/Qwen3-0.6B": 6e8,
        "Salesforce/codegen-350M-mono": 3.5e8,
    }
    assert {name: parameters_in(name) for name in names} == names
    assert parameters_in("models/target-v2.bin") is None
    (here / "m.gguf").write_text("")
    assert place_of("m.gguf") == "here"
    assert place_of("n.gguf") == "no such file or folder"
    assert place_of("package:json/none.gguf") == "package json has no none.gguf"
    assert place_of("package:no_such_module/x.gguf") == "package no_such_module is not installed"


def test_progress_without_a_terminal_prints_lines(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen()
    screen.start(4)
    completion = Completion("a", 0, "", "eos", 30, None, None, 0.0, 10, 40, 20, 0, 1)
    for second in (1, 3, 6, 7):
        now[0] = float(second)
        screen.round(6, 2, 1.0)
        screen.advance(completion)
    written = capsys.readouterr().err.splitlines()
    assert written == [
        "2/4 samples, 10 tokens/s, 3.00 accepted a round, 0:06 elapsed"
    ]  # two samples tell too little
    summary = screen.summary("o.jsonl")
    assert (summary["seconds"], summary["tokens_per_second"], summary["finish_reasons"]) == (
        7.0,
        17.14,
        {"eos": 4},
    )
    screen.close()


def test_progress_of_counted_work(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    with screen.counting("verdicts", 9) as progress:
        for second in (1, 4, 6, 7):
            now[0] = float(second)
            progress(second, 9)
    assert capsys.readouterr().err == "6/9 verdicts, 0:06 elapsed, about 0:03 left\n"
    with screen.counting("tokens", 9, beside=lambda: "2 of 2 actors at work") as progress:
        screen.rounds(5, 2, 3)  # rounds of remote workers keep the display
        now[0] += 9.0
        progress(6, 9)
    assert capsys.readouterr().err == "6/9 tokens, 0:09 elapsed\n2 of 2 actors at work\n"
    with Screen(quiet=True).counting("verdicts", 9) as progress:
        now[0] = 60.0
        progress(9, 9)
    assert capsys.readouterr().err == ""


def test_tables_escape_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text('name: "a\\nb"\ntarget: "\\e[31mred"\n')
    for command in (("pairs", str(path)), ("doctor", "--pair", str(path))):
        found = cli(*command).stdout
        assert "\x1b" not in found
        assert "a\\nb" in found
        assert "\\x1b[31mred" in found


def test_details_are_shown_only_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        Screen(verbose=verbose).detail("2 threads")
        assert capsys.readouterr().err == ("2 threads\n" if verbose else "")
    Screen(True, verbose=True).detail("2 threads")
    assert capsys.readouterr().err == ""


def test_a_speed_over_too_short_a_time_is_not_printed(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, shown in ((0.01, False), (0.4, False), (0.6, True), (60.0, True)):
        now[0] = 0.0
        screen = Screen(verbose=True)
        screen.start(1)
        screen.round(1, 1, 0.001, drafted=4, plain=0.1)
        now[0] = seconds
        screen.advance(Completion("a", 0, "", "eos", 30, None, None, 0.0, 10, 40, 20, 0, 1))
        screen.close(screen.summary("o.jsonl"))
        written = capsys.readouterr().err
        assert ("a second once the models were loaded" in written) is shown
        assert ("without drafts" in written) is shown
