"""Tasks: prompts, completions, programs and invalid data."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from bass_cli.errors import UserError
from bass_cli.eval.evaluation import read_format
from bass_cli.eval.judging import judge
from bass_cli.eval.stores import VerdictStore
from bass_cli.eval.tasks import load_task
from bass_cli.eval.tasks.task import PromptFormat, shape_prompt
from bass_cli.rank.code import code_in, names_of
from bass_cli.sandbox.programs import Program, Sandbox

MBPP = {
    "task_id": 11,
    "text": "Write a function to add one.",
    "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
    "test_setup_code": "import math",
    "code": "def f(x): return x + 1",
}


def passes(program: Program) -> bool:
    """Return whether the tests pass in this process.

    Program and tests have separate namespaces, as they have separate processes in the sandbox.
    """
    its: dict[str, object] = {}
    scope: dict[str, object] = {}
    try:
        exec(program.text, its)
        exec(program.setup, scope)
        scope |= {name: its[name] for name in program.names if name in its}
        exec(program.tests, scope)
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
        assert passes(task.program(problem, solution, whole=False))
        assert passes(task.program(problem, problem.prompt + solution, whole=True))
        assert not passes(task.program(problem, "", whole=False))


@pytest.mark.parametrize("form", get_args(PromptFormat)[:3])
def test_completion_follows_the_original_prompt_in_every_format(form: PromptFormat) -> None:
    """Public scorers append it to the data set's own prompt, whatever the model was shown."""
    task = load_task("humaneval")
    for problem in list(task.problems.values())[:20]:
        shown = shape_prompt(problem.prompt, form)
        assert shown.strip() == problem.prompt.strip()
        text = ("" if shown.endswith("\n") else "\n") + problem.fields["canonical_solution"]
        assert passes(
            task.program(problem, task.completion(problem, text, chat=False), whole=False)
        )
    assert shape_prompt("\n  a \n", "strip") == "a"
    assert shape_prompt("\n  a \n", "strip-nl") == "  a "
    assert shape_prompt("\n  a \n", "raw") == "\n  a \n"


def test_code_of_a_chat_answer_follows_the_prompt() -> None:
    task = load_task("humaneval")
    for problem in list(task.problems.values())[:40]:
        code = problem.prompt + problem.fields["canonical_solution"]
        answer = (
            f"Sure!\n```python\nprint('not this one')\n```\nrather\n```python\n{code}\n```\n"
            "It works."
        )
        completion = task.completion(problem, answer, chat=True)
        assert passes(task.program(problem, completion, whole=False))
        assert problem.fields["entry_point"] in task.question(problem)


def test_code_is_found_in_an_answer() -> None:
    assert code_in("a\n```python\nx = 1\n```\nb") == "x = 1"
    assert code_in("```\nx\n```\n```py\ndef f(): pass\n```", "f") == "def f(): pass"
    assert code_in("```python\nx = 1\ny = ") == "x = 1\ny = "  # cut off by the length limit
    assert code_in("    return 1") == "    return 1"
    assert code_in("```python\r\nx = 'a\u2028b\x0c'\r\n```") == "x = 'a\u2028b\x0c'"


ADD = "def add(x, y):\n    return x + y"
BODY = "    return x + y"
STUB = 'def add(x, y):\n    """Add."""'
# answers to "complete def add(x, y)" whose code is right
ANSWERS = {
    "a fence": f"Here:\n\n```python\n{ADD}\n```\nDone.",
    "no blank line before": f"Here:\n```python\n{ADD}\n```",
    "a list item": "1. It:\n\n   ```python\n   def add(x, y):\n       return x + y\n   ```\n\n2. Done.",
    "a list in a list": "- a\n  - b\n\n    ```py\n    def add(x, y):\n        return x + y\n    ```\n",
    "a quote": "> ```python\n> def add(x, y):\n>     return x + y\n> ```\n",
    "a list in a quote": "> 1. ```\n>    def add(x, y):\n>        return x + y\n>    ```\n",
    "an indented fence": "  ```python\n  def add(x, y):\n      return x + y\n  ```",
    "tildes": f"~~~python\n{ADD}\n~~~",
    "tildes around a fence": f"~~~\n'''\n```\n'''\n{ADD}\n~~~",
    "a longer fence": f'````python\n{STUB[:-3]}\n```\nadd(1, 2)\n```\n    """\n{BODY}\n````',
    "a longer closing fence": f"```python\n{ADD}\n`````\nnot ` this",
    "a fence in a docstring": f'```python\n{STUB[:-3]}\n    ```\n    add(1, 2)\n    ```\n    """\n{BODY}\n```',
    "a docstring indented by two": '```python\ndef add(x, y):\n  """Add.\n  ```\n  add(1, 2)\n  ```\n'
                                    '  """\n  return x + y\n```\nSo:\n```\nadd(1, 2)\n```',
    "a docstring's fence at the margin": f'```python\n{STUB[:-3]}\n```\nadd(1, 2)\n```\n"""\n{BODY}\n```\n',
    "never closed": f"Sure:\n```python\n{ADD}",
    "an info string": f'```python3 title="a.py" {{1}}\n{ADD}\n```',
    "an info string in braces": f"```{{.python .numberLines}}\n{ADD}\n```",
    "CRLF": f"Here:\n```python\n{ADD}\n```\n".replace("\n", "\r\n"),
    "use first": f"Use `add`:\n```\nadd(1, 2)\n```\n```python\n{ADD}\n```",
    "a shell first": f"```bash\npip install x\n```\n\n```python\n{ADD}\n```\n```\n3\n```",
    "the head first": f"Your function:\n```python\n{STUB}\n```\nComplete:\n```python\n{ADD}\n```",
    "another's method first": f"```\nclass A:\n    def add(self): pass\n```\n```\n{ADD}\n```",
    "another name first": f"```\ndef added(x): return add(x, 1)\n```\n```\n{ADD}\n```",
    "text in tags": f"<answer>\n```python\n{ADD}\n```\n</answer>",
    "thoughts": f"<think>\nadd?\n</think>\n```python\n{ADD}\n```",
    "details": f"<details>\n<summary>Code</summary>\n```python\n{ADD}\n```\n</details>",
    "HTML": f"<pre><code class='x'>{ADD}\n</code></pre>",
    "HTML's signs": "<pre>def add(x, y):\n    assert 1 &lt; 2\n    return x + y</pre>",
    "an indented block": "It is\n\n    def add(x, y):\n        return x + y\n\nas you see.",
    "a space after the name": f"```\nx\n```\n```\n{ADD.replace('add(', 'add (')}\n```",
    "a decorator": f"```\nimport functools\n```\n```\nimport functools\n@functools.cache\n{ADD}\n```",
    "a lambda": "```\nadd(1, 2)\n```\n```\nadd = lambda x, y: x + y\n```",
    "a class": "```\nadd(1)\n```\n```\nclass add(int):\n    def __new__(cls, x, y): return x + y\n```",
    "code alone": ADD,
    "code alone with a fence in its docstring": f'{STUB[:-3]}\n  ```\n  add(1, 2)\n  ```\n    """\n{BODY}\n',
    "code and prose": f"The function is:\n{ADD}\nIt adds two numbers, so x + y.\n\nRight?",
    "a body": BODY,
    "drafts within thoughts": f"<think>```python\ndef add(x, y): return 0\n```</think>\n```python\n{ADD}\n```",
    "thoughts that the prompt began": f"maybe\n```python\ndef add(x, y): return 0\n```\n</think>\n\n{ADD}",
    "text after the closing fence": f"```python\n{ADD}\n``` This adds.",
    "an end token after the closing fence": f"```python\n{ADD}\n```<|im_end|>",
    "two opening fences": f"```python\n```python\n{ADD}\n```\n```",
    "the language on a line of its own": f"```\npython\n{ADD}\n```",
    "a byte order mark": f"\ufeff```python\n\u200b{ADD}\n```",
    "spaces that do not break": f"```python\n{ADD}\n```".replace("    ", "\u00a0" * 4),
    "an answer that is indented": "\n".join("    " + line for line in ["```python", *ADD.split("\n"), "```"]),
    "a body in a fence": f"```python\n{BODY}\n```",
    "a body at the margin": "```python\nif x:\n    return x + y\nreturn y\n```",
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_the_code_of_a_chat_answer_adds_two_numbers(name: str, tmp_path: Path) -> None:
    head = f"{STUB}\n"
    record = {"task_id": "A/1", "prompt": head, "entry_point": "add", "test": "def check(f):\n"
              "    assert f(1, 2) == 3 and f(0, 5) == 5"}  # fmt: skip
    task = load_task("humaneval", write(tmp_path / "h.jsonl", record))
    (problem,) = task.problems.values()
    completion = task.completion(problem, ANSWERS[name], chat=True)
    scope: dict[str, Any] = {}
    exec(head + completion, scope)
    assert (scope["add"](1, 2), scope["add"](0, 5)) == (3, 5)


@pytest.mark.parametrize(
    "head", ["async def add(x)", "def add[T](x: T)", "def add (x)", "class add:"]
)
def test_all_forms_of_a_function_head_are_recognised(head: str) -> None:
    code = f"{head}:\n    oops oops" if not head.endswith(":") else f"{head}\n    oops oops"
    assert code_in(f"```\nx = 1\n```\n```\n{code}\n```", "add") == code


HOSTILE = {"fences": "```\n", "quotes": "> " * 30 + "\n", "items": "- ", "open code": "```\ndef add(\n```\n",
           "tags": "<pre", "brackets": "(", "code": "def add(): pass\n", "prose": "def a word\n"}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_code_is_found_in_linear_time(name: str) -> None:
    seconds = []
    for count in (50_000, 150_000):
        text = (HOSTILE[name] * count)[:count]
        start = time.process_time()
        code_in(text, "add")
        seconds.append(time.process_time() - start)
    assert seconds[1] < 6 * max(
        seconds[0], 0.05
    )  # three times the text; quadratic time would be nine times as long
    start = time.process_time()
    code_in(HOSTILE[name] * 1_000_000, "add")  # only the beginning is read
    assert time.process_time() - start < 5


def test_names_of_finds_what_tests_take_from_a_program() -> None:
    assert names_of("assert f(1) == math.pi\nassert set(f(2)) == {len('a')}") == ("f",)
    assert names_of("def check(c): assert c(1)\ncheck(f)", "def g(): pass") == ("f",)
    assert names_of("assert sum(1, 2) == 3") == ("sum",)
    assert names_of("assert sum(g(1)) == 3") == ("g",)
    assert names_of("assert sum(g(1)) == 3", solution="def g(): ...\ndef sum(): ...") == (
        "sum",
        "g",
    )
    assert names_of("root = Node(1)\nroot.left = Node(2)\nassert height(root) == 2") == (
        "Node",
        "height",
    )
    assert names_of("assert bisect(1) == 2 and bisect.x") == ("bisect",)
    assert names_of("for x in (lambda y: y, f): x(1)") == ("f",)
    assert names_of("no python") == ()


def test_stop_strings_do_not_cut_canonical_solutions() -> None:
    task = load_task("humaneval")
    for problem in task.problems.values():
        assert not any(stop in problem.fields["canonical_solution"] for stop in task.stops)


def test_mbpp_reads_both_versions_of_the_data(tmp_path: Path) -> None:
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
        task.program(one, "def f(x):\n    return x + len(str(math.floor(1)))", whole=False)
    )
    assert not passes(task.program(one, "def f(x): return 2", whole=False))  # the second test
    answer = task.completion(two, "```python\ndef g(x): return x + 2\n```", chat=True)
    assert passes(task.program(two, answer, whole=True))
    assert "assert g(1) == 3" in task.question(two)


def test_summaries_are_scored_by_rouge(tmp_path: Path) -> None:
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
    ("mbpp", MBPP, r'm.jsonl:2: problem "Mbpp/11" occurs twice in the data'),
    ("humaneval", 3, r"m.jsonl:1: field|m.jsonl:2: a problem must be a JSON object"),
    ("xsum", {"id": "a", "documents": "x", "summary": "y"}, 'field "document": it is missing; did '
                                                            'you mean "documents"'),
])  # fmt: skip
def test_data_errors_name_file_line_and_field(
    tmp_path: Path, name: str, record: object, fault: str
) -> None:
    first = {
        "mbpp": [MBPP],
        "humaneval": [],
        "xsum": [{"id": "b", "document": "x", "summary": "y"}],
    }[name]
    data = write(tmp_path / "m.jsonl", *first, *([3] if name == "humaneval" else []), record)
    with pytest.raises(
        UserError,
        match=fault if name != "humaneval" else "m.jsonl:1: a problem must be a JSON object",
    ):
        load_task(name, data)


def test_unknown_task_and_format_names_are_refused() -> None:
    with pytest.raises(UserError, match='there is no task "humanevil"; did you mean "humaneval"'):
        load_task("humanevil")
    with pytest.raises(UserError, match='there is no "chatty"; did you mean "chat"'):
        read_format("chatty", load_task("humaneval"))


def test_problem_whose_set_up_fails_is_an_error_and_not_a_verdict(tmp_path: Path) -> None:
    """A faulty prompt must not count against the model."""
    row = {
        "task_id": "T/1",
        "prompt": "TABLE = 1 / 0\ndef f():\n",
        "entry_point": "f",
        "test": "def check(f): f()",
    }
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    task = load_task("humaneval", str(tmp_path / "data.jsonl"))
    program = task.program(task.problems["T/1"], "    return 1", whole=False)
    with (
        VerdictStore(str(tmp_path / "verdicts.jsonl")) as store,
        pytest.raises(UserError, match=r'"T/1".*ZeroDivisionError'),
    ):
        judge(
            [(("T/1", 0), program)],
            store,
            {},
            open_sandbox=lambda: Sandbox(workers=1),
            progress=lambda done, total: None,
        )
    assert (tmp_path / "verdicts.jsonl").read_text() == ""
