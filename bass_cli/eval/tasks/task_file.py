"""The YAML file of a task: its keys, their defaults, and how the file is read.

docs/guide/tasks.md explains the keys. own.py makes a task of a file. Templates are Jinja in its
sandbox, as in chat templates. They are checked when they are rendered, because only then the data's
fields are known. A child process with limits renders them, because a template that came with a file
may loop for ever or fill the memory.
"""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from bass_cli.config.validation import Located, Strict, parse_model
from bass_cli.errors import UserError, nearest
from bass_cli.formats.limits import Limited, RefusalError
from bass_cli.reading import MOST_YAML, is_unicode, read_bytes, shown

SUFFIXES = (".yaml", ".yml")
_MOST_SOURCE = 1 << 20  # bytes of a file with a check function; each sample's program has a copy
_CHECKS = ("exact", "regex", "numeric", "choice", "program", "function")
_RULES = ("regex", "after", "code", "json_key")

Text = Annotated[str, Field(min_length=1)]
Which = Literal["first", "last"]
# CPU seconds and bytes for the templates of one record; a usual record takes a millisecond
_SECONDS, _MEMORY = 10.0, 1 << 30
LARGEST = 1 << 24  # characters of a rendered text; no model's context has room for more
_UNDEFINED = re.compile(r"'(\w+)' is undefined")
Key = tuple[str, ...]


class Extract(Strict, frozen=True):
    """A rule that finds an answer in a text: one of `regex`, `after`, `code` and `json_key`.

    match: which of several matches is taken. Default: the first block of code, else the last match.
    group: of the regex, by number or name. Default: the first group, else the whole match.
    until: the text that ends the answer of `after`; "" for the end of the model's text.
    """

    regex: Text | None = None
    after: Text | None = None
    code: Text | None = None
    json_key: Text | None = None
    match: Which | None = None
    group: int | str | None = None
    until: str = "\n"

    @field_validator("regex")
    @classmethod
    def _compiled(cls, value: str | None) -> str | None:
        if value is not None:
            compile_pattern(value)
        return value

    @model_validator(mode="after")
    def _one_rule(self) -> Extract:
        given = [name for name in _RULES if getattr(self, name)]
        if len(given) != 1:
            what = f"{' and '.join(given)} exclude each other" if given else "it has no rule"
            raise ValueError(f"{what}; give one of {', '.join(_RULES)}")
        fields = self.model_fields_set
        if "until" in fields and self.after is None:
            raise ValueError('"until" belongs to "after"')
        if self.group is not None:
            if self.regex is None:
                raise ValueError('"group" belongs to "regex"')
            pattern = re.compile(self.regex)
            names = [*range(pattern.groups + 1), *pattern.groupindex]
            if self.group not in names:
                known = ", ".join(map(str, names))
                raise ValueError(f"the regex has no group {shown(self.group)}; known: {known}")
        return self


class Exact(Strict, frozen=True):
    """Equal texts. White space at the ends is left out, and all other counts as one space."""

    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_articles: bool = False


class Pattern(Strict, frozen=True):
    """A text that a regular expression matches.

    pattern: a template of the expression.
    whole: whether all of the text must match.
    """

    pattern: Text
    whole: bool = True


class Numeric(Strict, frozen=True):
    """Equal numbers, within the larger of the two tolerances.

    tolerance: the largest difference.
    relative_tolerance: the same, as a share of the right answer.
    percent: whether "50%" is 50 ("ignore") or 0.5 ("fraction").
    match: which number of the answer is taken.
    """

    tolerance: Annotated[float, Field(ge=0)] = 0.0
    relative_tolerance: Annotated[float, Field(ge=0)] = 0.0
    percent: Literal["ignore", "fraction"] = "ignore"
    match: Which = "last"


class Choice(Strict, frozen=True):
    """The letter of a choice. `letters`: those that there are."""

    letters: str = "ABCD"

    @field_validator("letters")
    @classmethod
    def _letters(cls, value: str) -> str:
        if not re.fullmatch("[A-Z]{2,26}", value) or len(set(value)) < len(value):
            raise ValueError("2 to 26 different capital letters are needed, such as ABCD")
        return value


class Tests(Strict, frozen=True):
    """Tests that run with the answer, a Python program, in the sandbox.

    tests, setup, prefix: templates. `setup` runs before the tests. `prefix` stands before the
        answer, such as "{{ prompt }}" if the answer continues it.
    names: names of the program that the tests use. Default: those that `tests` reads and does not
        define.
    """

    tests: Text
    setup: str = ""
    prefix: str = ""
    names: tuple[Text, ...] | None = None


class Function(Strict, frozen=True):
    """A Python function that runs in the sandbox: name(answer, record) returns True or False.

    file: relative to the YAML file.
    """

    file: Text
    name: str = "check"

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not value.isidentifier():
            raise ValueError(f"{shown(value)} is not the name of a function")
        return value


class CheckOptions(Strict, frozen=True):
    """How an answer is checked: one of these."""

    exact: Exact | None = None
    regex: Pattern | None = None
    numeric: Numeric | None = None
    choice: Choice | None = None
    program: Tests | None = None
    function: Function | None = None

    @field_validator("exact", "numeric", "choice", mode="before")
    @classmethod
    def _defaults(cls, value: Any) -> Any:
        return {} if value is None else value  # "numeric:" without options

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if isinstance(given, str):  # "check: numeric"
            if given not in _CHECKS:
                raise ValueError(f"there is no check {shown(given)}; {nearest(given, _CHECKS)}")
            given = {given: {}}
        if isinstance(given, dict) and len(given) != 1:
            raise ValueError(f"one of {', '.join(_CHECKS)} is needed, not {len(given)} of them")
        return given

    @property
    def needs_answer(self) -> bool:
        """Whether the right answer must be in the data."""
        return (self.exact or self.numeric or self.choice) is not None


class Examples(Strict, frozen=True):
    """Solved problems that come before the problem of the prompt.

    records: the examples. `data`: a file of them, or hf:NAME. Default: the task's own data.
    number: how many are used. Default: all `records`, or 5.
    seed: chooses them. All problems have the same examples, but a problem is never its own.
    target: a template of the text that follows the prompt of an example.
    separator: the text after each example of a raw prompt.
    chat: whether chats have them too, as earlier turns.
    """

    target: Text
    records: tuple[dict[str, Any], ...] | None = Field(None, min_length=1)
    data: Text | None = None
    number: int | None = Field(None, ge=1, le=1000)
    seed: int = Field(0, ge=0)
    separator: str = "\n\n"
    chat: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> Examples:
        if self.records is not None and self.data is not None:
            raise ValueError('"records" and "data" exclude each other')
        if "seed" in self.model_fields_set and self.records is not None and self.number is None:
            raise ValueError('"seed" has no effect, because all "records" are used')
        return self

    @property
    def count(self) -> int:
        """The number of examples of a prompt."""
        return self.number or len(self.records or range(5))


class SamplingDefaults(Strict, frozen=True):
    """The task's own sampling. A pair and the options of a command take precedence."""

    temperature: Annotated[float, Field(ge=0)] = 0.2
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    max_new_tokens: Annotated[int, Field(ge=1)] = 512


class TaskFile(Strict, frozen=True):
    """A task. `folder` is that of the file, for relative paths; it is not a key.

    data: a file relative to the YAML file, or hf:NAME[:CONFIG][:SPLIT].
    id: the field with the name of a problem. Default: the task's name and the record's number.
    fields: templates of further fields, which later ones and all templates below can use.
    prompt, question: templates of the text that a model continues and of a chat's question.
    answer: a template of the right answer. `answers`: an expression that gives a list of them.
    """

    name: str
    data: Text
    check: CheckOptions
    id: Text | None = None
    fields: dict[str, str] = Field(default_factory=dict)
    prompt: Text | None = None
    question: Text | None = None
    system: Text | None = None
    examples: Examples | None = None
    answer: Text | None = None
    answers: Text | None = None
    stop: tuple[Text, ...] = ()
    extract: tuple[Extract, ...] = ()
    sampling: SamplingDefaults = SamplingDefaults()
    prompt_format: Literal["auto", "raw", "strip", "strip-nl", "chat"] = "auto"
    folder: Path | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        # It becomes a part of file names.
        if not re.fullmatch(r"[A-Za-z0-9_+.-]{1,80}", value) or value.startswith("."):
            raise ValueError(
                f"{shown(value)} is no name of a task; use letters, digits and _ + . -"
            )
        return value

    @field_validator("fields")
    @classmethod
    def _fields(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"{shown(name)} is no name that a template can use")
        return value

    @field_validator("extract", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> Any:
        return (value,) if isinstance(value, dict) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _rules_between_keys(self) -> TaskFile:
        if self.prompt is None and self.question is None:
            raise ValueError('it needs the key "prompt" (for raw text) or "question" (for chats)')
        if self.answer is not None and self.answers is not None:
            raise ValueError('"answer" and "answers" exclude each other')
        given = self.answer is not None or self.answers is not None
        if self.check.needs_answer and not given:
            raise ValueError('it needs the key "answer", which the check compares with')
        if given and not self.check.needs_answer:
            raise ValueError('"answer" has no effect with this check; leave it out')
        if self.question is None and self.system is not None:
            raise ValueError('"system" belongs to chats, which need the key "question"')
        self._refuse_keys_without_effect()
        if self.question is None and self.prompt_format == "chat":
            raise ValueError('"prompt_format" chat needs the key "question"')
        if self.prompt is None and self.prompt_format not in ("auto", "chat"):
            raise ValueError(f'"prompt_format" {self.prompt_format} needs the key "prompt"')
        return self

    def _refuse_keys_without_effect(self) -> None:
        """Raise ValueError for keys of raw prompts in a file that has chats only."""
        if self.prompt is not None:
            return
        if self.stop:
            raise ValueError('"stop" belongs to raw prompts, which need the key "prompt"')
        if self.examples is not None and not self.examples.chat:
            raise ValueError('"examples" have no effect with "chat" false and no "prompt"')


class Loaded(NamedTuple):
    """A task file that has been read, the lines of its keys, and the source of its function."""

    options: TaskFile
    located: Located
    source: str


def read_packaged(name: str) -> Loaded:
    """Read a task file that bass has, whose data may lie beside it."""
    folder = Path(__file__).parent
    return _parse((folder / f"{name}.yaml").read_bytes(), f"{name}.yaml", folder)


def read_task_file(path: str) -> Loaded:
    """Read a task file. UserError names file, line and key."""
    place = Path(os.path.expanduser(path))
    try:
        content = read_bytes(place, MOST_YAML)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot read the task file: {reason}") from None
    return _parse(content, path, place.parent.absolute())


def _parse(content: bytes, place: str, folder: Path | None) -> Loaded:
    options, located = parse_model(
        content,
        TaskFile,
        place,
        kind="a task file is a mapping with at least the keys data, prompt or question, and check",
        folder=folder,
    )
    source = ""
    if options.check.function is not None:
        source = _read_source(options.check.function, options, located)
    return Loaded(options, located, source)


def _read_source(function: Function, options: TaskFile, located: Located) -> str:
    """Return the text of the file with the check function, which defines it at the top level."""
    key = located.at("check", "function", "file")
    path = Path(os.path.expanduser(function.file))
    path = path if options.folder is None else options.folder / path
    try:
        source = read_bytes(path, _MOST_SOURCE).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{key}: {path}: the text is not valid UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{key}: {path}: cannot read it: {reason}") from None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", None) or error
        raise UserError(f"{key}: {path}:{line}: not valid Python: {reason}") from None
    found = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    if function.name not in found:
        known = f"it defines {', '.join(found)}" if found else "it defines none"
        raise UserError(f"{key}: {path}: there is no function {function.name}; {known}")
    return source


def templates_of(options: TaskFile) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each key that holds a template, and the template."""
    for name, text in options.fields.items():
        yield ("fields", name), text
    plain = {"prompt": options.prompt, "question": options.question, "answer": options.answer}
    for name, template in plain.items():
        if template is not None:
            yield (name,), template
    if options.check.regex is not None:
        yield ("check", "regex", "pattern"), options.check.regex.pattern
    if (tests := options.check.program) is not None:
        yield ("check", "program", "tests"), tests.tests
        yield ("check", "program", "setup"), tests.setup
        yield ("check", "program", "prefix"), tests.prefix


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression. ValueError if it is not valid."""
    if not is_unicode(pattern):
        raise ValueError("it contains half of a surrogate pair, which is not valid text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about future meanings of rare expressions
            return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown(pattern)} is no regular expression: {error}") from None


class TemplateError(ValueError):
    """A template that cannot be rendered, with the path of its key."""

    def __init__(self, key: Key, reason: str):
        super().__init__(reason)
        self.key = key


class Templates:
    """The templates of a file.

    Args:
        fields: templates by the names of further fields. Later ones can use earlier ones.
        texts: templates by key.
        lists: expressions by key, whose values are lists.
    """

    def __init__(
        self, fields: Mapping[str, str], texts: Mapping[Key, str], lists: Mapping[Key, str]
    ) -> None:
        import jinja2.sandbox  # before the child is forked

        del jinja2
        self._call = Limited(_renderer(fields, texts, lists), seconds=_SECONDS, memory=_MEMORY)
        self._any = next(iter(texts), ("fields",))

    def render(self, record: Mapping[str, Any]) -> dict[Key, Any]:
        """Render all templates with the fields of a record.

        Returns:
            A text for each template and a list of texts for each expression, by key.

        Raises:
            TemplateError: a template is not valid, or the record does not have a field.
        """
        try:
            rendered = json.loads(self._call(dict(record)))
        except RefusalError as error:
            raise TemplateError(self._any, str(error)) from None
        if "fault" in rendered:
            key, reason = rendered["fault"]
            raise TemplateError(tuple(key), reason)
        return {tuple(key): value for key, value in rendered["values"]}


def _renderer(
    fields: Mapping[str, str], texts: Mapping[Key, str], lists: Mapping[Key, str]
) -> Callable[[dict[str, Any]], bytes]:
    """Return the function for the child process: from a record to JSON."""
    compiled: dict[Key, Callable[[dict[str, Any]], Any]] = {}

    def value_of(key: Key, template: str, scope: dict[str, Any]) -> Any:
        if key not in compiled:
            compiled[key] = _compiled(template, is_expression=key in lists)
        return compiled[key](scope)

    def render(record: dict[str, Any]) -> bytes:
        import jinja2

        scope = {"record": record, **record}
        values = list[tuple[Key, Any]]()
        key: Key = ("fields",)
        try:
            for name, template in fields.items():
                key = ("fields", name)
                scope[name] = value_of(key, template, scope)
            for key, template in texts.items():
                values.append((key, value_of(key, template, scope)))
            for key, template in lists.items():
                values.append((key, _texts(value_of(key, template, scope))))
        except jinja2.UndefinedError as error:
            reason = str(error.message)
            if found := _UNDEFINED.match(reason):
                reason += f"; {nearest(found[1], scope)}"
            return json.dumps({"fault": (key, reason)}).encode()
        except jinja2.TemplateSyntaxError as error:
            return json.dumps({"fault": (key, f"line {error.lineno}: {error.message}")}).encode()
        except MemoryError:
            raise
        except Exception as error:  # any kind: a template calls methods of the data
            reason = f"{type(error).__name__}: {error}"[:500]
            return json.dumps({"fault": (key, reason)}).encode()
        return json.dumps({"values": values}).encode()

    return render


def _compiled(template: str, *, is_expression: bool) -> Callable[[dict[str, Any]], Any]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr  # a value as Python code, for tests
    if is_expression:
        expression = environment.compile_expression(template, undefined_to_none=False)
        return lambda scope: expression(**scope)
    text = environment.from_string(template)

    def render(scope: dict[str, Any]) -> str:
        rendered = text.render(**scope)
        if len(rendered) > LARGEST:
            raise ValueError(f"its text has {len(rendered)} characters; the limit is {LARGEST}")
        return rendered

    return render


def _texts(value: Any) -> Sequence[str]:
    """Return a list of texts. ValueError if the value is no list or is empty."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"a list of answers is needed, not {value!r:.80}")
    if any(isinstance(one, bool) or not isinstance(one, (str, int, float)) for one in value):
        raise ValueError(f"texts and numbers are needed, not {value!r:.80}")
    return [str(one) for one in value]
