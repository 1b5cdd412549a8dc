"""Generation files read for scoring: those of bass, and those of other tools (`task_id` with
`completion` or `solution`).

It checks lines and reads the manifest beside the file; which problems there are and what a text
is worth is not known here.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple

from bass_cli.errors import UserError, near_word
from bass_cli.io.reading import finite, open_regular, parse_json, whole
from bass_cli.io.resume import read_manifest

UNFINISHED = ("budget", "error")
COUNTED = ("tokens", "rounds", "drafted", "accepted")
PREFIXES = {"HumanEval/": "humaneval", "Mbpp/": "mbpp"}
TASKS = ("humaneval", "mbpp", "xsum")
_LINE_BYTES = 1 << 26  # of a sample; gzip can make a line a thousand times as long as its file


class Generation(NamedTuple):
    """One line of a generation file. `whole`: the text stands alone, it does not complete the
    prompt. Seconds are from the prompt's beginning; a figure is None where the file does not
    have it. A copy counts no tokens and no rounds."""

    line: int
    task_id: str
    sample: int
    text: str
    whole: bool
    finish_reason: str | None
    mean_logprob: float | None
    seconds: float | None
    tokens: int | None
    rounds: int | None
    drafted: int | None
    accepted: int | None
    late: bool = False  # it has its end, and came to it after the deadline

    @property
    def finished(self) -> bool:
        """Whether the sample had its end in time; "length" is one, it has all the tokens that it
        may have."""
        return self.finish_reason not in UNFINISHED and not self.late


@dataclass(frozen=True, slots=True)
class GenerationFile:
    """The lines of a file, at least one, what its manifest says (empty without one) and what a
    person should know."""

    path: str
    rows: tuple[Generation, ...]
    manifest: dict[str, Any]
    notes: tuple[str, ...]

    def setting(self, key: str) -> Any:
        """A value of the manifest's "results", None where there is none."""
        return _part(self.manifest, "results").get(key)

    @property
    def budget(self) -> float | None:
        """Seconds that a prompt had, None if there was no end or nobody wrote it down."""
        return _number(self.setting("budget"))

    @property
    def one_at_a_time(self) -> bool:
        """Whether prompts with a budget were decoded one after the other."""
        together = self.setting("coupling") == "maximal"
        return together or _part(self.manifest, "job").get("batch_size", "auto") == "auto"

    @property
    def total_seconds(self) -> float | None:
        """How long the whole generation took, if the manifest says so."""
        return _number(_part(self.manifest, "totals").get("seconds"))


def read_generations(path: str) -> GenerationFile:
    """The lines of a .jsonl file, gzipped or not. A broken last line is left out with a note;
    other faults: UserError."""
    notes: list[str] = []
    rows: list[Generation] = []
    seen: dict[tuple[str, int], int] = {}
    order: Counter[str] = Counter()
    for number, row in _records(path, notes):
        place = f"{path}:{number}"
        generation = _read_row(row, place, number, order)
        key = (_bare(generation.task_id), generation.sample)
        if key in seen:
            raise UserError(
                f'{place}: sample {generation.sample} of "{generation.task_id}" is in the file '
                f"twice, first in line {seen[key]}"
            )
        seen[key] = number
        rows.append(generation)
    if not rows:
        raise UserError(f"{path}: there is no sample in the file")
    manifest = _read_manifest(path)
    if manifest.get("finished") is False:
        notes.append("the run that wrote the file did not come to its end")
    file = GenerationFile(path, tuple(rows), manifest, tuple(notes))
    budget = math.inf if file.budget is None else file.budget
    held = (
        row._replace(late=row.finished and row.seconds is not None and row.seconds > budget)
        for row in rows
    )
    return replace(file, rows=tuple(held))


def _records(path: str, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON object of every line that is not blank, with the line's number, from 1."""
    broken: tuple[int, str] | None = None
    try:
        with _open(path) as stream:
            for at, line in enumerate(iter(lambda: stream.readline(_LINE_BYTES + 1), b""), 1):
                if len(line) > _LINE_BYTES:
                    raise UserError(f"{path}:{at}: the line has more than {_LINE_BYTES >> 20} MB")
                if not line.strip():
                    continue
                if broken is not None:
                    raise UserError(f"{path}:{broken[0]}: {broken[1]}")
                value = _parse(line)
                if isinstance(value, dict):
                    yield at, value
                else:
                    broken = at, value
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the generation file: {error.strerror or error}"
        ) from None
    except (EOFError, zlib.error):
        raise UserError(f"{path}: the gzip file is damaged or cut short") from None
    if broken is not None:
        notes.append(f"line {broken[0]} is the last one and torn; it is left out")


def _open(path: str) -> IO[bytes]:
    stream = open_regular(path)
    is_gzip = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    return gzip.open(stream, "rb") if is_gzip else stream  # type: ignore[return-value]


def _parse(line: bytes) -> dict[str, Any] | str:
    """The object on the line, or why there is none."""
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "the text is not valid UTF-8"
    except ValueError as error:
        return str(error)
    return value if isinstance(value, dict) else "a line must be a JSON object, {...}"


def _read_row(row: dict[str, Any], place: str, number: int, order: Counter[str]) -> Generation:
    """The line checked; `order` counts lines without a sample number, problem by problem."""
    task_id = _task_id(row, place)
    whole, text = _text(row, place)
    sample = _figure(row, "sample", int, place)
    if sample is None:
        sample = order[_bare(task_id)]
        order[_bare(task_id)] += 1
    reason = row.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise UserError(f'{place}: field "finish_reason": it must be a text')
    counts: list[Any] = [
        _figure(row, key, int, place) if row.get("copy_of") is None else 0 for key in COUNTED
    ]
    logprob, seconds = (_figure(row, key, float, place) for key in ("mean_logprob", "seconds"))
    return Generation(number, task_id, int(sample), text, whole, reason, logprob, seconds, *counts)


def _bare(task_id: str) -> str:
    """MBPP's own number of a problem, which other tools write "Mbpp/11"; else what it is."""
    return task_id.removeprefix("Mbpp/")


def _task_id(row: dict[str, Any], place: str) -> str:
    """The line's problem: `task_id`, which bass puts under `meta` if the prompt file had it; or
    an `id` like "a/1"."""
    meta = row.get("meta")
    value = row.get("task_id")
    if value is None and isinstance(meta, dict):
        value = meta.get("task_id")
    if value is None and "/" in str(row.get("id", "")):
        value = row["id"]
    if value is None:
        raise UserError(f'{place}: field "task_id": it is missing{_hint(row, "task_id")}')
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UserError(f'{place}: field "task_id": it must be a text or a whole number')
    return str(value)


def _text(row: dict[str, Any], place: str) -> tuple[bool, str]:
    """Whether the text stands alone, and the text; a `solution` goes before a `completion`, as
    other scorers have it."""
    ours = ("text",) if "finish_reason" in row else ()
    there = [key for key in ("solution", "completion", *ours) if key in row]
    key = next((key for key in there if row[key] is not None), there[0] if there else None)
    if key is None:
        raise UserError(
            f'{place}: field "completion" (or "solution"): it is missing{_hint(row, "completion")}'
        )
    if not isinstance(row[key], str):
        raise UserError(f'{place}: field "{key}": it must be a text')
    return key == "solution", row[key]


def _hint(row: dict[str, Any], key: str) -> str:
    near = near_word(key, row)
    return f'; the line has "{near}"' if near else ""


def _figure(row: dict[str, Any], key: str, kind: type, place: str) -> Any:
    """A number of the line; None where it is absent, null or not finite."""
    value = row.get(key)
    if value is None or (kind is float and type(value) is float and not math.isfinite(value)):
        return None
    try:
        return (
            whole(value)
            if kind is int
            else finite(value, least=0 if key == "seconds" else -math.inf)
        )
    except ValueError as error:
        raise UserError(f'{place}: field "{key}": {error}') from None


def _read_manifest(path: str) -> dict[str, Any]:
    """The manifest beside the file, empty where there is none that can be read: a score does not
    need it."""
    try:
        return read_manifest(path)
    except (OSError, ValueError):
        return {}


def _part(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    part = manifest.get(key)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> float | None:
    try:
        return finite(value) if value > 0 else None
    except (ValueError, TypeError):
        return None


def guess_task(file: GenerationFile) -> str:
    """The task that the manifest names or that the first `task_id` looks like; UserError if
    neither tells it."""
    named = file.setting("task")
    if isinstance(named, str):
        return named
    task_id = file.rows[0].task_id
    if task_id.isdigit():
        return "mbpp"
    for prefix, task in PREFIXES.items():
        if task_id.startswith(prefix):
            return task
    reason = (
        f'the task_id "{task_id[:80]}" does not tell the task; give --task '
        f"{', '.join(TASKS[:-1])} or {TASKS[-1]}"
    )
    raise UserError(f"{file.path}:{file.rows[0].line}: {reason}")


def by_problem(file: GenerationFile, known: Collection[str]) -> dict[str, list[Generation]]:
    """The samples of each problem by number, problems in the order of `known`; UserError at an
    unknown task_id."""
    groups: dict[str, list[Generation]] = {}
    for row in file.rows:
        bare = _bare(row.task_id)
        found = next((name for name in (row.task_id, bare, f"Mbpp/{bare}") if name in known), None)
        if found is None:
            name = row.task_id[:80]
            near = near_word(name, known)
            hint = f'; did you mean "{near}"?' if near else ""
            raise UserError(f'{file.path}:{row.line}: unknown task_id "{name}"{hint}')
        groups.setdefault(found, []).append(row)
    return {
        name: sorted(groups[name], key=lambda row: row.sample) for name in known if name in groups
    }
