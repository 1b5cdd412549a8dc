"""Build the report from outcomes: a dict for JSON, whose keys docs/EVAL.md explains.

Shares are fractions of 1, times are in seconds. metrics.py has the arithmetic, table.py shows the
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bass_cli.eval import metrics
from bass_cli.eval.samples import Generation, GenerationFile

PASSED = "passed"
NOT_FINISHED = "not finished"
LATE = "late"
RATED = "rated"
MEASURES = ("rouge1", "rouge2", "rougeL")
BY_ORDER = "ranked by order: the file has no log-probabilities"

Rating = dict[str, float]


class Outcome(NamedTuple):
    """A sample with the status of its verdict, or with its ratings if the task runs no programs."""

    generation: Generation
    status: str
    rating: Rating | None = None

    @property
    def passed(self) -> bool:
        return self.status == PASSED


def unjudged(generation: Generation) -> Outcome:
    """Return the outcome of a sample that did not finish in time. It counts as failed."""
    return Outcome(generation, LATE if generation.late else NOT_FINISHED)


Outcomes = Sequence[Outcome]


def build(
    file: GenerationFile,
    problems: Mapping[str, Outcomes],
    *,
    task: str,
    executes: bool,
    known: int,
    ks: Sequence[int],
    isolation: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Return the report on a file.

    Args:
        file: the generation file.
        problems: by task_id, the outcomes of a problem's samples in order of sample number.
        task: the task's name.
        executes: the task runs programs.
        known: number of problems in the data set.
        ks: values of k for pass@k.
        isolation: how the programs were isolated.
    """
    rows = [
        _problem(task_id, outcomes, executes, file.budget) for task_id, outcomes in problems.items()
    ]
    everything = [outcome for outcomes in problems.values() for outcome in outcomes]
    notes = [*file.notes, *_gaps(file, problems, known)]
    ranked = any(outcome.generation.mean_logprob is not None for outcome in everything)
    notes += _unranked(everything) if ranked else [BY_ORDER]
    document: dict[str, Any] = {
        "task": task,
        "file": file.path,
        "problems": len(rows),
        "samples": len(everything),
    }
    document["finished"] = sum(outcome.generation.finished for outcome in everything)
    document["late"] = sum(outcome.generation.late for outcome in everything)
    document |= _passes(problems, rows, ks, notes) if executes else {"rouge": _rouge(rows)}
    document["ranked_by"] = "mean_logprob" if ranked else "order"
    document["notes"] = notes
    document |= _timing(file, problems, rows)
    document["statuses"] = dict(sorted(Counter(outcome.status for outcome in everything).items()))
    document["isolation"] = dict(isolation) if isolation else None
    return document | {"by_problem": rows}


def _first(outcomes: Outcomes) -> Outcome | None:
    """Return the outcome of the finished sample that is ranked first."""
    finished = {outcome.generation: outcome for outcome in outcomes if outcome.generation.finished}
    first = metrics.first_ranked(finished)
    return None if first is None else finished[first]


def _problem(
    task_id: str, outcomes: Outcomes, executes: bool, budget: float | None
) -> dict[str, Any]:
    finished = [outcome for outcome in outcomes if outcome.generation.finished]
    row: dict[str, Any] = {"task_id": task_id, "samples": len(outcomes), "finished": len(finished)}
    row["late"] = sum(outcome.generation.late for outcome in outcomes)
    first = _first(outcomes)
    if executes:
        row["passed"] = sum(outcome.passed for outcome in outcomes)
        row["pass_first"] = first is not None and first.passed
        row["pass_all"] = row["passed"] > 0
    else:
        row["rouge"] = _ratings(
            [outcome.rating for outcome in finished if outcome.rating], first and first.rating
        )
    ends = _seconds(finished)
    every = _seconds(outcomes)
    row["seconds_to_first"] = min(ends, default=None)
    row["seconds_to_last"] = max(ends, default=None)
    row["overshoot"] = max(every) - budget if budget is not None and every else None
    return row


def _seconds(outcomes: Outcomes) -> list[float]:
    """Return when the samples ended. A prompt that could not be run has no time."""
    known = [
        outcome.generation for outcome in outcomes if outcome.generation.finish_reason != "error"
    ]
    return [generation.seconds for generation in known if generation.seconds is not None]


def _ratings(ratings: list[Rating], first: Rating | None) -> dict[str, Rating] | None:
    """Return ratings of the first and best sample and their mean. None if none is finished.

    The best sample is the one with the highest ROUGE-L.
    """
    if not ratings or first is None:
        return None
    best = max(ratings, key=lambda rating: rating["rougeL"])
    average = {name: metrics.mean(rating[name] for rating in ratings) or 0.0 for name in MEASURES}
    return {"first": first, "best": best, "mean": average}


def _passes(
    problems: Mapping[str, Outcomes],
    rows: list[dict[str, Any]],
    ks: Sequence[int],
    notes: list[str],
) -> dict[str, Any]:
    """Return Pass@First, Pass@All (arXiv 2404.15778) and pass@k. Adds a note if one is unknown."""
    passes: dict[str, Any] = {"pass_first": metrics.mean(row["pass_first"] for row in rows)}
    passes["pass_first_of_finished"] = metrics.mean(
        row["pass_first"] for row in rows if row["finished"]
    )
    passes["pass_all"] = metrics.mean(row["pass_all"] for row in rows)
    passes["pass_at_k"] = {}
    for k in ks:
        estimates = [_pass_at_k(outcomes, k) for outcomes in problems.values()]
        known = [estimate for estimate in estimates if estimate is not None]
        passes["pass_at_k"][str(k)] = metrics.mean(known) if len(known) == len(estimates) else None
        if len(known) < len(estimates):
            few = len(estimates) - len(known)
            notes.append(
                f"pass@{k} is unknown: {few} of {len(rows)} problems have fewer than {k} samples"
            )
    return passes


def _pass_at_k(outcomes: Outcomes, k: int) -> float | None:
    """Return pass@k of a problem. Unfinished samples count as failed.

    A prompt that could not be run has one line, whatever n is, and counts 0.
    """
    if all(outcome.generation.finish_reason == "error" for outcome in outcomes):
        return 0.0
    return metrics.pass_at_k(len(outcomes), sum(outcome.passed for outcome in outcomes), k)


def _rouge(rows: list[dict[str, Any]]) -> dict[str, Rating]:
    """Return means over all problems. A problem without a finished sample counts 0."""
    nothing = dict.fromkeys(MEASURES, 0.0)
    chosen = {
        kind: [(row["rouge"] or {}).get(kind, nothing) for row in rows]
        for kind in ("first", "best", "mean")
    }
    return {
        kind: {name: metrics.mean(rating[name] for rating in ratings) or 0.0 for name in MEASURES}
        for kind, ratings in chosen.items()
    }


def _timing(
    file: GenerationFile, problems: Mapping[str, Outcomes], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return times, tokens and acceptance of drafts."""
    generations = [outcome.generation for outcomes in problems.values() for outcome in outcomes]
    tokens = _total(generations, "tokens")
    late = [row["overshoot"] for row in rows if row["overshoot"] is not None]
    accepted = _total(generations, "accepted")
    return {
        "seconds_to_first": metrics.spread(
            [r["seconds_to_first"] for r in rows if r["seconds_to_first"] is not None]
        ),
        "seconds_to_last": metrics.spread(
            [r["seconds_to_last"] for r in rows if r["seconds_to_last"] is not None]
        ),
        "tokens": tokens,
        "tokens_per_second": metrics.ratio(tokens, _decoding_seconds(file, problems)),
        "accepted_per_round": metrics.ratio(accepted, _total(generations, "rounds")),
        "acceptance_rate": metrics.ratio(accepted, _total(generations, "drafted")),
        "budget": file.budget,
        "overshoot": metrics.overshoot(late),
    }


def _total(generations: list[Generation], name: str) -> int | None:
    """Return the sum over the lines that have the figure. None if no line has it."""
    known = [
        value
        for value in (getattr(generation, name) for generation in generations)
        if value is not None
    ]
    return sum(known) if known else None


def _decoding_seconds(file: GenerationFile, problems: Mapping[str, Outcomes]) -> float | None:
    """Return the run's seconds. None if unknown.

    They are in the manifest. Without it they are the sum of the problems' times if prompts ran one
    at a time, which they do with a budget and no --batch-size.
    """
    if file.total_seconds is not None or file.budget is None or not file.one_at_a_time:
        return file.total_seconds
    return sum(max(_seconds(outcomes), default=0.0) for outcomes in problems.values())


def _unranked(everything: Outcomes) -> list[str]:
    few = sum(one.generation.finished and one.generation.mean_logprob is None for one in everything)
    return [f"{few} finished samples have no log-probability; they are ranked last"] if few else []


def _gaps(file: GenerationFile, problems: Mapping[str, Outcomes], known: int) -> list[str]:
    """Return notes about missing problems, and about samples missing by the manifest's n."""
    notes = (
        [] if len(problems) == known else [f"the file has {len(problems)} of the {known} problems"]
    )
    n = file.setting("n")
    if isinstance(n, int):
        whole = (
            o
            for o in problems.values()
            if any(one.generation.finish_reason != "error" for one in o)
        )
        short = sum(len(outcomes) < n for outcomes in whole)
        notes += [f"{short} problems have fewer than the {n} requested samples"] if short else []
    return notes
