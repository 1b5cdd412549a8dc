"""Read options whose values may be files: chat templates, tools, schemas, regexes and grammars.

llguidance compiles schemas, regexes and grammars alike, in its Lark dialect. Nothing here needs a
tokenizer, so mistakes are found before a model is loaded. formats/chat_template.py renders
templates; formats/grammars.py follows a grammar token by token.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.errors import MachineError, UserError, first_line, spelled
from bass_cli.reading import parse_json, parse_object, read_bytes, shown

_MOST_OF_CHATS = 1 << 24  # bytes of a file with a template or tools
_MOST = 1 << 20  # bytes of a schema or a grammar
# The fields of sampling, of which a sample has at most one
FIELDS = ("json_schema", "json_object", "regex", "grammar")
# Without it llguidance allows only one of the ways to tokenise a text that the grammar fixes.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_LONGEST = 300  # characters of a message
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")
_COMPILED = re.compile(r'failed to compile JSON schema: |invalid regex ".*" \(in regex\): ')


def read_template(value: Any) -> Any:
    """Return the template in a file of this name. A text with {{ or {% is a template itself.

    Raises:
        UserError: the file cannot be read, or it is no template.
    """
    if not isinstance(value, (str, os.PathLike)) or is_template(value):
        return value
    try:
        text = _text_of(value, _MOST_OF_CHATS)
    except ValueError as error:
        raise UserError(f"`template`: {error}") from None
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
        text = _text_of(value, _MOST_OF_CHATS)
    except ValueError as error:
        raise UserError(f"`tools`: {error}") from None
    try:
        return checked_tools(parse_json(text))
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


# Structured output


class Structure(NamedTuple):
    """What the text of a sample must match. `text`: a JSON schema, a regex or a grammar."""

    kind: str
    text: str

    def lark(self) -> str:
        """Return it in llguidance's dialect of Lark.

        Raises:
            ValueError: The message of the library that refuses it.
            MachineError: The library is not installed.
        """
        ll = _library()
        if self.kind == "regex":
            # A digit is an ASCII one: which others there are depends on the version of Unicode.
            return f"start: /{ll.regex_to_lark(self.text, 'd')}/{_OPTIONS}"
        if self.kind != "grammar":
            return f"start: %json {self.text}{_OPTIONS}"
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            return f"{any_to_lark(self.text)}{_OPTIONS}"
        except (GbnfToLarkError, RecursionError) as error:
            raise ValueError(str(error)) from None

    def check(self) -> None:
        """Raise ValueError with the library's message if it cannot be compiled; else as `lark`."""
        fault = _fault_of(self.lark())
        if fault:
            raise ValueError(brief_fault(fault, self.kind))


@functools.lru_cache(maxsize=1024)
def _fault_of(lark: str) -> str:
    """Return the library's message about a grammar; empty if it compiles it."""
    found: str = _library().LLMatcher.validate_grammar(lark)
    return found


def brief_fault(message: str, kind: str = "") -> str:
    """Return a message of the library in one line, without the lines that it quotes.

    `kind`: Of the structure. Only the place in a grammar is one in what the user wrote.
    """
    brief = _COMPILED.sub("", message.partition("\n   1 | ")[0], count=1)
    place = _PLACE.match(brief)
    after = brief.rpartition("\nerror: ")[2]  # of a regex, without the lines that show the place
    text = " ".join((after if place is None or after != brief else brief[place.end() :]).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return f"line {place[1]}, column {place[2]}: {text}" if place and kind == "grammar" else text


def structure_of(given: Any) -> Structure | None:
    """Return the structure of a Sampling; None if its text is free."""
    if given.json_object:
        return Structure("json_object", '{"type": "object"}')
    for kind in FIELDS:
        if getattr(given, kind):
            return Structure(kind, getattr(given, kind))
    return None


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `base` with those of `given`. Another structure replaces that of
    `base`."""
    found = {**base, **given}
    if any(given.get(name) for name in FIELDS):
        return {key: found[key] for key in found if key in given or key not in FIELDS}
    return found


def read_structure(
    field: str, value: Any, *, folder: Path | None = None, files: bool = True
) -> Any:
    """Return the value of one of FIELDS: a schema, a regex or a grammar as text.

    A schema may be a mapping, a text in JSON, a file or a class of pydantic. A text with a colon
    is a grammar, because each of its rules has one; else it names a file.

    Args:
        folder: The folder of relative paths.
        files: Whether the value may name a file.

    Raises:
        ValueError: It cannot be read or compiled.
        MachineError: The library is not installed.
    """
    if value is None or value is False:
        return value
    if field == "json_object":
        _library()
        return value
    place = ""
    if field == "json_schema" and hasattr(value, "model_json_schema"):
        value = _schema_of(value)
    if field == "json_schema" and isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, (str, os.PathLike)):
        if field == "json_schema":
            raise ValueError(
                f"a mapping, a text, a file or a pydantic class is needed, not {shown(value)}"
            )
        return value  # of a wrong type, which pydantic refuses
    text = str(value)
    is_text = text.lstrip().startswith("{") if field == "json_schema" else ":" in text
    if isinstance(value, os.PathLike) or (files and field != "regex" and not is_text):
        path = Path(folder or "") / os.path.expanduser(value)
        value, place = _text_of(path, _MOST), f"{spelled(str(path))}: "
    try:
        if field == "json_schema":
            value = json.dumps(parse_object(value), ensure_ascii=False)
        if not value.strip():
            raise ValueError("it is empty")
        Structure(field, value).check()
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None
    return value


def _schema_of(kind: Any) -> Any:
    """Return the JSON schema that a class of pydantic makes of itself. ValueError if it fails."""
    try:
        return kind.model_json_schema()
    except Exception as error:  # of pydantic for a type without a schema, or of the class's code
        raise ValueError(
            f"pydantic makes no schema of {shown(kind)}: {first_line(error)}; correct the class, "
            "or give a schema as a mapping"
        ) from None


def _text_of(path: str | os.PathLike[str], most: int) -> str:
    """Return the text of a file of at most `most` bytes; ValueError if it cannot be read."""
    path = Path(os.path.expanduser(path))
    name = spelled(str(path))  # pydantic cannot hold a message with a name that is not UTF-8
    try:
        return read_bytes(path, most).decode()
    except OSError as error:
        raise ValueError(f"cannot read {name}: {spelled(str(error.strerror))}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not valid UTF-8") from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MachineError(
            "`json_schema`, `json_object`, `regex` and `grammar` need the package llguidance: "
            "pip install 'bass-cli[structure]'"
        ) from None
    return llguidance
