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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from bass_cli.config.file_options import checked_tools, read_template_args
from bass_cli.config.job import Job
from bass_cli.config.line import SettingError, checked_settings, own_job
from bass_cli.config.options import LINE
from bass_cli.errors import UserError, nearest
from bass_cli.io.fields import (
    HONOURED,
    OWN,
    SYSTEM_ROLES,
    check_text,
    checked_messages,
    from_sharegpt,
    kind_of,
    refusal_of,
    refuse,
    reserved_name,
)
from bass_cli.io.readers import Source, open_source
from bass_cli.reading import is_unicode, parse_json, shown, unquoted

_MOST_OWN = 1000  # the most different settings of prompts that are kept
_CONTENT = ("messages", "conversations", "token_ids")  # fields that stand in place of a prompt
_HINTS = 9  # how many field names an error message lists
# By kind of table: the name of what separates its cells, and the separators of other tables
_SEPARATORS = {"csv": ("commas", ";\t|"), "tsv": ("tabs", ",;|")}
# The deepest nesting of a `meta` field. JSON reading and writing take two calls a level, and Python
# allows 1,000.
_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text, chat messages or token ids.

    Args:
        meta: The other fields of its line; they are copied to its results.
        reference: A text in which drafts may be looked up.
        tools: Schemas of tools for the chat template; None for the job's.
        template_args: Values of the chat template's variables, before the job's.
        place: "file:line", for error messages.
        fault: Why the prompt cannot be run, although its file is well formed; None if it can.
        settings: Its own values of the options in config/options.py's LINE, by field.
        token_ids: The whole prompt as ids of the target's tokenizer; none are added.
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
    token_ids: list[int] | None = None

    def samples(self, n: int) -> int:
        """Return the number of its samples in a job of `n` samples per prompt."""
        return int(self.settings.get("n", n))

    def own_job(self, job: Job) -> Job:
        """Return the job with its own settings. UserError if they contradict those of the job."""
        try:
            return own_job(job, self.settings)
        except SettingError as error:
            refuse(self.place, error.field, str(error))

    def whole(self) -> str | list[int]:
        """Return the text, messages and tools without the chat template, or the token ids."""
        if self.token_ids is not None:
            return self.token_ids
        if self.text is not None:
            return self.text
        parts = [str(message.get("content") or "") for message in self.messages or ()]
        more = [one["tool_calls"] for one in self.messages or () if "tool_calls" in one]
        return "\n".join(
            [*parts, *map(str, more), *([] if self.tools is None else [str(self.tools)])]
        )


def length(prompt: str | list[int]) -> int:
    """Return about how many characters a prompt, a text or token ids, has."""
    return len(prompt) if isinstance(prompt, str) else 4 * len(prompt)


def open_prompts(
    source: str, column: str | None, separator: str | None = None, id_column: str | None = None
) -> Source:
    """Open a source of prompts; UserError if a column is given for a file without fields.

    Args:
        separator: The text between the prompts of a text file; None if each line is one.
        id_column: The field that holds the id of every prompt.
    """
    found = open_source(source, separator)
    for name, given in (("prompt_column", column), ("id_column", id_column)):
        if found.kind == "txt" and given is not None:
            raise UserError(f"`{name}`: a text file has no fields; leave it out")
    return replace(found, id_column=id_column)


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
            f'{key}: "{unquoted(text)}" is not a part of a job; write NUMBER/PARTS, from 1/8 to '
            "8/8 for eight parts"
        )
    return shard


class Wanted(NamedTuple):
    """Totals over prompts, of which some have settings of their own.

    Args:
        samples: The number of samples.
        drawn: The number of samples to draw; equal ones, at temperature 0, are drawn once.
        most: The most samples of a prompt that are drawn.
        new_tokens: The most new tokens of a sample.
        random: Whether any sample has a temperature above 0.
        changes_logits: Whether any sample has penalties, a bias or forbidden tokens.
        top: The most likeliest tokens that are reported of a place.
        scores: Whether any prompt is scored.
    """

    samples: int = 0
    drawn: int = 0
    most: int = 0
    new_tokens: int = 0
    random: bool = False
    changes_logits: bool = False
    top: int = 0
    scores: bool = False

    def with_prompt(self, job: Job) -> Wanted:
        """Add a prompt. `job`: the job with the prompt's own settings."""
        drawn = 1 if job.draws_one else job.n
        return Wanted(
            self.samples + job.n,
            self.drawn + drawn,
            max(self.most, drawn),
            max(self.new_tokens, job.sampling.max_new_tokens),
            self.random or job.sampling.temperature > 0,
            self.changes_logits or job.sampling.changes_logits,
            max(self.top, job.sampling.logprobs or 0),
            self.scores or job.sampling.prompt_logprobs is not None,
        )

    def share(self, of: int) -> Wanted:
        """Return a part of them, for one of `of` workers."""
        return self._replace(samples=-(-self.samples // of), drawn=-(-self.drawn // of))


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about prompts that are all valid.

    Args:
        count: The number of prompts; None if unknown.
        longest: The longest prompt, as `whole` gives it.
        plain: Whether any prompt is plain text, not messages.
        notes: Notes to the user about a dataset's columns.
        wanted: Totals over them; None if none has settings of its own, or if unknown.
    """

    count: int | None
    longest: str | list[int]
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
    """Check every prompt, but only the first row of a dataset that is on the hub.

    Args:
        column: The field with the text.
        limit: The number of prompts to read; None for all.
        shard: If given, the facts are about this shard's prompts only.
        job: As in `check`.
        on_prompt: Called with each prompt, also with those of other shards. Not for the hub's.
    """
    strict = job is not None and job.strict_fields
    notes: tuple[str, ...] = ()
    if source.kind == "hf":
        first = next(read_prompts(source, column=column, limit=1, strict=strict))
        notes = tuple(
            f'{source.name}: column "{name}" sets nothing; it is copied to the results as meta'
            for name in first.meta
            if reserved_name(name) is not None
        )
        if source.is_remote:
            return Checked(None, "", check([first], job=job).plain, notes)
    prompts = read_prompts(source, column=column, limit=limit, strict=strict)
    return replace(check(prompts, job=job, shard=shard, on_prompt=on_prompt), notes=notes)


def check(
    prompts: Iterable[Prompt],
    *,
    job: Job | None = None,
    shard: Shard | None = None,
    on_prompt: Callable[[Prompt], None] | None = None,
) -> Checked:
    """Read all prompts and return facts about them.

    `job`: The job that they are for; None if all prompts have one length and one distribution.

    Raises:
        UserError: There are messages, but the job's `chat` is False; a prompt's own settings
            contradict the job's, or there is no job.
    """
    count, plain, wanted, own = 0, False, Wanted(), dict[str, Job]()
    alike = True  # whether no prompt has settings of its own
    longest: str | list[int] = ""
    for prompt in prompts:
        if on_prompt is not None:
            on_prompt(prompt)
        if shard is not None and not shard.holds(prompt.id):
            continue
        if job is None:
            for name in prompt.settings:
                refuse(prompt.place, name, "here all prompts have the same settings; leave it out")
        elif job.chat is False and prompt.messages is not None:
            raise UserError(f"{prompt.place}: the prompt has messages, but `chat=False` was given")
        else:
            key = repr(prompt.settings)
            if key not in own:
                if len(own) >= _MOST_OWN:  # prompts may all have their own seed
                    own.clear()
                own[key] = prompt.own_job(job)
            alike = alike and not prompt.settings
            wanted = wanted.with_prompt(own[key])
        count, plain = count + 1, plain or prompt.text is not None
        longest = max(longest, prompt.whole(), key=length)
    return Checked(count, longest, plain, wanted=None if alike else wanted)


def read_prompts(
    source: Source | str, *, column: str = "prompt", limit: int | None = None, strict: bool = False
) -> Iterator[Prompt]:
    """Yield the prompts in order, at most `limit`; UserError at a fault, or if there are none.

    `strict`: Refuse unknown fields.
    """
    opened = open_source(source) if isinstance(source, str) else source
    how = _Reading(column, opened.id_column, opened.kind == "hf", strict, opened.kind)
    plain = opened.kind == "txt"
    by_line = plain and opened.separator is None

    def prompts() -> Iterator[Prompt]:
        for index, (line, record) in enumerate(itertools.islice(opened.records(), limit)):
            fields = {column: record} if plain else record
            id_ = str(line - 1 if by_line else index)
            yield _to_prompt(fields, id_, f"{opened.label}:{line}", how)

    yield from _distinct(opened.label, prompts())


def prompts_of(
    items: Iterable[str | Mapping[str, Any] | Prompt],
    *,
    column: str = "prompt",
    id_column: str | None = None,
    strict: bool = False,
) -> Iterator[Prompt]:
    """Yield Prompts for texts or mappings, which have the fields of a prompt line.

    A text, or an item without an id, is numbered, from 0.

    `column`, `id_column`, `strict`: See _Reading.
    """
    how = _Reading(column, id_column, strict=strict)

    def prompts() -> Iterator[Prompt]:
        for number, item in enumerate(items):
            if isinstance(item, Prompt):
                yield item
            elif isinstance(item, str):
                own = how._replace(id_column=None)
                yield _to_prompt({column: item}, str(number), f"prompts[{number}]", own)
            else:
                yield _to_prompt(item, str(number), f"prompts[{number}]", how)

    yield from _distinct("prompts", prompts())


def prompts_for(job: Job, items: Iterable[str | Mapping[str, Any] | Prompt]) -> Iterator[Prompt]:
    """Yield `prompts_of` with the fields that a job names."""
    return prompts_of(
        items, column=job.prompt_column, id_column=job.id_column, strict=job.strict_fields
    )


def _distinct(name: str, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yield the prompts; UserError if two have the same id, or if there are none."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            reason = f'"{unquoted(prompt.id)}" is also the id of {seen[prompt.id]}'
            refuse(prompt.place, "id", reason)
        seen[prompt.id] = prompt.place
        yield prompt
    if not seen:
        raise UserError(f"{name}: it contains no prompts")


class _Reading(NamedTuple):
    """How records become prompts.

    Args:
        column: The field with the prompt.
        id_column: The field with the id of every prompt. None: "id", if there is one.
        columns: Whether the fields are a dataset's columns, which its author named. Columns with
            the names of settings describe the data and become meta.
        strict: Whether unknown fields are refused.
        kind: The kind of the file; "" for records of a library's user.
    """

    column: str
    id_column: str | None = None
    columns: bool = False
    strict: bool = False
    kind: str = ""


def _to_prompt(record: Any, default_id: str, place: str, how: _Reading) -> Prompt:
    """Make a Prompt of one record."""
    if not isinstance(record, Mapping):
        wanted = 'an object like {"prompt": "..."}'
        parts = '; write messages as {"messages": [...]} and token ids as {"token_ids": [...]}'
        whole = "; rename a file that is one list to .json" if how.kind == "jsonl" else parts
        listed = whole if isinstance(record, list) else ""
        raise UserError(f"{place}: a prompt is {wanted}, not {kind_of(record)}{listed}")
    fields = {key: value for key, value in record.items() if value is not None}
    if record.get(how.column, "") is None and not fields.keys() & set(_CONTENT):
        refuse(place, how.column, "it is empty")
    text, messages, ids = _take_content(fields, how, place)
    for name in HONOURED if ids is not None else ():
        if name in fields:
            refuse(place, name, "token ids are a whole prompt; leave it out")
    text, messages, chat = _as_chat(text, messages, fields, place)
    reference = fields.pop("reference", None)
    if reference is not None:
        check_text(reference, "reference", place, may_be_empty=True)
    identity = _take_id(fields, how.id_column, default_id, place)
    settings = {} if how.columns else _take_settings(fields, place)
    for key, value in fields.items():
        if (refused := refusal_of(key, value, columns=how.columns)) is not None:
            refuse(place, *refused)
    if how.strict:
        _refuse_unknown(fields, how.column, place)
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
        identity,
        text,
        messages,
        fields,
        reference,
        place,
        fault,
        settings=settings,
        token_ids=ids,
        **chat,
    )


def _take_id(fields: dict[str, Any], column: str | None, default: str, place: str) -> str:
    """Take the id out of `fields`: that of `column`, or "id", or the default."""
    if column is not None and column not in fields:
        refuse(place, column, "it is missing; `id_column` names it")
    identity = fields.pop(column or "id", default)
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    check_text(identity, column or "id", place)
    return str(identity)


def _take_content(
    fields: dict[str, Any], how: _Reading, place: str
) -> tuple[str | None, list[dict[str, Any]] | None, list[int] | None]:
    """Take the prompt out of `fields`: its text, its messages or its token ids.

    Beside a prompt, conversations and ids in a dataset's columns describe the data.
    """
    column = how.column
    names = dict.fromkeys((column, *_CONTENT))
    given = {name: fields.pop(name) for name in names if name in fields}
    for name in ("conversations", "token_ids"):
        data = how.columns or isinstance(given.get(name), str)
        if data and name != column and given.keys() & {column, "messages"} and name in given:
            fields[name] = given.pop(name)
    if not given:
        _refuse_missing(fields, how, place)
    if len(given) > 1:
        first, second, *_ = given
        refuse(place, first, f'there is "{second}" too; give one of the two')
    ((name, value),) = given.items()
    if name == "token_ids":
        return None, None, _checked_ids(value, place)
    if name == "conversations":
        value, answer = from_sharegpt(value, place)
        if answer is not None and fields.setdefault("answer", answer) != answer:
            refuse(place, "answer", "the last answer of the conversation is carried by this name")
    elif name != "messages" and not _is_conversation(value):
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            refuse(place, column, 'it must be a string, not a list; token ids are "token_ids"')
        check_text(value, column, place)
        return value, None, None
    return None, checked_messages(value, place), None


def _is_conversation(value: Any) -> bool:
    """Whether a prompt is a list of messages, as in conversations of trl's data sets."""
    listed = isinstance(value, list) and bool(value)
    return listed and all(isinstance(one, Mapping) and "role" in one for one in value)


def _refuse_missing(fields: Mapping[str, Any], how: _Reading, place: str) -> NoReturn:
    """Raise the error of a record without a prompt. Name a field in its place."""
    for key, value in fields.items():
        refused = refusal_of(key, value, columns=how.columns)
        if key not in LINE and refused is not None:
            refuse(place, *refused)
    known = [unquoted(key) for key in itertools.islice(fields, _HINTS)]
    hint = f"; {nearest(how.column, known)}; `prompt_column` names the field" if fields else ""
    right, wrong = _SEPARATORS.get(how.kind, ("", ""))
    if len(fields) == 1 and any(one in next(iter(fields)) for one in wrong):
        hint = f'; a table with the one column "{known[0]}" needs {right} between its cells'
    other = "" if how.column == "messages" else ', and there is no "messages"'
    refuse(place, how.column, f"it is missing{other}{hint}")


def _checked_ids(ids: Any, place: str) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else ids  # an array or a tensor
    valid = isinstance(listed, (list, tuple)) and all(type(one) is int for one in listed)
    if not valid or not listed or min(listed) < 0:
        reason = f"it must be a list of token ids, as in [1, 2], not {shown(ids)}"
        refuse(place, "token_ids", f'{reason}; to copy it to the results, put it into "meta"')
    return list(listed)


def _refuse_unknown(fields: Mapping[str, Any], column: str, place: str) -> None:
    for key, value in fields.items():
        if key == "meta" and isinstance(value, Mapping):
            continue
        known = nearest(str(key), (column, *OWN, *LINE))
        refuse(place, unquoted(key), f"unknown field, and `strict_fields` is on; {known}")


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
                refuse(place, name, str(error))
    if text is not None and (found or system is not None):
        text, messages = None, [{"role": "user", "content": text}]
    if system is not None and messages is not None:
        check_text(system, "system", place)
        if messages[0]["role"] in SYSTEM_ROLES:
            refuse(place, "system", 'there is a system message in "messages" too; give one of them')
        messages = [{"role": "system", "content": system}, *messages]
    return text, messages, found


def _take_settings(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Remove a prompt's own settings from its fields, and return them checked."""
    given = {key: fields.pop(key) for key in LINE if key in fields}
    try:
        return checked_settings(given) if given else {}
    except SettingError as error:
        refuse(place, error.field, str(error))


def _with_meta(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Merge the fields of an object "meta" into the other fields."""
    given = fields.get("meta")
    if not isinstance(given, Mapping):
        return fields
    others = {key: value for key, value in fields.items() if key != "meta"}
    for key in given:
        if key in others:
            refuse(place, "meta", f'"{unquoted(key)}" is also a field of the prompt')
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
