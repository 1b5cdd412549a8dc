"""Problems read from a file or a hub's data set, with every field that a task needs checked
before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bass_cli.errors import UserError, nearest
from bass_cli.eval.tasks import Problem
from bass_cli.io.prompts import open_source
from bass_cli.io.readers import READERS, hub_records
from bass_cli.io.reading import is_unicode, whole

# by name, what raises ValueError at a value of another type
Fields = Mapping[str, Callable[[Any], Any]]


def read_problems(
    source: str,
    needed: Fields,
    make: Callable[[dict[str, Any]], Problem],
    optional: Fields | None = None,
) -> dict[str, Problem]:
    """The problems by task_id. `needed`: the fields that each record must have, `optional`:
    those that may be missing or null; `make` may raise ValueError. A UserError names file, line
    and field then, and at a task_id that comes twice."""
    found: dict[str, Problem] = {}
    for place, record in _records(source):
        if not isinstance(record, dict):
            raise UserError(f"{place}: a problem must be an object")
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
            raise UserError(f'{place}: problem "{problem.task_id}" is in the data twice')
        found[problem.task_id] = problem
    if not found:
        raise UserError(f"{source}: there is no problem in it")
    return found


def identity(value: Any) -> str:
    """What tells a record from the others: a text or a whole number."""
    if not isinstance(value, str):
        return str(whole(value))
    if not is_unicode(value):
        raise ValueError("it holds half of a surrogate pair, which is not text")
    return value


def _records(source: str) -> Iterator[tuple[str, Any]]:
    opened = open_source(source)
    if opened.kind == "hf":
        yield from ((f"{source}:{number}", record) for number, record in hub_records(source))
        return
    if opened.kind == "txt":
        raise UserError(f"{source}: problems have fields; give a .jsonl, .json or .parquet file")
    with opened.open() as stream:
        yield from (
            (f"{source}:{line}", record) for line, record in READERS[opened.kind](stream, source)
        )
