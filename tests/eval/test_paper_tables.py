"""Tables for papers: `bass score --format`, with what each format needs to be escaped."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import cli
from markdown_it import MarkdownIt
from scored import line, write

from bass_cli.eval.tables import Figure, Table, render, table_of

ALLOW = "--allow-code-execution"
HOSTILE = [
    "a_b%c#d&e$f{g}~h^i\\j", '<|im_start|>"q" `b`', "Qwen--2.5---x", "模型 é ß ×", "tab\tnl\nx\u202eb", "[x]*", "*", "''",
    "![a](b)", "<b>|</b>", "@a &amp; x",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("scored_stand_ins")


def score(*arguments: str, **settings: Any) -> Any:
    return cli("score", *arguments, ALLOW, **settings)


def run(path: str, passed: list[int], **results: Any) -> str:
    """Write a file of two samples a problem, of which the given numbers pass; the first is likelier."""
    rows = [line(i, s, "+ 1" if s < count else "+ 2", mean_logprob=-1.0 - s, seed=results.get("seed", 0))
            for i, count in enumerate(passed) for s in range(2)]  # fmt: skip
    known = {"task": "humaneval", "target": "org/Model_7B", "n": 2, "temperature": 0.2, "seed": 0}
    return write(path, rows, results={**known, **results})


def hostile_table() -> Table:
    cells = (Figure(0.5, 0.01, 0.4, 0.6), Figure(None), Figure(-0.031, 0.02, unit="s"))
    rows = tuple((name, *cells) for name in HOSTILE)
    return Table(
        "50 % & ± of a_b", ("a_b & c", "pass@1 (%)", "x", "A − B"), rows, frozenset({"A − B"})
    )


def test_one_file_is_one_row_with_errors() -> None:
    result = score(run("f.jsonl", [2, 1, 0, 0]), "--format", "md", code=0)
    header, rule, row, blank, caption = result.stdout.splitlines()
    assert header == "| model | Pass@First (%) | Pass@All (%) | pass@1 (%) |"
    assert rule == "| --- | ---: | ---: | ---: |"
    # by problem 1, 1, 0, 0 and 1, 0.5, 0, 0
    assert re.fullmatch(
        r"\| Model\\_7B \| 50\.0 ± 2[45]\.\d \| 50\.0 ± 28\.9 \| 37\.5 ± 23\.9 \|", row
    )
    assert (blank, caption[:46]) == ("", "humaneval, 4 problems, n = 2, T = 0.2, seed 0.")
    assert "Pass@First" in result.stderr, "the table for people is on standard error"


def test_several_files_are_one_table_with_the_settings_that_differ() -> None:
    files = [
        run("a.jsonl", [2, 0]),
        run("b.jsonl", [1, 1], temperature=0.8),
        run("c.jsonl", [0, 0], seed=1),
    ]
    result = score(*files, code=0)
    lines = [one.split() for one in result.stdout.splitlines()]
    assert lines[0][:3] == ["model", "T", "seed"]
    assert [one[:3] for one in lines[1:4]] == [
        ["Model_7B", "0.2", "0"],
        ["Model_7B", "0.8", "0"],
        ["Model_7B", "0.2", "1"],
    ]
    assert "note: c.jsonl: the file has 2 of the 12 problems" in result.stdout
    same = score(run("a.jsonl", [2, 0]), run("d.jsonl", [2, 0]), "--format", "csv")
    assert [row["file"] for row in csv.DictReader(same.stdout.splitlines())] == [
        "a.jsonl",
        "d.jsonl",
    ]
    document = json.loads(score(*files, "--format", "json").stdout)
    assert [one["file"] for one in document["reports"]] == files
    assert json.loads(score(files[0], "--json").stdout) == document["reports"][0]


def test_csv_has_fractions_errors_and_intervals() -> None:
    result = score(run("f.jsonl", [2, 1, 0, 0]), "--format", "csv", "--quiet")
    (row,) = csv.DictReader(result.stdout.splitlines())
    report = json.loads(score("f.jsonl", "--json").stdout)["estimates"]
    for name, key in {
        "Pass@First": "pass_first",
        "Pass@All": "pass_all",
        "pass@1": "pass@1",
    }.items():
        shown = [float(row[f"{name}{more}"]) for more in ("", " standard error", " low", " high")]
        assert shown == [
            report[key]["value"],
            report[key]["standard_error"],
            *report[key]["interval"],
        ]
    assert result.stderr == ""


def test_csv_has_no_formula_for_a_spreadsheet() -> None:
    table = Table(
        "",
        ("=a", "x (%)"),
        tuple(
            (text, Figure(-0.5))
            for text in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "-1.5 to +2.0", "a=b")
        ),
    )
    header, *rows = csv.reader(render(table, "csv"))
    assert header[0] == "'=a"
    assert [row[0] for row in rows] == [
        "'=1+1", "'+cmd|' /C calc'!A0", "'-2+3", "'@SUM(A1)", "-1.5 to +2.0", "a=b",
    ]  # fmt: skip
    assert {row[1] for row in rows} == {"-0.5"}, "a number stays a number"


def test_rows_on_different_numbers_of_problems_show_them() -> None:
    run("a.jsonl", [2, 0])
    run("b.jsonl", [2, 0, 1])
    shown = list(csv.DictReader(score("a.jsonl", "b.jsonl", "--format", "csv").stdout.splitlines()))
    assert [row["problems"] for row in shown] == ["2", "3"]


def test_unfinished_samples_have_a_column() -> None:
    write("f.jsonl", [line(0, 0, "+ 1"), line(0, 1, "+ 1", reason="budget")])
    (row,) = csv.DictReader(
        score("f.jsonl", "--task", "humaneval", "--format", "csv").stdout.splitlines()
    )
    assert (row["model"], row["finished"], row["pass@1"]) == ("f.jsonl", "0.5", "0.5"), (
        "no manifest: its name"
    )


def test_sweep_has_a_row_for_each_method_and_budget() -> None:
    report = json.loads(score(run("f.jsonl", [2, 1]), "--json").stdout)
    del report["by_problem"]
    reports = [report | {"method": method, "setting": report["setting"] | {"draft": draft}}
               for method, draft in (("plain", "none"), ("batched", "lookup"))]  # fmt: skip
    table = table_of(reports)
    assert table.columns[:3] == ("model", "method", "Pass@First (%)")
    assert [row[1] for row in table.rows] == ["plain", "batched"]


def test_markdown_shows_every_name_as_it_is() -> None:
    html = MarkdownIt("commonmark").enable("table").render("\n".join(render(hostile_table(), "md")))
    cells = re.findall(r"<td>(.*?)</td>", html)
    unescaped = [
        cell.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
        for cell in cells
    ]
    assert unescaped == [
        name.replace("\t", "\\t").replace("\n", "\\n").replace("\u202e", "\\u202e")
        for name in HOSTILE
    ]
    assert html.count("<tr>") == len(HOSTILE) + 1
    assert html.count('<td style="text-align:right">50.0 ± 1.0</td>') == len(HOSTILE)


def test_latex_has_no_bare_special_character() -> None:
    lines = render(hostile_table(), "latex")
    body = [one for one in lines if one.endswith(r"\\")]
    assert len(body) == len(HOSTILE) + 1
    for one in body:
        text = one.removesuffix(r"\\")
        text = re.sub(r"\\[&%$#_{}]", "", text)  # escaped
        assert text.count("&") == 3, "the columns of the table"
        assert not re.search(r"[#%_^~\"<>|`]", re.sub(r"\$[^$]*\$", "", text))
        assert text.count("{") == text.count("}")
        assert text.count("$") % 2 == 0
    assert r"$50.0 \pm 1.0$ & -- & $-0.031 \pm 0.020$" in body[1]
    assert r"\caption{50 \% \& $\pm$ of a\_b}" in lines[3]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_latex_compiles(tmp_path: Path) -> None:
    tables = [
        *render(hostile_table(), "latex"),
        score(run("f.jsonl", [2, 1]), "--format", "latex").stdout,
    ]
    frame = (r"\documentclass{article}\usepackage{booktabs}\begin{document}", r"\end{document}")
    (tmp_path / "t.tex").write_text("\n".join([frame[0], *tables, frame[1]]))
    command = ("pdflatex", "-halt-on-error", "-draftmode", "-interaction=nonstopmode", "t.tex")
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert found.returncode == 0, found.stdout[-2000:]


def test_wrong_formats_are_refused_before_anything_is_run() -> None:
    run("f.jsonl", [1])
    for words, message in (
        (("--format", "markdown"), 'there is no "markdown"'),
        (("--format", "md", "--json"), "leave one out"),
        (("--format", "csv", "--report", "/dev/stdout"), "prints there too"),
        (("g.jsonl", "--report", "r.json"), "it is for one file"),
        (("f.jsonl",), "f.jsonl"),
        (("f.jsonl.verdicts.jsonl",), "it holds verdicts, not samples"),
    ):
        write("g.jsonl", [line(0, 0, "+ 1")])
        assert message in score("f.jsonl", *words, code=2).stderr
    assert not Path("f.jsonl.verdicts.jsonl").exists()
