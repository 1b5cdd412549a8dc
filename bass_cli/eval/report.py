"""Build the report from outcomes: a dict for JSON, whose keys docs/EVAL.md explains. Show it.

Shares are fractions of 1, times are in seconds. The table on the screen has percent, in the terms
of the BASS paper (arXiv 2404.15778). statistics.py has the arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bass_cli.eval import statistics
from bass_cli.eval.samples import COUNTED, Generation, GenerationFile
from bass_cli.eval.setting import setting_of
from bass_cli.eval.statistics import FEW, Estimate, mean, overshoot, pass_at_k, ratio, spread
from bass_cli.eval.tasks.task import Task
from bass_cli.io.console import Screen
from bass_cli.rank.ranking import low

PASSED = "passed"
MEASURES = ("rouge1", "rouge2", "rougeL")
BY_ORDER = "ranked by order: the file has no log-probabilities"
TOO_NARROW = f"intervals are too narrow with fewer than {FEW} problems"
NO_WIDTH = (
    "a figure is equal for all problems, so its interval has no width and says nothing about other "
    "problems"
)
SHOWN = 20  # most problems that are shown; more would push the figures off the screen

Rating = dict[str, float]


class Outcome(NamedTuple):
    """A sample with the status of its verdict, or with its ratings if the task rates texts.

    `base`: the status by the base tests alone, if the task has them.
    """

    generation: Generation
    status: str
    rating: Rating | None = None
    base: str | None = None

    @property
    def passed(self) -> bool:
        return self.status == PASSED


Outcomes = Sequence[Outcome]
FirstByRanker = Mapping[str, Mapping[str, Generation]]


def unjudged(generation: Generation) -> Outcome:
    """Return the outcome of a sample that did not finish in time. It counts as failed."""
    return Outcome(generation, "late" if generation.late else "not finished")


def build(
    file: GenerationFile,
    problems: Mapping[str, Outcomes],
    task: Task | None,
    *,
    ks: Sequence[int] | None,
    isolation: Mapping[str, str] | None,
    firsts: FirstByRanker | None = None,
) -> dict[str, Any]:
    """Return the report on a file.

    Args:
        file: the generation file.
        problems: by task_id, the outcomes of a problem's samples in order of sample number.
        task: the task that the file answers. None: the report has no quality.
        ks: values of k for pass@k. Default: those of 1, 10 and 100 that have enough samples.
        isolation: how the programs were isolated.
        firsts: by ranker, then by task_id, the sample that is ranked first.
    """
    judged = task is not None and not task.rates
    rows = [_problem_row(name, one, judged, file.budget) for name, one in problems.items()]
    everything = [outcome for outcomes in problems.values() for outcome in outcomes]
    ranked = any(outcome.generation.mean_logprob is not None for outcome in everything)
    notes = [
        *file.notes,
        *_notes_on_missing(file, problems, len(task.problems if task else problems)),
    ]
    notes += _notes_on_ranking(everything) if ranked else [BY_ORDER]
    quality: dict[str, Any] = {}
    if task is not None:
        quality = _pass_rates(problems, rows, ks, notes) if judged else {"rouge": _mean_rouge(rows)}
        if task.has_base:
            quality["base"] = _base_pass_rates(problems, rows, ks)
        quality |= task.figures(
            {
                name: [one.generation.text if one.generation.finished else None for one in outcomes]
                for name, outcomes in problems.items()
            }
        )
    by = {} if firsts is None else {"pass_first_by": _pass_first_by_ranker(firsts, problems, rows)}
    estimates = _estimates(rows, {**quality, **by}) if quality else {}
    notes += _notes_on_intervals(estimates)
    return {
        "task": task.name if task else None,
        "file": file.path,
        "problems": len(rows),
        "samples": len(everything),
        "finished": sum(outcome.generation.finished for outcome in everything),
        "late": sum(outcome.generation.late for outcome in everything),
        **quality,
        **by,
        "estimates": {name: one.document() for name, one in estimates.items()},
        "ranked_by": "mean_logprob" if ranked else "order",
        "notes": notes,
        **_timing(file, problems, rows),
        "statuses": dict(sorted(Counter(outcome.status for outcome in everything).items())),
        "isolation": dict(isolation) if isolation else None,
        "setting": setting_of(file),
        "by_problem": rows,
    }


def _problem_row(
    task_id: str, outcomes: Outcomes, judged: bool, budget: float | None
) -> dict[str, Any]:
    finished = [outcome for outcome in outcomes if outcome.generation.finished]
    ranked_first = first_ranked(outcome.generation for outcome in finished)
    first = next((one for one in finished if one.generation is ranked_first), None)
    row: dict[str, Any] = {"task_id": task_id, "samples": len(outcomes), "finished": len(finished)}
    row["late"] = sum(outcome.generation.late for outcome in outcomes)
    if judged:
        row["passed"] = sum(outcome.passed for outcome in outcomes)
        row["pass_first"] = first is not None and first.passed
        row["pass_all"] = row["passed"] > 0
    else:
        row["rouge"] = _ratings([one.rating for one in finished if one.rating], first)
    ends, every = _end_times(finished), _end_times(outcomes)
    row["seconds_to_first"] = min(ends, default=None)
    row["seconds_to_last"] = max(ends, default=None)
    row["overshoot"] = max(every) - budget if budget is not None and every else None
    return row


def _end_times(outcomes: Outcomes) -> list[float]:
    """Return when the samples ended. A prompt that could not be run has no time."""
    known = (one.generation for one in outcomes if one.generation.finish_reason != "error")
    return [generation.seconds for generation in known if generation.seconds is not None]


def _ratings(ratings: list[Rating], first: Outcome | None) -> dict[str, Rating] | None:
    """Return ratings of the first and best sample and their mean. None if none is finished.

    The best sample is the one with the highest ROUGE-L.
    """
    if not ratings or first is None or first.rating is None:
        return None
    best = max(ratings, key=lambda rating: rating["rougeL"])
    return {"first": first.rating, "best": best, "mean": _mean_rating(ratings)}


def _mean_rating(ratings: list[Rating]) -> Rating:
    return {name: mean(rating[name] for rating in ratings) or 0.0 for name in MEASURES}


def _mean_rouge(rows: list[dict[str, Any]]) -> dict[str, Rating]:
    """Return means over all problems. A problem without a finished sample counts 0."""
    nothing = dict.fromkeys(MEASURES, 0.0)
    return {
        kind: _mean_rating([(row["rouge"] or {}).get(kind, nothing) for row in rows])
        for kind in ("first", "best", "mean")
    }


def _pass_rates(
    problems: Mapping[str, Outcomes],
    rows: list[dict[str, Any]],
    ks: Sequence[int] | None,
    notes: list[str],
) -> dict[str, Any]:
    """Return Pass@First, Pass@All (arXiv 2404.15778) and pass@k. Adds a note if one is unknown."""
    if ks is None:
        fewest = min((len(one) for one in problems.values() if _could_run(one)), default=1)
        ks = [k for k in (1, 10, 100) if k <= fewest] or [1]
    at_k: dict[str, float | None] = {}
    for row, outcomes in zip(rows, problems.values(), strict=True):
        row["pass_at_k"] = {str(k): _pass_at_k(outcomes, k) for k in ks}
    for k in map(str, ks):
        known = [row["pass_at_k"][k] for row in rows if row["pass_at_k"][k] is not None]
        few = len(rows) - len(known)
        at_k[k] = None if few else mean(known)
        if few:
            notes.append(
                f"pass@{k} is unknown: {few} of {len(rows)} problems have fewer than {k} samples"
            )
    return {
        "pass_first": mean(row["pass_first"] for row in rows),
        "pass_first_of_finished": mean(row["pass_first"] for row in rows if row["finished"]),
        "pass_all": mean(row["pass_all"] for row in rows),
        "pass_at_k": at_k,
    }


def _pass_first_by_ranker(
    firsts: FirstByRanker, problems: Mapping[str, Outcomes], rows: list[dict[str, Any]]
) -> dict[str, float | None]:
    """Return Pass@First by ranker, and add that of each problem to its row."""
    for row in rows:
        outcomes = problems[row["task_id"]]
        row["pass_first_by"] = {
            name: any(
                one.generation is found.get(row["task_id"]) and one.passed for one in outcomes
            )
            for name, found in firsts.items()
        }
    return {name: mean(row["pass_first_by"][name] for row in rows) for name in firsts}


def _estimates(rows: list[dict[str, Any]], quality: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the figures over problems with their errors, by name: see `value_of`.

    Figures that are unknown are left out. Pass@First is the choice of a ranking, so its error is
    the bootstrap's, over problems.
    """
    found: dict[str, Estimate | None] = {}
    if "rouge" in quality:
        names = [f"{kind}.{one}" for kind in ("first", "best", "mean") for one in MEASURES]
    else:
        names = _names_of(quality)
        of_base = _names_of(quality.get("base", {}))
        names += [f"base.{name}" for name in of_base if name != "pass_first_of_finished"]
    for name in names:
        values = [one for row in rows if (one := value_of(row, name)) is not None]
        is_choice = "pass_first" in name
        found[name] = statistics.bootstrap(values) if is_choice else statistics.share_of(values)
    return {name: one for name, one in found.items() if one is not None}


def _names_of(passes: Mapping[str, Any]) -> list[str]:
    known = ("pass_first", "pass_first_of_finished", "pass_all")
    names = [name for name in known if name in passes]
    names += [f"pass@{k}" for k, one in passes.get("pass_at_k", {}).items() if one is not None]
    return names + [f"pass_first_by.{name}" for name in passes.get("pass_first_by", ())]


def value_of(row: Mapping[str, Any], figure: str) -> float | None:
    """Return a figure of one problem. None if it is unknown, or if the problem does not count.

    Args:
        row: a row of a report's "by_problem".
        figure: a key of a report's "estimates", such as "pass@10", "base.pass_all",
            "pass_first_by.static" or "first.rougeL"; or "seconds_to_first", "seconds_to_last".
    """
    kind, _, rest = figure.partition(".")
    if kind == "base":
        return value_of({"finished": row["finished"], **row["base"]}, rest)
    if kind == "pass_first_by":
        return float(row["pass_first_by"][rest])
    if kind == "pass_first_of_finished":
        return float(row["pass_first"]) if row["finished"] else None
    if kind.startswith("pass@"):
        found: float | None = row["pass_at_k"].get(kind.removeprefix("pass@"))
        return found
    if rest in MEASURES:
        return float((row["rouge"] or {}).get(kind, {}).get(rest, 0.0))
    return None if row[kind] is None else float(row[kind])


def _notes_on_intervals(estimates: Mapping[str, Estimate]) -> list[str]:
    """Return a note if intervals of quality are too narrow."""
    if max((one.problems for one in estimates.values()), default=FEW) < FEW:
        return [TOO_NARROW]
    return [NO_WIDTH] if any(one.standard_error == 0.0 for one in estimates.values()) else []


def _base_pass_rates(
    problems: Mapping[str, Outcomes], rows: list[dict[str, Any]], ks: Sequence[int] | None
) -> dict[str, Any]:
    """Return the figures of `_pass_rates` by the base tests, and the statuses. Add them to rows."""
    based = {
        name: [one._replace(status=one.base or one.status) for one in outcomes]
        for name, outcomes in problems.items()
    }
    of_base = [_problem_row(name, outcomes, True, None) for name, outcomes in based.items()]
    figures = _pass_rates(based, of_base, ks, [])
    for row, one in zip(rows, of_base, strict=True):
        row["base"] = {key: one[key] for key in ("passed", "pass_first", "pass_all", "pass_at_k")}
    statuses = Counter(one.status for outcomes in based.values() for one in outcomes)
    return {**figures, "statuses": dict(sorted(statuses.items()))}


def _pass_at_k(outcomes: Outcomes, k: int) -> float | None:
    """Return pass@k of a problem. Unfinished samples count as failed.

    A prompt that could not be run has one line, whatever n is, and counts 0.
    """
    if not _could_run(outcomes):
        return 0.0
    return pass_at_k(len(outcomes), sum(outcome.passed for outcome in outcomes), k)


def _could_run(outcomes: Outcomes) -> bool:
    return any(outcome.generation.finish_reason != "error" for outcome in outcomes)


def _timing(
    file: GenerationFile, problems: Mapping[str, Outcomes], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return times, tokens and acceptance of drafts."""
    generations = [outcome.generation for outcomes in problems.values() for outcome in outcomes]
    totals = {name: _total(generations, name) for name in COUNTED}
    times = {
        name: [row[name] for row in rows if row[name] is not None]
        for name in ("seconds_to_first", "seconds_to_last", "overshoot")
    }
    return {
        "seconds_to_first": spread(times["seconds_to_first"]),
        "seconds_to_last": spread(times["seconds_to_last"]),
        "tokens": totals["tokens"],
        "tokens_per_second": ratio(totals["tokens"], _decoding_seconds(file, problems)),
        "accepted_per_round": ratio(totals["accepted"], totals["rounds"]),
        "acceptance_rate": ratio(totals["accepted"], totals["drafted"]),
        "budget": file.budget,
        "overshoot": overshoot(times["overshoot"]),
    }


def _total(generations: list[Generation], name: str) -> int | None:
    """Return the sum over the lines that have the figure. None if no line has it."""
    values = (getattr(generation, name) for generation in generations)
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _decoding_seconds(file: GenerationFile, problems: Mapping[str, Outcomes]) -> float | None:
    """Return the run's seconds. None if unknown.

    They are in the manifest. Without it they are the sum of the problems' times if prompts ran one
    at a time, which they do with a budget and no --batch-size.
    """
    if file.setting("best_of") is not None:  # the seconds are those of all samples
        return None
    if file.total_seconds is not None or file.budget is None or not file.one_at_a_time:
        return file.total_seconds
    return sum(max(_end_times(outcomes), default=0.0) for outcomes in problems.values())


def _notes_on_ranking(everything: Outcomes) -> list[str]:
    few = sum(one.generation.finished and one.generation.mean_logprob is None for one in everything)
    return [f"{few} finished samples have no log-probability; they are ranked last"] if few else []


def _notes_on_missing(
    file: GenerationFile, problems: Mapping[str, Outcomes], known: int
) -> list[str]:
    """Return notes about missing problems, and about numbers of samples that differ."""
    notes = []
    if len(problems) != known:
        notes.append(f"the file has {len(problems)} of the {known} problems")
    n, best = file.setting("n"), file.setting("best_of")
    if isinstance(best, int):
        notes.append(
            f"only the best {best} of {n} samples of each problem are in the file, ranked by "
            f"{file.setting('rank_by')}; pass@k describes the kept samples"
        )
    elif isinstance(n, int):
        short = sum(_could_run(one) and len(one) < n for one in problems.values())
        notes += [f"{short} problems have fewer than the {n} requested samples"] if short else []
    else:
        sizes = [len(one) for one in problems.values() if _could_run(one)]
        if sizes and min(sizes) < max(sizes):
            notes.append(f"problems have {min(sizes)} to {max(sizes)} samples")
    return notes


def first_ranked(finished: Iterable[Generation]) -> Generation | None:
    """Return the sample with the highest mean log-probability (Pass@First of arXiv 2404.15778).

    Samples without one come last. The lowest sample number wins a tie. None without samples.
    """
    return min(finished, key=lambda one: (low(one.mean_logprob), one.sample), default=None)


def show(document: dict[str, Any], screen: Screen) -> None:
    """Show the figures over all problems, each problem if there are few, then the notes."""
    screen.say(f"{document['task']}: {document['file']}")
    screen.table(
        ("total", f"{document['problems']} problems, {document['samples']} samples"),
        lines(document),
    )
    rows = document["by_problem"]
    if len(rows) <= SHOWN:
        heading = ("ROUGE-L: first", "best") if "rouge" in document else ("passed", "Pass@First")
        times = ("seconds_to_first", "seconds_to_last", "overshoot")
        screen.table(
            ("problem", "finished", *heading, "first", "last", "overshoot"),
            [
                [
                    row["task_id"],
                    f"{row['finished']} of {row['samples']}",
                    *_quality(row),
                    *(seconds(row[key]) for key in times),
                ]
                for row in rows
            ],
        )
    for note in document["notes"]:
        if note != BY_ORDER:
            screen.say(f"note: {note}")


def lines(document: dict[str, Any]) -> list[list[str]]:
    """Return the figures over all problems as (name, value). Those that are unknown are left out.

    A document without quality has neither `rouge` nor `pass_first`.
    """
    by_logprob = document["ranked_by"] == "mean_logprob"
    ranking = "mean log-probability" if by_logprob else "order (no log-probabilities)"
    shown = _rouge_lines(document, ranking) if "rouge" in document else []
    shown += _pass_lines(document, ranking) if "pass_first" in document else []
    answered = sum(row["finished"] > 0 for row in document["by_problem"])
    finished = (
        f"{document['finished']} of {document['samples']} samples"
        f"{' in time' if document['late'] else ''}; "
        f"{answered} of {document['problems']} problems have one"
    )
    if document["late"]:
        finished += f"; {document['late']} more ended after the deadline"
    shown.append(["finished", finished])
    for key, name in (("seconds_to_first", "first sample"), ("seconds_to_last", "last sample")):
        if times := document[key]:
            shown.append([name, ", ".join(f"{what} {seconds(one)}" for what, one in times.items())])
    if speed := _speed(document):
        shown.append(["speed", speed])
    if late := document["overshoot"]:
        of_problems = f"{percent(late['share_over'])} of problems late"
        ends = ", ".join(f"{key} {seconds(late[key])}" for key in ("median", "p90", "p99", "max"))
        shown.append(["deadline", f"{seconds(document['budget'])}; {of_problems}; {ends}"])
    statuses = (f"{count} {status}" for status, count in document["statuses"].items())
    shown.append(["verdicts", ", ".join(statuses)])
    if isolation := document["isolation"]:
        shown.append(["isolation", "; ".join(f"{key}: {word}" for key, word in isolation.items())])
    return shown


def _pass_lines(document: dict[str, Any], ranking: str) -> list[list[str]]:
    of_finished = percent(document["pass_first_of_finished"])
    first = (
        f"{with_error(document, 'pass_first')} (of problems with a finished sample {of_finished}); "
        f"ranked by {ranking}"
    )
    lines = [["Pass@First", first], ["Pass@All", with_error(document, "pass_all")]]
    if by := document.get("pass_first_by"):
        shown = (f"{name} {with_error(document, f'pass_first_by.{name}')}" for name in by)
        lines.append(["Pass@First by", ", ".join(shown)])
    for way, found in document.get("instructions", {}).items():
        prompt, instruction = percent(found["prompt"]), percent(found["instruction"])
        lines.append([f"{way} accuracy", f"prompt {prompt}, instruction {instruction}"])
    if base := document.get("base"):
        names = {"pass_first": "Pass@First", "pass_all": "Pass@All"}
        names |= {f"pass@{k}": f"pass@{k}" for k in base["pass_at_k"]}
        parts = (f"{name} {with_error(document, f'base.{key}')}" for key, name in names.items())
        lines.append(["base tests", ", ".join(parts)])
    return lines + [[f"pass@{k}", with_error(document, f"pass@{k}")] for k in document["pass_at_k"]]


def _rouge_lines(document: dict[str, Any], ranking: str) -> list[list[str]]:
    kinds = {"first": f"first, by {ranking}", "best": "best", "mean": "mean"}
    values = {
        kind: " / ".join(
            with_error(document, f"{kind}.{name}").removesuffix(" %") for name in MEASURES
        )
        for kind in kinds
    }
    return [["ROUGE-1/2/L", f"{values[kind]} ({words})"] for kind, words in kinds.items()]


def with_error(document: Mapping[str, Any], figure: str) -> str:
    """Return an estimate of a report in percent with its standard error, like "61.6 ± 3.8 %"."""
    found = document["estimates"].get(figure)
    if found is None or found["standard_error"] is None:
        return percent(None if found is None else found["value"])
    return f"{100 * found['value']:.1f} ± {100 * found['standard_error']:.1f} %"


def _quality(row: dict[str, Any]) -> list[str]:
    if "passed" in row:
        return [str(row["passed"]), "yes" if row["pass_first"] else "no"]
    rouge = row["rouge"]
    return [f"{100 * rouge[kind]['rougeL']:.1f}" if rouge else "-" for kind in ("first", "best")]


def _speed(document: dict[str, Any]) -> str:
    parts = []
    if document["tokens_per_second"] is not None:
        parts.append(f"{document['tokens_per_second']:.1f} tokens/s")
    if document["accepted_per_round"] is not None:
        parts.append(f"{document['accepted_per_round']:.2f} accepted drafts per round")
    if document["acceptance_rate"] is not None:
        parts.append(f"acceptance {percent(document['acceptance_rate'])}")
    return ", ".join(parts)


def seconds(value: float | None) -> str:
    """Return a time with three digits, or a dash if it is unknown."""
    return "-" if value is None else f"{value:.3g} s"


def percent(value: float | None) -> str:
    """Return a share in percent, or a dash if it is unknown."""
    return "-" if value is None else f"{100 * value:.1f} %"
