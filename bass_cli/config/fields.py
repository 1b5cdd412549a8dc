"""Define the types of a job's values: bounded numbers, numbers or words, drafts and times.

Each error says what would be valid. config/job.py has the fields, and rules across fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bass_cli.config.draft_spec import check_draft, check_target
from bass_cli.errors import UserError
from bass_cli.io.reading import LARGEST, is_unicode, shown

MOST_ROWS = 1_000_000  # the most samples of a prompt, and rows; no device holds as many
CONTROLLERS = ("auto", "bass", "table", "bass+table")

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


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _stops(value: Any) -> Any:
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise ValueError(f"a text or a list of texts is needed, not {shown(value)}")
    for text in listed:
        if text == "":
            raise ValueError("an empty stop string would stop every sample at once")
        if isinstance(text, str) and not is_unicode(text):
            raise ValueError(
                f"{shown(text)} holds half of a surrogate pair, which no sample's text has"
            )
    return listed


def _number_or(value: Any, words: tuple[str, ...], least: int, most: int) -> Any:
    """Return the value if it is one of the words or a whole number in the bounds, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII):
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value in words or (whole and least <= value <= most):
        return value
    raise ValueError(
        f"{shown(value)} is not valid; use {', '.join(words)} or a whole number from {least} to "
        f"{most}"
    )


def _draft_length(value: Any) -> Any:
    return _number_or(value, CONTROLLERS, 0, 64)


def _batch_size(value: Any) -> Any:
    return _number_or(value, ("auto",), 1, MOST_ROWS)


Natural = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, le=LARGEST)]
Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=LARGEST)]
Real = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Length = Annotated[str | int, BeforeValidator(_draft_length)]  # one of CONTROLLERS, or a number
BatchSize = Annotated[Literal["auto"] | int, BeforeValidator(_batch_size)]
# a tuple; its type is Sequence, so that type checkers accept lists
Stops = Annotated[Sequence[str], BeforeValidator(_stops), AfterValidator(tuple)]
Name = Annotated[str, Field(min_length=1)]
Target = Annotated[Name, AfterValidator(check_target)]
Draft = Annotated[Name, AfterValidator(check_draft)]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]

# seconds, 11 days; the operating system counts timeouts in milliseconds, in 31 bits
_LONGEST = 1_000_000


def parse_duration(text: str, key: str = "duration") -> float:
    """Parse "2s", "500ms", "1.5m" or "2" to seconds; UserError unless above 0, up to _LONGEST."""
    match = re.fullmatch(
        r"\s*([+-]?(?:\d{1,9}\.?\d{0,99}|\.\d{1,99}))\s*(ms|s|m|)\s*", text, re.ASCII
    )
    seconds = (
        float(match[1]) * {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}[match[2]] if match else 0.0
    )
    if not 0 < seconds <= _LONGEST:
        raise UserError(
            f'{key}: "{shown(text)[1:-1]}" is not a time above 0 and up to {_LONGEST} s; write it '
            "like 2s, 500ms or 1.5m"
        )
    return seconds
