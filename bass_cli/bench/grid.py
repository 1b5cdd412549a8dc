"""Run a bench: build and check the models, measure batch sizes x methods, return the document.

Within a repeat the methods run one after the other, plain first, so that a change of the machine's
speed affects all of them alike. preparation.py does what comes before the runs, drive.py one run,
cells.py and figures.py the figures, report.py the tables.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import bass_kernels as ops
from bass_cli.bench import pairs, preparation, rivals
from bass_cli.bench.ceilings import ceilings_of
from bass_cli.bench.cells import Costs, cell, compare, draft_length
from bass_cli.bench.costs import cost_of
from bass_cli.bench.document import document
from bass_cli.bench.drive import empty, fill
from bass_cli.bench.figures import Run, latency
from bass_cli.bench.gate import Gate
from bass_cli.bench.parts import Parts, measure_parts
from bass_cli.bench.preparation import Bench, Note, Phase, silent
from bass_cli.bench.report import number
from bass_cli.bench.settings import PLAIN, Settings
from bass_cli.bench.texts import Text, kinds_for, prompts_for
from bass_cli.bench.turns import Key, Turns
from bass_cli.engine.verify import Rate
from bass_cli.errors import MachineError
from bass_cli.io.console import clock
from bass_cli.lengths.controllers import Fixed
from bass_cli.run.plan import Plan, device_of

_ROUNDS = 4  # rounds before the parts are timed


def measure(settings: Settings, note: Note, phase: Phase = silent) -> Iterator[dict[str, Any]]:
    """Run the whole bench and yield its document (docs/BENCH.md), one for each --acceptance.

    If the correctness gate fails, there is one document without cells, whose "failures" say why.

    Args:
        note: receives lines of progress.
        phase: receives the name of each phase as it begins.
    """
    plan = pairs.plan_for(settings)
    for line in () if plan is None else plan.files.notes:
        note(line)
    device = device_of(settings.job.device) if plan is None else plan.device
    if settings.attention != "ragged" and ops.kind_for(torch.empty(0, device=device)) != "triton":
        raise MachineError(
            f"--attention {settings.attention}: only the Triton kernels of a CUDA device can run "
            "like that"
        )
    ops.attention_schedule(settings.attention)
    try:
        with pairs.need_of(settings, plan, device).explained():
            yield from _measure(settings, plan, note, phase)
    finally:
        ops.attention_schedule("ragged")


def _measure(
    settings: Settings, plan: Plan | None, note: Note, phase: Phase
) -> Iterator[dict[str, Any]]:
    kinds = kinds_for(settings, plan)
    settings = replace(settings, texts=tuple(kinds))
    one_kind = next(iter(kinds.values()), None)
    prompts = [text.tokens for text in one_kind] if one_kind else prompts_for(settings, plan)
    phase("loading the weights" if settings.shape is None else "making random weights")
    models = pairs.build_models(settings, plan)
    try:
        yield from _benches(settings, plan, models, prompts, kinds, note=note, phase=phase)
    finally:
        models.close()


def _benches(
    settings: Settings,
    plan: Plan | None,
    models: pairs.Models,
    prompts: list[list[int]],
    kinds: dict[str, list[Text]],
    *,
    note: Note,
    phase: Phase,
) -> Iterator[dict[str, Any]]:
    """Yield the documents, with the models loaded."""
    every = [*prompts, *(text.tokens for texts in kinds.values() for text in texts)]
    loops = pairs.build_loops(models, settings, context=max(map(len, every)) + settings.new_tokens)
    bench = Bench(
        settings,
        models,
        loops,
        prompts,
        ceilings_of(models.target.device, models.target.dtype),
        note,
        phase=phase,
        kinds=kinds,
    )
    preparation.grow(bench)
    passed = preparation.check(bench)
    if not passed.passed:
        yield _document(bench, passed, next(iter(settings.acceptances), ()))
        return
    simulated = None if loops.speculative is None else loops.speculative.simulated
    for acceptance in settings.acceptances or ((),):
        if simulated is not None:
            simulated.rates = acceptance
        if len(settings.acceptances) > 1:
            note(f"acceptance set to {pairs.words_of(acceptance)}")
        yield _grid(
            replace(bench, failures=[], surface=preparation.surface(bench, plan)),
            passed,
            acceptance,
            plan,
        )


def _grid(
    bench: Bench, passed: Gate, acceptance: Sequence[Rate], plan: Plan | None
) -> dict[str, Any]:
    """Measure all batch sizes and methods."""
    settings = bench.settings
    captures: list[dict[str, Any]] = []
    cells, batches = [], []
    of_kinds = itertools.product(settings.texts, settings.batch_sizes, settings.methods)
    plainly = itertools.product(settings.batch_sizes, settings.methods)
    keys: list[Key] = [(batch, method, kind) for kind, batch, method in of_kinds] or [*plainly]
    turns = Turns(keys, repeats=settings.repeats, limit=settings.time_limit)
    began = time.perf_counter()
    for batch in settings.batch_sizes:
        captures += preparation.capture(bench, batch)
    turns.exempt(time.perf_counter() - began)
    bench = preparation.warm_up(bench, turns)
    _run(bench, turns)
    for kind, batch in itertools.product(settings.texts or ("",), settings.batch_sizes):
        runs = {key[1]: runs for key, runs in turns.runs.items()
                if (key[0], "".join(key[2:])) == (batch, kind) and runs}  # fmt: skip
        found = [_cell(bench, batch, method, runs, turns) for method in runs]
        cells += [one | {"text": kind or None} for one in found]
        if runs:
            batches.append((bench.rows(batch), [latency(run).mean for run in runs[PLAIN]]))
    if plan is not None:
        bench.phase("running other engines", live=False)
        cells += rivals.measure(plan, bench.settings, batches, bench.note)
    return _document(bench, passed, acceptance) | {
        "captures": captures,
        "cells": sorted(cells, key=lambda cell: (cell["text"] or "", cell["batch"])),
        "controllers": compare(cells) if settings.controllers else [],
        "repeats": turns.report(),
    }


def _document(bench: Bench, passed: Gate, acceptance: Sequence[Rate]) -> dict[str, Any]:
    return document(bench.models, bench.settings, bench.ceilings, passed, acceptance) | {
        "failures": bench.failures
    }


def _run(bench: Bench, turns: Turns) -> None:
    """Run the cells in turn until all repeats are done or the time limit is reached."""
    settings = bench.settings
    while (turn := turns.next()) is not None:
        repeat, key = turn
        batch, method, *kind = key
        name = f"batch {batch}, repeat {repeat + 1} of {settings.repeats}"
        name = ", ".join([*kind, name])
        bench.phase(f"{name}: {method}, about {clock(turns.seconds_left())} left", live=False)
        began = time.perf_counter()
        run = bench.run(method, bench.rows(batch, repeat=repeat, kind="".join(kind)), *kind)
        turns.add(key, run, time.perf_counter() - began)
        if method == settings.methods[-1]:
            figures = ", ".join(
                f"{other[1]} {number(latency(runs[-1]).mean)}"
                for other, runs in turns.runs.items()
                if (other[0], *other[2:]) == (batch, *kind) and runs
            )
            bench.note(f"{name}, about {clock(turns.seconds_left())} left: ms per token {figures}")


def _cell(
    bench: Bench, batch: int, method: str, runs: dict[str, list[Run]], turns: Turns
) -> dict[str, Any]:
    drafting = bench.models.drafting if method != PLAIN else None
    head = bench.models.head
    costs = Costs(
        cost_of(bench.models.target),
        None if drafting is None else cost_of(drafting, head.spec if head else None),
        bench.settings.samples_per_prompt,
        bench.ceilings,
        at_once=bench.models.mask is not None,
    )
    captures = sum(run.captures for run in runs[method])
    if captures:
        bench.failures.append(
            f"batch {batch}, {method}: {captures} graphs were captured during the measured runs, "
            "so its times are wrong"
        )
    parts = _parts(bench, batch, method, draft_length(runs[method]), turns)
    return cell(
        batch, method, runs[method], runs[PLAIN][: len(runs[method])], parts=parts, costs=costs
    )


def _parts(bench: Bench, batch: int, method: str, width: int, turns: Turns) -> Parts | None:
    """Time the parts of a round near the beginning of a run, once for each draft length.

    Returns: None if the time limit has passed.
    """
    loop, key = bench.loops.of(method), (batch, method == PLAIN, width)
    if key in bench.parts or not turns.in_time():
        return bench.parts.get(key)
    bench.phase(f"batch {batch}: timing the parts of a round of {width} drafts", live=False)
    rows = bench.rows(batch)
    loop.use(Fixed(width))
    fill(loop, rows)
    for _ in range(_ROUNDS):
        if min(row.room for row in rows) > width + 1:
            loop.round()
    bench.parts[key] = measure_parts(loop, width, coupling=bench.settings.job.speculation.coupling)
    empty(loop)
    return bench.parts[key]
