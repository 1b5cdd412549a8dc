"""The task mbpp: short programs from a sentence and three tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bass_cli.eval.tasks.task import Fields, Problem, Task, identity
from bass_cli.rank.code import code_in, modules_of, names_of, with_imports
from bass_cli.reading import text, texts
from bass_cli.sandbox.programs import Program


class Mbpp(Task):
    """MBPP (Austin et al., arXiv 2108.07732): short programs from a sentence and three tests.

    The prompt is the usual zero-shot prompt of code models: text and tests in a docstring, after
    which the program follows. Reads both versions of the data set: "full" (`text`,
    `test_setup_code`) and "sanitized" (`prompt`, `test_imports`).
    """

    name = "mbpp"
    stops = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```")
    source = "hf:google-research-datasets/mbpp:full:test"
    needed: ClassVar[Fields] = {"task_id": identity, "test_list": texts}
    optional: ClassVar[Fields] = {
        "test_imports": texts,
        **dict.fromkeys(("test_setup_code", "text", "prompt", "code"), text),
    }

    def problem(self, record: dict[str, Any]) -> Problem:
        if not _sentence(record):
            raise ValueError('it needs a field "text" or "prompt"')
        tests = "\n".join(record["test_list"])
        task_id = f"Mbpp/{str(record['task_id']).removeprefix('Mbpp/')}"
        return Problem(task_id, f'"""\n{_sentence(record)}\n{tests}\n"""\n', record)

    def question(self, problem: Problem) -> str:
        tests = "\n".join(problem.fields["test_list"])
        return (
            f"{_sentence(problem.fields)} Your code should pass these tests:\n\n"
            f"```python\n{tests}\n```\n\n"
            "Answer with the whole code, its imports included, in one block."
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return code_in(text, next(iter(_names(problem)), None)) if chat else text

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program without the prompt, which is only a docstring.

        The data set's set-up code belongs to the tests, because it may use the program's classes.
        """
        tests, names = _tests(problem), _names(problem)
        return Program(with_imports(text, tests), tests, names, modules_of(tests, names))

    def statement(self, problem: Problem) -> str:
        return _sentence(problem.fields)

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str:
        return text


def _sentence(fields: Mapping[str, Any]) -> str:
    return str(fields.get("text") or fields.get("prompt") or "").strip()


def _tests(problem: Problem) -> str:
    fields = problem.fields
    setup = [*(fields.get("test_imports") or ()), fields.get("test_setup_code")]
    return "\n".join([*filter(None, setup), *fields["test_list"]])


def _names(problem: Problem) -> tuple[str, ...]:
    return names_of(_tests(problem), solution=problem.fields.get("code") or "")
