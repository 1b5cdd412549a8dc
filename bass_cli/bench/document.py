"""Make the document (docs/BENCH.md): machine, pair, settings, and a cell for each method and batch
size.

A cell holds the figures of one method at one batch size, taken from its runs. All results are dicts
for JSON. A key without a meaning for a method is None.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bass_cli import __version__
from bass_cli.bench.figures import (
    ENOUGH_TOKENS,
    NO_VERDICT,
    Latency,
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
from bass_cli.bench.floor import Ceilings, FloorInputs, floor_of
from bass_cli.bench.preparation import Bench
from bass_cli.bench.runs import Key, Parts
from bass_cli.bench.settings import PLAIN, SCALED, Settings
from bass_cli.config.speculation import CONTROLLERS
from bass_cli.engine.verify import Rate
from bass_cli.models.decoder import Decoder
from bass_cli.models.spec import count_parameters, head_parameters
from bass_cli.run.build import Models
from bass_cli.sandbox.programs import available_cores


def document(bench: Bench) -> dict[str, Any]:
    """Make a document without cells."""
    return {
        "machine": _machine(bench.models.target.device, bench.ceilings),
        "pair": _pair(bench.models, bench.settings, bench.acceptance),
        "settings": _settings(bench.settings),
        "gate": bench.gate and bench.gate.report(),
        "captures": [],
        "cells": [],
        "controllers": [],
        "repeats": None,
        "failures": bench.failures,
    }


def _machine(device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device)
        if cuda
        else platform.processor() or platform.machine(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "bass": __version__,
        "bandwidth_bytes_per_second": ceilings.bandwidth,
        "operations_per_second": ceilings.operations,
        "ceilings": ceilings.source,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
    }


def _settings(settings: Settings) -> dict[str, Any]:
    sampling = settings.job.sampling
    more = {"min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
    return {
        "batch_sizes": list(settings.batch_sizes),
        "methods": list(settings.methods),
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "repeats": settings.repeats,
        "samples_per_prompt": settings.samples_per_prompt,
        "attention": settings.attention,
        "tensor_parallel": settings.job.tensor_parallel,
        "prompts": settings.prompts,
        "texts": list(settings.texts),
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **sampling.model_dump(mode="json", include=more, exclude_defaults=True),
    }


def _pair(models: Models, settings: Settings, acceptance: Sequence[Rate]) -> dict[str, Any]:
    """Make the "pair" of the document. `acceptance` is empty if it was not set."""
    draft: dict[str, Any] = {"name": settings.job.pair.draft}
    if (drafting := models.drafter) is not None:
        draft = _decoder(settings.job.pair.draft, drafting)
    if models.head is not None:  # embedding and head are the target's
        numbers = map(math.prod, head_parameters(models.head.spec).values())
        draft |= {"parameters": sum(numbers)}
    return {
        "name": settings.job.pair.name,
        "kind": settings.kind,
        "label": _label(settings) + _rates(acceptance),
        "target": _decoder(settings.job.pair.target, models.target),
        "draft": draft,
        "acceptance": _number_or_all(acceptance),
        "depth": settings.depth,
        "scale": settings.scale,
        "coupling": settings.job.speculation.coupling,
    }


def _decoder(name: str, decoder: Decoder) -> dict[str, Any]:
    spec = decoder.spec
    return {
        "name": name,
        "layers": len(decoder.layers),
        "width": spec.width,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "inner": spec.inner,
        "vocab": decoder.vocab,
        "parameters": count_parameters(spec),
        "dtype": decoder.format.name,
    }


def _label(settings: Settings) -> str:
    name, kind = settings.job.pair.name, settings.kind
    if kind == SCALED:
        return f"{name}, the other layers' output scaled by {settings.scale}"
    return f"{name}, {kind}"


def words_of(rates: Sequence[Rate]) -> str:
    """Format rates as --acceptance takes them."""
    words = (rate if isinstance(rate, tuple) else (rate,) for rate in rates)
    return ", ".join("/".join(map(str, chances)) for chances in words)


def _rates(rates: Sequence[Rate]) -> str:
    text = words_of(rates)
    return f" to {text}, by row in turn" if len(rates) > 1 else f" to {text}" if rates else ""


def _number_or_all(rates: Sequence[Rate]) -> float | list[float | list[float]] | None:
    """Return one number, or a list by row in turn whose items are numbers or lists by position."""
    if len(rates) == 1 and not isinstance(rates[0], tuple):
        return rates[0]
    return [list(rate) if isinstance(rate, tuple) else rate for rate in rates] or None


def cell(
    key: Key, runs: Sequence[Run], plain: Sequence[Run], *, parts: Parts | None, inputs: FloorInputs
) -> dict[str, Any]:
    """Make the cell of a method.

    Args:
        runs, plain: runs of the method and of plain decoding, one of each for every repeat.
        parts: None if the parts of a round were not timed.
    """
    counted = [counts(run) for run in runs]
    length = draft_length(runs) if parts is None else parts.width
    round_ms = _round_ms(runs, length)
    latencies, rates = [latency(run) for run in runs], [tokens_per_second(run) for run in runs]
    made = timing(key, latencies, rates, [latency(run).mean for run in plain]) | {
        "draft_length": length,
        "rounds": statistics.median(one.rounds for one in counted),
        "acceptance_rate": _mean([one.rate for one in counted]),
        "acceptance_per_trial": _mean([one.trials for one in counted]),
        "mean_accepted": _mean([one.mean for one in counted]),
        "parts_ms": None if parts is None else _parts_ms(parts, round_ms, inputs.at_once),
        "shares": None if parts is None else _shares(parts, round_ms),
        **_against_floor(runs, inputs),
        "prefill_seconds": statistics.median(run.prefill for run in runs),
        "captures_while_measured": sum(run.captures for run in runs),
    }
    too_short = key.method in CONTROLLERS and runs[0].tokens < ENOUGH_TOKENS
    return made | {"verdict": NO_VERDICT} if too_short else made


def timing(
    key: Key, latencies: Sequence[Latency], rates: Sequence[float], plain: Sequence[float]
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
    speedup, bounds = spread(ratios), None if key.method == PLAIN else interval(ratios)
    return {
        "batch": key.batch,
        "method": key.method,
        "text": key.text or None,
        "ms_per_token": {key: s.median for key, s in spreads.items()},
        "ms_per_token_spread": {key: [s.least, s.greatest] for key, s in spreads.items()},
        "tokens_per_second": statistics.median(rates),
        "speedup": speedup.median,
        "speedup_spread": [speedup.least, speedup.greatest],
        "speedup_interval": None if bounds is None else list(bounds),
        "verdict": None if key.method == PLAIN else verdict(bounds),
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


def _against_floor(runs: Sequence[Run], inputs: FloorInputs) -> dict[str, Any]:
    """Compute how much of the ceilings a run used, and its time at the ceilings (the floor)."""
    operations, bandwidth, floors = [], [], []
    for run in runs:
        floor = floor_of(run, inputs)
        seconds = max(finish_times(run))
        operations.append(floor.work.operations / seconds / inputs.ceilings.operations)
        bandwidth.append(floor.work.bytes / seconds / inputs.ceilings.bandwidth)
        floors.append(latency(run, floor.ends))
    return {
        "flop_utilisation": statistics.median(operations),
        "bandwidth_utilisation": statistics.median(bandwidth),
        "floor_ms_per_token": {
            key: statistics.median(getattr(one, key) for one in floors)
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
    others = {method: mean for method, mean in means.items() if method in CONTROLLERS}
    return {
        "batch": batch,
        "best": 0 if best == PLAIN else int(best),
        "ms_per_token": fixed[best],
        "loss": {method: mean / fixed[best] - 1 for method, mean in others.items()},
        "slower": {method: mean / fixed[PLAIN] - 1 for method, mean in others.items()},
    }
