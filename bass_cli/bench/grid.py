"""Run a bench: build and check the models, measure batch sizes x methods, return the document.

Within a repeat the methods run one after the other, plain first, so that a change of the machine's
speed affects all of them alike. preparation.py does what comes before the runs, runs.py one run,
document.py and figures.py the figures, report.py the tables. Other engines run after our own
methods. They do not report their prefill time, so the time of a run of one token is subtracted.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import bass_kernels as ops
from bass_cli.bench import preparation, rivals
from bass_cli.bench.document import cell, compare, document, draft_length, timing, words_of
from bass_cli.bench.figures import Latency, latency
from bass_cli.bench.floor import FloorInputs, ceilings_for, sizes_of
from bass_cli.bench.preparation import Bench
from bass_cli.bench.report import number
from bass_cli.bench.runs import Key, Parts, Schedule, empty, fill, measure_parts
from bass_cli.bench.settings import PLAIN, Settings
from bass_cli.bench.texts import texts_for
from bass_cli.errors import MachineError
from bass_cli.io.console import Screen, clock
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.capture import synchronise
from bass_cli.run.plan import Plan, device_of
from bass_cli.system.host import give_back_memory

_ROUNDS = 4  # rounds before the parts are timed


def measure(settings: Settings, screen: Screen) -> Iterator[dict[str, Any]]:
    """Run the whole bench and yield its document (docs/BENCH.md), one for each --acceptance.

    If the correctness gate fails, there is one document without cells, whose "failures" say why.
    """
    plan = preparation.plan_for(settings)
    for line in () if plan is None else plan.files.notes:
        screen.note(line)
    device = device_of(settings.job.device) if plan is None else plan.device
    if settings.attention != "ragged" and ops.kind_for(torch.empty(0, device=device)) != "triton":
        raise MachineError(
            f"`attention` {settings.attention}: only the Triton kernels of a CUDA device can run "
            "like that"
        )
    ops.attention_schedule(settings.attention)
    try:
        with preparation.need_of(settings, plan, device).explained():
            yield from _measure(settings, plan, screen)
    finally:
        ops.attention_schedule("ragged")


def _measure(settings: Settings, plan: Plan | None, screen: Screen) -> Iterator[dict[str, Any]]:
    texts = texts_for(settings, plan)
    settings = replace(settings, texts=tuple(kind for kind in texts if kind))
    screen.phase("loading the weights" if settings.specs is None else "making random weights")
    models = preparation.build_models(settings, plan)
    try:
        longest = max(len(text.tokens) for kind in texts.values() for text in kind)
        loops = preparation.build_loops(
            models, settings, context=longest + settings.new_tokens, plan=plan
        )
        ceilings = ceilings_for(models.target)
        bench = Bench(settings, plan, models, loops, texts, ceilings, screen)
        preparation.grow(bench)
        yield from _benches(preparation.check(bench))
    finally:
        models.close()


def _benches(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a document for each acceptance."""
    acceptances, loop = bench.settings.acceptances or ((),), bench.loops.speculative
    if bench.failures:
        yield document(replace(bench, acceptance=acceptances[0]))
        return
    for acceptance in acceptances:
        if loop is not None and loop.simulated is not None:
            loop.simulated.rates = acceptance
        if len(acceptances) > 1:
            bench.screen.note(f"acceptance set to {words_of(acceptance)}")
        surface = preparation.surface(bench)
        new = replace(bench, failures=[], learnt={}, surface=surface, acceptance=acceptance)
        yield _grid(new)


def _grid(bench: Bench) -> dict[str, Any]:
    """Measure all batch sizes and methods."""
    settings = bench.settings
    of_texts = itertools.product(bench.texts, settings.batch_sizes, settings.methods)
    keys = [Key(batch, method, text) for text, batch, method in of_texts]
    schedule = Schedule(keys, repeats=settings.repeats, limit=settings.time_limit)
    began = time.perf_counter()
    captures = [
        entry for batch in settings.batch_sizes for entry in preparation.capture(bench, batch)
    ]
    schedule.exempt(time.perf_counter() - began)
    bench = preparation.warm_up(bench, schedule)
    _run(bench, schedule)
    cells = [_cell(bench, key, schedule) for key, runs in schedule.runs.items() if runs]
    if bench.plan is not None:
        bench.screen.phase("running other engines", live=False)
        plain = {
            key: [latency(run).mean for run in runs]
            for key, runs in schedule.runs.items()
            if key.method == PLAIN and runs
        }
        cells += _rivals(bench, bench.plan, plain, dict.fromkeys(cells[0]))
    return document(bench) | {
        "captures": captures,
        "cells": sorted(cells, key=lambda cell: (cell["text"] or "", cell["batch"])),
        "controllers": compare(cells) if settings.controllers else [],
        "repeats": schedule.report(),
    }


def _run(bench: Bench, schedule: Schedule) -> None:
    """Run the cells in turn until all repeats are done or the time limit is reached."""
    settings = bench.settings
    while (run := schedule.next()) is not None:
        repeat, key = run
        name = f"batch {key.batch}, repeat {repeat + 1} of {settings.repeats}"
        name = f"{key.text}, {name}" if key.text else name
        bench.screen.phase(
            f"{name}: {key.method}, about {clock(schedule.seconds_left())} left", live=False
        )
        began = time.perf_counter()
        done = bench.run(key, bench.rows(key, repeat))
        schedule.add(key, done, time.perf_counter() - began)
        if key.method == settings.methods[-1]:
            figures = ", ".join(
                f"{other.method} {number(latency(runs[-1]).mean)}"
                for other, runs in schedule.runs.items()
                if other._replace(method=key.method) == key and runs
            )
            bench.screen.note(
                f"{name}, about {clock(schedule.seconds_left())} left: ms per token {figures}"
            )


def _cell(bench: Bench, key: Key, schedule: Schedule) -> dict[str, Any]:
    runs, plain = schedule.runs[key], schedule.runs[key._replace(method=PLAIN)]
    drafter = bench.models.drafter if key.method != PLAIN else None
    head, job = bench.models.head, bench.settings.job
    sizes = functools.partial(sizes_of, eight_bits=job.kv_dtype == "fp8")
    inputs = FloorInputs(
        sizes(bench.models.target),
        None if drafter is None else sizes(drafter, head.spec if head else None),
        bench.settings.samples_per_prompt,
        bench.ceilings,
        at_once=bench.loops.of(key.method).drafter.at_once,
    )
    captures = sum(run.captures for run in runs)
    if captures:
        bench.failures.append(
            f"batch {key.batch}, {key.method}: {captures} graphs were captured during the measured "
            "runs, so its times are wrong"
        )
    parts = _parts(bench, key, draft_length(runs), schedule)
    return cell(key, runs, plain[: len(runs)], parts=parts, inputs=inputs)


def _parts(bench: Bench, key: Key, width: int, schedule: Schedule) -> Parts | None:
    """Time the parts of a round near the beginning of a run, once for each draft length.

    Returns: None if the time limit has passed.
    """
    loop, of = bench.loops.of(key.method), (key.batch, key.method == PLAIN, width)
    if of in bench.parts or not schedule.in_time():
        return bench.parts.get(of)
    bench.screen.phase(
        f"batch {key.batch}: timing the parts of a round of {width} drafts", live=False
    )
    rows = bench.rows(key)
    loop.use(Fixed(width))
    fill(loop, rows)
    for _ in range(_ROUNDS):
        if min(row.room for row in rows) > width + 1:
            loop.round()
    bench.parts[of] = measure_parts(loop, width)
    empty(loop)
    return bench.parts[of]


def _rivals(
    bench: Bench, plan: Plan, plain: Mapping[Key, Sequence[float]], empty_cell: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a cell for each rival that is installed and each batch size.

    Args:
        plain: ms per token of plain decoding in each repeat, by its cell.
        empty_cell: all keys of a cell, with None.
    """
    settings, cuda = bench.settings, plan.device.type == "cuda"
    longest = max(map(len, bench.prompts))
    job = rivals.describe(plan, longest=longest, rows=max(settings.batch_sizes))
    for name in rivals.installed(settings.rivals, cuda=cuda, note=bench.screen.note):
        if name == "vllm":
            free, total = torch.cuda.mem_get_info(plan.device)
            job["vllm"] = {
                "max_num_seqs": max(settings.batch_sizes),
                "gpu_memory_utilization": round(0.8 * free / total, 2),
                "enable_prefix_caching": False,
            }
        generate = rivals.LOADERS[name](job)
        for key, latencies in plain.items():
            bench.screen.note(f"batch {key.batch}: {name}")
            prompts = [row.tokens for row in bench.rows(key)]
            timed = _rival(key._replace(method=name), generate, prompts, bench, latencies)
            yield empty_cell | timed
        del generate
        give_back_memory(plan.device)


def _rival(
    key: Key,
    generate: rivals.Generate,
    prompts: list[list[int]],
    bench: Bench,
    plain: Sequence[float],
) -> dict[str, Any]:
    """Time a rival on one batch, as often as our own methods ran."""

    def seconds(tokens: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        generate(prompts, tokens, exact=True)
        synchronise(device)
        return time.perf_counter() - began

    device, tokens = bench.models.target.device, max(bench.settings.new_tokens, 2)
    seconds(2)
    each, prefills = [], []
    for _ in plain:
        prefills.append(seconds(1))
        each.append((seconds(tokens) - prefills[-1]) / (tokens - 1))
    latencies = [Latency(*[second * 1000.0] * 3) for second in each]
    rates = [len(prompts) / second for second in each]
    return timing(key, latencies, rates, plain) | {"prefill_seconds": statistics.median(prefills)}
