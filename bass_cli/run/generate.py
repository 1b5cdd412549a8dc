"""The library's `generate`, which the commands use too.

Heavy modules are imported when it is called. config/job.py describes jobs, engine.py runs them, and
io/results.py writes files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.io.prompts import Checked, Prompt, prompts_for
from bass_cli.io.results import Completion
from bass_cli.io.terminal import spell_record
from bass_cli.run.requests import check_prompts_kind, checked_list, first_prompts, plan_of

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
    from bass_cli.run.engine import Engine

    check_prompts_kind(prompts)
    known = Checked(count, "", plain=False)
    if isinstance(job, Job):
        prompts = first_prompts(prompts, job.limit)
        if isinstance(prompts, Sequence):
            prompts, known = checked_list(prompts, job)
    plan = plan_of(job, known)
    engine = Engine(
        plan,
        lazy=True,
        loop=loop,
        on_round=on_round,
        on_phase=on_phase,
        on_bytes=on_bytes,
        on_note=on_note,
    )
    return engine.draw(prompts_for(plan.job, prompts), done, known.count)
