"""`bass filter`: copy the samples of a file that meet all criteria, in their order.

Lines are read one at a time; in memory are only the hashes for --unique. A line of a prompt with
its samples (--group) keeps those that meet the criteria, and is dropped with the last of them. A
JSON schema is checked by the jsonschema package. References to other documents are not followed, so
nothing is fetched. A regex of a schema has the time limit of those in expressions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from bass_cli import __version__
from bass_cli.config.sample_commands import FilterArgs
from bass_cli.data.duplicates import THRESHOLD, ExactDuplicates, NearDuplicates
from bass_cli.data.expressions import (
    PATIENCE,
    NoValueError,
    Row,
    compile_expression,
    compile_regex,
    read_key,
)
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.io.linefile import OUTPUTS, read_records, write_lines
from bass_cli.io.results import line_of
from bass_cli.io.resume import (
    OutputState,
    check_output_place,
    manifest_path,
    part_of,
    read_manifest,
    write_manifest,
)
from bass_cli.io.saving import check_format, is_stream, refuse_shared_files
from bass_cli.io.terminal import json_on_a_terminal
from bass_cli.reading import no_constant, os_errors_as, parse_json, read_bytes, shown, unquoted

_MOST = 1 << 20  # bytes of a schema, as for --json-schema
_NO_JSON = object()
_SAMPLES = "samples"
_MISSING = "a key is missing"  # the reason under --missing drop
_WHERE = "the expression is false"
_DEFAULT_KEY = "text"
_TICK = 256  # lines between two reports of the progress: some milliseconds


class Criterion(NamedTuple):
    """What kept samples meet. `reason`: why others are dropped. `meets` raises NoValueErrors."""

    reason: str
    meets: Callable[[Row], bool]


def filter_file(args: FilterArgs, screen: Screen) -> dict[str, Any]:
    """Run `bass filter`; return the counts of samples: read, kept, and dropped by reason."""
    out = "-" if args.out is None or is_stream(args.out) else args.out
    if args.json_document and out == "-":
        raise UserError(
            "`json_document` needs `out` FILE, because standard output carries the samples"
        )
    if args.missing not in (None, "error", "drop"):
        raise UserError(f'`missing` "{unquoted(args.missing)}": write error or drop')
    criteria = read_criteria(args)
    _check_files(args, out)
    filtering = Filtering(args.file, criteria, drop_missing=args.missing == "drop")
    if out == "-":  # without progress, which would stand between the lines
        _print(filtering.lines())
    else:
        manifest = _manifest(args)
        with screen.watching(filtering.progress, filtering.share) as tick:
            write_lines(out, _without_manifest(filtering.lines(tick), out))
        own = {"finished": True, "totals": filtering.totals, "filtered": filtering.counts()}
        write_manifest(out, manifest | own)
    for note in filtering.notes:
        screen.note(f"{args.file}: {note}")
    for one in filtering.describe("standard output" if out == "-" else out):
        screen.note(one)
    return filtering.counts()


def _without_manifest(lines: Iterator[bytes], out: str) -> Iterator[bytes]:
    """Yield the lines; then remove an old manifest, before the output has the new lines."""
    yield from lines
    manifest_path(out).unlink(missing_ok=True)


def _print(lines: Iterator[bytes]) -> None:
    """Write lines to standard output; on a terminal without control characters."""
    is_terminal = sys.stdout.isatty()
    for line in lines:
        if is_terminal:
            line = json_on_a_terminal(line.decode("utf-8", "replace").rstrip()).encode() + b"\n"
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def read_criteria(args: FilterArgs) -> list[Criterion]:
    """Return the criteria of the options; those that hold texts in memory come last."""
    text = read_key(args.key or _DEFAULT_KEY, "key")
    tokens = read_key("tokens", "min_tokens")
    found: list[Criterion] = []
    if args.where is not None:
        found.append(Criterion(_WHERE, compile_expression(args.where)))
    for least, most, unit, size in (
        (args.min_tokens, args.max_tokens, "tokens", lambda row: _whole(tokens(row))),
        (args.min_chars, args.max_chars, "characters", lambda row: len(_text(text(row)))),
    ):
        found += _limits(least, most, unit, size)
    if args.valid_json and args.schema is not None:
        raise UserError("`valid_json`: `schema` checks that too; give one of them")
    if args.valid_json:
        found.append(Criterion("no valid JSON", lambda row: holds_json(_text(text(row)))))
    if args.schema is not None:
        matches = schema_check(args.schema)
        found.append(Criterion("no JSON of the schema", lambda row: matches(_text(text(row)))))
    if args.unique is not None:
        found.append(_unique(args.unique, args.within or "prompt", text))
    elif args.within is not None:
        raise UserError("`within` needs `unique`")
    if not found:
        raise UserError(
            "there is no criterion; add `where`, `unique`, `schema`, `valid_json`, `min_tokens`, "
            "`max_tokens`, `min_chars` or `max_chars`"
        )
    return found


def _limits(
    least: int | None, most: int | None, unit: str, size: Callable[[Row], int]
) -> Iterator[Criterion]:
    if least is not None and most is not None and least > most:
        name = "tokens" if unit == "tokens" else "chars"
        raise UserError(f"`min_{name}` {least} is more than `max_{name}` {most}")
    if least is not None:
        yield Criterion(f"fewer than {least} {unit}", lambda row: size(row) >= least)
    if most is not None:
        yield Criterion(f"more than {most} {unit}", lambda row: size(row) <= most)


def _unique(how: str, within: str, text: Callable[[Row], Any]) -> Criterion:
    """Return the criterion of `--unique`. `within`: prompt or file."""
    if within not in ("prompt", "file"):
        raise UserError(f'`within` "{unquoted(within)}": write prompt or file')
    kind, sign, rest = how.partition(":")
    seen: ExactDuplicates | NearDuplicates
    if kind == "exact" and not sign:
        seen, reason = ExactDuplicates(), "a duplicate"
    elif kind == "near":
        seen, reason = NearDuplicates(_threshold(rest) if sign else THRESHOLD), "a near duplicate"
    else:
        raise UserError(f'`unique` "{unquoted(how)}": write exact, near or near:THRESHOLD')
    id_of = read_key("id", "within")

    def is_new(row: Row) -> bool:
        if within == "file":
            return not seen.add(_text(text(row)))
        try:
            prompt = id_of(row)
        except NoValueError:
            raise UserError(
                "`unique` compares samples of the same prompt, and the line has no id; with "
                "`within` file all lines are compared"
            ) from None
        return not seen.add(_text(text(row)), repr(prompt))

    return Criterion(reason, is_new)


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UserError(f"`unique` near:{unquoted(text)}: a number above 0 and up to 1 is needed")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NoValueError(1, f"a text is needed, not {shown(value)}", missing=value is None)
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise NoValueError(
            1, f"a whole number is needed, not {shown(value)}", missing=value is None
        )
    return value


class Filtering:
    """One pass over a file.

    Args:
        path: The file; "-" for standard input.
        drop_missing: Whether a sample without a key that a criterion reads is dropped; otherwise
            that is a UserError.

    Attributes:
        notes: What was left out of the file, such as a torn last line.
        totals: Those of a manifest, for the kept samples.
    """

    def __init__(self, path: str, criteria: list[Criterion], *, drop_missing: bool):
        self._path, self._criteria, self._drop_missing = path, criteria, drop_missing
        self._name = "stdin" if path == "-" else path
        self._read = self._kept = 0
        self._dropped = Counter[str]()
        self._past = OutputState()
        self._file: IO[bytes] | None = None  # for the progress
        self.notes: list[str] = []

    def progress(self) -> str:
        """Return how far the pass has come."""
        return f"{self._read} samples read, {self._kept} kept"

    def share(self) -> float | None:
        """Return the share of the file that has been read; None if unknown."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
            if self._file is not None:
                size = os.fstat(self._file.fileno()).st_size
                return min(self._file.tell() / size, 1.0) if size else None
        return None

    def _opened(self, file: IO[bytes]) -> None:
        self._file = file

    def lines(self, tick: Callable[[], None] = lambda: None) -> Iterator[bytes]:
        """Yield the kept lines. A line that is kept whole is the line of the file, byte by byte.

        `tick`: Called now and then, when the progress has changed.
        """
        for number, line, row in read_records(
            self._path, self.notes, what="the file", on_open=self._opened
        ):
            kept = self._kept_part(row, f"{self._name}:{number}")
            if number % _TICK == 0:
                tick()
            if kept is None:
                continue
            if any(key in kept for key in ("finish_reason", _SAMPLES)):
                self._past.count(kept)
            whole = line if line.endswith(b"\n") else line + b"\n"
            yield whole if kept is row else line_of(kept).encode() + b"\n"

    @property
    def totals(self) -> dict[str, Any]:
        """The totals over the kept samples; the seconds of the run do not describe them."""
        return self._past.totals | {"samples": self._kept, "seconds": None}

    def _kept_part(self, row: dict[str, Any], place: str) -> dict[str, Any] | None:
        """Return the row, a part of its samples, or None."""
        listed = row.get(_SAMPLES)
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            return row if self._keeps(row, place) else None
        shared = {key: value for key, value in row.items() if key != _SAMPLES}
        if not listed:  # a prompt that failed
            return row if self._keeps({**shared, "finish_reason": "error"}, place) else None
        numbered = [{"sample": at, **one} for at, one in enumerate(listed)]
        kept = [one for one in numbered if self._keeps({**shared, **one}, place)]
        if len(kept) == len(listed):
            return row
        return {**row, _SAMPLES: kept} if kept else None

    def _keeps(self, row: Row, place: str) -> bool:
        """Whether a sample meets all criteria. It is counted."""
        self._read += 1
        for reason, meets in self._criteria:
            try:
                is_met = meets(row)
            except NoValueError as fault:
                if not (fault.missing and self._drop_missing):
                    raise self._error(fault, place, reason) from None
                reason, is_met = _MISSING, False
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            if not is_met:
                self._dropped[reason] += 1
                return False
        self._kept += 1
        return True

    def _error(self, fault: NoValueError, place: str, reason: str) -> UserError:
        remedy = "`missing` drop leaves out such samples; has(KEY) in `where` tests for a key"
        text = str(fault) if reason == _WHERE else f"{fault.reason} (for: {reason})"
        return UserError(f"{place}: {text}", *([remedy] if fault.missing else []))

    def counts(self) -> dict[str, Any]:
        """Return the numbers of samples: read, kept, and dropped by reason."""
        return {
            "samples": self._read,
            "kept": self._kept,
            "dropped": {
                reason: self._dropped[reason]
                for reason in (*(one.reason for one in self._criteria), _MISSING)
                if reason in self._dropped
            },
        }

    def describe(self, out: str) -> list[str]:
        """Return the counts as lines of text."""
        dropped = self.counts()["dropped"]
        lost = self._read - self._kept
        lines = [f"{self._read} samples: {self._kept} kept in {out}, {lost} dropped"]
        width = len(str(lost))
        return lines + [f"  {count:>{width}}  {reason}" for reason, count in dropped.items()]


def _check_files(args: FilterArgs, out: str) -> None:
    """Raise UserError if the output cannot be written, or would replace another file."""
    inputs: list[tuple[str, str | Path | None]] = [
        ("FILE", args.file),
        ("the manifest of FILE", manifest_path(args.file)),
        ("`schema`", args.schema),
    ]
    written = [("`out`", out)] + ([] if out == "-" else [("its manifest", manifest_path(out))])
    refuse_shared_files(written, inputs)
    if out == "-":
        return
    check_format("`out`", out, suffixes=OUTPUTS, written="lines are JSON or parquet")
    if not args.overwrite and os.path.isfile(out) and os.path.getsize(out):
        raise UserError(f"{out}: it exists; use `overwrite` to replace it, or give another name")
    check_output_place(out, overwrite=args.overwrite)


def _manifest(args: FilterArgs) -> dict[str, Any]:
    """Return the manifest of the input, with the criteria among the settings of its results.

    So `bass generate` does not continue a filtered file.
    """
    before: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # a file of another tool has none
        before = {} if args.file == "-" else read_manifest(args.file)
    results = part_of(before, "results")
    options = ("where", "key", "unique", "within", "schema", "valid_json", "missing",
               "min_tokens", "max_tokens", "min_chars", "max_chars")  # fmt: skip
    chosen = {name: value for name in options if (value := getattr(args, name))}
    return {
        "results": {**results, "filter": [*results.get("filter", []), chosen]},
        **{key: before[key] for key in ("job", "source", "versions") if key in before},
        "filtered_from": args.file,
        "filtered_by": f"bass {__version__}",
    }


# Checks of JSON and of its schema


def holds_json(text: Any) -> bool:
    """Whether a value is a text of one JSON value, with blanks around it at most."""
    return _json_in(text) is not _NO_JSON


def schema_check(path: str) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is a text of JSON that matches a schema.

    Args:
        path: The file of the schema; its "$schema" chooses the draft, 2020-12 by default.

    Raises:
        UserError: The file cannot be read, or is not a valid schema.
        MachineError: The package jsonschema is not installed.
    """
    try:
        with os_errors_as(UserError, f"`schema` {path}: cannot read the schema"):
            schema = parse_json(read_bytes(path, _MOST))
    except ValueError as error:
        raise UserError(f"`schema` {path}: cannot read the schema: {error}") from None
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
            f"`schema` {path}: it is no valid schema: {unquoted(error.message)}"
            + (f" (at {place})" if place else "")
        ) from None
    kind = jsonschema.validators.extend(kind, _WITH_REGEX)
    validator = kind(schema, registry=referencing.Registry())

    def matches(text: Any) -> bool:
        value = _json_in(text)
        try:
            return value is not _NO_JSON and bool(validator.is_valid(value))
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


def _json_in(text: Any) -> Any:
    """Return the JSON value that a text holds; _NO_JSON if the value is no such text."""
    try:
        return json.loads(text, parse_constant=no_constant) if isinstance(text, str) else _NO_JSON
    except (ValueError, RecursionError):
        return _NO_JSON
