"""The bench itself: builds the models, checks them, then measures batch sizes x methods and returns
the document.

Within a repeat the methods run in turn, plain first, so that a drifting machine hits all of them
alike. Not here: one run (drive.py), what its figures mean (figures.py, cells.py), rivals
(rivals.py), how the document is shown (report.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

import bass_kernels as ops
from bass_cli.bench import gate, pairs, rivals
from bass_cli.bench.ceilings import Ceilings, ceilings_of
from bass_cli.bench.cells import Costs, cell, draft_length
from bass_cli.bench.comparison import compare
from bass_cli.bench.costs import cost_of
from bass_cli.bench.document import document
from bass_cli.bench.drive import decode, empty, fill
from bass_cli.bench.figures import Run, latency
from bass_cli.bench.parts import Parts, measure_parts
from bass_cli.bench.settings import PLAIN, Settings
from bass_cli.bench.texts import prompts_for, rows_for
from bass_cli.bench.turns import Turns
from bass_cli.config.job import CONTROLLERS
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import Lengths
from bass_cli.errors import MachineError
from bass_cli.io.progress import clock
from bass_cli.lengths.controllers import Fixed, make_lengths
from bass_cli.lengths.round_cost import Surface
from bass_cli.plan import Plan, device_of
from bass_cli.profiling.measure import LIMITS
from bass_cli.profiling.measure import measure as profile

_WARM_TOKENS, _GATE_TOKENS, _GATE_ROWS = 8, 16, 4
_ROUNDS = 4  # before parts are timed
Note = Callable[[str], None]


class Phase(Protocol):
    """Is told what is done from now on; `live`: whether that may be shown by something that
    itself takes time."""

    def __call__(self, name: str, *, live: bool = True) -> None: ...


def _silent(name: str, *, live: bool = True) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that stays the same from cell to cell. `failures`: what makes the figures
    worthless, found on the way. `surface`: what rounds cost, for the controllers that want to
    know. `parts`: of rounds, by batch size, whether a draft is there at all, and draft length."""

    settings: Settings
    models: pairs.Models
    loops: pairs.Loops
    prompts: list[list[int]]
    ceilings: Ceilings
    note: Note
    failures: list[str] = field(default_factory=list)
    surface: Surface | None = None
    parts: dict[tuple[int, bool, int], Parts] = field(default_factory=dict)
    phase: Phase = _silent

    def rows(
        self,
        count: int,
        *,
        limit: int | None = None,
        temperature: float | None = None,
        repeat: int = 0,
    ) -> list[Row]:
        return rows_for(
            self.prompts, count, self.settings, limit=limit, temperature=temperature, repeat=repeat
        )

    def run(self, method: str, rows: list[Row]) -> Run:
        """One run of these new rows, with a draft-length controller that knows nothing yet."""
        loop = self.loops.of(method)
        loop.use(self.lengths(method))
        prefill = fill(loop, rows)
        return decode(loop, rows, prefill=prefill)

    def lengths(self, method: str) -> Lengths:
        speculation = self.settings.job.speculation
        if method in CONTROLLERS:
            return make_lengths(
                method, limit=speculation.max, coupling=speculation.coupling, surface=self.surface
            )
        return Fixed(0 if method == PLAIN else int(method))


def measure(settings: Settings, note: Note, phase: Phase = _silent) -> Iterator[dict[str, Any]]:
    """The whole bench as a document (docs/BENCH.md), one for each acceptance that is to be set.
    `note` takes a line of progress, `phase` what is done from now on. The gate comes first: if
    it fails, there is one document without cells, and its "failures" say why."""
    plan = pairs.plan_for(settings)
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
    prompts = prompts_for(settings, plan)
    phase("loading the weights" if settings.shape is None else "making random weights")
    models = pairs.build_models(settings, plan)
    loops = pairs.build_loops(
        models, settings, context=max(map(len, prompts)) + settings.new_tokens
    )
    bench = Bench(
        settings,
        models,
        loops,
        prompts,
        ceilings_of(models.target.device, models.target.dtype),
        note,
        phase=phase,
    )
    _grow(bench)
    passed = _gate(bench)
    if not passed.passed:
        yield _document(bench, passed, next(iter(settings.acceptances), ()))
        return
    imposed = None if loops.speculative is None else loops.speculative.imposed
    for acceptance in settings.acceptances or ((),):
        if imposed is not None:
            imposed.rates = acceptance
        if len(settings.acceptances) > 1:
            note(f"acceptance set to {', '.join(map(str, acceptance))}")
        yield _grid(
            replace(bench, failures=[], surface=_profile(bench, plan)), passed, acceptance, plan
        )


def _grid(
    bench: Bench, passed: gate.Gate, acceptance: Sequence[float], plan: Plan | None
) -> dict[str, Any]:
    """All batch sizes and methods."""
    settings = bench.settings
    captures: list[dict[str, Any]] = []
    cells, batches = [], []
    turns = Turns(
        list(itertools.product(settings.batch_sizes, settings.methods)),
        repeats=settings.repeats,
        limit=settings.time_limit,
    )
    began = time.perf_counter()
    for batch in settings.batch_sizes:
        captures += _capture(bench, batch)
    turns.exempt(time.perf_counter() - began)
    bench = _warm_up(bench, turns)
    _run(bench, turns)
    for batch in settings.batch_sizes:
        runs = {
            method: turns.runs[batch, method]
            for method in settings.methods
            if turns.runs[batch, method]
        }
        cells += [_cell(bench, batch, method, runs, turns) for method in runs]
        if runs:
            batches.append((bench.rows(batch), [latency(run).mean for run in runs[PLAIN]]))
    if plan is not None:
        bench.phase("running other engines", live=False)
        cells += rivals.measure(plan, bench.settings, batches, bench.note)
    return _document(bench, passed, acceptance) | {
        "captures": captures,
        "cells": sorted(cells, key=lambda cell: cell["batch"]),
        "controllers": compare(cells) if settings.controllers else [],
        "repeats": turns.report(),
    }


def _document(bench: Bench, passed: gate.Gate, acceptance: Sequence[float]) -> dict[str, Any]:
    return document(bench.models, bench.settings, bench.ceilings, passed, acceptance) | {
        "failures": bench.failures
    }


def _profile(bench: Bench, plan: Plan | None) -> Surface | None:
    """What rounds cost: the pair's profile, or, where a method needs one, what is measured now.
    A job's first use has none, and neither have `bass` and `auto` here unless controllers are
    compared."""
    settings, loop = bench.settings, bench.loops.speculative
    if plan is not None and plan.surface is not None and plan.surface.measured:
        return plan.surface
    if loop is None or not (
        settings.controllers or any("table" in method for method in settings.methods)
    ):
        return None
    bench.phase("measuring what rounds cost")
    most = max(settings.batch_sizes)
    rows = {count for count in (1, 2, 4, 8, 16, 32, 64, *settings.batch_sizes) if count <= most}
    return profile(
        loop,
        bench.prompts,
        rows=sorted(rows),
        coupling=settings.job.speculation.coupling,
        limit=LIMITS[loop.batch.device.type],
        longest=settings.longest,
        tokens=settings.new_tokens,
        samples=settings.samples_per_prompt,
    )


def _grow(bench: Bench) -> None:
    """Let the stores grow to what the largest batch needs now: growing moves them, and graphs
    would be captured anew."""
    for loop in (bench.loops.plain, bench.loops.speculative):
        if loop is not None:
            fill(loop, bench.rows(max(bench.settings.batch_sizes)))
            empty(loop)


def _gate(bench: Bench) -> gate.Gate:
    bench.phase("checking that speculation equals plain decoding")
    count = min(_GATE_ROWS, max(bench.settings.batch_sizes))
    limit = min(_GATE_TOKENS, bench.settings.new_tokens)
    rows, again = (bench.rows(count, limit=limit, temperature=0.0) for _ in range(2))
    passed = gate.check(bench.loops, bench.models, rows, again)
    if passed.rows is not None:
        bench.note(
            f"gate: greedy speculation equals plain decoding in {passed.rows_equal} of "
            f"{passed.rows} rows, "
            f"{passed.tokens_equal} of {passed.tokens} tokens"
        )
    if not passed.passed:
        bench.failures.append(
            "the gate failed: nothing was timed ("
            + (
                "the tokens differ from plain decoding's)"
                if passed.finite
                else "logits are not finite)"
            )
        )
    return passed


def _capture(bench: Bench, batch: int) -> list[dict[str, Any]]:
    """Capture all graphs that runs of this batch size can need: the seconds are those of its own
    row count, the rest is for the time when some rows have ended. Where the very length counts,
    each has its own, as it would in a long job."""
    found = []
    exact = [method for method in bench.settings.methods if method.startswith("bass")]
    each = bool(exact) or bench.settings.job.speculation.coupling == "maximal"
    for name, loop, longest in (
        (PLAIN, bench.loops.plain, 0),
        ("speculative", bench.loops.speculative, bench.settings.longest),
    ):
        if loop is None or loop.graphs is None or not loop.graphs.enabled:
            continue
        bench.phase(f"batch {batch}: compiling kernels, capturing graphs")
        before, began = loop.graphs.captures, time.perf_counter()
        loop.prepare([batch], range(longest + 1), each=each)
        found.append(
            {
                "batch": batch,
                "loop": name,
                "graphs": loop.graphs.captures - before,
                "seconds": time.perf_counter() - began,
            }
        )
        loop.prepare(range(1, batch), range(longest + 1), each=each)
    return found


def _warm_up(bench: Bench, turns: Turns) -> Bench:
    """A short run of every cell. With a time limit the bench that is returned may have fewer new
    tokens."""
    settings, warm, batches = bench.settings, {}, set[int]()
    for batch, method in turns.runs:
        if batch not in batches:
            bench.phase(f"batch {batch}: warming up")
        batches.add(batch)
        warm[batch, method] = bench.run(
            method, bench.rows(batch, limit=min(_WARM_TOKENS, settings.new_tokens))
        )
    tokens = turns.tokens(
        warm, settings.new_tokens, least=settings.new_tokens if settings.tokens_asked_for else 0
    )
    return replace(bench, settings=replace(settings, new_tokens=tokens))


def _run(bench: Bench, turns: Turns) -> None:
    """Every method's runs, in turn, until all are done or time is up."""
    settings = bench.settings
    while (turn := turns.next()) is not None:
        repeat, (batch, method) = turn
        name = f"batch {batch}, repeat {repeat + 1} of {settings.repeats}"
        bench.phase(f"{name}: {method}, about {clock(turns.seconds_left())} left", live=False)
        began = time.perf_counter()
        turns.add(
            (batch, method),
            bench.run(method, bench.rows(batch, repeat=repeat)),
            time.perf_counter() - began,
        )
        if method == settings.methods[-1]:
            figures = ", ".join(
                f"{one} {latency(turns.runs[batch, one][-1]).mean:.3g}" for one in settings.methods
            )
            bench.note(f"{name}, about {clock(turns.seconds_left())} left: ms per token {figures}")


def _cell(
    bench: Bench, batch: int, method: str, runs: dict[str, list[Run]], turns: Turns
) -> dict[str, Any]:
    drafting = bench.models.drafting if method != PLAIN else None
    costs = Costs(
        cost_of(bench.models.target),
        None if drafting is None else cost_of(drafting),
        bench.settings.samples_per_prompt,
        bench.ceilings,
    )
    captures = sum(run.captures for run in runs[method])
    if captures:
        bench.failures.append(
            f"batch {batch}, {method}: {captures} graphs were captured while it was measured; "
            "its times are wrong"
        )
    parts = _parts(bench, batch, method, draft_length(runs[method]), turns)
    return cell(
        batch, method, runs[method], runs[PLAIN][: len(runs[method])], parts=parts, costs=costs
    )


def _parts(bench: Bench, batch: int, method: str, width: int, turns: Turns) -> Parts | None:
    """The parts of a round near the beginning of a run, the same for all methods of a draft
    length; None if there is no time for them."""
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
