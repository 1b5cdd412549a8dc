"""The library's `generate`, which the commands use too.

Heavy modules are imported when it is called. config/job.py describes jobs, engine.py runs them, and
io/results.py writes files.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.io.prompts import Checked, Prompt, check, prompts_for
from bass_cli.io.results import Completion
from bass_cli.io.terminal import spell_record
from bass_cli.reading import shown
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.engine.loop import Loop
    from bass_cli.run.plan import Plan

_LOG = logging.getLogger("bass")
_LOG.addFilter(spell_record)


def generate(
    prompts: Iterable[str | Mapping[str, Any] | Prompt],
    job: Job | Plan,
    *,
    done: Container[tuple[str, int]] = (),
    count: int | None = None,
    on_round: Callable[[RoundResult], None] | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[int, int], None] = lambda done, whole: None,
    on_note: Callable[[str], None] = _LOG.warning,
    loop: Loop | None = None,
) -> Iterator[Completion]:
    """Generate samples 0 to n - 1 of every prompt, and yield each as soon as it ends.

    The call checks the job; the models are loaded at the first step of the iterator. A prompt that
    cannot run yields one Completion with finish_reason "error". torch uses the job's threads.

    Seeds: the job's seed, the prompt's id, the sample's number and the prompt's tokens fix a
    sample, at every call and whatever else is drawn (under shared coupling). A prompt without an
    id is numbered, from 0 at each call. So the first unnamed prompts of two calls have the same
    noise, and the same samples if they are equal. For other samples of the same prompt raise n,
    change the seed or give the prompt another id.

    Args:
        prompts: Texts, or mappings like the lines of a prompt file: {"id", "prompt"} or {"id",
            "messages"}. Options of sampling and `n` may be fields too; the rest comes back as
            `meta`. A list is checked at the call. Other iterables are read as rows become free,
            so they may be endless; their own `max_new_tokens` is at most the job's.
        job: A Job, or the Plan of one.
        done: Pairs (id, sample) that are not generated.
        count: The number of prompts; None if unknown.
        on_round: Called after every round.
        on_phase: Called with the name of each phase before the rounds.
        on_bytes: Called with the bytes of weights that are read, and the bytes in all.
        on_note: Called with notes to the user, such as that memory ran out and fewer rows are used.
        loop: An empty loop to use instead of a new one.

    Raises:
        UserError: The job or a prompt has a mistake.
        MachineError: The machine lacks memory, a device or a package.
    """
    from bass_cli.run import engine as scheduler

    _check_kind(prompts, job)
    if isinstance(job, Job):
        prompts, plan, count = _planned(prompts, job, count)
    else:
        plan = job
    return scheduler.generate(
        plan,
        prompts_for(plan.job, prompts),
        done=done,
        count=count,
        on_round=on_round,
        on_phase=on_phase,
        on_bytes=on_bytes,
        on_note=on_note,
        loop=loop,
    )


def _planned(
    prompts: Iterable[Any], job: Job, count: int | None
) -> tuple[Iterable[Any], Plan, int | None]:
    """Check a list of prompts and plan the job; return prompts, plan and number of prompts."""
    configure_threads(job.threads, _LOG.info)
    prompts, known = _first(prompts, job.limit), Checked(count, "", plain=False)
    if isinstance(prompts, Sequence):
        prompts = list(prompts_for(job, prompts))
        known = check(prompts, job=job)
    return prompts, _plan_of(job, known), known.count


def _check_kind(prompts: Any, job: Any) -> None:
    """Raise UserError for a single prompt in place of a list, or for a job of another type."""
    if not isinstance(getattr(job, "job", job), Job):
        raise UserError(f"job: a Job or its plan is needed, not {shown(job)}")
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts: a list of texts or mappings is needed, not {shown(prompts)}; put a single "
            "prompt into a list"
        )


def _first(prompts: Iterable[Any], limit: int | None) -> Iterable[Any]:
    """Take at most `limit` prompts; a list stays a list."""
    if limit is None:
        return prompts
    return prompts[:limit] if isinstance(prompts, Sequence) else itertools.islice(prompts, limit)


def _plan_of(job: Job, known: Checked) -> Plan:
    from bass_cli.run.plan import make_plan

    plan = make_plan(job, longest_prompt=known.longest, prompts=known.count, wanted=known.wanted)
    for note in plan.notes:
        _LOG.info(note)
    return plan
