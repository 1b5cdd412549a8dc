"""What an evaluation consists of: problems, how they become prompts, and what scoring makes of an
answer.

Not here: the tasks themselves (humaneval.py, mbpp.py, summaries.py), generating
(cli/evaluate.py), scoring (scoring.py).
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
    """One problem: `prompt` as the data set has it, `fields` everything that it says."""

    task_id: str
    prompt: str
    fields: Mapping[str, Any]


class Answer(NamedTuple):
    """What a model gave. `whole`: a solution that stands alone; otherwise it goes on where the
    prompt ends."""

    text: str
    whole: bool


class Defaults(NamedTuple):
    """How a task is sampled where neither pair nor person says otherwise."""

    temperature: float
    top_p: float
    max_new_tokens: int


class Task(Protocol):
    """A set of problems and what is due to them. `executes`: scoring runs programs. `problems`:
    by task_id, in the data set's order. `stops`: strings that end a completion (not a chat
    answer)."""

    name: str
    executes: bool
    defaults: Defaults
    stops: Sequence[str]
    problems: dict[str, Problem]

    def question(self, problem: Problem) -> str:
        """What a chat model is asked."""

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """What a model's text contributes after the data set's own prompt."""

    def program(self, problem: Problem, answer: Answer) -> Program:
        """The program with the answer, and its tests, which run in a process of their own."""

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        """Figures of merit, as fractions of 1, where nothing is run."""


def load_task(name: str, data: str | None = None) -> Task:
    """The task of that name, with its problems read from `data` (a file, or
    hf:NAME[:CONFIG][:SPLIT]) or from where they are by default. UserError for an unknown name
    and for faults of the data."""
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
    """The format of that name; UserError if there is none."""
    if name not in get_args(PromptFormat):
        raise UserError(
            f'--prompt-format (or BASS_PROMPT_FORMAT): there is no "{name}"; '
            f"{nearest(name, get_args(PromptFormat))}"
        )
    return cast(PromptFormat, name)


def shape_prompt(prompt: str, form: PromptFormat) -> str:
    """A completion prompt in that format: as it is, or without blanks ("strip") or newlines
    ("strip-nl") at its ends."""
    return {"strip": prompt.strip(), "strip-nl": prompt.strip("\n")}.get(form, prompt)
