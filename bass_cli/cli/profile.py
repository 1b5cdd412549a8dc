"""The body of `bass profile`: time the rounds of a pair on this device and save the times.

torch is imported after the number of threads is set. The measurement is in run/profile.py.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bass_cli.config.command_options import job_options
from bass_cli.config.job import Job, chosen_pair, make_job
from bass_cli.config.machine_commands import ProfileArgs
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.sources import check_sources
from bass_cli.io.cache import is_writable
from bass_cli.io.console import Screen
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.lengths.surface import Surface
    from bass_cli.run.plan import Plan

BATCH_SIZES = {"cuda": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 2, 4, 8)}
RATES = (0.6, 0.8, 0.9)  # acceptance rates for which the best lengths are shown
_LEGEND = (
    "{pair}: milliseconds of a round, and the fastest draft length",
    "  rows      samples decoded at once",
    "  plain     a round without drafts; 4 drafts: with 4 drafts for each sample;",
    "            drafting: the part of it that makes the drafts",
    "  60% kept  fastest length if 60% of drafts are accepted; 0 is plain decoding",
)
_CONTEXT = {"cuda": 400, "cpu": 128}  # tokens of a prompt


def run(args: ProfileArgs, screen: Screen) -> dict[str, Any]:
    """Measure and save the rounds of a pair; return the JSON document."""
    job = make_profile_job(args)
    check_sources(job.pair)  # importing torch takes seconds
    configure_threads(job.threads, screen.note)

    from bass_cli.run.plan import make_plan

    screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
    plan = make_plan(job, options=("`batch_sizes`", None), grows=False)
    if plan.profile is None:
        raise UserError(
            f'pair "{job.pair.name}" has no draft, so there is no draft length to choose and '
            "nothing to profile; give `pair.draft`"
        )
    if not is_writable(folder := plan.profile.parent):
        raise MachineError(
            f"{folder}: profiles cannot be saved here; set XDG_CACHE_HOME to a writable folder"
        )
    for note in plan.notes:
        screen.note(note)
    with plan.memory_need.explained():
        return _measure(plan, args, screen)


def make_profile_job(args: ProfileArgs) -> Job:
    """Make the job whose rounds are measured: its rows are the largest of --batch-sizes."""
    rows = max(batch_sizes_of(args.batch_sizes)) if args.batch_sizes else "auto"
    given = job_options(args, batch_size=rows, max_new_tokens=200, draft_length="auto")
    return make_job(chosen_pair(args), **given)


def batch_sizes_of(text: str) -> tuple[int, ...]:
    """Parse a list of batch sizes like 1,2,8; UserError for anything else."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(
        re.fullmatch("[0-9]{1,4}", word) and 1 <= int(word) <= 1024 for word in words
    ):
        raise UserError(
            f'`batch_sizes`: "{text}" is not a list of numbers from 1 to '
            "1024; write them like 1,2,8"
        )
    return tuple(sorted({int(word) for word in words}))


def _measure(plan: Plan, args: ProfileArgs, screen: Screen) -> dict[str, Any]:
    from bass_cli.lengths.surface import save_surface
    from bass_cli.run.build import build
    from bass_cli.run.profile import LIMITS, joined, measure

    kind = plan.device.type
    rows = (
        batch_sizes_of(args.batch_sizes)
        if args.batch_sizes
        else tuple(count for count in BATCH_SIZES[kind] if count <= plan.most_rows)
    )
    plan = replace(plan, job=plan.job.model_copy(update={"batch_size": max(rows)}))
    assert plan.profile is not None
    screen.phase("loading the weights")
    loop = build(plan)
    length = min(_CONTEXT[kind], plan.files.target.spec.context // 4)
    prompts = [joined(plan.files.tokenizer, i, length) for i in range(-(-max(rows) // 8))]
    compiling = "compiling kernels, then " if kind == "cuda" else ""
    screen.phase(
        f"{compiling}measuring rounds of {', '.join(map(str, rows))} rows, for up to "
        f"{LIMITS[kind]:.0f} s"
    )
    began = time.perf_counter()
    surface = measure(
        loop,
        prompts,
        rows=rows,
        limit=LIMITS[kind],
        context=plan.files.target.spec.context,
        note=screen.note,
    )
    seconds = time.perf_counter() - began
    if not save_surface(plan.profile, surface, screen.error):
        raise MachineError(
            f"the profile was measured but could not be saved in {plan.profile.parent}"
        )
    return _show(plan, surface, seconds, screen)


def _show(plan: Plan, surface: Surface, seconds: float, screen: Screen) -> dict[str, Any]:
    """Print the table of best draft lengths; return the JSON document."""
    from bass_cli.lengths.controllers import best_length

    rates = sorted(
        {*RATES, *([round(surface.acceptance, 2)] if surface.acceptance is not None else [])}
    )
    limit = plan.longest
    best = {
        rows: {rate: best_length(surface, rows, rate, range(limit + 1)) for rate in rates}
        for rows in surface.rows
    }
    if not plan.job.pair.draft.startswith("lookup") and surface.acceptance is not None:
        screen.say(f"acceptance rate on the measured texts: {surface.acceptance:.2f}")
    columns = (
        "rows",
        "plain ms",
        "4 drafts ms",
        "drafting ms",
        *(f"{rate:.0%} kept" for rate in rates),
    )
    lines = [
        [
            str(rows),
            f"{surface.seconds(rows, 0) * 1e3:.2f}",
            f"{surface.seconds(rows, 4) * 1e3:.2f}",
            f"{surface.draft_seconds(rows, 4) * 1e3:.2f}",
            *(str(best[rows][rate]) for rate in rates),
        ]
        for rows in surface.rows
    ]
    for line in _LEGEND:
        screen.say(line.format(pair=plan.job.pair.name))
    screen.table(columns, lines)
    screen.note(f"measured in {seconds:.1f} s; saved in {plan.profile}")
    return {
        "pair": plan.job.pair.name,
        "file": str(plan.profile),
        "seconds": seconds,
        "acceptance": surface.acceptance,
        "digest": surface.digest(),
        "best": best,
        "surface": json.loads(surface.to_json()),
    }
