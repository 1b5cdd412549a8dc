"""Where prompts come from: .jsonl, .json, .txt, .parquet, stdin or a Hugging Face dataset, read one
at a time.

Nothing is tokenised here. `check_prompts` walks a source once before a model is loaded,
`read_prompts` streams it afterwards; every fault is a UserError that names file, line and field.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import itertools
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from bass_cli.errors import MachineError, UserError, nearest
from bass_cli.io.readers import LONGEST_LINE, READERS, format_of, hub_records
from bass_cli.io.reading import is_unicode, shown
from bass_cli.io.shards import Shard, held_by

IN_MEMORY = 64 * 2**20
BLOCK = 2**20
_HINTS = 9  # fields that an error names
_KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
_KINDS |= {dict: "an object", type(None): "null"}
# of a field under `meta`: writing and reading JSON take two calls a level, of the 1,000 that Python
# allows
_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text or chat messages. `place` is "file:line" for error messages, `meta`
    all other fields. `fault`: why there can be no samples of it, though the file is well formed."""

    id: str
    text: str | None
    messages: list[dict[str, Any]] | None
    meta: dict[str, Any]
    reference: str | None
    place: str
    fault: str | None = None

    def whole(self) -> str:
        """All of its text; that of messages without what a chat template puts around them."""
        return self.text or "\n".join(message["content"] for message in self.messages or ())


@dataclass(frozen=True, slots=True)
class Source:
    """Something that holds prompts and can be read more than once; `spooled` is what stdin
    brought."""

    name: str
    kind: str
    spooled: IO[bytes] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The bytes from the start."""
        if self.spooled is None:
            with open(self.name, "rb") as stream:
                yield stream
        else:
            self.spooled.seek(0)
            yield self.spooled

    def digest(self) -> str | None:
        """SHA-256 of the content, in hexadecimal; None for a dataset of the hub, which only has
        its name."""
        if self.kind == "hf":
            return None
        with self.open() as stream:
            summary = hashlib.sha256()
            while block := stream.read(BLOCK):
                summary.update(block)
            return summary.hexdigest()


def open_prompts(source: str, column: str | None) -> Source:
    """`open_source`; UserError where a field is asked of lines of text."""
    found = open_source(source)
    if found.kind == "txt" and column is not None:
        raise UserError(
            "--prompt-column (or BASS_PROMPT_COLUMN): lines of text have no fields; leave it out"
        )
    return found


def open_source(source: str) -> Source:
    """The Source that "-", "hf:NAME[:CONFIG][:SPLIT]" or a path stands for; stdin is read to its
    end here."""
    if source == "-":
        if sys.stdin is None:
            raise UserError("stdin: it is closed; give a prompt file, or feed standard input")
        return _spool(sys.stdin.buffer)
    if source.startswith("hf:"):
        return Source(source, "hf")
    path = Path(source)
    kind = path.suffix.lower().removeprefix(".")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{source}: this is a folder, a prompt file is needed")
        if not stat.S_ISREG(
            mode
        ):  # a file is read more than once; a pipe is empty then, and a device may have no end
            raise UserError(
                f"{source}: this is a pipe or a device, not a file; give - in its place and feed "
                f"standard input: < {source}"
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
    """What is known of prompts that are all valid: how many there are (None: nobody knows), the
    longest text, and whether any is plain text, not messages."""

    count: int | None
    longest: str
    plain: bool


def check_prompts(
    source: Source,
    *,
    column: str,
    limit: int | None,
    shard: Shard | None = None,
    chat: bool | None = None,
) -> Checked:
    """Check every prompt (a hub dataset only has its first row checked); what is known of those
    in the shard. `chat`: as in `check`."""
    if source.kind == "hf":
        first = check(read_prompts(source, column=column, limit=1), chat=chat)
        return Checked(None, "", first.plain)
    return check(held_by(shard, read_prompts(source, column=column, limit=limit)), chat=chat)


def check(prompts: Iterable[Prompt], *, chat: bool | None = None) -> Checked:
    """What is known of these, all of which are read. UserError at messages if `chat` is False,
    which is --no-chat."""
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
    """The prompts in order, at most `limit`; UserError at the first fault, and if there is none
    at all."""
    opened = open_source(source) if isinstance(source, str) else source
    name = "stdin" if opened.spooled else opened.name
    lines = enumerate(itertools.islice(_records(opened, name, column), limit))
    by_line = opened.kind == "txt"
    yield from _distinct(
        name,
        (
            _to_prompt(record, str(line - 1 if by_line else index), column, f"{name}:{line}")
            for index, (line, record) in lines
        ),
    )


def prompts_of(
    items: Iterable[str | Mapping[str, Any] | Prompt], *, column: str = "prompt"
) -> Iterator[Prompt]:
    """The same for what a program has: texts, or mappings like the lines of a file, called by
    their numbers where they have no id."""
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
    """They themselves; UserError if two have one id, or there is none."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            _refuse(
                prompt.place,
                "id",
                f'"{shown(prompt.id)[1:-1]}" is already the id of {seen[prompt.id]}',
            )
        seen[prompt.id] = prompt.place
        yield prompt
    if not seen:
        raise UserError(f"{name}: there is no prompt in it")


def _records(source: Source, name: str, column: str) -> Iterator[tuple[int, Any]]:
    if source.kind == "hf":
        yield from hub_records(source.name)
        return
    with source.open() as stream:
        for line, record in READERS[source.kind](stream, name):
            yield line, {column: record} if source.kind == "txt" else record


def _refuse(place: str, field: str, reason: str) -> NoReturn:
    raise UserError(f'{place}: field "{field}": {reason}')


def _to_prompt(record: Any, default_id: str, column: str, place: str) -> Prompt:
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
        _refuse(place, column, f'it is missing, and there is no "messages"{hint}')
    if text is not None and messages is not None:
        _refuse(place, column, 'there is "messages" too; give one of the two')
    if text is not None:
        _check_text(text, column, place)
    else:
        _check_messages(messages, place)
    reference = fields.pop("reference", None)
    if reference is not None:
        _check_text(reference, "reference", place, may_be_empty=True)
    identity = fields.pop("id", default_id)
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    _check_text(identity, "id", place)
    fault = (
        None
        if is_unicode(identity)
        else f'{place}: field "id": it holds half of a surrogate pair, which is not text'
    )
    for key in [key for key, value in fields.items() if _is_deeper(value, _DEPTH)]:
        del fields[key]  # it could not be written to the line that says so
        fault = f'{place}: field "{key}": it is nested more than {_DEPTH} deep'
    return Prompt(identity, text, messages, fields, reference, place, fault)


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested in each other more than `most` deep."""
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


def _check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        _refuse(place, "messages", 'it must be a list of {"role", "content"}')
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            _refuse(
                place,
                f"messages[{number}]",
                f'it must be {{"role", "content"}}, not {_kind_of(message)}',
            )
        for key in ("role", "content"):
            _check_text(
                message.get(key), f"messages[{number}].{key}", place, may_be_empty=key == "content"
            )


def _spool(stream: IO[bytes]) -> Source:
    spooled = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - it lives as long as the Source
    for block in _until_fault(stream):
        try:
            spooled.write(block)
        except OSError as error:
            raise MachineError(
                f"stdin: more than {IN_MEMORY >> 20} MB need a temporary file: {error.strerror}; "
                "set TMPDIR to a folder with room, or give a prompt file"
            ) from None
    source = Source("-", "txt", spooled)
    with source.open() as lines:
        return Source("-", format_of(lines), spooled)


def _until_fault(stream: IO[bytes]) -> Iterator[bytes]:
    """Standard input block by block, to its end or just beyond a fault, which its reader will
    name: what is no text, or has no line ends, may never end."""
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
