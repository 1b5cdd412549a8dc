"""The library: samples of prompts, as they end. The commands draw through it too.

Not here: what is drawn and how (config/job.py, scheduler.py), files (io/results.py). Nothing
heavy is imported before it is called.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt, check, prompts_of
from bass_cli.io.reading import shown
from bass_cli.system.threads import settle

if TYPE_CHECKING:
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.engine.loop import Loop
    from bass_cli.plan import Plan

_LOG = logging.getLogger("bass")


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
    """Samples 0 to n - 1 of every prompt, each as soon as it ends; of which prompt and number it
    is, says the Completion.

    prompts: texts, or mappings like the lines of a prompt file ({"id", "prompt"} or {"id",
    "messages"}; other fields come back as `meta`). Without an id a prompt is called by its number.
    They are taken one at a time, as rows become free, so they may be endless; of a list all are
    checked first. The seed fixes the samples of an id, whatever else is drawn.

    Returns when all was checked that can be without weights: UserError for a mistake, MachineError
    for what this machine lacks. The models are loaded at the first step. A prompt that cannot run
    gives one Completion with finish_reason "error". torch gets as many threads as the job says, or
    else as cores are free.

    job: or its plan, which was checked. `done`: (id, sample) not to be given. `count`:
    how many prompts there are, if that is known. `on_round` sees every round, `on_phase` the
    name of what is done before rounds are, `on_bytes` how many bytes of the weights are read, of
    how many, `on_note` what the user should know: that memory ran out, and fewer rows go on.
    `loop`: an empty one to use instead of a new one.
    """
    from bass_cli import scheduler

    _check_kind(prompts, job)
    if isinstance(job, Job):
        settle(job.threads, _LOG.info)
        longest = ""
        prompts = _first(prompts, job.limit)
        if isinstance(prompts, Sequence):
            prompts = whole = list(prompts_of(prompts, column=job.prompt_column))
            checked = check(whole)
            count, longest = checked.count, checked.longest
        plan = _plan_of(job, longest, count)
    else:
        plan = job
    return scheduler.generate(
        plan,
        prompts_of(prompts, column=plan.job.prompt_column),
        done=done,
        count=count,
        on_round=on_round,
        on_phase=on_phase,
        on_bytes=on_bytes,
        on_note=on_note,
        loop=loop,
    )


def _check_kind(prompts: Any, job: Any) -> None:
    """UserError for one prompt where many are needed: its characters or fields would be taken; and
    for what is no job."""
    if not isinstance(getattr(job, "job", job), Job):
        raise UserError(f"job: a Job or its plan is needed, not {shown(job)}")
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts: a list of texts or mappings is needed, not {shown(prompts)}; of one prompt "
            "make a list"
        )


def _first(prompts: Iterable[Any], limit: int | None) -> Iterable[Any]:
    """So many of them at most; a list stays one, of which all can be checked."""
    if limit is None:
        return prompts
    return prompts[:limit] if isinstance(prompts, Sequence) else itertools.islice(prompts, limit)


def _plan_of(job: Job, longest: str, count: int | None) -> Plan:
    from bass_cli.plan import make_plan

    plan = make_plan(job, longest_prompt=longest, prompts=count)
    for note in plan.notes:
        _LOG.info(note)
    return plan
