"""Check texts that should hold JSON: whether they parse, and whether they match a JSON schema.

A schema is checked by the jsonschema package. References to other documents are not followed, so
nothing is fetched. A regex of a schema has the time limit of those in expressions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import regex

from bass_cli.data.expressions import PATIENCE
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
    kind = jsonschema.validators.extend(kind, {"pattern": _pattern})
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
        except regex.error as error:
            raise UserError(f"`schema` {path}: a pattern is not valid: {error}") from None
        except RecursionError:
            return False  # the value or the schema nests deeper than Python's stack

    return matches


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Exception]:
    """Check the keyword "pattern", as jsonschema does, but with a time limit."""
    from jsonschema import ValidationError

    if not validator.is_type(value, "string"):
        return
    if regex.search(pattern, value, timeout=PATIENCE) is None:
        yield ValidationError(f"{pattern} does not match")


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
