"""Make the charts of a page as data: series of points and bars, with a title that says the finding.

The page draws them (charts.js). Shares are in percent, times in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bass_cli.eval.report import Outcome, first_ranked
from bass_cli.eval.statistics import quantile
from bass_cli.io.resume import part_of
from bass_cli.report.runs import Run

_POINTS = 120  # most steps of a curve: one for about four pixels of a chart
_BARS = 12  # most bars of a histogram or of a list of kinds, so that labels fit
METHODS = {"plain": "plain decoding", "single": "one sample at a time", "batched": "the batch"}

Chart = dict[str, Any]


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts that the data of these runs allows.

    Each chart is {"kind", "title", "x", "y": {"label", ...}, "series", "note"}. The kinds are line,
    bars (a histogram) and rows (words). A series of lines has points [x, y, low, high], where low
    and high may be missing, and perhaps "step" and the look of its line. A series of bars or rows
    has a value for each of the chart's labels.
    """
    chart_functions: list[Callable[[Sequence[Run]], Chart | None]] = [
        _pass_curve,
        _quality_by_budget,
        _quality_by_time,
        _failures,
        _finish_reasons,
        _lengths,
        _acceptance,
        _acceptance_by_place,
    ]
    return [chart for chart in (make(runs) for make in chart_functions) if chart is not None]


def _pass_curve(runs: Sequence[Run]) -> Chart | None:
    series: list[dict[str, Any]] = []
    for run in runs:
        estimates = run.figures["estimates"]
        ks = [int(k) for k in run.figures.get("pass_at_k", {}) if f"pass@{k}" in estimates]
        points = [[k, *_with_bounds(estimates[f"pass@{k}"])] for k in sorted(ks)]
        if len(points) > 1:
            series.append({"name": run.source.name, "points": points})
    if not series:
        return None
    best = max(series, key=lambda one: one["points"][-1][1])
    (k, first, *_), (most, last, *_) = best["points"][0], best["points"][-1]
    whose = f" in {best['name']}" if len(series) > 1 else ""
    title = f"pass@k rises from {first:.1f} % (k = {k}) to {last:.1f} % (k = {most}){whose}"
    if first == last:
        title = f"pass@k is {first:.1f} % for every k{whose}"
    return {
        "kind": "line",
        "title": title,
        "x": {"label": "k, samples of a problem", "log": True},
        "y": {"label": "pass@k, %", "least": 0},
        "series": series,
        "note": "Bands: 95 % intervals over problems.",
    }


def _with_bounds(estimate: Mapping[str, Any]) -> list[float]:
    """Return the value and, if they are known, the bounds of its interval, in percent."""
    return [_percent(one) for one in (estimate["value"], *(estimate["interval"] or ()))]


def _quality_by_budget(runs: Sequence[Run]) -> Chart | None:
    """Chart quality against the budget, if two runs of a method have different budgets."""
    groups: dict[str, list[tuple[float, float, list[float]]]] = {}
    for run in runs:
        budget, quality = run.figures.get("budget"), _quality(run)
        if budget is not None and quality is not None:
            groups.setdefault(_method(run), []).append((budget, *quality))
    series: list[dict[str, Any]] = [
        {"name": name, "points": [[x, y, *bounds] for x, y, bounds in sorted(points)]}
        for name, points in groups.items()
        if len({one[0] for one in points}) > 1
    ]
    if not series:
        return None
    name = "ROUGE-L of the first" if any("rouge" in run.figures for run in runs) else "Pass@First"
    least = min(point[0] for one in series for point in one["points"])
    at_least = [(p[1], one["name"]) for one in series for p in one["points"] if p[0] == least]
    value, method = max(at_least)
    title = f"{name} within {least:g} s is highest with {method}: {value:.1f} %"
    if len(series) == 1 or not value:
        title = f"{name} is {value:.1f} % within {least:g} s per prompt"
    return {
        "kind": "line",
        "title": title,
        "x": {"label": "budget per prompt, s", "log": True},
        "y": {"label": f"{name}, %", "least": 0},
        "series": series,
    }


def _method(run: Run) -> str:
    if run.source.method is not None:
        return METHODS[run.source.method]
    return str(run.file.setting("target") or "all runs")


def _quality(run: Run) -> tuple[float, list[float]] | None:
    """Return Pass@First, or ROUGE-L of the first, in percent, with the bounds of its interval."""
    estimates = run.figures["estimates"]
    found = estimates.get("first.rougeL" if "rouge" in run.figures else "pass_first")
    if found is None:
        return None
    value, *bounds = _with_bounds(found)
    return value, bounds


def _quality_by_time(runs: Sequence[Run]) -> Chart | None:
    series, found = [], None
    for number, run in enumerate(runs):
        steps = {kind: _steps(run.judged, kind) for kind in ("Pass@All", "Pass@First")}
        for kind, points in steps.items():
            if points and (kind == "Pass@First" or len(runs) <= _FEW):
                name = f"{kind}, {run.source.name}" if len(runs) > 1 else kind
                look = {"color": number, "dashed": kind == "Pass@All"}
                series.append({"name": name, "points": points, "step": True, **look})
        if found is None and steps["Pass@All"]:
            found = steps["Pass@All"]
    if not series or found is None:
        return None
    last = found[-1][1]
    half = next(point for point in found if point[1] >= last / 2)
    of = f" in {runs[0].source.name}" if len(runs) > 1 else ""
    return {
        "kind": "line",
        "title": f"Half of the solved problems{of} are solved within {half[0]:.3g} s",
        "x": {"label": "time since a prompt's start, s", "least": 0},
        "y": {"label": "problems solved so far, %", "least": 0},
        "series": series,
    }


_FEW = 3  # most runs with two curves each; more lines could not be distinguished


def _steps(judged: Mapping[str, Sequence[Outcome]], kind: str) -> list[list[float]]:
    """Return the share of problems that are solved by a time, in percent, as [seconds, share].

    Pass@All: a sample that passes has ended. Pass@First: the likeliest sample of those that have
    ended passes.
    """
    changes: list[tuple[float, int]] = []
    for outcomes in judged.values():
        timed = sorted(
            (
                one
                for one in outcomes
                if one.generation.finished and one.generation.seconds is not None
            ),
            key=lambda one: one.generation.seconds or 0.0,
        )
        solved, best = False, None
        for one in timed:
            best = one.generation if best is None else first_ranked((best, one.generation))
            leads = best is one.generation
            now = (solved or one.passed) if kind == "Pass@All" else one.passed if leads else solved
            if now != solved:
                changes.append((one.generation.seconds or 0.0, 1 if now else -1))
            solved = now
    if not changes:
        return []
    changes.sort()
    total, points = 0, [[0.0, 0.0]]
    for seconds, change in changes:
        total += change
        points.append([round(seconds, 4), _percent(total / len(judged))])
    stride = math.ceil(len(points) / _POINTS)
    return [*points[:-1:stride], points[-1]]


def _failures(runs: Sequence[Run]) -> Chart | None:
    counts = {run.source.name: Counter(filter(None, run.outlines.kinds)) for run in runs}
    total = sum(counts.values(), Counter[str]())
    if len(total) < 2:  # one kind says nothing
        return None
    kind, number = total.most_common(1)[0]
    share = number / total.total()
    names = {"time": "the time limit", "memory": "the memory limit", "syntax": "syntax errors"}
    shown = names.get(kind, "wrong results (assertions)" if kind == "assertion" else kind)
    return _bars(
        f"{_whole(share)} of the failures are {shown}", "what failed", counts, _labels(total)
    )


def _finish_reasons(runs: Sequence[Run]) -> Chart | None:
    counts = {
        run.source.name: Counter(row.finish_reason or "unknown" for row in run.file.rows)
        for run in runs
    }
    total = sum(counts.values(), Counter[str]())
    if not total or set(total) == {"unknown"}:
        return None
    ended = (total["eos"] + total["stop"]) / total.total()
    cut = (total["length"] + total["budget"]) / total.total()
    title = f"{_whole(ended)} of the samples end by themselves"
    title += f", {_whole(cut)} are cut" if cut else ""
    return _bars(title, "finish reason", counts, _labels(total))


def _labels(total: Counter[str]) -> list[str]:
    """Return the most common words; the others are counted together as "other"."""
    words = [word for word, _ in total.most_common()]
    return words if len(words) <= _BARS else [*words[: _BARS - 1], "other"]


def _bars(
    title: str, label: str, counts: Mapping[str, Counter[str]], labels: Sequence[str]
) -> Chart:
    """Return bars of the shares of samples, in percent of what was counted in a run."""
    series = []
    for name, found in counts.items():
        whole = found.total() or 1
        kept = {word: found[word] for word in labels}
        if "other" in kept:
            kept["other"] += sum(found.values()) - sum(kept.values())
        values = [_percent(count / whole) for count in kept.values()]
        series.append({"name": name, "values": values, "counts": list(kept.values())})
    return {
        "kind": "rows",
        "title": title,
        "x": {"label": label},
        "y": {"label": "share of samples, %", "least": 0},
        "labels": list(labels),
        "series": series,
    }


def _lengths(runs: Sequence[Run]) -> Chart | None:
    values = {
        run.source.name: [row.tokens for row in run.file.rows if row.tokens is not None]
        for run in runs
    }
    everything = sorted(one for found in values.values() for one in found)
    if not everything:
        return None
    middle = quantile(everything, 0.5)
    return _histogram(
        f"Half of the samples have at most {middle:.0f} tokens, the longest {everything[-1]}",
        "length, tokens",
        values,
    )


def _acceptance(runs: Sequence[Run]) -> Chart | None:
    values = {
        run.source.name: [
            row.accepted / row.rounds
            for row in run.file.rows
            if row.rounds and row.accepted is not None and row.drafted
        ]
        for run in runs
    }
    if not any(values.values()):
        return None
    rates = [
        (run.figures["accepted_per_round"], run.figures["acceptance_rate"], run.source.name)
        for run in runs
        if run.figures["acceptance_rate"] is not None
    ]
    per_round, rate, name = max(rates)
    whose = f" in {name}" if len(runs) > 1 else ""
    chart = _histogram(
        f"{per_round:.2f} drafted tokens are accepted per round{whose}, {_whole(rate)} of drafts",
        "accepted tokens per round, mean of a sample",
        values,
    )
    note = "Samples with drafts."
    if not any(_by_place(run) for run in runs):
        note += " Acceptance by place in the draft is not recorded."
    return {**chart, "note": note}


def _acceptance_by_place(runs: Sequence[Run]) -> Chart | None:
    series = [
        {"name": run.source.name, "color": number, "points": points}
        for number, run in enumerate(runs)
        if (points := _by_place(run))
    ]
    if not series:
        return None
    points = _by_place(next(run for run in runs if _by_place(run)))
    (_, first), (place, last) = points[0], points[-1]
    whose = f" in {series[0]['name']}" if len(runs) > 1 else ""
    title = f"The first drafted token is accepted in {first:.0f} % of drafts{whose}"
    if place > 1:
        title += f", token {place} in {last:.0f} %"
    return {
        "kind": "line",
        "title": title,
        "x": {"label": "place in the draft", "least": 1, "whole": True},
        "y": {"label": "accepted there, %", "least": 0},
        "series": series,
        "note": "Counts of the last run of each file. A token counts only if all before it do.",
    }


def _by_place(run: Run) -> list[list[float]]:
    """Return [place, share that was accepted in percent], from the manifest. Empty if unknown."""
    counts = part_of(run.file.manifest, "last_run", "by_place")
    try:
        pairs = list(zip(counts["drafted"], counts["accepted"], strict=True))
        return [[place, _percent(accepted / drafted)] for place, (drafted, accepted) in
                enumerate(pairs, 1) if drafted]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return []


def _histogram(title: str, label: str, values: Mapping[str, Sequence[float]]) -> Chart:
    """Return bars of equal width over the range of the values."""
    everything = [one for found in values.values() for one in found]
    low, high = min(everything), max(everything)
    width = _round_width((high - low) / _BARS, whole=all(type(one) is int for one in everything))
    start = math.floor(low / width) * width
    bins = int((high - start) / width) + 1
    labels = [_edge(start + number * width) for number in range(bins)]
    counts = {
        name: Counter(labels[min(int((one - start) / width), bins - 1)] for one in found)
        for name, found in values.items()
    }
    chart = _bars(title, label, counts, labels)
    return {**chart, "kind": "bars", "x": {"label": f"{label} (from, in steps of {_edge(width)})"}}


def _round_width(width: float, *, whole: bool) -> float:
    """Return the next of 1, 2, 5, 10, ... times a power of ten; at least 1 for whole numbers."""
    if width <= 0:
        return 1
    power = 10.0 ** math.floor(math.log10(width))
    found = next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))
    return max(found, 1) if whole else found


def _edge(value: float) -> str:
    return f"{round(value, 6):g}"


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _whole(share: float) -> str:
    """Return a share in whole percent; a small one is not shown as 0 %."""
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
