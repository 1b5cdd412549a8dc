"""A task that a YAML file describes: one of bass (gsm8k), or one of a user.

task_file.py has the keys and renders the prompts; answers.py finds and compares the answers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bass_cli.errors import UserError, nearest
from bass_cli.eval.tasks.answers import (
    Finder,
    SlowRuleError,
    are_close,
    decimal,
    letter_in,
    normalised,
    number_in,
)
from bass_cli.eval.tasks.task import Check, Defaults, Problem, Task, identity, records_of
from bass_cli.eval.tasks.task_file import (
    Extract,
    Key,
    Loaded,
    TaskFile,
    TemplateError,
    Templates,
    compile_pattern,
    templates_of,
)
from bass_cli.io.readers import open_source
from bass_cli.rank.code import modules_of, names_of, with_imports
from bass_cli.reading import shown
from bass_cli.sandbox.programs import Program

_PATTERN: Key = ("check", "regex", "pattern")
_PROGRAM: Key = ("check", "program")
_TARGET: Key = ("examples", "target")
_SHOWN: tuple[Key, ...] = (("prompt",), ("question",))  # the templates that examples have
R = TypeVar("R")
# In the detail of a verdict if a check function raised, or returned neither True nor False
FAULT = "the check function"
# The program's process has no part in this. The record is JSON, because it may have no Python form.
_CALL = """import json
try:
    result = {name}(json.loads({answer!r}), json.loads({record!r}))
except BaseException as error:
    raise RuntimeError(f"{fault} raised {{type(error).__name__}}: {{error}}"[:200]) from None
if result is not True and result is not False:
    raise RuntimeError(f"{fault} returned {{result!r:.100}}, not True or False")
assert result, "{name} returned False"
"""


class Rendered(NamedTuple):
    """A record, its place for messages, and the texts of its templates by key."""

    place: str
    record: Mapping[str, Any]
    texts: Mapping[Key, Any]

    def text(self, *key: str) -> str:
        """Return the text of a key. Empty if the file does not have the key."""
        return str(self.texts.get(key, ""))

    def is_same(self, other: Rendered) -> bool:
        """Return whether both have the same prompt and the same question."""
        keys: tuple[Key, Key] = ("prompt",), ("question",)
        return all(self.text(*key).strip() == other.text(*key).strip() for key in keys)


class OwnTask(Task):
    """A task of a YAML file. See docs/guide/tasks.md.

    Args:
        loaded: the file.
        data: replaces the file's data.

    Raises:
        UserError: the data does not fit the file.
    """

    def __init__(self, loaded: Loaded, data: str | None = None) -> None:
        options = self._options = loaded.options
        self._located, self._source = loaded.located, loaded.source
        self.name, self.stops = options.name, options.stop
        self.executes = options.check.program is not None or options.check.function is not None
        self.defaults = Defaults(**options.sampling.model_dump())
        self.prompt_format = options.prompt_format
        self.has_prompt = options.prompt is not None
        self.has_question = options.question is not None
        self.source = _beside(options.folder, options.data)
        self.files = list(self._files_read())
        self._finder = Finder()
        self._rules = options.extract or _usual_rules(options)
        lists: dict[Key, str] = {} if options.answers is None else {("answers",): options.answers}
        self._templates = Templates(options.fields, dict(templates_of(options)), lists)
        self._pool: _Pool | None = None
        self._rendered: dict[str, Rendered] = {}
        if data is None:
            _check_source(self.source, self._located.at("data"))
        super().__init__(data)
        if options.examples is not None:
            pool = self._pool = _Pool(self, loaded, data or self.source)
            for name, one in self.problems.items() if self.has_prompt else ():
                before = pool.before(self._rendered[name])
                self.problems[name] = one._replace(prompt=before + one.prompt)

    def _files_read(self) -> Iterator[str]:
        options = self._options
        yield self.source
        if options.examples is not None and options.examples.data is not None:
            yield _beside(options.folder, options.examples.data)
        if options.check.function is not None:
            yield _beside(options.folder, options.check.function.file)

    def problem_at(self, record: dict[str, Any], place: str, number: int) -> Problem:
        field = self._options.id
        task_id = f"{self.name}/{number}"
        if field is not None:
            key = self._located.at("id")
            if field not in record:
                hint = nearest(field, record)
                raise UserError(f"{place}: {key}: there is no field {shown(field)}; {hint}")
            try:
                task_id = identity(record[field])
            except ValueError as error:
                raise UserError(f"{place}: {key}: field {shown(field)}: {error}") from None
        rendered = self.render(self._templates, record, place)
        # Without a prompt for raw text, lists and pages show the question.
        prompt = rendered.text("prompt") or rendered.text("question")
        self._rendered.setdefault(task_id, rendered)
        problem = Problem(task_id, prompt, record)
        self._refuse_unusable(rendered)
        return problem

    def _of(self, problem: Problem) -> Rendered:
        return self._rendered[problem.task_id]

    def render(self, templates: Templates, record: Mapping[str, Any], place: str) -> Rendered:
        """Render a record. UserError names its place, and the key of the template."""
        try:
            return Rendered(place, record, templates.render(record))
        except TemplateError as error:
            raise UserError(f"{place}: {self._located.at(*error.key)}: {error}") from None

    def statement(self, problem: Problem) -> str:
        return self._of(problem).text("prompt") or self.question(problem)

    def question(self, problem: Problem) -> str:
        return self._of(problem).text("question")

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        options = self._options
        found = [] if options.system is None else [{"role": "system", "content": options.system}]
        if self._pool is not None and self._pool.options.chat:
            found += self._pool.turns(self._of(problem))
        return [*found, {"role": "user", "content": self.question(problem)}]

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        """Return the text unchanged, so that a changed rule can find the answer in it."""
        return text

    def answer(self, problem: Problem, text: str) -> str | None:
        found = None if self._options.check.program is not None else self._find(problem, text)
        return None if found is None else self._comparable(found)

    def check_key(self, problem: Problem) -> str:
        rules = [rule.model_dump() for rule in self._rules]
        right = self._right(self._of(problem)), self._of(problem).text(*_PATTERN)
        return json.dumps([rules, self._options.check.model_dump(), right])

    def check(self, problem: Problem, text: str) -> Check:
        found = self._find(problem, text)
        if found is None:
            return Check("no answer", 'no rule of "extract" finds an answer')
        answer = self._comparable(found)
        if answer is None:
            return Check("no answer", f"{shown(found)} has no {self._what}")
        if self._options.check.regex is not None:
            pattern, whole = self._of(problem).text(*_PATTERN), self._options.check.regex.whole
            match = functools.partial(self._finder.matches, pattern, answer, whole=whole)
            passed, wanted = self._limited(problem, _PATTERN, match), f"a match of {shown(pattern)}"
        else:
            right = dict.fromkeys(
                str(self._comparable(one)) for one in self._right(self._of(problem))
            )
            passed = any(self._is_equal(answer, one) for one in right)
            wanted = " or ".join(map(shown, right))
        return Check("passed" if passed else "failed", f"{shown(answer)}, expected {wanted}")

    def program(self, problem: Problem, text: str, *, whole: bool) -> Program:
        """Return the program: the answer and the tests of the file, or the check function.

        A text that no rule finds an answer in is used as it is. `whole`: the text has the prefix.
        """
        rendered, function = self._of(problem), self._options.check.function
        if function is not None:
            found = self._find(problem, text)
            answer = json.dumps(text if found is None else found)
            record = json.dumps(rendered.record)
            call = _CALL.format(name=function.name, answer=answer, record=record, fault=FAULT)
            return Program("", call, (), self._source)
        options = self._options.check.program
        assert options is not None
        tests, setup = rendered.text(*_PROGRAM, "tests"), rendered.text(*_PROGRAM, "setup")
        names = options.names or names_of(tests, setup)
        body = self._body(problem, text, next(iter(names), None), whole=whole)
        setup = modules_of(tests, names) + setup
        return Program(with_imports(body, tests), tests, tuple(names), setup)

    def entry_point(self, problem: Problem) -> str | None:
        options = self._options.check.program
        return options.names[0] if options is not None and options.names else None

    def source_of(self, problem: Problem, text: str, *, whole: bool) -> str | None:
        if self._options.check.program is None:
            return None
        return self._body(problem, text, self.entry_point(problem), whole=whole)

    def _body(self, problem: Problem, text: str, name: str | None, *, whole: bool) -> str:
        """Return the program of a text, without tests. `name`: the function that it defines."""
        found = self._find(problem, text, name)
        code = text if found is None else found
        return code if whole else self._of(problem).text(*_PROGRAM, "prefix") + code

    @property
    def trial(self) -> tuple[str, Program] | None:
        """The check function's file, without a call."""
        if self._options.check.function is None:
            return None
        key = self._located.at("check", "function", "file")
        return f"{key}: {self._options.check.function.file}", Program("", "", (), self._source)

    def notes_on(self, details: Iterable[str]) -> list[str]:
        faults = [detail for detail in details if FAULT in detail]
        if not faults or self._options.check.function is None:
            return []
        return [f"{len(faults)} samples failed by a fault of the check, such as: {faults[0]}"]

    def _find(self, problem: Problem, text: str, name: str | None = None) -> str | None:
        """Return the answer in a text. `name`: the function that code must define."""
        find = functools.partial(self._finder.find, self._rules, text, name)
        return self._limited(problem, ("extract",), find)

    def _limited(self, problem: Problem, key: Key, call: Callable[[], R]) -> R:
        try:
            return call()
        except SlowRuleError as error:
            raise UserError(
                f"{self._located.at(*key)}: on a sample of {problem.task_id}: {error}; simplify "
                "the expression, and score the file again"
            ) from None

    def _comparable(self, text: str) -> str | None:
        """Return a text in the form in which it is compared. None if it has no such form."""
        check = self._options.check
        if check.numeric is not None:
            number = number_in(text, check.numeric)
            return None if number is None else decimal(number)
        if check.choice is not None:
            return letter_in(text, check.choice)
        if check.exact is not None:
            return normalised(text, check.exact) or None
        return text

    def _is_equal(self, answer: str, right: str) -> bool:
        if (how := self._options.check.numeric) is not None:
            return are_close(Fraction(answer), Fraction(right), how)
        return answer == right

    @property
    def _what(self) -> str:
        """What an answer must have."""
        check = self._options.check
        return "number" if check.numeric else "letter of a choice" if check.choice else "text"

    def _right(self, rendered: Rendered) -> list[str]:
        """Return the right answers of a problem. Empty if the check needs none."""
        if self._options.answers is not None:
            return list(rendered.texts[("answers",)])
        return [rendered.text("answer")] if self._options.answer is not None else []

    def _refuse_unusable(self, rendered: Rendered) -> None:
        """Raise UserError if a problem has no prompt, or a right answer cannot be compared."""
        for key in ("prompt", "question"):
            if (key,) in rendered.texts and not rendered.text(key).strip():
                raise UserError(f"{rendered.place}: {self._located.at(key)}: the text is empty")
        for right in self._right(rendered):
            if self._comparable(right) is None:
                key = self._located.at("answer" if self._options.answers is None else "answers")
                reason = f"the right answer {shown(right)} has no {self._what}"
                raise UserError(f"{rendered.place}: {key}: {reason}")
        if self._options.check.regex is not None:
            try:
                compile_pattern(rendered.text(*_PATTERN))
            except ValueError as error:
                key = self._located.at(*_PATTERN)
                raise UserError(f"{rendered.place}: {key}: {error}") from None


class _Pool:
    """The examples of a task, rendered when they are first used.

    Args:
        task: the task.
        loaded: its file.
        source: the task's own data.
    """

    def __init__(self, task: OwnTask, loaded: Loaded, source: str) -> None:
        options = loaded.options
        assert options.examples is not None
        self.options, self._task, self._located = options.examples, task, loaded.located
        texts = {key: text for key, text in templates_of(options) if key in _SHOWN}
        texts[_TARGET] = self.options.target
        self._templates = Templates(options.fields, texts, {})
        at = ("examples", "records")
        if self.options.records is not None:
            self._records = [
                (self._located.at(*at, number), record)
                for number, record in enumerate(self.options.records)
            ]
        else:
            if self.options.data is not None:
                source = _beside(options.folder, self.options.data)
                _check_source(source, self._located.at("examples", "data"))
            self._records = list(records_of(source))
        self._order = list(range(len(self._records)))
        if self.options.records is None or self.options.number is not None:
            self._order.sort(key=functools.partial(_hash, self.options.seed))
        self._rendered: dict[int, Rendered] = {}

    def before(self, problem: Rendered) -> str:
        """Return the text before a raw prompt: the examples, each with its target."""
        return "".join(
            one.text("prompt") + one.text(*_TARGET) + self.options.separator
            for one in self._chosen(problem)
        )

    def turns(self, problem: Rendered) -> list[dict[str, str]]:
        """Return the examples as turns of a chat."""
        return [
            turn
            for one in self._chosen(problem)
            for turn in (
                {"role": "user", "content": one.text("question")},
                {"role": "assistant", "content": one.text(*_TARGET).strip()},
            )
        ]

    def _chosen(self, problem: Rendered) -> list[Rendered]:
        """Return the examples for a problem, which is never one of them.

        UserError if there are too few. Examples in the file may be all the others that there are.
        """
        wanted, found = self.options.count, list[Rendered]()
        for number in self._order:
            if len(found) == wanted:
                break
            if number not in self._rendered:
                place, record = self._records[number]
                self._rendered[number] = self._task.render(self._templates, record, place)
            if not self._rendered[number].is_same(problem):
                found.append(self._rendered[number])
        all_others = self.options.records is not None and self.options.number is None
        if not found or (len(found) < wanted and not all_others):
            raise UserError(
                f"{problem.place}: {self._located.at('examples', 'number')}: {wanted} examples are "
                f"needed beside the problem itself, and there are {len(found)}"
            )
        return found


def _usual_rules(options: TaskFile) -> tuple[Extract, ...]:
    """Return the rules of a file that has none."""
    return (Extract(code="python"),) if options.check.program is not None else ()


def _beside(folder: Path | None, source: str) -> str:
    """Return a source of data, relative to the folder of the file that names it."""
    if source.startswith("hf:") or folder is None:
        return source
    return os.path.join(folder, os.path.expanduser(source))


def _check_source(source: str, key: str) -> None:
    """Raise UserError with the place of the key if a source of data cannot be opened."""
    try:
        open_source(source)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _hash(seed: int, number: int) -> bytes:
    """Return the key that sorts examples: the same on every machine and Python version."""
    return hashlib.sha256(f"{seed}:{number}".encode()).digest()
