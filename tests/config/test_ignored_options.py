"""Test that no option is ignored: an option that would have no effect is refused before a model is
loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_pair
from command_line import cli

from bass_cli.config.job import load_pair, make_job
from bass_cli.generation import unescape

XSUM = ["xsum", "--data", "x.jsonl"]


@pytest.fixture
def place(here: Path) -> Path:
    """A folder with prompts, a pair of tiny models, and data."""
    write_pair(here, prompts=1)
    (here / "x.jsonl").write_text(json.dumps({"id": "1", "document": "a b", "summary": "a"}) + "\n")
    (here / "f.jsonl").write_text(json.dumps({"task_id": "1", "completion": "a"}) + "\n")
    return here


@pytest.mark.parametrize(("arguments", "fault"), [
    (["generate", "p.txt", "--draft", "none", "--draft-length", "4"], "no draft, so draft length "
                                                                      "4 has no meaning; leave the length out, or "
                                                                      "name a --draft"),
    (["generate", "p.txt", "--draft", "none", "--draft-length", "bass"], "so draft length bass has no meaning"),
    (["generate", "p.txt", "--out", "o.csv.gz"], "--out o.csv.gz: nothing is written as .csv.gz; lines are JSON "
                                                 "or parquet. Use a name that ends in .jsonl, .jsonl.gz, "),
    (["generate", "p.txt", "--out", "o.gz"], "--out o.gz: nothing is written as .gz; lines are JSON"),
    (["generate", "p.txt", "--out", "o.JSON"], "nothing is written as .json;"),
    (["generate", "p.txt", "--resume"], "--resume (or BASS_RESUME): samples go to standard output, where no file "
                                        "is kept; add --out FILE"),
    (["generate", "p.txt", "--overwrite", "--out", "/dev/stderr"], "--overwrite (or BASS_OVERWRITE): samples go to "
                                                                   "/dev/stderr, where no"),
    (["generate", "p.txt", "--prompt-column", "text"], "--prompt-column (or BASS_PROMPT_COLUMN): "
                                                       "a text file has no"),
    (["eval", *XSUM, "--plot", "c.png"], "--plot (or BASS_PLOT): a chart shows a sweep; add "
                                         "--budgets"),
    (["eval", *XSUM, "--out", "o.csv"], "--out o.csv: nothing is written as .csv;"),
    (["eval", *XSUM, "--report", "r.jsonl.gz"], "--report r.jsonl.gz: nothing is written as .jsonl.gz; "
                                                "a report is one JSON"),
    (["eval", *XSUM, "--k", "1"], "--k (or BASS_K): xsum has no verdicts; leave it out"),
    (["eval", *XSUM, "--workers", "2"], "--workers (or BASS_WORKERS): xsum has no programs to "
                                        "run; leave it out"),
    (["eval", *XSUM, "--timeout", "2s"], "--timeout (or BASS_TIMEOUT): xsum has no programs to "
                                         "run; leave it out"),
    (["eval", *XSUM, "--rejudge"], "--rejudge (or BASS_REJUDGE): xsum has no verdicts; "
                                   "leave it out"),
    (["eval", *XSUM, "--budgets", "1s", "--draft", "none", "--draft-length", "4"], "so draft length 4 has no meaning"),
    (["score", "f.jsonl", "--task", *XSUM, "--timeout", "2s"], "--timeout (or BASS_TIMEOUT): xsum "
                                                               "has no programs to run"),
    (["bench", "--prompts", "p.txt", "--prompt-tokens", "9"], "--prompt-tokens (or "
                                                              "BASS_PROMPT_TOKENS): the prompts of"),
])  # fmt: skip
def test_option_without_effect_is_refused(place: Path, arguments: list[str], fault: str) -> None:
    before = sorted(place.iterdir())
    pair = [] if arguments[0] == "score" else ["--pair", "pair.yaml"]
    result = cli(*arguments, *pair)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fault in result.stderr
    assert sorted(place.iterdir()) == before


def test_draft_length_flag_overrides_the_pair(place: Path) -> None:
    pair = load_pair("pair.yaml")
    assert make_job(pair, draft_length="3").speculation.length == 3
    assert (
        make_job(pair, draft="none").speculation.length == "auto"
    )  # the pair's own length was for its draft
    assert make_job(pair, draft="none", draft_length="0").speculation.length == 0


@pytest.mark.parametrize(("given", "expected"), [
    (r"\n", "\n"), (r"\n\ndef ", "\n\ndef "), (r"\t\r", "\t\r"), (r"\\n", r"\n"), (r"\\\n", "\\\n"), (r"\d\e", r"\d\e"),
    ("\\", "\\"), ("a\nb", "a\nb"), ("é\\n", "é\n"),
])  # fmt: skip
def test_a_stop_string_is_unescaped_as_a_shell_user_expects(given: str, expected: str) -> None:
    assert unescape(given) == expected


def test_the_manifest_has_the_real_stop_strings(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stops(*flags: str) -> list[str]:
        cli("generate", "p.jsonl", "--out", "o.jsonl", "--overwrite", *flags, code=0)
        return json.loads((tmp_path / "o.jsonl.manifest.json").read_text())["results"]["stop"]

    assert stops("--stop", r"\n", "--stop", r"a\tb") == ["\n", "a\tb"]
    monkeypatch.setenv("BASS_STOP", r"\n\n")
    assert stops() == ["\n\n"]
    monkeypatch.setenv("BASS_STOP", json.dumps(["\n", r"\n"]))  # JSON has escapes of its own
    assert stops() == ["\n", r"\n"]
