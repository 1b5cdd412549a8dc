"""Make prompts of the records of a file (io/readers.py), of texts or of mappings, and check them.

`check_prompts` reads a source once before a model is loaded; `read_prompts` streams it afterwards.
A fault is a UserError that names file, line and field. A field with a reserved name, such as
`temperature`, is a fault; all other fields become `meta`. Prompts are not tokenised here. A Shard
selects the prompts of one part of a job.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from bass_cli.config.chats import checked_tools, read_template_args
from bass_cli.errors import UserError, nearest
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


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about prompts that are all valid.

    Args:
        count: The number of prompts; None if unknown.
        longest: The longest text.
        plain: Whether any prompt is plain text, not messages.
        notes: Notes to the user about a dataset's columns.
    """

    count: int | None
    longest: str
    plain: bool
    notes: tuple[str, ...] = ()


def check_prompts(
    source: Source,
    *,
    column: str,
    limit: int | None,
    shard: Shard | None = None,
    chat: bool | None = None,
    on_prompt: Callable[[Prompt], None] | None = None,
) -> Checked:
    """Check every prompt, but only the first row of a hub dataset.

    Args:
        column: The field with the text.
        limit: The number of prompts to read; None for all.
        shard: If given, the facts are about this shard's prompts only.
        chat: As in `check`.
        on_prompt: Called with each prompt of a file, also with those of other shards.
    """
    if source.kind == "hf":
        first = next(read_prompts(source, column=column, limit=1))
        known = check([first], chat=chat)
        notes = tuple(
            f'{source.name}: column "{name}" sets nothing; it is copied to the results as meta'
            for name in first.meta
            if _reserved_name(name) is not None
        )
        return Checked(None, "", known.plain, notes)
    prompts = read_prompts(source, column=column, limit=limit)
    return check(prompts, chat=chat, shard=shard, on_prompt=on_prompt)


def check(
    prompts: Iterable[Prompt],
    *,
    chat: bool | None = None,
    shard: Shard | None = None,
    on_prompt: Callable[[Prompt], None] | None = None,
) -> Checked:
    """Read all prompts and return facts about them. UserError at messages if `chat` is False."""
    count, longest, plain = 0, "", False
    for prompt in prompts:
        if on_prompt is not None:
            on_prompt(prompt)
        if shard is not None and not shard.holds(prompt.id):
            continue
        if chat is False and prompt.messages is not None:
            raise UserError(f"{prompt.place}: the prompt has messages, but `chat=False` was given")
        count, plain = count + 1, plain or prompt.text is not None
        longest = max(longest, prompt.whole(), key=len)
    return Checked(count, longest, plain)


def read_prompts(
    source: Source | str, *, column: str = "prompt", limit: int | None = None
) -> Iterator[Prompt]:
    """Yield the prompts in order, at most `limit`; UserError at a fault, or if there are none."""
    opened = open_source(source) if isinstance(source, str) else source
    plain, columns = opened.kind == "txt", opened.kind == "hf"
    by_line = plain and opened.separator is None

    def prompts() -> Iterator[Prompt]:
        for index, (line, record) in enumerate(itertools.islice(opened.records(), limit)):
            fields = {column: record} if plain else record
            id_ = str(line - 1 if by_line else index)
            yield _to_prompt(fields, id_, column, f"{opened.label}:{line}", columns=columns)

    yield from _distinct(opened.label, prompts())


def prompts_of(
    items: Iterable[str | Mapping[str, Any] | Prompt], *, column: str = "prompt"
) -> Iterator[Prompt]:
    """Yield Prompts for texts or mappings, which have the fields of a prompt line.

    An item without an id is numbered, from 0.
    """

    def prompts() -> Iterator[Prompt]:
        for number, item in enumerate(items):
            if isinstance(item, Prompt):
                yield item
            else:
                fields = {column: item} if isinstance(item, str) else item
                yield _to_prompt(fields, str(number), column, f"prompts[{number}]")

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
    record: Any, default_id: str, column: str, place: str, *, columns: bool = False
) -> Prompt:
    """Make a Prompt of one record.

    `columns`: the fields are a dataset's columns, which its author named. Columns with the names
    of settings describe the data and become meta.
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
    for key, value in fields.items():
        if (refused := _refusal(key, value, columns=columns)) is not None:
            _refuse(place, *refused)
    fields = _with_meta(fields, place)
    fault = None
    if not is_unicode(identity):
        fault = (
            f'{place}: field "id": it contains half of a surrogate pair, which is not valid text'
        )
    for key in [key for key, value in fields.items() if _is_deeper(value, _DEPTH)]:
        del fields[key]  # the line with this error could not be written with it
        fault = f'{place}: field "{key}": it is nested more than {_DEPTH} levels deep'
    return Prompt(identity, text, messages, fields, reference, place, fault, **chat)


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


# Settings and parts of a prompt that other tools read. Ignoring such a field would give wrong
# samples, so it is refused, with what to use instead.
_OPTIONS = {  # by option, as messages name it
    "sampling.max_new_tokens": "max_new_tokens max_tokens max_completion_tokens max_output_tokens "
    "max_tokens_to_sample n_predict num_predict max_gen_len max_gen_toks",
    "sampling.stop": "stop stop_sequences stop_strings stop_words stopping_strings stop_token",
    "n": "n num_return_sequences num_samples num_completions candidate_count",
    "sampling.temperature": "temperature do_sample greedy",
    "sampling.seed": "seed random_seed",
    **{f"sampling.{name}": name for name in ("top_p", "top_k", "stop_token_ids")},
    "sampling.include_stop": "include_stop include_stop_str_in_output",
    **{"pair.target": "model", "pair.draft": "draft", "chat=True": "chat"},
    "template": "template chat_template",
    **{"speculation.length": "draft_length", "speculation.coupling": "coupling"},
    **{name: name for name in ("budget", "pair", "batch_size", "tensor_parallel", "device")},
    **{name: name for name in ("dtype", "threads", "limit", "prompt_column", "token_ids")},
    "include_stop": "include_stop",
}
_AS_MESSAGE = "system_prompt system_message system_instruction"
_TOOLS = "functions"
_ARGS = "enable_thinking documents"
_UNREADABLE = (
    "images image image_url videos audios multi_modal_data mm_processor_kwargs "
    "prompt_token_ids prompt_embeds input_ids"
)
_OBJECTS = "reasoning thinking"  # settings if they are objects, else data
_UNKNOWN = (
    "tool_choice function_call parallel_tool_calls response_format min_p logprobs top_logprobs "
    "prompt_logprobs logit_bias best_of echo suffix presence_penalty frequency_penalty "
    "repetition_penalty typical_p length_penalty bad_words min_tokens min_new_tokens max_length "
    "num_beams use_beam_search eos_token_id ignore_eos skip_special_tokens "
    "modalities audio reasoning_effort verbosity web_search_options "
    "structured_outputs guided_json guided_regex guided_choice guided_grammar grammar "
    "add_generation_prompt continue_final_message prediction repeat_penalty repeat_last_n "
    "no_repeat_ngram_size "
    "diversity_penalty num_beam_groups encoder_repetition_penalty epsilon_cutoff eta_cutoff top_a "
    "tfs_z mirostat dynatemp_range dry_multiplier penalty_alpha guidance_scale negative_prompt "
    "bad_words_ids truncate_prompt_tokens max_time num_ctx json_schema lora_request"
)
# The reason by reserved name
RESERVED = {
    **{
        name: f"set it for the whole run with `{option}`"
        for option, names in _OPTIONS.items()
        for name in names.split()
    },
    **dict.fromkeys(_AS_MESSAGE.split(), 'use "system"'),
    **dict.fromkeys(_TOOLS.split(), 'use "tools"'),
    **dict.fromkeys(_ARGS.split(), 'put it into "template_args": {...}'),
    "chat_template_kwargs": 'use "template_args"',
    **dict.fromkeys(_UNREADABLE.split(), "bass cannot pass it to the model"),
    **dict.fromkeys(f"{_UNKNOWN} {_OBJECTS}".split(), "bass has no such setting"),
}
# Objects that hold the settings in requests to other engines
_CONTAINERS = (
    "sampling sampling_params sampling_parameters parameters params options speculation "
    "generation_config generation_kwargs gen_kwargs generate_kwargs generation_params config "
    "settings kwargs extra_body body"
)
HONOURED = ("system", "tools", "template_args")  # fields that set something for their prompt
_OWN = ("id", "messages", "reference", "meta", *HONOURED)
_META = 'to copy it to the results, put it into "meta": {...}'


def _spelling(name: str) -> str:
    """Return the name without what spellings of one name differ by: "maxTokens", "Max-Tokens"."""
    return re.sub(r"[\W_]", "", name).lower()


_BY_SPELLING = {_spelling(name): name for name in (*_CONTAINERS.split(), *_OWN, *RESERVED)}


def _reserved_name(key: Any) -> str | None:
    """Return the reserved name that a key spells; None if there is none."""
    name = _BY_SPELLING.get(_spelling(str(key)))
    return name if name in RESERVED else None


def _refusal(key: Any, value: Any, *, columns: bool) -> tuple[str, str] | None:
    """Return the field and the reason if a field is refused, in any spelling; else None.

    `columns`: the fields are a dataset's columns, of which only tools and system messages are
    refused.
    """
    field, name = shown(key)[1:-1], _BY_SPELLING.get(_spelling(str(key)), "")
    if name in _OBJECTS.split() and not isinstance(value, Mapping):
        return None
    if name in RESERVED and (not columns or name in f"{_TOOLS} {_AS_MESSAGE}".split()):
        return field, f"{RESERVED[name]}; {_META}"
    if columns:
        return None
    if name in _OWN and key != name:
        return field, f'did you mean "{name}"? Otherwise, {_META}'
    if name in _CONTAINERS.split() and isinstance(value, Mapping):
        for inner in value:
            if (setting := _reserved_name(inner)) is not None:
                return f"{field}.{shown(inner)[1:-1]}", f"{RESERVED[setting]}; {_META}"
    return None
