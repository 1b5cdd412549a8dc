"""The base class of a task: its problems, its prompts, and how an answer is scored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from bass_cli.errors import UserError, nearest
from bass_cli.io.readers import open_source
from bass_cli.reading import is_unicode
from bass_cli.reading import whole as whole_number
from bass_cli.sandbox.programs import DEFAULT_LIMITS, Limits, Program

PromptFormat = Literal["raw", "strip", "strip-nl", "chat"]
# a check for each field, by name; it raises ValueError if the value has another type
Fields = Mapping[str, Callable[[Any], Any]]


class Problem(NamedTuple):
    """One problem: the data set's own prompt, and all fields of its record."""

    task_id: str
    prompt: str
    fields: Mapping[str, Any]


class Defaults(NamedTuple):
    """Sampling options of a task. The pair and the user can override them."""

    temperature: float = 0.2
    top_p: float = 0.95
    max_new_tokens: int = 512


class Check(NamedTuple):
    """The verdict on an answer: "passed", "failed" or "no answer", and one line about it."""

    status: str
    detail: str = ""


def identity(value: Any) -> str:
    """Return a record's identifier, a text or a whole number, as text."""
    if not isinstance(value, str):
        return str(whole_number(value))
    if not is_unicode(value):
        raise ValueError("it contains half of a surrogate pair, which is not valid text")
    return value


class Task:
    """A set of problems, and how to prompt and score them.

    Attributes:
        executes: scoring runs programs in the sandbox (`program`).
        rates: scoring rates texts (`rate`), so that no sample passes or fails. A task that neither
            executes nor rates compares answers (`check`).
        has_prompt, has_question: whether there is a text to continue, and a question for chats.
        prompt_format: the default format. "auto" chooses by the model.
        has_base: a sample runs the tests of `base_program` first, then those of `program`.
        limits: limits of a program.
        constants: the data may have NaN and Infinity, which Python's JSON has.
        stops: strings that end a completion. Chat answers do not use them.
        source: the default data: a file, or hf:NAME[:CONFIG][:SPLIT].
        files: names of local files that the task is read from, beside its data.
        needed, optional: checks of the fields of a record. Optional ones may be missing or null.
        problems: problems by task_id, in the data set's order.

    Args:
        data: like `source`.

    Raises:
        UserError: the data is invalid.
    """

    name: str
    executes: bool = True
    rates: bool = False
    has_base: bool = False
    limits: Limits = DEFAULT_LIMITS
    constants: bool = False
    has_prompt: bool = True
    has_question: bool = True
    prompt_format: str = "auto"
    defaults: Defaults = Defaults()
    stops: Sequence[str]
    source: str
    files: Sequence[str] = ()
    needed: ClassVar[Fields]
    optional: ClassVar[Fields] = {}

    def __init__(self, data: str | None = None) -> None:
        self.problems = self._read(data or self.source)

    def problem(self, record: dict[str, Any]) -> Problem:
        """Return the problem of a record with valid fields. ValueError if it is no problem."""
        raise NotImplementedError

    def problem_at(self, record: dict[str, Any], place: str, number: int) -> Problem:
        """Return the problem of a record, whose fields are checked here.

        Args:
            record: the record.
            place: its file and line, for messages.
            number: its number from 1.
        """
        for field, check in {**self.optional, **self.needed}.items():
            if field in self.needed and field not in record:
                raise UserError(
                    f'{place}: field "{field}": it is missing; {nearest(field, record)}'
                )
            if field in self.needed or record.get(field) is not None:
                try:
                    check(record[field])
                except ValueError as error:
                    raise UserError(f'{place}: field "{field}": {error}') from None
        try:
            return self.problem(record)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None

    def question(self, problem: Problem) -> str:
        """Return the question for a chat model."""
        raise NotImplementedError

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """Return the messages for a chat model."""
        return [{"role": "user", "content": self.question(problem)}]

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """Return what a model's text adds after the data set's own prompt."""
        raise NotImplementedError

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program with a model's text, and its tests.

        `whole`: the text is the whole program. Otherwise it continues the prompt.
        """
        raise NotImplementedError

    def statement(self, problem: Problem) -> str:
        """Return the prompt as rankers see it: without tests."""
        return problem.prompt

    def entry_point(self, problem: Problem) -> str | None:
        """Return the name of the function that the prompt describes. None if tests alone name it.

        Rankers use it, so it must not come from the tests.
        """
        return None

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str | None:
        """Return the program with a model's text, without tests. None if answers are no programs.

        `whole`: see `program`.
        """
        return None

    @property
    def trial(self) -> tuple[str, Program] | None:
        """A program that must pass before any other is worth running, and its place for messages.

        None if there is none.
        """
        return None

    def notes_on(self, details: Iterable[str]) -> list[str]:
        """Return notes on the details of all verdicts, for the user."""
        return []

    def base_program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program with the original tests, in a task that adds tests to a data set."""
        raise NotImplementedError

    def check(self, problem: Problem, text: str) -> Check:
        """Compare the answer in a model's text with the right one."""
        raise NotImplementedError

    def check_key(self, problem: Problem) -> str:
        """Return everything that the result of `check` depends on beside the model's text.

        A sample is checked again only if its text or this key has changed.
        """
        return json.dumps([self.name, dict(problem.fields)], default=str)

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the answer in a text, in a form in which equal answers are equal texts.

        None if the text has no answer, or if the task has no rule to find it.
        """
        return None

    def figures(self, responses: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
        """Return more figures for the report, which JSON can hold.

        Args:
            responses: by task_id, the samples' texts. None: the sample is not finished.
        """
        return {}

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        """Return the scores of a text, as fractions of 1."""
        raise NotImplementedError

    def _read(self, source: str) -> dict[str, Problem]:
        """Return the problems of the data by task_id. Errors name file, line and field."""
        found: dict[str, Problem] = {}
        for number, (place, record) in enumerate(records_of(source, constants=self.constants), 1):
            problem = self.problem_at(record, place, number)
            if problem.task_id in found:
                raise UserError(f'{place}: problem "{problem.task_id}" occurs twice in the data')
            found[problem.task_id] = problem
        if not found:
            raise UserError(f"{source}: it contains no problems")
        return found


def records_of(source: str, *, constants: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a source with their places. UserError for one that is no object.

    `constants`: see Task.
    """
    opened = dataclasses.replace(open_source(source), constants=constants)
    if opened.kind == "txt":
        raise UserError(
            f"{source}: a text file has no fields; use a .jsonl, .json or .parquet file"
        )
    for line, record in opened.records():
        if not isinstance(record, dict):
            raise UserError(f"{opened.label}:{line}: a problem must be a JSON object")
        yield f"{opened.label}:{line}", record


def shape_prompt(prompt: str, form: PromptFormat) -> str:
    """Return a completion prompt in a format.

    "strip" removes white space at both ends, "strip-nl" removes newlines.
    """
    return {"strip": prompt.strip(), "strip-nl": prompt.strip("\n")}.get(form, prompt)
