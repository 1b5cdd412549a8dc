"""Describe errors of pydantic in the words of this project, for jobs, pair files and prompts."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from pydantic import ValidationError

from bass_cli.reading import shown

# Messages for pydantic's errors about values of another type
_NEEDED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number is needed"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number is needed"),
    "finite_number": "a finite number is needed",
    "string_type": "a text is needed",
    "tuple_type": "a text or a list of texts is needed",
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false is needed"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping is needed"),
    "string_too_short": "it is empty",
}


def reason_of(fault: Mapping[str, Any]) -> str:
    """Describe one error of pydantic, with the value."""
    kind, value = fault["type"], fault["input"]
    if kind == "missing":
        return "it is missing"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    reason = _NEEDED.get(kind) or message[:1].lower() + message[1:]
    known = kind == "string_too_short" or (kind == "value_error" and isinstance(value, dict))
    return reason if known or shown(value) in reason else f"{reason} (got {shown(value)})"


def first_fault(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """Return the key path of the first fault, without pydantic's union steps, and a reason."""
    path, reason = located_fault(error, ())
    return tuple(map(str, path)), reason


def located_fault(
    error: ValidationError, items: Container[tuple[str | int, ...]]
) -> tuple[tuple[str | int, ...], str]:
    """Return the same, with the numbers of list items whose paths are in `items`."""
    fault = error.errors(include_url=False)[0]
    own_steps = re.compile(r"literal\[|int$|function-")
    path: tuple[str | int, ...] = ()
    for step in fault["loc"]:
        if (*path, step) in items if isinstance(step, int) else not own_steps.match(step):
            path = (*path, step)
    return path, reason_of(fault)
