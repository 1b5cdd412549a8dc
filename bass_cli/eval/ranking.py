"""What rankers see of a task's problems and of a file of samples, and the lines with their scores.

A ranker sees a problem's statement, its entry point and the samples, never its tests. For
Pass@First by several rankers, those that run a model are not run again: their scores are read from
the lines, where `bass rank` writes them (`RankedFile`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from bass_cli.errors import UserError
from bass_cli.eval.samples import Generation, GenerationFile, known_problem, read_row
from bass_cli.eval.tasks.task import Problem, Task
from bass_cli.io.linefile import read_records
from bass_cli.io.results import line_of
from bass_cli.io.resume import OutputState, is_of_prompt, samples_of
from bass_cli.rank.ranking import (
    Candidate,
    Group,
    Members,
    Scores,
    Standing,
    best_first,
    candidate_of,
    needs_model,
    parse_rankers,
    ranker_without_model,
    text_of,
)
from bass_cli.reading import finite, parse_object, whole

Problems = Mapping[str, Sequence[Generation]]
_SAMPLES = "samples"
_PATIENCE = 1.0  # seconds of one search for the answer, as in bass filter
Row = dict[str, Any]


def read_rankers(text: str | None) -> list[str]:
    """Parse the option `rank_by`. Empty if it is not given."""
    return [] if text is None else parse_rankers(text, "`rank_by`")


def first_by_ranker(
    names: Sequence[str], task: Task, file: GenerationFile, problems: Problems
) -> dict[str, dict[str, Generation]] | None:
    """Return by ranker, then by task_id, the sample that is ranked first. None without rankers.

    Problems without a finished sample have no first sample.

    Raises:
        UserError: a ranker runs a model, and a finished sample has no score of it in the file.
    """
    if not names:
        return None
    finished = {
        name: found for name, rows in problems.items() if (found := [r for r in rows if r.finished])
    }
    groups = [group_of(task, task.problems[name], rows) for name, rows in finished.items()]
    firsts: dict[str, dict[str, Generation]] = {}
    for name in names:
        every: Sequence[Scores]
        if needs_model(name):
            every = [[_score(name, row, file.path) for row in rows] for rows in finished.values()]
        else:
            every = list(ranker_without_model(name).scores(groups))
        firsts[name] = {
            group.id: finished[group.id][best_first(group.candidates, scores)[0]]
            for group, scores in zip(groups, every, strict=True)
        }
    return firsts


def lacks_scores(names: Iterable[str], file: GenerationFile) -> bool:
    """Return whether a finished sample has no score of one of these rankers in its line."""
    scores: Iterable[Any] = (row.scores for row in file.rows if row.finished)
    return any(not isinstance(one, dict) or not one.keys() >= set(names) for one in scores)


def group_of(task: Task, problem: Problem, rows: Sequence[Generation]) -> Group:
    """Return what rankers see of a problem and its finished samples."""
    answers = [task.answer(problem, row.text) for row in rows]
    has_rule = any(answer is not None for answer in answers)
    candidates = [
        Candidate(
            row.sample,
            row.text,
            row.finish_reason,
            row.mean_logprob,
            task.source_of(problem, row.text, whole=row.whole),
            # an empty answer has no vote
            "" if answer is None and has_rule else answer,
        )
        for row, answer in zip(rows, answers, strict=True)
    ]
    statement, entry_point = task.statement(problem), task.entry_point(problem)
    return Group(problem.task_id, statement, candidates, entry_point)


def _score(name: str, row: Generation, path: str) -> float | None:
    """Return a sample's score from its line."""
    scores: Any = row.scores
    place = f"{path}:{row.line}"
    if not isinstance(scores, dict) or name not in scores:
        raise UserError(
            f'{place}: sample {row.sample} of "{row.task_id}" has no score "{name}"',
            f"run `bass rank {path} --by {name}` first; it writes the scores into the file",
        )
    try:
        return None if scores[name] is None else finite(scores[name])
    except ValueError as error:
        raise UserError(f'{place}: field "scores": "{name}": {error}') from None


class _Line(NamedTuple):
    """The place of a line in the copy, its number in the file, and its samples' numbers.

    Without samples it is the line of a prompt that could not be run.
    """

    id: str
    start: int
    size: int
    number: int
    samples: tuple[int, ...]


class RankedFile:
    """A file of samples.

    Args:
        path: The file, in any format of bass, or with lines of other tools.
        task: The task of the samples; None if there is none.
        prompts: The prompts by id, for files of no task; None: those in the lines, if any.
        answer: A regular expression whose last match in a text is the answer; a group in it is
            the answer alone. It is one of the regex package, whose searches have a time limit.
        exclusive: Whether the file will be replaced, so that no other process may read or write.

    Attributes:
        notes: What was left out, such as a torn last line.
        totals: Those of a manifest, for the lines that `lines` has yielded.
        kept, dropped: The numbers of samples that `lines` has kept and dropped.

    Raises:
        UserError: A line is wrong, or another process writes to the file.
    """

    def __init__(
        self,
        path: str,
        *,
        task: Task | None = None,
        prompts: Mapping[str, str] | None = None,
        answer: Any = None,
        exclusive: bool = False,
    ):
        self.path, self.notes = path, list[str]()
        self._task, self._prompts, self._answer = task, prompts, answer
        self._copy: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - held with the object
        self._lines = list[_Line]()
        self._of_prompt: dict[str, list[_Line]] = {}
        self._past = OutputState()
        self.kept = self.dropped = 0
        self._read(exclusive=exclusive)

    def __len__(self) -> int:
        return len(self._of_prompt)

    def __enter__(self) -> RankedFile:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the copy, and let other processes use the file."""
        self._copy.close()
        self._lock.close()

    def _read(self, *, exclusive: bool) -> None:
        kind = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB

        def lock(stream: IO[bytes]) -> None:
            # the lock lasts as long as this copy, also when the file has been read
            self._lock = os.fdopen(os.dup(stream.fileno()), "rb")
            try:
                fcntl.flock(stream, kind)
            except BlockingIOError:
                raise UserError(f"{self.path}: another process is using this file") from None

        seen: dict[tuple[str, int], int] = {}
        order: Counter[str] = Counter()
        start = 0
        for number, line, row in read_records(self.path, self.notes, on_open=lock):
            id_ = self._id(row, number)
            numbers = tuple(self._numbers(row, number, id_, order))
            for one in numbers:
                if (id_, one) in seen:
                    raise UserError(
                        f'{self.path}:{number}: sample {one} of "{id_}" is in the file twice, '
                        f"first in line {seen[id_, one]}"
                    )
                seen[id_, one] = number
            self._copy.write(line)
            found = _Line(id_, start, len(line), number, numbers)
            start += len(line)
            self._lines.append(found)
            if numbers:
                self._of_prompt.setdefault(id_, []).append(found)
        if not self._lines:
            raise UserError(f"{self.path}: the file has no samples")

    def _id(self, row: Row, number: int) -> str:
        """Return what the samples of a prompt share: the id of the prompt or the problem."""
        id_ = row.get("id", row.get("task_id"))
        if not isinstance(id_, (str, int)) or isinstance(id_, bool):
            raise UserError(f'{self.path}:{number}: field "id" (or "task_id"): a text is needed')
        return str(id_)

    def _numbers(self, row: Row, number: int, id_: str, order: Counter[str]) -> Iterator[int]:
        """Yield the numbers of a line's samples; without numbers they follow the file's order."""
        every = samples_of(row)
        if len(every) == 1 and is_of_prompt(every[0]):
            return
        for one in every:
            if "sample" not in one:
                one["sample"] = order[id_]
                order[id_] += 1
            try:
                yield whole(one["sample"])
            except ValueError as error:
                raise UserError(f'{self.path}:{number}: field "sample": {error}') from None

    def _row(self, line: _Line) -> Row:
        self._copy.seek(line.start)
        return parse_object(self._copy.read(line.size))

    def members(self) -> Iterator[Members]:
        """Yield the samples of each prompt, in the order of the prompts' first lines."""
        for id_, lines in self._of_prompt.items():
            found = [
                (line, dict(one) | {"sample": at})
                for line in lines
                for one, at in zip(samples_of(self._row(line)), line.samples, strict=True)
            ]
            yield self._members(id_, found)

    def _members(self, id_: str, found: Sequence[tuple[_Line, Row]]) -> Members:
        if self._task is None:
            prompt = self._prompt_of(id_, found[0][1])
            return Members.of(
                id_, prompt, [self._candidate(line, row, prompt) for line, row in found]
            )
        rows = [
            read_row(row, f"{self.path}:{line.number}", line.number, Counter())
            for line, row in found
        ]
        problems = self._task.problems
        problem = problems[known_problem(rows[0], self.path, problems)]
        return Members.of(id_, *group_of(self._task, problem, rows)[1:])

    def _prompt_of(self, id_: str, row: Row) -> str | None:
        """Return the text of a prompt: of the prompt file, or of its line if it was echoed."""
        if self._prompts is not None:
            if id_ not in self._prompts:
                raise UserError(f'`prompts`: there is no prompt "{id_}", which {self.path} has')
            return self._prompts[id_]
        if isinstance(row.get("prompt"), str):
            text: str = row["prompt"]
            return text
        messages = row.get("messages")
        return text_of(messages) if isinstance(messages, list) else None

    def _candidate(self, line: _Line, row: Row, prompt: str | None) -> Candidate:
        place = f"{self.path}:{line.number}"
        key = next((one for one in ("text", "completion", "solution") if row.get(one)), "text")
        text, number = row.get(key), None
        if not isinstance(text, str):
            fault = "it is missing" if text is None else "a text is needed"
            raise UserError(f'{place}: field "{key}": {fault}')
        with contextlib.suppress(ValueError):  # missing, null or not finite
            number = finite(row.get("mean_logprob"))
        reason = None if row["finish_reason"] == "unknown" else row["finish_reason"]
        answer = self._answer_in(text, place)
        found = candidate_of(prompt, row["sample"], text, reason, number, answer=answer)
        return found._replace(program=text) if key == "solution" else found

    def _answer_in(self, text: str, place: str) -> str | None:
        if self._answer is None:
            return None
        try:
            found = deque(self._answer.finditer(text, timeout=_PATIENCE), maxlen=1)
        except TimeoutError:
            raise UserError(
                f"{place}: `answer`: the regular expression takes more than {_PATIENCE:g} s on "
                "this text; write it without repetitions inside repetitions"
            ) from None
        return str(found[0][1 if self._answer.groups else 0] or "") if found else ""

    def lines(
        self, standings: Mapping[tuple[str, int], Standing], best: int | None
    ) -> Iterator[bytes]:
        """Yield the lines with `rank` and `scores`, in the order of the file.

        Args:
            standings: By prompt id and sample number.
            best: Only samples up to this rank are kept; None: all.
        """
        for line in self._lines:
            read = self._row(line)
            row = self._ranked(read, line, standings, best) if line.samples else read
            if row is not None:
                if any(key in row for key in ("finish_reason", _SAMPLES)):
                    self._past.count(row)
                yield line_of(row).encode() + b"\n"

    def _ranked(
        self, row: Row, line: _Line, standings: Mapping[tuple[str, int], Standing], best: int | None
    ) -> Row | None:
        """Return a line with ranks; None if none of its samples is kept."""
        listed = isinstance(row.get(_SAMPLES), list)
        kept = list[Row]()
        for one, at in zip(row[_SAMPLES] if listed else [row], line.samples, strict=True):
            standing = standings[line.id, at]
            if best is not None and standing.rank > best:
                self.dropped += 1
                continue
            self.kept += 1
            before = one.get("scores") if isinstance(one.get("scores"), dict) else {}
            # a line of a prompt may leave the numbers to the order, which would change
            number = {"sample": at} if listed and "sample" not in one and best else {}
            own = {"rank": standing.rank, "scores": {**before, **standing.scores}}
            kept.append({**number, **one, **own})
        if not kept:
            return None
        return {**row, _SAMPLES: kept} if listed else kept[0]

    @property
    def totals(self) -> dict[str, Any]:
        """Return the totals of the lines that were yielded."""
        return self._past.totals
