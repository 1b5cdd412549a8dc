"""Read generation files for scoring: files of bass, and files of other tools.

Files of other tools have `task_id` with `completion` or `solution`. This checks each line and
reads the manifest beside the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from bass_cli.errors import UserError, near_word
from bass_cli.eval.tasks import task_names
from bass_cli.io.linefile import read_records
from bass_cli.io.resume import part_of, read_manifest, samples_of
from bass_cli.rank.ranking import UNFINISHED
from bass_cli.reading import finite, whole

COUNTED = ("tokens", "rounds", "drafted", "accepted")
# Keys of which every sample has one; `bass generate` always writes the number of a sample
_OF_SAMPLES = {"completion", "solution", "text", "sample"}
PREFIXES = {"HumanEval/": "humaneval", "Mbpp/": "mbpp"}


class Generation(NamedTuple):
    """One line of a generation file. Figures that the file does not have are None.

    Attributes:
        line: line number from 1.
        whole: the text is the whole program; otherwise it continues the prompt.
        seconds: time from the prompt's start to the sample's end.
        tokens, rounds, drafted, accepted: 0 for a copy of another sample.
        late: the sample ended by itself, but after the deadline.
        scores: the line's own value, unchecked. `bass rank` writes scores by ranker.
    """

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
    late: bool = False
    scores: Any = None

    @property
    def finished(self) -> bool:
        """Whether the sample ended in time. Reaching the length limit counts as an end."""
        return self.finish_reason not in UNFINISHED and not self.late


@dataclass(frozen=True, slots=True)
class GenerationFile:
    """The lines of a generation file (at least one), its manifest (may be empty) and notes.

    `budget`: seconds per prompt. None without a budget or if unknown.
    """

    path: str
    rows: tuple[Generation, ...]
    manifest: dict[str, Any]
    budget: float | None
    notes: tuple[str, ...]

    def setting(self, key: str) -> Any:
        """Return a value of the manifest's "results". None if it is missing."""
        return part_of(self.manifest, "results").get(key)

    @property
    def one_at_a_time(self) -> bool:
        """Whether prompts with a budget ran one after the other."""
        together = self.setting("coupling") == "maximal"
        return together or part_of(self.manifest, "job").get("batch_size", "auto") == "auto"

    @property
    def total_seconds(self) -> float | None:
        """Seconds of the whole generation. None if unknown."""
        return _positive_number(part_of(self.manifest, "totals").get("seconds"))


def read_generations(
    path: str, *, by_id: bool = False, on_sample: Callable[[dict[str, Any]], None] | None = None
) -> GenerationFile:
    """Read a file of samples in any format that `bass generate` writes.

    A broken last line is left out with a note. UserError for all other faults.

    Args:
        path: the file.
        by_id: read files that answer no task too: `id` names the prompt, and a line with the number
            of a sample but no text has an empty one. Such a file may have no samples yet.
        on_sample: called with the JSON object of each sample, in the order of `rows`.
    """
    manifest = manifest_of(path)
    budget = _positive_number(part_of(manifest, "results").get("budget"))
    notes: list[str] = []
    rows: list[Generation] = []
    seen: dict[tuple[str, int], int] = {}
    order: Counter[str] = Counter()
    for number, _, row in read_records(path, notes):
        place = f"{path}:{number}"
        if not all(isinstance(one, dict) for one in _listed(row)):
            raise UserError(f'{place}: field "samples": it must be a list of JSON objects')
        for sample in samples_of(row) if _is_of_bass(row) else [row]:
            if by_id and not sample.keys() & _OF_SAMPLES:
                raise UserError(
                    f"{place}: this is no sample: it has no text{_hint(sample, 'text')}"
                )
            one = read_row(_with_task_id(sample) if by_id else sample, place, number, order)
            key = (bare_id(one.task_id), one.sample)
            if key in seen:
                raise UserError(
                    f'{place}: sample {one.sample} of "{one.task_id}" is in the file '
                    f"twice, first in line {seen[key]}"
                )
            seen[key] = number
            late = one.finished and budget is not None and (one.seconds or 0.0) > budget
            rows.append(one._replace(late=late))
            if on_sample is not None:
                on_sample(sample)
    if not rows and not by_id:
        raise UserError(f"{path}: the file has no samples")
    if manifest.get("finished") is False:
        notes.append("the run that wrote the file did not finish")
    return GenerationFile(path, tuple(rows), manifest, budget, tuple(notes))


def _listed(row: dict[str, Any]) -> list[Any]:
    found = row.get("samples")
    return found if isinstance(found, list) else []


def _is_of_bass(row: dict[str, Any]) -> bool:
    """Whether the line is of bass, in a layout that may leave out the finish reason."""
    return isinstance(row.get("samples"), list) or row.keys() >= {"id", "sample", "text"}


def _with_task_id(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line in which a missing task_id is the id, and a missing text is empty."""
    texts = row.keys() & {"completion", "solution", "text"}
    more: dict[str, Any] = {} if texts else {"completion": ""}
    meta = row.get("meta")
    of_meta = meta.get("task_id") if isinstance(meta, dict) else None
    if row.get("task_id") is None and of_meta is None and isinstance(row.get("id"), (str, int)):
        more |= {"task_id": row["id"]}
    if texts == {"text"} and "finish_reason" not in row:
        more |= {"completion": row["text"]}
    return {**row, **more} if more else row


def read_row(row: dict[str, Any], place: str, number: int, order: Counter[str]) -> Generation:
    """Check a line. `order` counts the lines without a sample number for each problem."""
    task_id = _task_id(row, place)
    is_whole, text = _text(row, place)
    sample = _checked_number(row, "sample", whole, place)
    if sample is None:
        sample = order[bare_id(task_id)]
        order[bare_id(task_id)] += 1
    reason = row.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise UserError(f'{place}: field "finish_reason": it must be a text')
    is_copy = row.get("copy_of") is not None
    counts: list[Any] = [
        0 if is_copy else _checked_number(row, key, whole, place) for key in COUNTED
    ]
    logprob = _checked_number(row, "mean_logprob", finite, place)
    seconds = _checked_number(row, "seconds", partial(finite, least=0), place)
    found = Generation(
        number, task_id, int(sample), text, is_whole, reason, logprob, seconds, *counts
    )
    return found._replace(scores=row.get("scores"))


def bare_id(task_id: str) -> str:
    """Return a task_id without the prefix "Mbpp/" that some tools add."""
    return task_id.removeprefix("Mbpp/")


def find_problem(task_id: str, known: Collection[str]) -> str | None:
    """Return the task's own name of a problem, with or without "Mbpp/". None if it is unknown."""
    bare = bare_id(task_id)
    return next((name for name in (task_id, bare, f"Mbpp/{bare}") if name in known), None)


def known_problem(row: Generation, path: str, known: Collection[str]) -> str:
    """Return the task's own name of a sample's problem. UserError if it is unknown."""
    found = find_problem(row.task_id, known)
    if found is None:
        name = row.task_id[:80]
        near = near_word(name, known)
        hint = f'; did you mean "{near}"?' if near else ""
        raise UserError(f'{path}:{row.line}: unknown task_id "{name}"{hint}')
    return found


def _task_id(row: dict[str, Any], place: str) -> str:
    """Return a line's task_id.

    It is `task_id`, or `meta.task_id` if the prompt file of bass had it, or an `id` like "a/1".
    """
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
    """Return whether the text is the whole program, and the text.

    `solution` takes precedence over `completion`, as in other scorers.
    """
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


def _checked_number(row: dict[str, Any], key: str, check: Callable[[Any], Any], place: str) -> Any:
    """Return a checked number of a line. None if it is missing, null or not finite."""
    value = row.get(key)
    if value is None or (isinstance(value, float) and check is not whole and not isfinite(value)):
        return None
    try:
        return check(value)
    except ValueError as error:
        raise UserError(f'{place}: field "{key}": {error}') from None


def manifest_of(path: str) -> dict[str, Any]:
    """Return the manifest beside the file. Empty if it cannot be read; scoring works without."""
    try:
        return read_manifest(path)
    except (OSError, ValueError):
        return {}


def _positive_number(value: Any) -> float | None:
    try:
        return finite(value) if value > 0 else None
    except (ValueError, TypeError):
        return None


def guess_task(file: GenerationFile) -> str:
    """Return the task from the manifest, or from the form of the first `task_id`.

    UserError if neither determines it.
    """
    named = file.setting("task")
    if isinstance(named, str):
        return known_task(named, file.path)
    task_id = file.rows[0].task_id
    if task_id.isdigit():
        return "mbpp"
    for prefix, task in PREFIXES.items():
        if task_id.startswith(prefix):
            return task
    *names, last = task_names()
    reason = (
        f'the task_id "{task_id[:80]}" does not determine the task; add `task` '
        f"{', '.join(names)} or {last}"
    )
    raise UserError(f"{file.path}:{file.rows[0].line}: {reason}")


def known_task(name: str, path: str) -> str:
    """Return the name of a task in a file's manifest. UserError if it is that of a task file."""
    if name in task_names():
        return name
    reason = f'its samples are of the task "{name}", which is a task file'
    raise UserError(f"{path}: {reason}; name it with `task` FILE.yaml")


def by_problem(file: GenerationFile, known: Collection[str]) -> dict[str, list[Generation]]:
    """Group samples by problem, in the order of `known`, each group by sample number.

    UserError for an unknown task_id.
    """
    groups: dict[str, list[Generation]] = {}
    for row in file.rows:
        groups.setdefault(known_problem(row, file.path, known), []).append(row)
    return {
        name: sorted(groups[name], key=lambda row: row.sample) for name in known if name in groups
    }
