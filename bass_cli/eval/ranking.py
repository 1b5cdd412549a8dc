"""Rank the samples of a task's problems, for Pass@First by several rankers.

A ranker sees a problem's statement, its entry point and the samples, never its tests. Rankers that
run a model are not run here: their scores are read from the lines, where `bass rank` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bass_cli.errors import UserError
from bass_cli.eval.samples import Generation, GenerationFile
from bass_cli.eval.tasks.task import Problem, Task
from bass_cli.rank.ranking import (
    Candidate,
    Group,
    Scores,
    best_first,
    needs_model,
    parse_rankers,
    ranker_without_model,
)
from bass_cli.reading import finite

Problems = Mapping[str, Sequence[Generation]]


def read_rankers(text: str | None) -> list[str]:
    """Parse the option `rank_by`. Empty if it is not given."""
    return [] if text is None else parse_rankers(text, "`rank_by`")


def firsts_of(
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
