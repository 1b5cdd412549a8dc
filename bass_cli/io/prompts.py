"""Make prompts of the records of a file (io/readers.py), of texts or of mappings, and check them.

`check_prompts` reads a source once before a model is loaded; `read_prompts` streams it afterwards.
A fault is a UserError that names file, line and field. Some options of a job are fields too
(`settings`); a field with another reserved name, such as `tools`, is a fault; the rest becomes
`meta`. Prompts are not tokenised here. A Shard selects the prompts of one part of a job.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from bass_cli.config.chats import checked_tools, read_template_args
from bass_cli.config.job import Job
from bass_cli.config.line import SettingError, checked_settings, own_job
from bass_cli.config.options import LINE
from bass_cli.errors import UserError, nearest
from bass_cli.io.fields import OWN, refusal_of, reserved_name
from bass_cli.io.readers import Source, open_source
from bass_cli.reading import is_unicode, parse_json, shown

_HINTS = 9  # how many field names an error message lists
_KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
SYSTEM_ROLES = ("system", "developer")  # a conversation has its system message in the first place
# The keys of a message. Those that a template would drop are refused when it is rendered.
_ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool", "function")  # others may occur too
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content",
            "reasoning", "thinking")  # fmt: skip
# The deepest nesting of a `meta` field. JSON reading and writing take two calls a level, and Python
# allows 1,000.
_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text or chat messages.

    Args:
        meta: The other fields of its line; they are copied to its results.
        reference: A text in which drafts may be looked up.
        tools: Schemas of tools for the chat template; None for the job's.
        template_args: Values of the chat template's variables, before the job's.
        place: "file:line", for error messages.
        fault: Why the prompt cannot be run, although its file is well formed; None if it can.
        settings: Its own values of the options in config/options.py's LINE, by field.
    """

    id: str
    text: str | None
    messages: list[dict[str, Any]] | None
    meta: dict[str, Any]
    reference: str | None
    place: str
    fault: str | None = None
    tools: list[Any] | None = None
    template_args: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def samples(self, n: int) -> int:
        """Return the number of its samples in a job of `n` samples per prompt."""
        return int(self.settings.get("n", n))

    def own_job(self, job: Job) -> Job:
        """Return the job with its own settings. UserError if they contradict those of the job."""
        try:
            return own_job(job, self.settings)
        except SettingError as error:
            _refuse(self.place, error.field, str(error))

    def whole(self) -> str:
        """Return the text, or messages and tools without the chat template."""
        if self.text is not None:
            return self.text
        parts = [str(message.get("content") or "") for message in self.messages or ()]
        more = [one["tool_calls"] for one in self.messages or () if "tool_calls" in one]
        return "\n".join(
            [*parts, *map(str, more), *([] if self.tools is None else [str(self.tools)])]
        )


def open_prompts(source: str, column: str | None, separator: str | None = None) -> Source:
    """Open a source of prompts; UserError if `column` is given for a file without fields.

    `separator`: The text between the prompts of a text file; None if each line is one.
    """
    found = open_source(source, separator)
    if found.kind == "txt" and column is not None:
        raise UserError("`prompt_column`: a text file has no fields; leave it out")
    return found


class Shard(NamedTuple):
    """Part `number`, from 1, of `of` parts of a job, as in `--shard 2/8`.

    The part of a prompt depends on its id alone. So parts run independently, and prompts stay in
    their parts when others are added to the file. io/merging.py makes one file of the parts.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def holds(self, id_: str) -> bool:
        """Whether the prompt with this id belongs to this part."""
        return shard_of(id_, self.of) == self


def shard_of(id_: str, of: int) -> Shard:
    """Return the part, of `of` parts, that the prompt with this id belongs to."""
    spelled = id_.encode("utf-8", "surrogatepass")  # an id may hold lone surrogates
    digest = hashlib.blake2b(spelled, digest_size=8).digest()
    return Shard(int.from_bytes(digest, "big") % of + 1, of)


def held_by(shard: Shard | None, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yield the prompts that belong to the shard; all prompts if there is none."""
    return (prompt for prompt in prompts if shard is None or shard.holds(prompt.id))


def parse_shard(text: str, key: str = "`shard`") -> Shard:
    """Parse "2/8"; a UserError begins with `key`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.of:
        raise UserError(
            f'{key}: "{shown(text)[1:-1]}" is not a part of a job; write NUMBER/PARTS, from 1/8 to '
            "8/8 for eight parts"
        )
    return shard


class Wanted(NamedTuple):
    """What prompts ask for, of which some have settings of their own.

    Args:
        samples: The number of samples.
        drawn: The number of samples to draw; equal ones, at temperature 0, are drawn once.
        most: The most samples of a prompt that are drawn.
        new_tokens: The most new tokens of a sample.
        random: Whether any sample has a temperature above 0.
    """

    samples: int = 0
    drawn: int = 0
    most: int = 0
    new_tokens: int = 0
    random: bool = False

    def with_prompt(self, job: Job) -> Wanted:
        """Add a prompt. `job`: the job with the prompt's own settings."""
        drawn = 1 if job.draws_one else job.n
        return Wanted(
            self.samples + job.n,
            self.drawn + drawn,
            max(self.most, drawn),
            max(self.new_tokens, job.sampling.max_new_tokens),
            self.random or job.sampling.temperature > 0,
        )

    def share(self, of: int) -> Wanted:
        """Return a part of them, for one of `of` workers."""
        return self._replace(samples=-(-self.samples // of), drawn=-(-self.drawn // of))


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about prompts that are all valid.

    Args:
        count: The number of prompts; None if unknown.
        longest: The longest text.
        plain: Whether any prompt is plain text, not messages.
        notes: Notes to the user about a dataset's columns.
        wanted: What they ask for; None if none has settings of its own, or if unknown.
    """

    count: int | None
    longest: str
    plain: bool
    notes: tuple[str, ...] = ()
    wanted: Wanted | None = None


def check_prompts(
    source: Source,
    *,
    column: str,
    limit: int | None,
    shard: Shard | None = None,
    job: Job | None = None,
    on_prompt: Callable[[Prompt], None] | None = None,
) -> Checked:
    """Check every prompt, but only the first row of a hub dataset.

    Args:
        column: The field with the text.
        limit: The number of prompts to read; None for all.
        shard: If given, the facts are about this shard's prompts only.
        job: As in `check`.
        on_prompt: Called with each prompt of a file, also with those of other shards.
    """
    strict = job is not None and job.strict_fields
    if source.kind == "hf":
        first = next(read_prompts(source, column=column, limit=1, strict=strict))
        known = check([first], job=job)
        notes = tuple(
            f'{source.name}: column "{name}" sets nothing; it is copied to the results as meta'
            for name in first.meta
            if reserved_name(name) is not None
        )
        return Checked(None, "", known.plain, notes)
    prompts = read_prompts(source, column=column, limit=limit, strict=strict)
    return check(prompts, job=job, shard=shard, on_prompt=on_prompt)


def check(
    prompts: Iterable[Prompt],
    *,
    job: Job | None = None,
    shard: Shard | None = None,
    on_prompt: Callable[[Prompt], None] | None = None,
) -> Checked:
    """Read all prompts and return facts about them.

    `job`: The job that they are for; None if it has one length and law for all prompts.

    Raises:
        UserError: There are messages, but the job's `chat` is False; a prompt's own settings
            contradict the job's, or there is no job.
    """
    count, longest, plain, wanted, own = 0, "", False, Wanted(), dict[str, Job]()
    for prompt in prompts:
        if on_prompt is not None:
            on_prompt(prompt)
        if shard is not None and not shard.holds(prompt.id):
            continue
        if job is None:
            for name in prompt.settings:
                _refuse(prompt.place, name, "here all prompts have the same settings; leave it out")
        elif job.chat is False and prompt.messages is not None:
            raise UserError(f"{prompt.place}: the prompt has messages, but `chat=False` was given")
        else:
            key = repr(prompt.settings)
            if key not in own:
                own[key] = prompt.own_job(job)
            wanted = wanted.with_prompt(own[key])
        count, plain = count + 1, plain or prompt.text is not None
        longest = max(longest, prompt.whole(), key=len)
    alike = not own.keys() - {repr({})}
    return Checked(count, longest, plain, wanted=None if alike else wanted)


def read_prompts(
    source: Source | str, *, column: str = "prompt", limit: int | None = None, strict: bool = False
) -> Iterator[Prompt]:
    """Yield the prompts in order, at most `limit`; UserError at a fault, or if there are none.

    `strict`: Refuse unknown fields.
    """
    opened = open_source(source) if isinstance(source, str) else source
    plain, columns = opened.kind == "txt", opened.kind == "hf"
    by_line = plain and opened.separator is None

    def prompts() -> Iterator[Prompt]:
        for index, (line, record) in enumerate(itertools.islice(opened.records(), limit)):
            fields = {column: record} if plain else record
            id_ = str(line - 1 if by_line else index)
            place = f"{opened.label}:{line}"
            yield _to_prompt(fields, id_, column, place, columns=columns, strict=strict)

    yield from _distinct(opened.label, prompts())


def prompts_of(
    items: Iterable[str | Mapping[str, Any] | Prompt],
    *,
    column: str = "prompt",
    strict: bool = False,
) -> Iterator[Prompt]:
    """Yield Prompts for texts or mappings, which have the fields of a prompt line.

    An item without an id is numbered, from 0. `strict`: Refuse unknown fields.
    """

    def prompts() -> Iterator[Prompt]:
        for number, item in enumerate(items):
            if isinstance(item, Prompt):
                yield item
            else:
                fields = {column: item} if isinstance(item, str) else item
                place = f"prompts[{number}]"
                yield _to_prompt(fields, str(number), column, place, strict=strict)

    yield from _distinct("prompts", prompts())


def _distinct(name: str, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yield the prompts; UserError if two have the same id, or if there are none."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            reason = f'"{shown(prompt.id)[1:-1]}" is also the id of {seen[prompt.id]}'
            _refuse(prompt.place, "id", reason)
        seen[prompt.id] = prompt.place
        yield prompt
    if not seen:
        raise UserError(f"{name}: it contains no prompts")


def _refuse(place: str, field: str, reason: str) -> NoReturn:
    raise UserError(f'{place}: field "{field}": {reason}')


def _to_prompt(
    record: Any,
    default_id: str,
    column: str,
    place: str,
    *,
    columns: bool = False,
    strict: bool = False,
) -> Prompt:
    """Make a Prompt of one record.

    Args:
        columns: The fields are a dataset's columns, which its author named. Columns with the names
            of settings describe the data and become meta.
        strict: Refuse unknown fields.
    """
    if not isinstance(record, Mapping):
        wanted = 'an object like {"prompt": "..."}'
        raise UserError(f"{place}: a prompt is {wanted}, not {_kind_of(record)}")
    fields = {key: value for key, value in record.items() if value is not None}
    text = fields.pop(column, None) if column != "messages" else None
    messages = fields.pop("messages", None)
    if text is None and messages is None:
        known = [shown(key)[1:-1] for key in itertools.islice(fields, _HINTS)]
        hint = f"; {nearest(column, known)}" if fields else ""
        other = "" if column == "messages" else ', and there is no "messages"'
        _refuse(place, column, f"it is missing{other}{hint}")
    if text is not None and messages is not None:
        _refuse(place, column, 'there is "messages" too; give one of the two')
    if text is not None:
        _check_text(text, column, place)
    else:
        messages = _checked_messages(messages, place)
    text, messages, chat = _as_chat(text, messages, fields, place)
    reference = fields.pop("reference", None)
    if reference is not None:
        _check_text(reference, "reference", place, may_be_empty=True)
    identity = fields.pop("id", default_id)
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    _check_text(identity, "id", place)
    settings = {} if columns else _take_settings(fields, place)
    for key, value in fields.items():
        if (refused := refusal_of(key, value, columns=columns)) is not None:
            _refuse(place, *refused)
    if strict:
        _refuse_unknown(fields, column, place)
    fields = _with_meta(fields, place)
    fault = None
    if not is_unicode(identity):
        fault = (
            f'{place}: field "id": it contains half of a surrogate pair, which is not valid text'
        )
    for key in [key for key, value in fields.items() if _is_deeper(value, _DEPTH)]:
        del fields[key]  # the line with this error could not be written with it
        fault = f'{place}: field "{key}": it is nested more than {_DEPTH} levels deep'
    return Prompt(
        identity, text, messages, fields, reference, place, fault, settings=settings, **chat
    )


def _refuse_unknown(fields: Mapping[str, Any], column: str, place: str) -> None:
    for key, value in fields.items():
        if key == "meta" and isinstance(value, Mapping):
            continue
        known = nearest(str(key), (column, *OWN, *LINE))
        _refuse(place, shown(key)[1:-1], f"unknown field, and `strict_fields` is on; {known}")


def _as_chat(
    text: str | None, messages: list[dict[str, Any]] | None, fields: dict[str, Any], place: str
) -> tuple[str | None, list[dict[str, Any]] | None, dict[str, Any]]:
    """Take the fields of chats out of `fields`; return text, messages and those of a Prompt.

    With one of these fields a plain text becomes the user's message.
    """
    system, found = fields.pop("system", None), dict[str, Any]()
    for name, read in (("tools", checked_tools), ("template_args", read_template_args)):
        if (value := fields.pop(name, None)) is not None:
            try:
                found[name] = read(parse_json(value) if isinstance(value, str) else value)
            except ValueError as error:
                _refuse(place, name, str(error))
    if text is not None and (found or system is not None):
        text, messages = None, [{"role": "user", "content": text}]
    if system is not None and messages is not None:
        _check_text(system, "system", place)
        if messages[0]["role"] in SYSTEM_ROLES:
            _refuse(
                place, "system", 'there is a system message in "messages" too; give one of them'
            )
        messages = [{"role": "system", "content": system}, *messages]
    return text, messages, found


def _take_settings(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Remove a prompt's own settings from its fields, and return them checked."""
    given = {key: fields.pop(key) for key in LINE if key in fields}
    try:
        return checked_settings(given) if given else {}
    except SettingError as error:
        _refuse(place, error.field, str(error))


def _with_meta(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Merge the fields of an object "meta" into the other fields."""
    given = fields.get("meta")
    if not isinstance(given, Mapping):
        return fields
    others = {key: value for key, value in fields.items() if key != "meta"}
    for key in given:
        if key in others:
            _refuse(place, "meta", f'"{shown(key)[1:-1]}" is also a field of the prompt')
    return {**others, **given}


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` levels deep."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(most if level else 0):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))
        ]
    return bool(level)


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _check_text(value: Any, field: str, place: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        _refuse(place, field, f"it must be a string, not {_kind_of(value)}")
    if not value and not may_be_empty:
        _refuse(place, field, "it is empty")


def _checked_messages(messages: Any, place: str) -> list[dict[str, Any]]:
    """Return the messages without keys that are null.

    Any role may occur, because the template decides. UserError at a key or a value that a chat
    template might drop or misread.
    """
    if not isinstance(messages, list) or not messages:
        _refuse(place, "messages", 'it must be a list of {"role", "content"}')
    found = []
    for number, message in enumerate(messages):
        here = f"messages[{number}]"
        if not isinstance(message, dict):
            _refuse(place, here, f'it must be {{"role", "content"}}, not {_kind_of(message)}')
        message = {key: value for key, value in message.items() if value is not None}
        role: Any = message.get("role")
        _check_text(role, f"{here}.role", place)
        if role not in _ROLES and role.lower() in _ROLES:
            _refuse(place, f"{here}.role", f'{shown(role)}: did you mean "{role.lower()}"?')
        for key in message:
            if key not in _MESSAGE:
                reason = f"it is not a key of a message; {nearest(str(key), _MESSAGE)}"
                _refuse(place, f"{here}.{shown(key)[1:-1]}", reason)
        if isinstance(message.get("content"), list):
            _refuse(place, f"{here}.content", "it must be one string, not a list of parts")
        if "tool_calls" in message:
            message["tool_calls"] = _checked_calls(message["tool_calls"], here, place)
        if "content" in message or "tool_calls" not in message:
            _check_text(message.get("content"), f"{here}.content", place, may_be_empty=True)
        found.append(message)
    if found[-1]["role"] == "assistant" and not found[-1].get("content"):
        reason = "there is no text to continue; leave the last message out"
        _refuse(place, f"messages[{len(found) - 1}].content", reason)
    return found


def _checked_calls(calls: Any, here: str, place: str) -> list[dict[str, Any]]:
    """Return the calls of tools, with arguments as objects: templates write them as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        _refuse(place, f"{here}.tool_calls", "it must be a list of objects")
    found = []
    for number, call in enumerate(calls):
        inner = call.get("function", call)
        name = f"{here}.tool_calls[{number}]"
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            _refuse(place, name, 'it must be {"function": {"name": "...", "arguments": {...}}}')
        arguments = inner.get("arguments", {})
        try:
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            _refuse(place, f"{name}.function.arguments", str(error))
        if not isinstance(arguments, dict):
            _refuse(place, f"{name}.function.arguments", "it must be an object")
        inner = {**inner, "arguments": arguments}
        found.append({**call, "function": inner} if "function" in call else inner)
    return found
