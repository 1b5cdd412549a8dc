"""Read a task's problems from a file or from a data set of the hub.

All fields that the task needs are checked before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bass_cli.errors import UserError, nearest
from bass_cli.eval.tasks import Problem
from bass_cli.io.prompts import open_source
from bass_cli.io.readers import READERS, hub_records
from bass_cli.io.reading import is_unicode, whole

# a check for each field, by name; it raises ValueError if the value has another type
Fields = Mapping[str, Callable[[Any], Any]]


def read_problems(
    source: str,
    needed: Fields,
    make: Callable[[dict[str, Any]], Problem],
    optional: Fields | None = None,
) -> dict[str, Problem]:
    """Read problems by task_id.

    Args:
        source: a file, or hf:NAME[:CONFIG][:SPLIT].
        needed: checks of the fields that each record must have.
        make: makes a problem of a record. It may raise ValueError.
        optional: checks of fields that may be missing or null.

    Raises:
        UserError: a record is invalid or a task_id occurs twice. Names file, line and field.
    """
    found: dict[str, Problem] = {}
    for place, record in _records(source):
        if not isinstance(record, dict):
            raise UserError(f"{place}: a problem must be a JSON object")
        for field, check in {**(optional or {}), **needed}.items():
            if field in needed and field not in record:
                raise UserError(
                    f'{place}: field "{field}": it is missing; {nearest(field, record)}'
                )
            if field in needed or record.get(field) is not None:
                try:
                    check(record[field])
                except ValueError as error:
                    raise UserError(f'{place}: field "{field}": {error}') from None
        try:
            problem = make(record)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
        if problem.task_id in found:
            raise UserError(f'{place}: problem "{problem.task_id}" occurs twice in the data')
        found[problem.task_id] = problem
    if not found:
        raise UserError(f"{source}: it contains no problems")
    return found


def identity(value: Any) -> str:
    """Return a record's identifier, a text or a whole number, as text."""
    if not isinstance(value, str):
        return str(whole(value))
    if not is_unicode(value):
        raise ValueError("it contains half of a surrogate pair, which is not valid text")
    return value


def _records(source: str) -> Iterator[tuple[str, Any]]:
    opened = open_source(source)
    if opened.kind == "hf":
        yield from ((f"{source}:{number}", record) for number, record in hub_records(source))
        return
    if opened.kind == "txt":
        raise UserError(
            f"{source}: a text file has no fields; use a .jsonl, .json or .parquet file"
        )
    with opened.open() as stream:
        yield from (
            (f"{source}:{line}", record) for line, record in READERS[opened.kind](stream, source)
        )
