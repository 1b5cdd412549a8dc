"""Faults in the files and manifests of `bass score` are named before a program runs."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from scored import Sandbox, line, write
from test_score import ALLOW, score, scored, verdicts

pytestmark = pytest.mark.usefixtures("scored_stand_ins")

GOOD = '{"task_id": "HumanEval/0", "completion": "+ 1"}\n'
LINE = '{"task_id": "HumanEval/0", "completion": "x"'
BAD: list[tuple[str | None, list[str], str]] = [
    (None, [], "f.jsonl: cannot read the generation file: No such file"),
    ("", [], "f.jsonl: the file has no samples"),
    ('{"task_id": "Hum', [], "f.jsonl: the file has no samples"),
    (f"{GOOD}oops\n{GOOD}", [], "f.jsonl:2: broken JSON: Expecting value at column 1"),
    (f"{GOOD}[1]\n{GOOD}", [], "f.jsonl:2: a line must be a JSON object"),
    (f'{GOOD}{{"completion": "x"}}\n', [], 'f.jsonl:2: field "task_id": it is missing'),
    ('{"task_id": "HumanEval/0", "completions": "x"}\n', [],
     'f.jsonl:1: field "completion" (or "solution"): it is missing; the line has "completions"'),
    ('{"task_id": "HumanEval/0", "completion": null}\n', [], 'f.jsonl:1: field "completion": it '
                                                             'must be a text'),
    ('{"task_id": true, "completion": "x"}\n', [], 'f.jsonl:1: field "task_id": it must be a text '
                                                   'or a whole number'),
    ('{"task_id": "HumanEval/0", "completion": "x", "seconds": "1"}\n', [],
     "f.jsonl:1: field \"seconds\": a finite number from 0 on is needed, not '1'"),
    (f'{LINE}, "seconds": -1}}\n', [], 'f.jsonl:1: field "seconds": a finite number from 0 on is '
                                       'needed, not -1'),
    (f'{LINE}, "seconds": {10**400}}}\n', [], 'f.jsonl:1: field "seconds": a finite number from 0 '
                                              'on is needed, not 1000'),
    (f'{LINE}, "tokens": {10**400}}}\n', [], 'f.jsonl:1: field "tokens": a whole number from 0 on '
                                             'is needed, not 1000'),
    (f'{LINE}, "tokens": 3.5}}\n', [], 'f.jsonl:1: field "tokens": a whole number from 0 on is '
                                       'needed, not 3.5'),
    (f'{LINE}, "mean_logprob": [1]}}\n', [], 'f.jsonl:1: field "mean_logprob": a finite number is '
                                             'needed, not [1]'),
    (f'{LINE}, "finish_reason": []}}\n', [], 'f.jsonl:1: field "finish_reason": it must be a text'),
    (f'{{"task_id": "{"H" * 10**6}", "completion": '
     f'"x"}}\n', ["--task", "humaneval"], 'f.jsonl:1: unknown task_id "HHHH'),
    (f'{GOOD}{"[" * 10**5}\n{GOOD}', [], "f.jsonl:2: broken JSON: it is nested too deep"),
    (f'{GOOD}{{"a": {"9" * 6000}}}\n{GOOD}', [], "f.jsonl:2: broken JSON: a number has too many "
                                                 "digits"),
    ('{"task_id": "HumanEval/0", "completion": "x", "sample": -1}\n', [],
     'f.jsonl:1: field "sample": a whole number from 0 on is needed, not -1'),
    (f'{GOOD}{{"task_id": "HumanEval/0", "completion": "x", "sample": 0}}\n', [],
     'f.jsonl:2: sample 0 of "HumanEval/0" is in the file twice, first in line 1'),
    ('{"task_id": 11, "completion": "x", "sample": 0}\n{"task_id": "Mbpp/11", "completion": "x", '
     '"sample": 0}\n', [], 'f.jsonl:2: sample 0 of "Mbpp/11" is in the file twice, first in line 1'),
    (GOOD, ["--report", "-"], "--report -: give a file name"),
    (GOOD, ["--report", "/dev/stdout", "--json"], "--report /dev/stdout: --json prints the report there too"),
    (f'{GOOD}{{"task_id": "HumanEvil/3", "completion": "x"}}\n', [],
     'f.jsonl:2: unknown task_id "HumanEvil/3"; did you mean "HumanEval/3"?'),
    ('{"task_id": "a/1", "completion": "x"}\n', [], 'f.jsonl:1: the task_id "a/1" does not determine '
                                                    'the task; add --task hum'),
    (GOOD, ["--task", "humanevil"], 'unknown task "humanevil"'),
    (GOOD, ["--k", "1,0"], '--k (or BASS_K): "0" is not a whole number above 0'),
    *((GOOD, ["--workers", number], "--workers (or BASS_WORKERS): it should be a whole number "
                                    "from 1 to 1024")
      for number in ("0", "100000", "9" * 400)),
    (GOOD, ["--timeout", "1e400"], '--timeout (or BASS_TIMEOUT): "1e400" is not a time above 0 '
                                   'and up to'),
    (GOOD, ["--timeout", "soon"], '--timeout (or BASS_TIMEOUT): "soon" is not a time above 0'),
    (GOOD, ["--report", "no/r.json"], "--report no/r.json: the folder no is not there"),
    (GOOD, ["--report", "f.jsonl"], "--report f.jsonl: this is the generation file"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "arguments", "expected"), BAD)
def test_bad_input_is_refused_before_anything_is_run(
    content: str | None, arguments: list[str], expected: str
) -> None:
    if content is not None:
        Path("f.jsonl").write_text(content)
    result = score("f.jsonl", ALLOW, *arguments)
    assert expected in result.stderr
    assert (
        result.exit_code,
        result.stdout,
        Sandbox.opened,
        Path("f.jsonl.verdicts.jsonl").exists(),
    ) == (2, "", 0, False)


@pytest.mark.parametrize("kind", ["pipe", "device", "bomb"])
def test_pipes_devices_and_endless_lines_are_refused(kind: str) -> None:
    """A pipe without a writer, a device, and a small gzip file with a line of 100 MB."""
    path = Path("f.jsonl")
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "bomb": lambda: path.write_bytes(gzip.compress(b'{"text": "' + bytes(100 * 2**20), 1)),
    }[kind]()
    result = score("f.jsonl", ALLOW)
    expected = (
        "f.jsonl:1: the line has more than 64 MB"
        if kind == "bomb"
        else "generation file: a file is needed, not"
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr


@pytest.mark.parametrize("manifest", [
    "null", "[]", "{", '{"results": null}', '{"results": [], "totals": '
                                            '3}', "[" * 10**5, '{"a": ' + "9" * 6000 + "}",
    '{"results": {"budget": Infinity, "n": "2"}, "totals": {"seconds": NaN}}',
    f'{{"results": {{"budget": {10**400}, "n": -1}}, "totals": {{"seconds": {10**400}}}}}',
    '{"results": {"budget": [], "task": ["a"], "n": {}}, "totals": {"seconds": "1"}}',
])  # fmt: skip
def test_score_works_with_a_broken_manifest(manifest: str) -> None:
    write("f.jsonl", [line(0, 0, "+ 1")])
    Path("f.jsonl.manifest.json").write_text(manifest)
    report = scored("f.jsonl")
    assert (report["pass_first"], report["budget"]) == (1.0, None)


@pytest.mark.parametrize("change", [
    {"isolation": {"network": ["a"]}}, {"isolation": []}, {"seconds": "1"}, {"sample": True}, {"status": None},
    {"seconds": float("inf")}, {"sample": 2**64}, {"detail": 3},
])  # fmt: skip
def test_verdict_with_wrong_types_is_refused(change: dict[str, Any]) -> None:
    write("f.jsonl", [line(0, 0, "+ 1"), line(1, 0, "+ 1")])
    scored("f.jsonl")
    first, second = verdicts()
    Path("f.jsonl.verdicts.jsonl").write_text(
        f"{json.dumps(first | change)}\n{json.dumps(second)}\n"
    )
    result = score("f.jsonl", ALLOW)
    assert result.exit_code == 2
    assert "f.jsonl.verdicts.jsonl:1: this line is not a verdict" in result.stderr


def test_invalid_utf8_and_damaged_gzip_are_refused() -> None:
    Path("f.jsonl").write_bytes(b'{"task_id": "\xff"}\n' + GOOD.encode())
    assert "f.jsonl:1: the text is not valid UTF-8" in score("f.jsonl").stderr
    Path("f.jsonl").write_bytes(gzip.compress(GOOD.encode() * 9) + b"more")
    result = score("f.jsonl")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "f.jsonl: the gzip data is broken" in result.stderr
    Path("f.jsonl").write_bytes(gzip.compress(GOOD.encode())[:-9])  # as a killed run leaves it
    notes = scored("f.jsonl")["notes"]
    assert "the compressed data is cut short; later lines are missing" in notes
