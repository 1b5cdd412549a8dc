"""Read prompts from files, standard input and Hugging Face datasets.

`check_prompts` reads a source once before a model is loaded; `read_prompts` streams it afterwards.
A fault is a UserError that names file, line and field. A field with a reserved name, such as
`temperature`, is a fault; all other fields become `meta`. Prompts are not tokenised here.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import itertools
import json
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from bass_cli.errors import MachineError, UserError, nearest
from bass_cli.io.readers import LONGEST_LINE, READERS, format_of, hub_records
from bass_cli.io.reading import is_unicode, shown, whole
from bass_cli.io.reading import text as text_of
from bass_cli.io.reserved import fault_of, reserved_name
from bass_cli.io.shards import Shard, held_by

IN_MEMORY = 64 * 2**20
BLOCK = 2**20
_HINTS = 9  # how many field names an error message lists
_KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
_KINDS |= {dict: "an object", type(None): "null"}
_ROLES = ("system", "user", "assistant")
_MESSAGE = ("role", "content")  # the keys of a message
# PromptDigest: the most marks, hexadecimal digits of a mark, and of the last digest
_MARKS, _MARK, _WHOLE = 512, 8, 32
_encode = json.JSONEncoder(default=str).encode
# The deepest nesting of a `meta` field. JSON reading and writing take two calls a level, and Python
# allows 1,000.
_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text or chat messages.

    Args:
        meta: The other fields of its line; they are copied to its results.
        reference: A text in which drafts may be looked up.
        place: "file:line", for error messages.
        fault: Why the prompt cannot be run, although its file is well formed; None if it can.
    """

    id: str
    text: str | None
    messages: list[dict[str, Any]] | None
    meta: dict[str, Any]
    reference: str | None
    place: str
    fault: str | None = None

    def whole(self) -> str:
        """Return the text, or the contents of the messages without the chat template."""
        return self.text or "\n".join(message["content"] for message in self.messages or ())


@dataclass(frozen=True, slots=True)
class Source:
    """A source of prompts that can be read more than once.

    `kind` is a file format or "hf". `spooled` is the content of standard input.
    """

    name: str
    kind: str
    spooled: IO[bytes] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the content at its start."""
        if self.spooled is None:
            with open(self.name, "rb") as stream:
                yield stream
        else:
            self.spooled.seek(0)
            yield self.spooled

    def digest(self) -> str | None:
        """Return the SHA-256 of the content, in hexadecimal; None for a dataset of the hub."""
        if self.kind == "hf":
            return None
        with self.open() as stream:
            summary = hashlib.sha256()
            while block := stream.read(BLOCK):
                summary.update(block)
            return summary.hexdigest()

    def digests(self) -> Iterator[str]:
        """Yield the digests of every beginning of the content that ends with a line.

        Each line gives two: without its line end and with it. One of them equals the `digest` of
        the file before lines were added at its end.
        """
        if self.kind == "hf":
            return
        with self.open() as stream:
            summary = hashlib.sha256()
            for line in stream:
                text = line.rstrip(b"\r\n")
                for part in (text, line[len(text) :]):
                    summary.update(part)
                    yield summary.hexdigest()


class PromptDigest:
    """A running digest of a job's prompts, which tells added prompts from changed ones.

    It covers everything in a prompt that reaches the lines of its samples. The digest after each
    prompt is held in memory. A manifest holds the last digest and up to 512 marks.
    """

    def __init__(self, source: Source, column: str = "prompt"):
        self._source, self._column = source, column
        self._running, self._after = hashlib.sha256(), bytearray()
        self._size = _WHOLE // 2  # bytes of one digest

    def over(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts, and add each of them."""
        for prompt in prompts:
            self.add(prompt)
            yield prompt

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        known = [prompt.id, prompt.text, prompt.messages, prompt.reference, prompt.meta]
        content = _encode([*known, prompt.fault is None])
        self._running.update(content.encode() + b"\n")
        self._after += self._running.digest()[: self._size]

    @property
    def count(self) -> int:
        """The number of prompts added so far."""
        return len(self._after) // self._size

    def record(self) -> dict[str, Any]:
        """Return the manifest's value.

        `digest` is the digest after all `count` prompts. `marks` joins the first 8 digits of the
        digests after every `stride` prompts.
        """
        stride = 1
        while self.count // stride > _MARKS:
            stride *= 2
        marks = (self.at(end)[:_MARK] for end in range(stride, self.count + 1, stride))
        last = self.at(self.count)
        return {"count": self.count, "digest": last, "stride": stride, "marks": "".join(marks)}

    def of_file(self) -> str | None:
        """Return the digest of the whole file, which manifests of older versions hold."""
        return self._source.digest()

    def compare(self, before: Any) -> Change:
        """Compare these prompts with a manifest's.

        Args:
            before: The manifest's value: a `record`, or the digest of a whole file in manifests of
                older versions.
        """
        if isinstance(before, str):
            if before == self.of_file():
                return Change(None, None, self.count)
            if before in self._source.digests():
                return Change(None, _SOME, self.count)
            return Change("the prompt file has changed, and not only at its end", None, self.count)
        try:
            count, last = whole(before["count"], least=1), text_of(before["digest"])
            stride, marks = whole(before["stride"], least=1), text_of(before["marks"])
        except (ValueError, KeyError, TypeError):
            return Change("the manifest's entry cannot be read", None, self.count)
        if count <= self.count and self.at(count) == last:
            grown = None if count == self.count else str(count)
            return Change(None, grown, self.count)
        return Change(self._first_change(count, stride, marks), None, self.count)

    def _first_change(self, count: int, stride: int, marks: str) -> str:
        """Describe the first difference, as exactly as the marks allow."""
        same, ends = 0, range(stride, min(count, self.count) + 1, stride)
        while same < len(ends) and marks.startswith(self.at(ends[same])[:_MARK], same * _MARK):
            same += 1
        first, last = same * stride + 1, min((same + 1) * stride, count)
        if first > self.count:
            return f"{count} before, {self.count} now; those after number {self.count} are missing"
        what = self._named(first) if first == last else f"one of numbers {first} to {last}"
        sizes = "" if count == self.count else f"{count} before, {self.count} now; "
        return f"{sizes}{what} has changed"

    def _named(self, number: int) -> str:
        """Name a prompt by its number from 1, its id and its place."""
        prompts = read_prompts(self._source, column=self._column)
        prompt = next(itertools.islice(prompts, number - 1, None))
        return f'number {number} (id "{shown(prompt.id)[1:-1]}", {prompt.place})'

    def at(self, count: int) -> str:
        """Return the digest after `count` prompts (at least 1), in hexadecimal."""
        return self._after[(count - 1) * self._size : count * self._size].hex()


_SOME = "an unknown number"  # of prompts, in a manifest of an older version


class Change(NamedTuple):
    """The difference between a manifest's prompts and those of this run.

    Args:
        fault: What differs; None if the manifest's prompts are the first prompts of this run.
        before: The manifest's number of prompts if there are more now, else None.
        now: The number of prompts of this run.
    """

    fault: str | None
    before: str | None
    now: int


def open_prompts(source: str, column: str | None) -> Source:
    """Open a source of prompts; UserError if `column` is given for a file without fields."""
    found = open_source(source)
    if found.kind == "txt" and column is not None:
        raise UserError(
            "--prompt-column (or BASS_PROMPT_COLUMN): a text file has no fields; leave it out"
        )
    return found


def open_source(source: str) -> Source:
    """Open "-", "hf:NAME[:CONFIG][:SPLIT]" or a path. Standard input is read to its end."""
    if source == "-":
        if sys.stdin is None:
            raise UserError("stdin: it is closed; name a prompt file, or redirect one: < FILE")
        return _spool(sys.stdin.buffer)
    if source.startswith("hf:"):
        return Source(source, "hf")
    path = Path(source)
    kind = path.suffix.lower().removeprefix(".")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{source}: this is a folder; name a prompt file")
        if not stat.S_ISREG(mode):  # it is read twice, and a device may have no end
            raise UserError(
                f"{source}: this is a pipe or a device, not a file; read it from standard input "
                f"instead: - < {source}"
            )
        path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{source}: there is no such prompt file") from None
    except OSError as error:
        raise UserError(f"{source}: cannot read the prompt file: {error.strerror}") from None
    if kind not in READERS:
        hint = nearest(path.suffix, (f".{kind}" for kind in READERS))
        raise UserError(f'{source}: a prompt file cannot end in "{path.suffix}"; {hint}')
    return Source(source, kind)


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about prompts that are all valid.

    Args:
        count: The number of prompts; None if unknown.
        longest: The longest text.
        plain: Whether any prompt is plain text, not messages.
        digest: The digest of all prompts of a file; None for a dataset of the hub.
        notes: Notes to the user about a dataset's columns.
    """

    count: int | None
    longest: str
    plain: bool
    digest: PromptDigest | None = None
    notes: tuple[str, ...] = ()


def check_prompts(
    source: Source,
    *,
    column: str,
    limit: int | None,
    shard: Shard | None = None,
    chat: bool | None = None,
) -> Checked:
    """Check every prompt, but only the first row of a hub dataset.

    Args:
        column: The field with the text.
        limit: The number of prompts to read; None for all.
        shard: If given, the facts are about this shard's prompts only.
        chat: As in `check`.
    """
    if source.kind == "hf":
        first = next(read_prompts(source, column=column, limit=1))
        notes = tuple(
            f'{source.name}: column "{name}" sets nothing; it is copied to the results as meta'
            for name in first.meta
            if reserved_name(name) is not None
        )
        return Checked(None, "", check([first], chat=chat).plain, notes=notes)
    digest = PromptDigest(source, column)
    prompts = digest.over(read_prompts(source, column=column, limit=limit))
    return replace(check(held_by(shard, prompts), chat=chat), digest=digest)


def check(prompts: Iterable[Prompt], *, chat: bool | None = None) -> Checked:
    """Read all prompts and return facts about them. UserError at messages if `chat` is False."""
    count, longest, plain = 0, "", False
    for prompt in prompts:
        if chat is False and prompt.messages is not None:
            raise UserError(f"{prompt.place}: the prompt has messages, but --no-chat was given")
        count, longest, plain = (
            count + 1,
            max(longest, prompt.whole(), key=len),
            plain or prompt.text is not None,
        )
    return Checked(count, longest, plain)


def read_prompts(
    source: Source | str, *, column: str = "prompt", limit: int | None = None
) -> Iterator[Prompt]:
    """Yield the prompts in order, at most `limit`; UserError at a fault, or if there are none."""
    opened = open_source(source) if isinstance(source, str) else source
    name = "stdin" if opened.spooled else opened.name
    lines = enumerate(itertools.islice(_records(opened, name, column), limit))
    by_line, columns = opened.kind == "txt", opened.kind == "hf"
    yield from _distinct(
        name,
        (
            _to_prompt(
                record,
                str(line - 1 if by_line else index),
                column,
                f"{name}:{line}",
                columns=columns,
            )
            for index, (line, record) in lines
        ),
    )


def prompts_of(
    items: Iterable[str | Mapping[str, Any] | Prompt], *, column: str = "prompt"
) -> Iterator[Prompt]:
    """Yield Prompts for texts or mappings, which have the fields of a prompt line.

    An item without an id is numbered, from 0.
    """
    yield from _distinct(
        "prompts",
        (
            item
            if isinstance(item, Prompt)
            else _to_prompt(
                {column: item} if isinstance(item, str) else item,
                str(number),
                column,
                f"prompts[{number}]",
            )
            for number, item in enumerate(items)
        ),
    )


def _distinct(name: str, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yield the prompts; UserError if two have the same id, or if there are none."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            _refuse(
                prompt.place,
                "id",
                f'"{shown(prompt.id)[1:-1]}" is also the id of {seen[prompt.id]}',
            )
        seen[prompt.id] = prompt.place
        yield prompt
    if not seen:
        raise UserError(f"{name}: it contains no prompts")


def _records(source: Source, name: str, column: str) -> Iterator[tuple[int, Any]]:
    if source.kind == "hf":
        yield from hub_records(source.name)
        return
    with source.open() as stream:
        for line, record in READERS[source.kind](stream, name):
            yield line, {column: record} if source.kind == "txt" else record


def _refuse(place: str, field: str, reason: str) -> NoReturn:
    raise UserError(f'{place}: field "{field}": {reason}')


def _to_prompt(
    record: Any, default_id: str, column: str, place: str, *, columns: bool = False
) -> Prompt:
    """Make a Prompt of one record.

    `columns`: the fields are a dataset's columns, which its author named. Columns with the names
    of settings describe the data and become meta.
    """
    if not isinstance(record, Mapping):
        raise UserError(
            f'{place}: a prompt is an object like {{"prompt": "..."}}, not {_kind_of(record)}'
        )
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
    reference = fields.pop("reference", None)
    if reference is not None:
        _check_text(reference, "reference", place, may_be_empty=True)
    identity = fields.pop("id", default_id)
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    _check_text(identity, "id", place)
    for key, value in fields.items():
        if (refused := fault_of(key, value, columns=columns)) is not None:
            _refuse(place, *refused)
    fields = _with_meta(fields, place)
    fault = (
        None
        if is_unicode(identity)
        else f'{place}: field "id": it contains half of a surrogate pair, which is not valid text'
    )
    for key in [key for key, value in fields.items() if _is_deeper(value, _DEPTH)]:
        del fields[key]  # the line with this error could not be written with it
        fault = f'{place}: field "{key}": it is nested more than {_DEPTH} levels deep'
    return Prompt(identity, text, messages, fields, reference, place, fault)


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

    UserError at anything that a chat template might drop or misread.
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
        if role not in _ROLES:
            hint = 'use "system"' if role == "developer" else nearest(role, _ROLES)
            _refuse(place, f"{here}.role", f"{shown(role)} is not a role; {hint}")
        for key in message:
            if key not in _MESSAGE:
                _refuse(
                    place,
                    f"{here}.{shown(key)[1:-1]}",
                    "a message has role and content; chat templates may drop other keys",
                )
        if isinstance(message.get("content"), list):
            _refuse(place, f"{here}.content", "it must be one string, not a list of parts")
        _check_text(message.get("content"), f"{here}.content", place, may_be_empty=True)
        found.append(message)
    if found[-1]["role"] == "assistant":
        _refuse(
            place,
            f"messages[{len(found) - 1}].role",
            "the last message is the assistant's; bass cannot continue an answer; end with a user "
            "message",
        )
    return found


def _spool(stream: IO[bytes]) -> Source:
    spooled = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
    for block in _until_fault(stream):
        try:
            spooled.write(block)
        except OSError as error:
            raise MachineError(
                f"stdin: input of more than {IN_MEMORY >> 20} MB needs a temporary file: "
                f"{error.strerror}; set TMPDIR to a folder with free space, or name a prompt file"
            ) from None
    source = Source("-", "txt", spooled)
    with source.open() as lines:
        return Source("-", format_of(lines), spooled)


def _until_fault(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield standard input in blocks, up to its end or just beyond a fault.

    Input that is not UTF-8, or has no line ends, may be endless. The format's reader reports the
    fault.
    """
    decoder, length = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        try:
            block = (
                stream.read1(BLOCK) if isinstance(stream, io.BufferedReader) else stream.read(BLOCK)
            )
        except OSError as error:
            raise UserError(f"stdin: cannot read it: {error.strerror}") from None
        if not block:
            return
        yield block
        end = block.rfind(b"\n")
        length = length + len(block) if end < 0 else len(block) - end - 1
        try:
            decoder.decode(block)
        except UnicodeDecodeError:
            return
        if length > LONGEST_LINE:
            return
