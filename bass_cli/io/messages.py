"""Check the messages of a chat, and make messages of text parts and of ShareGPT conversations.

A fault is a UserError that names file, line and field. Chat templates are applied in formats/.
"""

from __future__ import annotations

from typing import Any, NoReturn

from bass_cli.errors import UserError, nearest
from bass_cli.reading import parse_json, shown

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
                refuse(place, f"{here}.{shown(key)[1:-1]}", reason)
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
            refuse(place, f"{here}.{shown(others[0])[1:-1]}", "a part has a type and a text")
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
            refuse(place, f"{here}.{shown(next(iter(turn)))[1:-1]}", "a turn has from and value")
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
