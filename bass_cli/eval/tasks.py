"""The interface of a task: its problems, their prompts, and how an answer is scored.

The tasks are in humaneval.py, mbpp.py and summaries.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

from bass_cli.errors import UserError, nearest
from bass_cli.eval.answers import code_in as code_in
from bass_cli.sandbox.jail.job_spec import Program

TASKS = ("humaneval", "mbpp", "xsum")
PromptFormat = Literal["raw", "strip", "strip-nl", "chat"]


class Problem(NamedTuple):
    """One problem: the data set's own prompt, and all fields of its record."""

    task_id: str
    prompt: str
    fields: Mapping[str, Any]


class Answer(NamedTuple):
    """A model's answer. `whole`: it stands alone; otherwise it continues the prompt."""

    text: str
    whole: bool


class Defaults(NamedTuple):
    """Sampling options of a task. The pair and the user can override them."""

    temperature: float
    top_p: float
    max_new_tokens: int


class Task(Protocol):
    """A set of problems, and how to prompt and score them.

    Attributes:
        executes: scoring runs programs.
        stops: strings that end a completion. Chat answers do not use them.
        problems: problems by task_id, in the data set's order.
    """

    name: str
    executes: bool
    defaults: Defaults
    stops: Sequence[str]
    problems: dict[str, Problem]

    def question(self, problem: Problem) -> str:
        """Return the question for a chat model."""

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """Return what a model's text adds after the data set's own prompt."""

    def program(self, problem: Problem, answer: Answer) -> Program:
        """Return the program with the answer, and its tests."""

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        """Return the scores of a text, as fractions of 1. For tasks that run no programs."""


def load_task(name: str, data: str | None = None) -> Task:
    """Load a task and its problems.

    Args:
        name: one of TASKS.
        data: a file, or hf:NAME[:CONFIG][:SPLIT]. Default: the task's own data set.

    Raises:
        UserError: the name is unknown, or the data is invalid.
    """
    if name == "humaneval":
        from bass_cli.eval.humaneval import HumanEval

        return HumanEval(data)
    if name == "mbpp":
        from bass_cli.eval.mbpp import Mbpp

        return Mbpp(data)
    if name == "xsum":
        from bass_cli.eval.summaries import Summaries

        return Summaries(data)
    raise UserError(f'there is no task "{name}"; {nearest(name, TASKS)}')


def prompt_format(name: str) -> PromptFormat:
    """Return the prompt format of that name. UserError if there is none."""
    if name not in get_args(PromptFormat):
        raise UserError(
            f'--prompt-format (or BASS_PROMPT_FORMAT): there is no "{name}"; '
            f"{nearest(name, get_args(PromptFormat))}"
        )
    return cast(PromptFormat, name)


def shape_prompt(prompt: str, form: PromptFormat) -> str:
    """Return a completion prompt in a format.

    "strip" removes white space at both ends, "strip-nl" removes newlines.
    """
    return {"strip": prompt.strip(), "strip-nl": prompt.strip("\n")}.get(form, prompt)
