"""`bass report`: what is read, the figures, hostile texts as data, and mistakes of the user."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import hostile_text
import pytest
from checkpoints import write_tokenizer
from command_line import cli, rows_in
from pages import Page
from scored import line, write

from bass_cli.config.evaluation_commands import ReportArgs
from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io.console import Screen
from bass_cli.io.layout import LayoutWriter
from bass_cli.io.results import Completion, open_output
from bass_cli.report.command import run
from bass_cli.report.runs import Pieces, failure_kind

ALLOW = "--allow-code-execution"
HOSTILE = [
    "<script>document.title='forged'</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]></style></title><svg onload=alert(1)>",
    "a\u202egnp.exe\u2066 \u200f\u061c",
    "zero\0byte \x1b[31m \x85 \u2028",
    "lone \ud800 half \udfff",
    "{{ 7*7 }} {% raw %} &lt;b&gt; \\u003c",
    hostile_text.TEXT,
]

pytestmark = pytest.mark.usefixtures("scored_stand_ins")


def reported(*arguments: str, out: str = "page.html", **options: Any) -> Page:
    """Make a page of the files and return it."""
    run(ReportArgs(runs=list(arguments), out=out, overwrite=True, **options), Screen(True))
    return Page.read(out)


def statuses(data: dict[str, Any]) -> list[str]:
    words = data["verdicts"]["statuses"]
    return [words["words"][place] for place in words["at"]]


def judged() -> str:
    """Write and score a file: three problems with two samples. Return its path."""
    rows = [
        line(0, 0, "+ 1", mean_logprob=-0.1),
        line(0, 1, "+ 2", mean_logprob=-0.2, seconds=3.0),
        line(1, 0, "+ (", mean_logprob=-0.1, seconds=2.0),
        line(1, 1, "+ 1", mean_logprob=-0.4, seconds=4.0, reason="length"),
        line(2, 0, "+ 9", mean_logprob=-0.3),
        line(2, 1, "+", mean_logprob=-0.5, reason="budget"),
    ]
    path = write("f.jsonl", rows, results={"task": "humaneval", "n": 2, "budget": 9.0})
    cli("score", path, ALLOW, "--report", "f.report.json", code=0)
    return path


def test_figures_equal_those_of_score_and_verdicts_are_shown() -> None:
    path = judged()
    page = reported(path)
    (data,) = page.runs()
    (head,) = page.head["runs"]
    score = json.loads(Path("f.report.json").read_text())
    assert statuses(data) == ["passed", "failed", "failed", "passed", "failed", "not finished"]
    shown = dict(head["headline"])
    assert shown["Pass@First"].startswith(f"{100 * score['pass_first']:.1f} ±")
    assert shown["Pass@All"].startswith(f"{100 * score['pass_all']:.1f} ±")
    assert shown["pass@1"].startswith(f"{100 * score['pass_at_k']['1']:.1f} ±")
    assert head["settings"]["n"] == "2"
    details = data["verdicts"]["details"]
    assert "SyntaxError" in details["words"][details["at"][2]]
    assert data["prompts"][1]["prompt"] == "n = 1 "
    assert [data["columns"]["prompts"][place] for place in data["columns"]["prompt"]] == [
        f"HumanEval/{number}" for number in (0, 0, 1, 1, 2, 2)
    ]


def test_charts_equal_counting_by_hand() -> None:
    charts = {chart["y"]["label"]: chart for chart in reported(judged()).head["charts"]}
    curve = charts["pass@k, %"]["series"][0]["points"]
    # one of two samples passes for problems 0 and 1, none for problem 2
    assert [point[:2] for point in curve] == [[1, 33.33], [2, 66.67]]
    times = {one["name"]: one["points"] for one in charts["problems solved so far, %"]["series"]}
    assert times["Pass@All"] == [[0.0, 0.0], [1.0, 33.33], [4.0, 66.67]]
    assert times["Pass@First"] == [[0.0, 0.0], [1.0, 33.33]]
    by_label = {chart["x"]["label"]: chart for chart in reported("f.jsonl").head["charts"]}
    ends = by_label["finish reason"]
    counts = dict(zip(ends["labels"], ends["series"][0]["counts"], strict=True))
    assert counts == {"eos": 4, "length": 1, "budget": 1}
    failures = by_label["what failed"]
    counts = dict(zip(failures["labels"], failures["series"][0]["counts"], strict=True))
    assert counts == {"assertion": 2, "syntax": 1}  # one did not finish, two passed
    lengths = next(chart for label, chart in by_label.items() if label.startswith("length"))
    assert sum(lengths["series"][0]["counts"]) == 6


def test_a_sample_without_a_fitting_verdict_is_not_judged() -> None:
    """A verdict belongs to a program. A later text of the same sample has none."""
    path = judged()
    rows = rows_in(path)
    rows[0]["text"] = rows[0]["completion"] = "+ 3"
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = reported(path)
    (data,) = page.runs()
    assert statuses(data)[:2] == ["not judged", "failed"]
    (note,) = [one for one in page.head["runs"][0]["notes"] if "no verdict" in one]
    assert "run bass score f.jsonl" in note
    assert "that of 2 problems" in note
    assert dict(page.head["runs"][0]["headline"])["Pass@All"].startswith("50.0")
    other = reported(path, timeout="99s").runs()[0]  # verdicts were made with 10 s
    assert set(statuses(other)) == {"not judged", "not finished"}


def completions(n: int = 3) -> list[Completion]:
    return [
        Completion(f"p{number}", sample, f"text {number}.{sample}", "eos", 5, -0.5 - sample, -2.5, 1.5, 3,
                   6, 4, 0, 7, prompt="A prompt" if number else None)
        for number in range(2) for sample in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("group", [False, True])
def test_every_layout_gives_the_same_page(suffix: str, group: bool) -> None:
    name = f"o.{suffix}"
    with open_output(name, {"results": {}}, resume=False, overwrite=False) as writer:
        layout = LayoutWriter(writer, columns=None, group=group, n=3)
        for completion in completions():
            layout.write(completion)
    (data,) = reported(name).runs()
    columns = data["columns"]
    assert data["texts"] == [
        f"text {number}.{sample}" for number in range(2) for sample in range(3)
    ]
    assert columns["prompts"] == ["p0", "p1"]
    assert columns["sample"] == [0, 1, 2, 0, 1, 2]
    assert columns["tokens"] == [5] * 6
    assert columns["mean_logprob"] == [-0.5, -1.5, -2.5] * 2
    assert columns["accepted"] == [4] * 6
    assert [columns["reasons"][one] for one in columns["reason"]] == ["eos"] * 6
    assert [one.get("prompt") for one in data["prompts"]] == [None, "A prompt"]


def test_chosen_columns_and_files_of_other_tools_are_read() -> None:
    write("few.jsonl", [{"id": "a", "sample": 0, "mean_logprob": -1.0}, {"id": "b", "sample": 0}])
    write("text.jsonl", [{"id": "a", "sample": 0, "text": "hello"}])
    write("theirs.jsonl", [{"task_id": "HumanEval/1", "completion": "+ 1"},
                           {"task_id": "HumanEval/1", "completion": "+ 2"}])  # fmt: skip
    few, text, theirs = (reported(f"{name}.jsonl").runs()[0] for name in ("few", "text", "theirs"))
    assert few["columns"]["mean_logprob"] == [-1.0, None]
    assert few["texts"] == ["", ""]
    assert text["texts"] == ["hello"]
    assert theirs["columns"]["sample"] == [0, 1]
    assert theirs["prompts"][0]["prompt"] == "n = 1 "


def test_prompts_are_no_samples() -> None:
    write("p.jsonl", [{"id": "a", "sample": 0, "text": ""}, {"id": "b", "prompt": "hello"}])
    with pytest.raises(UserError, match=r"p\.jsonl:2: this is no sample: it has no text$"):
        reported("p.jsonl")


def test_prompts_that_failed_are_shown_with_their_error() -> None:
    write("f.jsonl", [Completion.failed("a", "too long", seed=0, meta={}).row()])
    (data,) = reported("f.jsonl").runs()
    assert data["extras"][0]["error"] == "too long"
    assert data["columns"]["reasons"] == ["error"]


@pytest.mark.parametrize("place", ["text", "id", "prompt", "error", "meta", "finish_reason"])
def test_hostile_texts_are_data_and_arrive_unchanged(place: str) -> None:
    rows = []
    for number, text in enumerate(HOSTILE):
        row: dict[str, Any] = {"id": f"p{number}", "sample": 0, "text": "a", "finish_reason": "eos"}
        rows.append(row | {place: {"key": text} if place == "meta" else text})
    Path("f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = reported("f.jsonl")
    (data,) = page.runs()
    found = {
        "text": data["texts"],
        "id": data["columns"]["prompts"],
        "prompt": [one.get("prompt") for one in data["prompts"]],
        "error": [one.get("error") for one in data["extras"]],
        "meta": [one.get("meta", {}).get("key") for one in data["prompts"]],
        "finish_reason": data["columns"]["reasons"],
    }
    assert found[place] == HOSTILE
    clean = reported(write("clean.jsonl", [{"id": "a", "sample": 0, "text": "a"}]))
    assert page.code == clean.code
    assert set(page.tags) == set(clean.tags)
    assert not {"img", "svg"} & set(page.tags)


def test_a_file_name_is_data_too() -> None:
    name = "<img src=x>{{ 7 }}.jsonl"
    write(name, [{"id": "a", "sample": 0, "text": "a"}])
    page = reported(name)
    assert page.head["runs"][0]["name"] == name
    assert "img" not in page.tags


def test_the_policy_allows_only_the_pages_own_script_and_style() -> None:
    page = reported(judged())
    rules = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    for rule, contents in (("script-src", page.code), ("style-src", page.styles)):
        digests = [hashlib.sha256(one.encode()).digest() for one in contents]
        assert rules[rule] == " ".join(
            f"'sha256-{base64.b64encode(one).decode()}'" for one in digests
        )
    assert rules["require-trusted-types-for"] == "'script'"


def test_the_page_needs_no_other_file_and_writes_no_markup() -> None:
    page = reported(judged())
    (code,) = page.code
    everything = code + page.styles[0]
    assert (
        re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|import\(", everything) == []
    )
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", code)
        == []
    )
    assert {"link", "img", "iframe"} & set(page.tags) == set()


def test_a_report_names_its_file_and_a_sweep_its_files() -> None:
    path = judged()
    for budget in (1, 2):
        name = f"s.plain-{budget}s.jsonl"
        shutil.copy(path, name)
        write_manifest(name, {"results": {"task": "humaneval", "n": 2, "budget": budget}})
    shutil.copy(f"{path}.verdicts.jsonl", "s.jsonl.verdicts.jsonl")  # a sweep's files share them
    files = [{"file": f"s.plain-{budget}s.jsonl"} for budget in (1, 2)]
    Path("s.sweep.json").write_text(json.dumps({"reports": files}))
    page = reported("f.report.json", "s.sweep.json", path)
    names = [run["name"] for run in page.head["runs"]]
    assert names == ["f.jsonl", "s.plain-1s.jsonl", "s.plain-2s.jsonl"]
    (chart,) = [one for one in page.head["charts"] if one["x"]["label"].startswith("budget")]
    (series,) = chart["series"]
    assert series["name"] == "plain decoding"
    assert [point[:2] for point in series["points"]] == [[1, 33.33], [2, 33.33]]


def write_manifest(name: str, manifest: dict[str, Any]) -> None:
    Path(f"{name}.manifest.json").write_text(json.dumps(manifest))


def test_figures_of_summaries_come_from_the_report_beside_the_file() -> None:
    rows = [{"id": str(number), "task_id": str(number), "sample": 0, "text": "12345",
             "finish_reason": "eos"} for number in range(3)]  # fmt: skip
    write("x.jsonl", rows, results={"task": "xsum"})
    assert "ROUGE-L of the first" not in dict(reported("x.jsonl").head["runs"][0]["headline"])
    cli("score", "x.jsonl", "--report", "x.report.json", code=0)
    shown = dict(reported("x.jsonl").head["runs"][0]["headline"])
    assert shown["ROUGE-L of the first"].startswith("25.0")
    write("x.jsonl", rows[:2], results={"task": "xsum"})  # the report is on another file now
    assert "ROUGE-L of the first" not in dict(reported("x.jsonl").head["runs"][0]["headline"])


def test_token_log_probabilities_are_shown_with_the_length_of_each_token(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    text = "the cat sat – 日本 😀"
    ids = [*tokenizer.encode_part(text), 2]
    manifest = {"results": {"target": str(folder), "vocabulary": tokenizer.fingerprint()}}
    row = {"id": "a", "sample": 0, "text": text, "finish_reason": "eos", "token_ids": ids,
           "token_logprobs": [-0.12345] * (len(ids) - 1) + [float("nan")]}  # fmt: skip
    write("f.jsonl", [row], **manifest)
    (extra,) = reported("f.jsonl").runs()[0]["extras"]
    assert extra["token_logprobs"] == [-0.123] * (len(ids) - 1) + [None]
    assert len(extra["pieces"]) == len(ids)
    assert sum(extra["pieces"]) == len(text) + 1  # the emoji has two UTF-16 units; the end has none
    assert extra["pieces"][0] == len(tokenizer.decode(ids[:1]))
    page = reported("f.jsonl")
    assert page.head["runs"][0]["notes"] == []
    write_manifest("f.jsonl", {"results": {"target": str(folder), "vocabulary": "another"}})
    page = reported("f.jsonl")
    assert "pieces" not in page.runs()[0]["extras"][0]
    assert any("another tokenizer" in note for note in page.head["runs"][0]["notes"])
    manifest["results"]["target"] = "/gone/model"
    write_manifest("f.jsonl", manifest)
    (note,) = reported("f.jsonl").head["runs"][0]["notes"]
    assert "/gone/model" in note
    assert "`model`" in note
    assert "pieces" in reported("f.jsonl", model=str(folder)).runs()[0]["extras"][0]


def test_drafted_tokens_are_shown_with_and_without_log_probabilities(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode_part("the mat")
    results = {"target": str(tmp_path), "vocabulary": tokenizer.fingerprint()}
    row = {"id": "a", "sample": 0, "text": "the mat", "finish_reason": "eos", "token_ids": ids}
    marks = [1, *[0] * (len(ids) - 1)]
    given = (marks, [1, "<b>", None, 2], "1", None)
    lines = [row | {"sample": at, "token_drafted": one} for at, one in enumerate(given)]
    write("f.jsonl", lines, results=results)
    extras = reported("f.jsonl").runs()[0]["extras"]
    assert [extra.get("token_drafted") for extra in extras] == [marks, [1, 0, 0, 0], None, None]
    assert [sum(extra.get("pieces", [])) for extra in extras] == [7, 7, 0, 0]


def test_tokens_that_do_not_spell_the_text_are_not_placed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    pieces = Pieces({"results": {"target": str(tmp_path), "vocabulary": tokenizer.fingerprint()}})
    ids = tokenizer.encode_part("the mat")
    assert sum(pieces.of(ids, "the mat")["pieces"]) == 7
    assert pieces.of(ids, "another text") == {}
    assert pieces.of(["x"], "the mat") == {}
    assert pieces.of(None, "the mat") == {}


@pytest.mark.parametrize(("status", "detail", "kind"), [
    ("passed", "", ""), ("not judged", "", ""), ("not finished", "", ""),
    ("timed out", "more than 10 s", "time"), ("out of memory", "", "memory"),
    ("failed", "SyntaxError: invalid syntax (<program>, line 12)", "syntax"),
    ("failed", "IndentationError: x", "syntax"), ("failed", "line 22: AssertionError", "assertion"),
    ("failed", "line 3: AssertionError: got TypeError", "assertion"),
    ("failed", "line 13: NameError: name 'x' is not defined", "NameError"),
    ("failed", "line 1: MemoryError", "memory"), ("failed", "exit code 1", "other"),
    ("failed", "input 1: returned 6, not -6", "wrong answer"), ("failed", "TypeError: no (input 3)", "TypeError"),
])  # fmt: skip
def test_failures_are_named_by_what_failed(status: str, detail: str, kind: str) -> None:
    assert failure_kind(status, detail) == kind


@pytest.mark.parametrize(("name", "options", "message"), [
    ("missing.jsonl", {}, "missing.jsonl: cannot read the "),
    ("empty.jsonl", {}, "empty.jsonl: the file has no samples"),
    ("other.json", {}, "other.json: this is not a report of bass"),
    ("gone.json", {}, "gone.json: its file of samples nowhere.jsonl is missing"),
    ("broken.jsonl", {}, 'broken.jsonl:1: field "tokens"'),
    ("f.jsonl", {"out": "page.pdf"}, "`out` page.pdf: a page is an HTML file"),
    ("f.jsonl", {"out": "-"}, "`out` -: give a file name"),
    ("f.jsonl", {"out": "f.jsonl"}, "`out` f.jsonl: a page is an HTML file"),
    ("samples.html", {}, "`out` samples.html.html: "),
    ("samples.html", {"out": "samples.html"}, "`out` samples.html: this is the file, which would be lost"),
    ("f.jsonl", {"out": "notes.html"}, "notes.html: it exists and is not a page of bass report"),
    ("f.jsonl", {"port": 80}, "`port`: it is the port of `serve`"),
    ("f.jsonl", {"serve": True, "port": 70000}, "`port`: a number from 1 to 65535"),
    ("f.jsonl", {"serve": True, "out": "p.html"}, "`serve` and `out` cannot be used together"),
    ("f.jsonl", {"serve": True, "overwrite": True}, "`overwrite`: `serve` writes no file"),
    ("f.jsonl", {"task": "humanevil"}, 'unknown task "humanevil"'),
    ("f.jsonl", {"timeout": "soon"}, "`timeout`"),
])  # fmt: skip
def test_mistakes_are_errors_and_write_nothing(
    name: str, options: dict[str, Any], message: str
) -> None:
    write("f.jsonl", [line(0, 0, "+ 1")])
    write("samples.html", [line(0, 0, "+ 1")])
    Path("samples.html.html").mkdir()
    Path("empty.jsonl").write_text("")
    Path("other.json").write_text('{"a": 1}')
    Path("gone.json").write_text(json.dumps({"file": "nowhere.jsonl", "by_problem": []}))
    write("broken.jsonl", [line(0, 0, "+ 1", tokens="many")])
    Path("notes.html").write_text("<p>my notes</p>")
    before = {path.name: path.is_dir() or path.read_bytes() for path in Path().iterdir()}
    with pytest.raises(UserError, match=re.escape(message)):
        run(ReportArgs(runs=[name], **options), Screen(True))
    assert {path.name: path.is_dir() or path.read_bytes() for path in Path().iterdir()} == before


def test_the_command_shows_flags_in_messages_and_writes_only_to_standard_error() -> None:
    write("f.jsonl", [line(0, 0, "+ 1")])
    result = cli("report", "f.jsonl", "--port", "80")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--port (or BASS_PORT): it is the port of --serve" in " ".join(result.stderr.split())


def test_an_earlier_page_is_replaced_without_a_flag() -> None:
    write("f.jsonl", [line(0, 0, "+ 1")])
    for _ in range(2):
        cli("report", "f.jsonl", code=0)
    assert Page.read("f.html").runs()[0]["texts"] == ["+ 1"]


def test_settings_of_the_manifest_are_listed() -> None:
    job = Job.model_validate(
        {"pair": {"name": "p", "target": "t", "draft": "lookup"}, "n": 4}
    ).model_dump(mode="json")
    results = {"target": "a/model", "temperature": 0.2, "stop": ["\n"], "n": 4}
    write("f.jsonl", [line(0, 0, "+ 1")], results=results, job=job, totals={"seconds": 12.5},
          versions={"bass": "1", "device": "a card"}, begun="2026-11-26")  # fmt: skip
    (head,) = reported("f.jsonl").head["runs"]
    settings = head["settings"]
    assert settings["model"] == "a/model"
    assert settings["sampling: temperature"] == "0.2"
    assert settings["sampling: stop"] == '["\\n"]'
    assert settings["draft"] == "lookup"
    assert settings["machine: device"] == "a card"
    assert head["run"] | {"note": ""} == {"begun": "2026-11-26", "seconds": "12.5", "note": ""}


def test_acceptance_by_place_comes_from_the_manifest() -> None:
    usage = {"by_place": {"drafted": [40, 20, 0], "accepted": [30, 5, 0]}}
    write("f.jsonl", [line(0, 0, "+ 1")], results={}, last_run=usage)
    charts = {chart["x"]["label"]: chart for chart in reported("f.jsonl").head["charts"]}
    assert charts["place in the draft"]["series"][0]["points"] == [[1, 75.0], [2, 25.0]]
    assert charts["place in the draft"]["title"].startswith(
        "The first drafted token is accepted in 75 %"
    )
    for broken in ({"by_place": {"drafted": ["x"], "accepted": [1]}}, {"by_place": 3}, []):
        write("f.jsonl", [line(0, 0, "+ 1")], results={}, last_run=broken)
        found = {chart["x"]["label"]: chart for chart in reported("f.jsonl").head["charts"]}
        assert "place in the draft" not in found
        note = next(chart["note"] for label, chart in found.items() if label.startswith("accepted"))
        assert "not recorded" in note


@pytest.mark.parametrize("change", [
    {"estimates": 3}, {"estimates": {"pass_first": {"value": "x"}}}, {"estimates": None}, {"pass_at_k": [1]},
    {"pass_at_k": {"one": 1.0}}, {"pass_first": "all"}, {"pass_first_by": {"static": {}}}, {"samples": "6"},
])  # fmt: skip
def test_a_damaged_report_beside_the_file_is_left_out(change: dict[str, Any]) -> None:
    path = judged()
    document = json.loads(Path("f.report.json").read_text())
    Path(f"{path}.verdicts.jsonl").unlink()
    assert dict(reported(path).head["runs"][0]["headline"])["Pass@First"].startswith("33.3")
    Path("f.report.json").write_text(json.dumps(document | change))
    assert "Pass@First" not in dict(reported(path).head["runs"][0]["headline"])


def test_pass_first_by_several_rankers_comes_from_the_report() -> None:
    path = judged()
    cli("score", path, ALLOW, "--rank-by", "logprob,static", "--report", "f.report.json", code=0)
    figures = dict(reported(path).head["runs"][0]["figures"])
    assert figures["Pass@First by"].startswith("logprob 33.3")
    assert "static" in figures["Pass@First by"]
