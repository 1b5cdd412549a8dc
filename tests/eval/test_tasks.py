"""The tasks: what a model is asked, what its text contributes, which program decides; faults of
the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bass_cli.errors import UserError
from bass_cli.eval.tasks import Answer, code_in, load_task, prompt_format, shape_prompt

MBPP = {
    "task_id": 11,
    "text": "Write a function to add one.",
    "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
    "test_setup_code": "import math",
    "code": "def f(x): return x + 1",
}


def passes(program: tuple[str, str]) -> bool:
    scope: dict[str, object] = {}
    try:
        for text in program:
            exec(text, scope)
    except Exception:
        return False
    return True


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_humaneval_is_packaged_and_its_programs_are_those_of_its_own_scorer() -> None:
    task = load_task("humaneval")
    assert len(task.problems) == 164
    for problem in list(task.problems.values())[:20]:
        solution = problem.fields["canonical_solution"]
        assert passes(task.program(problem, Answer(solution, False)))
        assert passes(task.program(problem, Answer(problem.prompt + solution, True)))
        assert not passes(task.program(problem, Answer("", False)))


@pytest.mark.parametrize("form", ["raw", "strip", "strip-nl"])
def test_a_completion_fits_the_original_prompt_in_every_format(form: str) -> None:
    """A public scorer puts it after the prompt as the data set has it, whatever the model was
    shown."""
    task = load_task("humaneval")
    for problem in list(task.problems.values())[:20]:
        shown = shape_prompt(problem.prompt, prompt_format(form))
        assert shown.strip() == problem.prompt.strip()
        text = ("" if shown.endswith("\n") else "\n") + problem.fields["canonical_solution"]
        assert passes(
            task.program(problem, Answer(task.completion(problem, text, chat=False), False))
        )
    assert shape_prompt("\n  a \n", "strip") == "a"
    assert shape_prompt("\n  a \n", "strip-nl") == "  a "
    assert shape_prompt("\n  a \n", "raw") == "\n  a \n"


def test_a_chat_answer_s_code_follows_the_prompt() -> None:
    task = load_task("humaneval")
    for problem in list(task.problems.values())[:40]:
        code = problem.prompt + problem.fields["canonical_solution"]
        answer = (
            f"Sure!\n```python\nprint('not this one')\n```\nrather\n```python\n{code}\n```\n"
            "It works."
        )
        completion = task.completion(problem, answer, chat=True)
        assert passes(task.program(problem, Answer(completion, False)))
        assert problem.fields["entry_point"] in task.question(problem)


def test_code_is_found_in_an_answer() -> None:
    assert code_in("a\n```python\nx = 1\n```\nb") == "x = 1"
    assert code_in("```\nx\n```\n```py\ndef f(): pass\n```", "f") == "def f(): pass"
    assert code_in("```python\nx = 1\ny = ") == "x = 1\ny = "  # cut off by a limit
    assert code_in("    return 1") == "    return 1"
    assert code_in("```python\r\nx = 'a\u2028b\x0c'\r\n```") == "x = 'a\u2028b\x0c'"


def test_stops_do_not_cut_what_is_right() -> None:
    task = load_task("humaneval")
    for problem in task.problems.values():
        assert not any(stop in problem.fields["canonical_solution"] for stop in task.stops)


def test_mbpp_in_both_of_its_versions(tmp_path: Path) -> None:
    sanitized = {
        "task_id": 12,
        "prompt": "Add two.",
        "test_list": ["assert g(1) == 3"],
        "test_imports": ["import math"],
    }
    task = load_task("mbpp", write(tmp_path / "m.jsonl", MBPP, sanitized))
    assert list(task.problems) == ["Mbpp/11", "Mbpp/12"]
    one, two = task.problems.values()
    assert (
        one.prompt == '"""\nWrite a function to add one.\nassert f(1) == 2\nassert f(2) == 3\n"""\n'
    )
    assert passes(
        task.program(one, Answer("def f(x):\n    return x + len(str(math.floor(1)))", False))
    )
    assert not passes(task.program(one, Answer("def f(x): return 2", False)))  # the second test
    answer = task.completion(two, "```python\ndef g(x): return x + 2\n```", chat=True)
    assert passes(task.program(two, Answer(answer, True)))
    assert "assert g(1) == 3" in task.question(two)


def test_summaries_are_rated_by_rouge(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    task = load_task(
        "xsum",
        write(
            tmp_path / "x.jsonl", {"id": 7, "document": "A long story.", "summary": "The cat sat."}
        ),
    )
    (problem,) = task.problems.values()
    assert problem.task_id == "7"
    assert problem.prompt.startswith("Article: A long story.")
    assert task.rate(problem, "The cat sat.") == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    # stems: three words of three, "the cat" of two pairs, two in order
    rated = task.rate(problem, "sat the cats")
    assert rated == {
        "rouge1": pytest.approx(1.0),
        "rouge2": pytest.approx(0.5),
        "rougeL": pytest.approx(2 / 3),
    }
    assert task.completion(problem, "\n The cat.\n", chat=False) == "The cat."


@pytest.mark.parametrize(("name", "record", "fault"), [
    ("mbpp", {**MBPP, "test_list": "x"}, r'm.jsonl:2: field "test_list": a list of texts is needed, not .x'),
    ("mbpp", {**MBPP, "test_list": ["a", None]}, r'm.jsonl:2: field "test_list": a list of texts is needed, not ..a'),
    ("mbpp", {**MBPP, "test_imports": 3}, r'm.jsonl:2: field "test_imports": a list of texts is needed, not 3'),
    ("mbpp", {**MBPP, "test_setup_code": ["a"]}, r'm.jsonl:2: field "test_setup_code": a text is needed, not'),
    ("mbpp", {**MBPP, "text": {}}, r'm.jsonl:2: field "text": a text is needed, not {}'),
    ("mbpp", {**MBPP, "task_id": True}, r'm.jsonl:2: field "task_id": a whole number from 0 on is needed, not True'),
    ("mbpp", {k: v for k, v in MBPP.items() if k != "test_list"}, r'm.jsonl:2: field "test_list": it is missing'),
    ("mbpp", MBPP, r'm.jsonl:2: problem "Mbpp/11" is in the data twice'),
    ("humaneval", 3, r"m.jsonl:1: field|m.jsonl:2: a problem must be an object"),
    ("xsum", {"id": "a", "documents": "x", "summary": "y"}, 'field "document": it is missing; did '
                                                            'you mean "documents"'),
])  # fmt: skip
def test_faults_of_the_data_name_their_place(
    tmp_path: Path, name: str, record: object, fault: str
) -> None:
    first = {
        "mbpp": [MBPP],
        "humaneval": [],
        "xsum": [{"id": "b", "document": "x", "summary": "y"}],
    }[name]
    data = write(tmp_path / "m.jsonl", *first, *([3] if name == "humaneval" else []), record)
    with pytest.raises(
        UserError, match=fault if name != "humaneval" else "m.jsonl:1: a problem must be an object"
    ):
        load_task(name, data)


def test_unknown_names() -> None:
    with pytest.raises(UserError, match='there is no task "humanevil"; did you mean "humaneval"'):
        load_task("humanevil")
    with pytest.raises(UserError, match='there is no "chatty"; did you mean "chat"'):
        prompt_format("chatty")
