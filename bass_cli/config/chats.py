"""Read the files and values of chats: templates, their variables, and schemas of tools.

The options are declared in options.py; job.py and io/prompts.py call these functions. Templates are
rendered in formats/chat_template.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bass_cli.errors import UserError
from bass_cli.reading import parse_json, read_bytes, shown

_MOST = 1 << 24  # bytes of a file with a template or tools


def read_template(value: Any) -> Any:
    """Return the template in a file of this name. A text with {{ or {% is a template itself.

    Raises:
        UserError: the file cannot be read, or it is no template.
    """
    if not isinstance(value, (str, os.PathLike)) or is_template(value):
        return value
    text = _text_of(value, "`template`")
    if not is_template(text):
        raise UserError(f"{value}: it is not a chat template, because it has neither {{{{ nor {{%")
    return text


def is_template(value: Any) -> bool:
    """Whether a value is a template, not the name of a file."""
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def read_template_args(value: Any) -> Any:
    """Return the object in a JSON text; ValueError if it is none. Other objects stay."""
    value = parse_json(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError(
            f'an object such as {{"enable_thinking": false}} is needed, not {shown(value)}'
        )
    return value


def read_tools(value: Any) -> Any:
    """Return the tools in a file of this name, or the list itself.

    Raises:
        UserError: the file cannot be read, or has no list of tools.
        ValueError: the value is no list of tools.
    """
    if not isinstance(value, (str, os.PathLike)):
        return checked_tools(value)
    try:
        return checked_tools(parse_json(_text_of(value, "`tools`")))
    except ValueError as error:
        raise UserError(f"{value}: {error}") from None


def checked_tools(tools: Any) -> Any:
    """Return the list of the schemas of tools; ValueError if it is none."""
    if not isinstance(tools, (list, tuple)) or not tools:
        raise ValueError("a list with at least one schema of a tool is needed")
    for number, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            wanted = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
            raise ValueError(f"tool {number} is not an object like {wanted}")
    return tools


def _text_of(file: str | os.PathLike[str], option: str) -> str:
    path = Path(os.path.expanduser(file))
    try:
        return read_bytes(path, _MOST).decode()
    except UnicodeDecodeError:
        raise UserError(f"{option}: {path} is not valid UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option}: cannot read {path}: {reason}") from None
