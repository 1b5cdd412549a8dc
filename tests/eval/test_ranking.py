"""Pass@First by several rankers: `--rank-by` of `bass score`, and what rankers see of a task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in
from scored import Programs, Texts, adding, install, line, write

from bass_cli.eval.ranking import first_by_ranker, group_of
from bass_cli.eval.samples import by_problem, read_generations
from bass_cli.eval.tasks.programming import HumanEval, Mbpp, MbppPlus
from bass_cli.eval.tasks.task import Problem


class Coded(Programs):
    """The stand-in task, with what rankers see."""

    def statement(self, problem: Problem) -> str:
        return problem.prompt

    def entry_point(self, problem: Problem) -> None:
        return None

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str:
        return problem.prompt + text

    def answer(self, problem: Problem, text: str) -> None:
        return None


class Untold(Mapping[str, Any]):
    """The fields of a problem, of which those with tests cannot be read."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        assert "test" not in key, f"{key} was read"
        assert key not in ("code", "canonical_solution"), f"{key} was read"
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Coded:
    task = Coded({f"HumanEval/{i}": adding(i) for i in range(3)})
    install(monkeypatch, tmp_path, task, Texts({"0": Problem("0", "", {})}))
    return task


def score(*arguments: str, **settings: Any) -> Any:
    return cli("score", *arguments, **settings)


def rows() -> list[dict[str, Any]]:
    """Problem 0: the likeliest fails in a name. Problem 1: two of three agree, and are right.

    Problem 2: the only sample that would pass did not finish.
    """
    return [
        line(0, 0, "+ one", mean_logprob=-0.1),
        line(0, 1, "+ 1", mean_logprob=-0.9),
        line(1, 0, "+ 2", mean_logprob=-0.1),
        line(1, 1, "+ 1", mean_logprob=-0.8),
        line(1, 2, "+  1  # again", mean_logprob=-0.9),
        line(2, 0, "+ 3", mean_logprob=-0.5),
        line(2, 1, "+ 1", reason="budget", mean_logprob=-0.1),
    ]


def test_pass_first_is_reported_by_each_ranker(task: Coded) -> None:
    write("f.jsonl", rows())
    result = score("f.jsonl", "--rank-by", "logprob,static,majority", "--json", code=0)
    report = json.loads(result.stdout)
    assert report["pass_first_by"] == {"logprob": 0, "static": 1 / 3, "majority": 1 / 3}
    assert report["pass_first"] == 0
    assert [row["pass_first_by"] for row in report["by_problem"]] == [
        {"logprob": False, "static": True, "majority": False},
        {"logprob": False, "static": False, "majority": True},
        {"logprob": False, "static": False, "majority": False},
    ]
    table = score("f.jsonl", "--rank-by", "static,logprob").stdout
    assert "static 33.3 ± 27." in table
    assert "%, logprob 0.0 ± 0.0 %" in table
    # one of three: the bootstrap's error is sqrt(1/3 x 2/3 / 3) = 0.272
    static = report["estimates"]["pass_first_by.static"]
    assert static["standard_error"] == pytest.approx((2 / 27) ** 0.5, rel=0.03)
    assert report["estimates"]["pass_first_by.logprob"]["value"] == 0.0


def test_figures_without_rankers_are_unchanged(task: Coded) -> None:
    write("f.jsonl", rows())
    plain = json.loads(score("f.jsonl", "--json").stdout)
    ranked = json.loads(score("f.jsonl", "--json", "--rank-by", "static").stdout)
    assert "pass_first_by" not in plain
    assert all("pass_first_by" not in row for row in plain["by_problem"])
    del ranked["pass_first_by"], ranked["estimates"]["pass_first_by.static"]
    for row in ranked["by_problem"]:
        del row["pass_first_by"]
    assert ranked == plain


def test_scores_of_models_are_read_from_the_lines(task: Coded) -> None:
    scores = {(0, 0): 1, (0, 1): 2, (1, 0): None, (1, 1): -5, (1, 2): -6, (2, 0): 0, (2, 1): 9}
    scored = [
        row | {"scores": {"reverse": scores[int(row["id"]), row["sample"]]}} for row in rows()
    ]
    write("f.jsonl", scored)
    report = json.loads(score("f.jsonl", "--rank-by", "reverse", "--json").stdout)
    assert [row["pass_first_by"]["reverse"] for row in report["by_problem"]] == [True, True, False]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (None, "run `bass rank f.jsonl --by reverse` first"),
        ({"static": 1}, 'sample 0 of "HumanEval/0" has no score "reverse"'),
        ({"reverse": "high"}, 'f.jsonl:1: field "scores": "reverse": a finite number'),
    ],
)
def test_missing_scores_are_refused_before_programs_run(
    task: Coded, scores: Any, said: str
) -> None:
    write("f.jsonl", [row | {"scores": scores} for row in rows()])
    assert said in " ".join(score("f.jsonl", "--rank-by", "reverse", code=2).stderr.split())
    assert not Path("f.jsonl.verdicts.jsonl").exists()


def test_unknown_ranker_is_refused(task: Coded) -> None:
    write("f.jsonl", rows())
    result = score("f.jsonl", "--rank-by", "statik", code=2)
    assert "--rank-by" in result.stderr
    assert 'did you mean "static"' in result.stderr


def test_tasks_without_verdicts_refuse_rankers(task: Coded) -> None:
    write("f.jsonl", [{"task_id": "0", "completion": "a"}])
    result = score("f.jsonl", "--task", "xsum", "--rank-by", "logprob", code=2)
    assert "xsum has no verdicts; leave it out" in " ".join(result.stderr.split())


def test_rankers_never_read_the_tests_of_humaneval(tmp_path: Path) -> None:
    task = HumanEval()
    task.problems = {
        name: one._replace(fields=Untold(one.fields)) for name, one in task.problems.items()
    }
    solution = "    return sorted(numbers)[0]\n"
    path = write(
        str(tmp_path / "f.jsonl"),
        [line(n, at, text) for n in range(5) for at, text in enumerate([solution, "    pass\n"])],
    )
    file = read_generations(path)
    problems = by_problem(file, task.problems)
    firsts = first_by_ranker(["logprob", "static", "majority"], task, file, problems)
    assert firsts is not None
    assert {name: len(found) for name, found in firsts.items()} == dict.fromkeys(firsts, 5)
    assert {row.sample for row in firsts["static"].values()} == {0}


def test_rankers_see_no_tests_in_mbpp_prompts(tmp_path: Path) -> None:
    """MBPP's prompt contains its tests; rankers get its sentence."""
    record = {"task_id": 1, "text": "Add two.", "test_list": ["assert add(1) == 3"]}
    data = tmp_path / "mbpp.jsonl"
    data.write_text(json.dumps(record))
    task = Mbpp(str(data))
    (problem,) = task.problems.values()
    assert "assert" in problem.prompt
    file = read_generations(
        write(str(tmp_path / "f.jsonl"), [{"task_id": "Mbpp/1", "completion": "def add(a): ..."}])
    )
    group = group_of(task, problem._replace(fields=Untold({"text": "Add two."})), file.rows)
    assert group.prompt == "Add two."
    assert group.entry_point is None
    assert group.candidates[0].program == "def add(a): ..."


NUMBERS = """
data: numbers.jsonl
id: name
prompt: "{{ ask }} ="
answers: "[right]"
extract: {regex: 'so (\\S+)'}
check:
  numeric: {}
"""


def test_majority_uses_the_answers_that_a_task_file_extracts(here: Path) -> None:
    """Samples without an answer have no vote, although their texts are equal."""
    Path("numbers.yaml").write_text(NUMBERS)
    Path("numbers.jsonl").write_text('{"name": "a", "ask": "6 * 200", "right": "1200"}\n')
    texts = ["so 7", "no idea", "no idea", "no idea", "well, so 1,200", "first so 1200.0"]
    rows = [
        {"task_id": "a", "sample": at, "completion": text, "mean_logprob": -0.1 * at}
        for at, text in enumerate(texts)
    ]
    write("f.jsonl", rows)
    done = score(
        "f.jsonl", "--task", "numbers.yaml", "--rank-by", "logprob,majority", "--json", code=0
    )
    assert json.loads(done.stdout)["pass_first_by"] == {"logprob": 0.0, "majority": 1.0}
    cli("rank", "f.jsonl", "--task", "numbers.yaml", "--by", "majority", code=0)
    found = rows_in("f.jsonl")
    assert [row["scores"]["majority"] for row in found] == [1 / 6, 0, 0, 0, 2 / 6, 2 / 6]
    assert [row["rank"] for row in found] == [3, 4, 5, 6, 1, 2]


def test_files_of_the_best_samples_say_so(task: Coded) -> None:
    """Their speed is unknown, because the seconds are those of all samples."""
    best = [row for row in rows() if row["sample"] == 0]
    results = {"n": 3, "best_of": 1, "rank_by": "static"}
    write("f.jsonl", best, results=results, totals={"samples": 3, "seconds": 1.0}, finished=True)
    report = json.loads(score("f.jsonl", "--json").stdout)
    assert report["tokens_per_second"] is None
    assert any("only the best 1 of 3 samples" in note for note in report["notes"])


def test_rankers_see_no_tests_in_mbpp_plus_prompts(tmp_path: Path) -> None:
    record = {"task_id": 2, "prompt": "Add two.", "code": "def add(a): return a + 2",
              "test_list": ["assert add(1) == 3"], "test": "assert add(2) == 4"}  # fmt: skip
    data = tmp_path / "plus.jsonl"
    data.write_text(json.dumps(record))
    task = MbppPlus(str(data))
    (problem,) = task.problems.values()
    assert "assert" in problem.prompt
    group = group_of(task, problem._replace(fields=Untold(problem.fields)), [])
    assert (group.prompt, group.entry_point) == ("Add two.", None)
