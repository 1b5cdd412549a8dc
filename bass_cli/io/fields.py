"""Check the fields of a prompt: names that are refused in any spelling, and the messages of a chat.

Messages are also made of text parts and of ShareGPT conversations. A fault is a UserError that
names file, line and field. io/prompts.py makes prompts of the fields; chat templates are applied in
formats/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from bass_cli.config.options import JOB, LINE
from bass_cli.config.other_names import OTHER_NAMES, spelling
from bass_cli.errors import UserError, nearest
from bass_cli.reading import parse_json, shown, unquoted

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
# Roles by the names that ShareGPT files have for them
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}
_FOR_TRAINING = ("weight", "loss")  # keys of a turn that no sample depends on


def refuse(place: str, field: str, reason: str) -> NoReturn:
    raise UserError(f'{place}: field "{field}": {reason}')


def kind_of(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def check_text(value: Any, field: str, place: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        refuse(place, field, f"it must be a string, not {kind_of(value)}")
    if not value and not may_be_empty:
        refuse(place, field, "it is empty")


def checked_messages(messages: Any, place: str) -> list[dict[str, Any]]:
    """Return the messages without keys that are null.

    Any role may occur, because the template decides. UserError at a key or a value that a chat
    template might drop or misread.
    """
    if not isinstance(messages, list) or not messages:
        refuse(place, "messages", 'it must be a list of {"role", "content"}')
    found = []
    for number, message in enumerate(messages):
        here = f"messages[{number}]"
        if not isinstance(message, dict):
            refuse(place, here, f'it must be {{"role", "content"}}, not {kind_of(message)}')
        message = {key: value for key, value in message.items() if value is not None}
        role: Any = message.get("role")
        check_text(role, f"{here}.role", place)
        if role not in _ROLES and role.lower() in _ROLES:
            refuse(place, f"{here}.role", f'{shown(role)}: did you mean "{role.lower()}"?')
        for key in message:
            if key not in _MESSAGE:
                reason = f"it is not a key of a message; {nearest(str(key), _MESSAGE)}"
                refuse(place, f"{here}.{unquoted(key)}", reason)
        if isinstance(message.get("content"), list):
            message["content"] = _text_of_parts(message["content"], f"{here}.content", place)
        if "tool_calls" in message:
            message["tool_calls"] = _checked_calls(message["tool_calls"], here, place)
        if "content" in message or "tool_calls" not in message:
            check_text(message.get("content"), f"{here}.content", place, may_be_empty=True)
        found.append(message)
    if found[-1]["role"] == "assistant" and not found[-1].get("content"):
        reason = "there is no text to continue; leave the last message out"
        refuse(place, f"messages[{len(found) - 1}].content", reason)
    return found


def _text_of_parts(parts: list[Any], field: str, place: str) -> str:
    """Join the texts of a content that is a list of parts, with line ends, as vLLM does."""
    texts = list[str]()
    for number, part in enumerate(parts):
        here = f"{field}[{number}]"
        if not isinstance(part, dict):
            refuse(
                place, here, f'it must be {{"type": "text", "text": "..."}}, not {kind_of(part)}'
            )
        part = {key: value for key, value in part.items() if value is not None}
        if part.get("type") != "text":
            refuse(place, here, f"bass reads parts of the type text, not {shown(part.get('type'))}")
        check_text(part.get("text"), f"{here}.text", place, may_be_empty=True)
        if others := [key for key in part if key not in ("type", "text")]:
            refuse(place, f"{here}.{unquoted(others[0])}", "a part has a type and a text")
        texts.append(part["text"])
    return "\n".join(texts)


def from_sharegpt(turns: Any, place: str) -> tuple[list[dict[str, Any]], str | None]:
    """Return the messages of a ShareGPT conversation, and its last answer, which is left out.

    The answer is None if the conversation ends with another turn. Turns that have the keys of
    messages are returned as they are.
    """
    if not isinstance(turns, list) or not turns:
        refuse(place, "conversations", 'it must be a list of {"from", "value"}')
    found = list[dict[str, Any]]()
    for number, turn in enumerate(turns):
        here = f"conversations[{number}]"
        if not isinstance(turn, dict):
            refuse(place, here, f'it must be {{"from", "value"}}, not {kind_of(turn)}')
        turn = {
            key: value
            for key, value in turn.items()
            if value is not None and key not in _FOR_TRAINING
        }
        if "role" in turn:
            found.append(turn)
            continue
        speaker = turn.pop("from", None)
        check_text(speaker, f"{here}.from", place)
        if speaker not in _SHAREGPT:
            refuse(
                place, f"{here}.from", f"{shown(speaker)} is no speaker; {nearest('', _SHAREGPT)}"
            )
        content = turn.pop("value", None)
        check_text(content, f"{here}.value", place, may_be_empty=True)
        if turn:
            refuse(place, f"{here}.{unquoted(next(iter(turn)))}", "a turn has from and value")
        found.append({"role": _SHAREGPT[speaker], "content": content})
    if found[-1]["role"] != "assistant":
        return found, None
    if len(found) == 1:
        refuse(place, "conversations", "it has an answer only")
    return found[:-1], found[-1].get("content")


def _checked_calls(calls: Any, here: str, place: str) -> list[dict[str, Any]]:
    """Return the calls of tools, with arguments as objects: templates write them as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        refuse(place, f"{here}.tool_calls", "it must be a list of objects")
    found = []
    for number, call in enumerate(calls):
        inner = call.get("function", call)
        name = f"{here}.tool_calls[{number}]"
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            refuse(place, name, 'it must be {"function": {"name": "...", "arguments": {...}}}')
        arguments = inner.get("arguments", {})
        try:
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            refuse(place, f"{name}.function.arguments", str(error))
        if not isinstance(arguments, dict):
            refuse(place, f"{name}.function.arguments", "it must be an object")
        inner = {**inner, "arguments": arguments}
        found.append({**call, "function": inner} if "function" in call else inner)
    return found


# Names of fields

# Settings and parts of a prompt that other tools read, or that hold for a whole run. Ignoring such
# a field would give wrong samples, so it is refused, with what to use instead.
_AS_MESSAGE = "system_prompt system_message system_instruction"
_TOOLS = "functions"
_ARGS = "enable_thinking documents"
_UNREADABLE = (
    "images image image_url videos audios multi_modal_data mm_processor_kwargs prompt_embeds"
)
_OBJECTS = "reasoning thinking"  # settings if they are objects, else data
_UNKNOWN = (
    "tool_choice function_call parallel_tool_calls logprobs top_logprobs prompt_logprobs best_of "
    "suffix typical_p length_penalty min_tokens min_new_tokens max_length num_beams "
    "use_beam_search eos_token_id ignore_eos skip_special_tokens modalities audio reasoning_effort "
    "verbosity web_search_options add_generation_prompt continue_final_message prediction "
    "repeat_last_n no_repeat_ngram_size diversity_penalty num_beam_groups "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff top_a tfs_z mirostat dynatemp_range "
    "dry_multiplier penalty_alpha guidance_scale negative_prompt bad_words_ids "
    "truncate_prompt_tokens max_time num_ctx"
)


_IDS = "prompt_token_ids input_ids"
# Objects that hold the settings in requests to other engines
_CONTAINERS = (
    "sampling sampling_params sampling_parameters parameters params options speculation "
    "generation_config generation_kwargs gen_kwargs generate_kwargs generation_params config "
    "settings kwargs extra_body body"
)
HONOURED = ("system", "tools", "template_args")  # fields that set something for their prompt
OWN = ("id", "messages", "conversations", "token_ids", "reference", "meta", *HONOURED)
_META = 'to copy it to the results, put it into "meta": {...}'


def _instead(option: str) -> str:
    """Return what to use instead of another name of this option."""
    field = option.rpartition(".")[2]
    if field in LINE:
        return f'bass calls it "{field}"'
    return f"set it for the whole run with `{option}`"


_NAMED_ELSEWHERE = {*OWN, *_CONTAINERS.split(), *_OBJECTS.split()}
# The reason by reserved name
RESERVED = {
    **{name: _instead(option.path) for name, option in JOB.items() if name not in _NAMED_ELSEWHERE},
    **{name: _instead(option) for option, names in OTHER_NAMES.items() for name in names.split()},
    **dict.fromkeys(_AS_MESSAGE.split(), 'use "system"'),
    **dict.fromkeys(_TOOLS.split(), 'use "tools"'),
    **dict.fromkeys(_ARGS.split(), 'put it into "template_args": {...}'),
    **dict.fromkeys(_IDS.split(), 'use "token_ids"'),
    "chat_template_kwargs": 'use "template_args"',
    **dict.fromkeys(_UNREADABLE.split(), "bass cannot pass it to the model"),
    **dict.fromkeys(f"{_UNKNOWN} {_OBJECTS}".split(), "bass has no such setting"),
    **{name: _instead(name) for name in LINE},
}


_BY_SPELLING = {spelling(name): name for name in (*_CONTAINERS.split(), *OWN, *RESERVED)}


def reserved_name(key: Any) -> str | None:
    """Return the reserved name that a key spells; None if there is none."""
    name = _BY_SPELLING.get(spelling(str(key)))
    return name if name in RESERVED else None


def refusal_of(key: Any, value: Any, *, columns: bool) -> tuple[str, str] | None:
    """Return the field and the reason if a field is refused, in any spelling; else None.

    `columns`: the fields are a dataset's columns, of which only tools and system messages are
    refused.
    """
    field, name = unquoted(key), _BY_SPELLING.get(spelling(str(key)), "")
    if name in _OBJECTS.split() and not isinstance(value, Mapping):
        return None
    if name in RESERVED and (not columns or name in f"{_TOOLS} {_AS_MESSAGE}".split()):
        return field, f"{RESERVED[name]}; {_META}"
    if columns:
        return None
    if name in OWN and key != name:
        return field, f'did you mean "{name}"? Otherwise, {_META}'
    if name in _CONTAINERS.split() and isinstance(value, Mapping):
        for inner in value:
            if (setting := reserved_name(inner)) is not None:
                reason = RESERVED[setting]
                if setting in LINE:
                    reason = f'give "{setting}" as a field beside the prompt'
                return f"{field}.{unquoted(inner)}", f"{reason}; {_META}"
    return None
