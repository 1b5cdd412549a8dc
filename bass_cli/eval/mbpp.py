"""MBPP (Austin et al., arXiv 2108.07732): short programs from a sentence and three tests.

The prompt is the usual zero-shot prompt of code models: text and tests in a docstring, after
which the program follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bass_cli.errors import UserError
from bass_cli.eval.answers import code_in
from bass_cli.eval.data import Fields, identity, read_problems
from bass_cli.eval.naming import modules_of, names_of, with_imports
from bass_cli.eval.tasks import Answer, Defaults, Problem
from bass_cli.io.reading import text, texts
from bass_cli.sandbox.jail.job_spec import Checked

_DATA = "hf:google-research-datasets/mbpp:full:test"
_FIELDS: Fields = {"task_id": identity, "test_list": texts}
_OPTIONAL: Fields = {"test_imports": texts, "test_setup_code": text, "text": text, "prompt": text,
                     "code": text}  # fmt: skip


class Mbpp:
    """The task "mbpp".

    Reads both versions of the data set: "full" (`text`, `test_setup_code`) and "sanitized"
    (`prompt`, `test_imports`).
    """

    name, executes = "mbpp", True
    defaults = Defaults(temperature=0.2, top_p=0.95, max_new_tokens=512)
    stops: Sequence[str] = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```")

    def __init__(self, data: str | None = None):
        self.problems = read_problems(data or _DATA, _FIELDS, _problem, _OPTIONAL)

    def question(self, problem: Problem) -> str:
        tests = "\n".join(problem.fields["test_list"])
        return (
            f"{_sentence(problem.fields)} Your code should pass these tests:\n\n"
            f"```python\n{tests}\n```\n\n"
            "Answer with the whole code, its imports included, in one block."
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return code_in(text, next(iter(self._names(problem)), None)) if chat else text

    def program(self, problem: Problem, answer: Answer) -> Checked:
        """Return the program without the prompt, which is only a docstring.

        The data set's set-up code belongs to the tests, because it may use the program's classes.
        """
        tests, names = _tests(problem), self._names(problem)
        return Checked(with_imports(answer.text, tests), tests, names, modules_of(tests, names))

    def _names(self, problem: Problem) -> tuple[str, ...]:
        return names_of(_tests(problem), solution=problem.fields.get("code") or "")

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        raise UserError("mbpp is scored by running programs")


def _tests(problem: Problem) -> str:
    fields = problem.fields
    setup = [*(fields.get("test_imports") or ()), fields.get("test_setup_code")]
    return "\n".join([*filter(None, setup), *fields["test_list"]])


def _sentence(record: Any) -> str:
    return str(record.get("text") or record.get("prompt") or "").strip()


def _problem(record: dict[str, Any]) -> Problem:
    if not _sentence(record):
        raise ValueError('it needs a field "text" or "prompt"')
    tests = "\n".join(record["test_list"])
    task_id = f"Mbpp/{str(record['task_id']).removeprefix('Mbpp/')}"
    return Problem(task_id, f'"""\n{_sentence(record)}\n{tests}\n"""\n', record)
