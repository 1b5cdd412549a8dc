"""Turn runs into the cells of the document, and compare controllers with fixed lengths.

A cell holds the figures of one method at one batch size. All results are dicts for JSON;
docs/BENCH.md explains every key. A key without a meaning for a method is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from bass_cli.bench.ceilings import Ceilings
from bass_cli.bench.costs import Cost, needs
from bass_cli.bench.figures import (
    ENOUGH_TOKENS,
    NO_VERDICT,
    Run,
    counts,
    finish_times,
    interval,
    latency,
    most_common,
    round_seconds,
    spread,
    tokens_per_second,
    verdict,
)
from bass_cli.bench.parts import Parts
from bass_cli.bench.settings import PLAIN
from bass_cli.config.job import CONTROLLERS

EMPTY: dict[str, Any] = dict.fromkeys(
    (
        "batch",
        "method",
        "draft_length",
        "ms_per_token",
        "ms_per_token_spread",
        "tokens_per_second",
        "speedup",
        "speedup_spread",
        "speedup_interval",
        "verdict",
        "text",
        "rounds",
        "acceptance_rate",
        "acceptance_per_trial",
        "mean_accepted",
        "parts_ms",
        "shares",
        "flop_utilisation",
        "bandwidth_utilisation",
        "floor_ms_per_token",
        "prefill_seconds",
        "captures_while_measured",
    )
)


class Costs(NamedTuple):
    """Inputs of a method's floor.

    draft: None for lookup and plain decoding. samples: samples of each prompt. at_once: whether
    one pass drafts all tokens.
    """

    target: Cost
    draft: Cost | None
    samples: int
    ceilings: Ceilings
    at_once: bool = False


def cell(
    batch: int,
    method: str,
    runs: Sequence[Run],
    plain: Sequence[Run],
    *,
    parts: Parts | None,
    costs: Costs,
) -> dict[str, Any]:
    """Make the cell of a method.

    Args:
        runs, plain: runs of the method and of plain decoding, one of each for every repeat.
        parts: None if the parts of a round were not timed.
    """
    found = [counts(run) for run in runs]
    length = draft_length(runs)
    round_ms = _round_ms(runs, length if parts is None else parts.width)
    too_short = method in CONTROLLERS and runs[0].tokens < ENOUGH_TOKENS
    return (
        EMPTY
        | timing(
            batch,
            method,
            [latency(run) for run in runs],
            [tokens_per_second(run) for run in runs],
            [latency(run).mean for run in plain],
        )
        | {
            "draft_length": length if parts is None else parts.width,
            "rounds": statistics.median(c.rounds for c in found),
            "acceptance_rate": _mean([c.rate for c in found]),
            "acceptance_per_trial": _mean([c.trials for c in found]),
            "mean_accepted": _mean([c.mean for c in found]),
            "parts_ms": None if parts is None else _parts_ms(parts, round_ms, costs.at_once),
            "shares": None if parts is None else _shares(parts, round_ms),
            **_against_floor(runs, costs),
            "prefill_seconds": statistics.median(run.prefill for run in runs),
            "captures_while_measured": sum(run.captures for run in runs),
            **({"verdict": NO_VERDICT} if too_short else {}),
        }
    )


def timing(
    batch: int,
    method: str,
    latencies: Sequence[Any],
    rates: Sequence[float],
    plain: Sequence[float],
) -> dict[str, Any]:
    """Make the figures that every method has, rivals too.

    Args:
        latencies: one Latency for each repeat.
        rates: tokens per second, one for each repeat.
        plain: ms per token of plain decoding (mean row) in the same repeats.
    """
    spreads = {
        key: spread([getattr(one, key) for one in latencies]) for key in ("first", "last", "mean")
    }
    ratios = [theirs / ours.mean for ours, theirs in zip(latencies, plain, strict=True)]
    speedup, sure = spread(ratios), None if method == PLAIN else interval(ratios)
    return {
        "batch": batch,
        "method": method,
        "ms_per_token": {key: s.median for key, s in spreads.items()},
        "ms_per_token_spread": {key: [s.least, s.greatest] for key, s in spreads.items()},
        "tokens_per_second": statistics.median(rates),
        "speedup": speedup.median,
        "speedup_spread": [speedup.least, speedup.greatest],
        "speedup_interval": None if sure is None else list(sure),
        "verdict": None if method == PLAIN else verdict(sure),
    }


def draft_length(runs: Sequence[Run]) -> int:
    """Return the most frequent draft length of the rounds."""
    return most_common(step.width for run in runs for step in run.steps)


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def _round_ms(runs: Sequence[Run], width: int) -> float | None:
    seconds = [second for run in runs for second in round_seconds(run, width)]
    return statistics.median(seconds) * 1000.0 if seconds else None


def _parts_ms(
    parts: Parts, round_ms: float | None, at_once: bool = False
) -> dict[str, float | None]:
    steps = min(parts.width, 1) if at_once else parts.width
    return {
        "draft": parts.draft * 1000.0,
        "draft_step": parts.draft * 1000.0 / steps if steps else None,
        "verify": parts.verify * 1000.0,
        "accept": parts.accept * 1000.0,
        "verify_and_accept": (parts.verify + parts.accept) * 1000.0,
        "device": parts.device * 1000.0,
        "host": None if round_ms is None else max(0.0, round_ms - parts.device * 1000.0),
        "round": round_ms,
    }


def _shares(parts: Parts, round_ms: float | None) -> dict[str, float] | None:
    """Return each part's share of the sum of the parts.

    The parts are timed alone. On a shared machine their sum may differ from the time of a round.
    """
    if round_ms is None:
        return None
    found = {key: getattr(parts, key) * 1000.0 for key in ("draft", "verify", "accept")}
    found["other"] = max(0.0, parts.device * 1000.0 - sum(found.values()))
    found["host"] = max(0.0, round_ms - parts.device * 1000.0)
    whole = sum(found.values())
    return {key: part / whole for key, part in found.items()}


def _against_floor(runs: Sequence[Run], costs: Costs) -> dict[str, Any]:
    """Compute how much of the ceilings a run used, and its time at the ceilings (the floor)."""
    operations, bandwidth, floors = [], [], []
    for run in runs:
        needed = needs(
            run,
            costs.target,
            costs.draft,
            samples=costs.samples,
            ceilings=costs.ceilings,
            at_once=costs.at_once,
        )
        seconds = max(finish_times(run))
        operations.append(needed.work.operations / seconds / costs.ceilings.operations)
        bandwidth.append(needed.work.bytes / seconds / costs.ceilings.bandwidth)
        floors.append(latency(run, needed.ends))
    return {
        "flop_utilisation": statistics.median(operations),
        "bandwidth_utilisation": statistics.median(bandwidth),
        "floor_ms_per_token": {
            key: statistics.median(getattr(floor, key) for floor in floors)
            for key in ("first", "last", "mean")
        },
    }


def compare(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each controller with the best fixed draft length, which is known only afterwards.

    Returns: one entry for each batch size: `best`, the fixed length (0 is plain decoding);
    `ms_per_token` of its mean row; by controller, `loss` against it and `slower` than plain
    decoding, as shares. A share below 0 means that the controller was faster.
    """
    return [
        _best_and_losses(batch, [cell for cell in cells if cell["batch"] == batch])
        for batch in sorted({cell["batch"] for cell in cells})
    ]


def _best_and_losses(batch: int, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {cell["method"]: cell["ms_per_token"]["mean"] for cell in cells}
    fixed = {method: mean for method, mean in means.items() if method == PLAIN or method.isdigit()}
    best = min(fixed, key=fixed.__getitem__)
    others = {
        method: mean
        for method, mean in means.items()
        if "auto" in method or "bass" in method or "table" in method
    }
    return {
        "batch": batch,
        "best": 0 if best == PLAIN else int(best),
        "ms_per_token": fixed[best],
        "loss": {method: mean / fixed[best] - 1 for method, mean in others.items()},
        "slower": {method: mean / fixed[PLAIN] - 1 for method, mean in others.items()},
    }
