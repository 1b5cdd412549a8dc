"""Check texts that should hold JSON: whether they parse, and whether they match a JSON schema.

A schema is checked by the jsonschema package. References to other documents are not followed, so
nothing is fetched. A regex of a schema has the time limit of those in expressions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from bass_cli.data.expressions import PATIENCE, compile_regex
from bass_cli.errors import MachineError, UserError
from bass_cli.reading import parse_json, read_bytes, shown

_MOST = 1 << 20  # bytes of a schema, as for --json-schema


def holds_json(text: Any) -> bool:
    """Whether a value is a text of one JSON value, with blanks around it at most."""
    return _parsed(text)[0]


def schema_check(path: str) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is a text of JSON that matches a schema.

    Args:
        path: The file of the schema; its "$schema" chooses the draft, 2020-12 by default.

    Raises:
        UserError: The file cannot be read, or is not a valid schema.
        MachineError: The package jsonschema is not installed.
    """
    try:
        schema = parse_json(read_bytes(path, _MOST))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"`schema` {path}: cannot read the schema: {reason}") from None
    if not isinstance(schema, (dict, bool)):
        raise UserError(f"`schema` {path}: a schema is an object, not {shown(schema)}")
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise MachineError(
            "`schema` needs jsonschema, which is not installed here: pip install 'bass-cli[filter]'"
        ) from None
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        raise UserError(
            f"`schema` {path}: it is no valid schema: {shown(error.message)[1:-1]}"
            + (f" (at {place})" if place else "")
        ) from None
    kind = jsonschema.validators.extend(kind, _WITH_REGEX)
    validator = kind(schema, registry=referencing.Registry())

    def matches(text: Any) -> bool:
        is_json, value = _parsed(text)
        try:
            return is_json and bool(validator.is_valid(value))
        except referencing.exceptions.Unresolvable as error:
            raise UserError(
                f"`schema` {path}: it refers to {error.ref}, which is not in the file; put it "
                'under "$defs"'
            ) from None
        except TimeoutError:
            raise UserError(
                f"`schema` {path}: a pattern takes more than {PATIENCE:g} s on this text; write it "
                "without repetitions inside repetitions"
            ) from None
        except _PatternError as error:
            raise UserError(f"`schema` {path}: a pattern is not valid: {error}") from None
        except RecursionError:
            return False  # the value or the schema nests deeper than Python's stack

    return matches


class _PatternError(Exception):
    """A regex of the schema is not valid."""


@functools.lru_cache(maxsize=1_000)
def _compiled(pattern: str) -> Any:
    try:
        return compile_regex(pattern)
    except ValueError as error:
        raise _PatternError(error) from None


def _occurs(pattern: str, text: str) -> bool:
    """Search for a regex of the schema. TimeoutError if that takes more than PATIENCE."""
    return _compiled(pattern).search(text, timeout=PATIENCE) is not None


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Exception]:
    from jsonschema import ValidationError

    if validator.is_type(value, "string") and not _occurs(pattern, value):
        yield ValidationError(f"{pattern} does not match")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], value: Any, schema: Any
) -> Iterator[Exception]:
    if not validator.is_type(value, "object"):
        return
    for pattern, inner in patterns.items():
        for key in value:
            if _occurs(pattern, key):
                yield from validator.descend(value[key], inner, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, inner: Any, value: Any, schema: dict[str, Any]
) -> Iterator[Exception]:
    if not validator.is_type(value, "object"):
        return
    patterns = schema.get("patternProperties", {})
    for key in value:
        if key not in schema.get("properties", {}) and not any(
            _occurs(pattern, key) for pattern in patterns
        ):
            yield from validator.descend(value[key], inner, path=key)


# The keywords with a regex, which are checked as jsonschema does, but with a time limit
_WITH_REGEX = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}


def _parsed(text: Any) -> tuple[bool, Any]:
    """Return whether a value is a text that holds JSON, and what it holds."""
    try:
        return (True, json.loads(text, parse_constant=_refuse)) if isinstance(text, str) else _NO
    except (ValueError, RecursionError):
        return _NO


_NO = (False, None)


def _refuse(word: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(word)
