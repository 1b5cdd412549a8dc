"""Show a report as a table, in the terms of the BASS paper (arXiv 2404.15778).

The table has percent where the JSON report has fractions of 1.
"""

from __future__ import annotations

from typing import Any

from bass_cli.eval.report import BY_ORDER
from bass_cli.io.console import Screen

SHOWN = 20  # most problems that are shown; more would push the figures off the screen


def show(document: dict[str, Any], screen: Screen) -> None:
    """Show the figures over all problems, each problem if there are few, then the notes."""
    screen.say(f"{document['task']}: {document['file']}")
    screen.table(
        ("total", f"{document['problems']} problems, {document['samples']} samples"),
        lines(document),
    )
    rows = document["by_problem"]
    if len(rows) <= SHOWN:
        screen.table(("problem", "finished", *_heading(document), "first", "last", "overshoot"), [
            [row["task_id"], f"{row['finished']} of "
                             f"{row['samples']}", *_quality(row), _time(row["seconds_to_first"]),
             _time(row["seconds_to_last"]), _time(row["overshoot"])] for row in rows
        ])  # fmt: skip
    for note in document["notes"]:
        if note != BY_ORDER:
            screen.say(f"note: {note}")


def lines(document: dict[str, Any]) -> list[list[str]]:
    """Return (name, value) lines. Figures that are unknown are left out."""
    shown = _rouge(document) if "rouge" in document else _passes(document)
    answered = sum(row["finished"] > 0 for row in document["by_problem"])
    late = f"; {document['late']} more ended after the deadline" if document["late"] else ""
    shown.append(["finished", f"{document['finished']} of {document['samples']} "
                              f"samples{' in time' if late else ''}; {answered} of "
                              f"{document['problems']} problems have one{late}"])  # fmt: skip
    for key, name in (("seconds_to_first", "first sample"), ("seconds_to_last", "last sample")):
        shown += [[name, _spread(document[key])]] if document[key] else []
    shown += [["speed", speed]] if (speed := _speed(document)) else []
    if document["overshoot"]:
        late = document["overshoot"]
        over = f"{_percent(late['share_over'])} of problems late; median {_time(late['median'])}"
        shown.append(["deadline", f"{_time(document['budget'])}; {over}, p90 {_time(late['p90'])}, "
                                  f"p99 {_time(late['p99'])}, max "
                                  f"{_time(late['max'])}"])  # fmt: skip
    shown.append(
        [
            "verdicts",
            ", ".join(f"{count} {status}" for status, count in document["statuses"].items()),
        ]
    )
    if document["isolation"]:
        shown.append(
            [
                "isolation",
                "; ".join(f"{key}: {word}" for key, word in document["isolation"].items()),
            ]
        )
    return shown


def _passes(document: dict[str, Any]) -> list[list[str]]:
    ranking = (
        "mean log-probability"
        if document["ranked_by"] == "mean_logprob"
        else "order (no log-probabilities)"
    )
    of_finished = _percent(document["pass_first_of_finished"])
    shown = [["Pass@First", f"{_percent(document['pass_first'])} (of problems with a finished "
                            f"sample {of_finished}); ranked by {ranking}"]]  # fmt: skip
    shown.append(["Pass@All", _percent(document["pass_all"])])
    return shown + [[f"pass@{k}", _percent(value)] for k, value in document["pass_at_k"].items()]


def _rouge(document: dict[str, Any]) -> list[list[str]]:
    ranking = (
        "mean log-probability"
        if document["ranked_by"] == "mean_logprob"
        else "order (no log-probabilities)"
    )
    kinds = {"first": f"first, by {ranking}", "best": "best", "mean": "mean"}
    return [
        [
            "ROUGE-1/2/L",
            f"{' / '.join(f'{100 * value:.1f}' for value in document['rouge'][kind].values())} "
            f"({words})",
        ]
        for kind, words in kinds.items()
    ]


def _heading(document: dict[str, Any]) -> tuple[str, ...]:
    return ("ROUGE-L: first", "best") if "rouge" in document else ("passed", "Pass@First")


def _quality(row: dict[str, Any]) -> list[str]:
    if "passed" in row:
        return [str(row["passed"]), "yes" if row["pass_first"] else "no"]
    return [
        f"{100 * row['rouge'][kind]['rougeL']:.1f}" if row["rouge"] else "-"
        for kind in ("first", "best")
    ]


def _spread(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {_time(value)}" for name, value in values.items())


def _speed(document: dict[str, Any]) -> str:
    parts = []
    if document["tokens_per_second"] is not None:
        parts.append(f"{document['tokens_per_second']:.1f} tokens/s")
    if document["accepted_per_round"] is not None:
        parts.append(f"{document['accepted_per_round']:.2f} accepted drafts per round")
    if document["acceptance_rate"] is not None:
        parts.append(f"acceptance {_percent(document['acceptance_rate'])}")
    return ", ".join(parts)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
