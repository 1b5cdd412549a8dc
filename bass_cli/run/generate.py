"""The library: samples of prompts, as they end. The commands draw through it too.

Not here: what is drawn and how (config/job.py, scheduler.py), files (io/results.py). Nothing
heavy is imported before it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bass_cli.config.job import JOB_FLAGS, SAMPLING_FLAGS, SPECULATION_FLAGS, Job
from bass_cli.errors import UserError
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt, check, prompts_of
from bass_cli.io.reading import shown
from bass_cli.io.terminal import spell_record
from bass_cli.system.threads import configure_threads

if TYPE_CHECKING:
    from bass_cli.engine.contracts import RoundResult
    from bass_cli.engine.loop import Loop
    from bass_cli.run.plan import Plan

_LOG = logging.getLogger("bass")
# What messages below the command line call by its flag, as a field of a Job
_FIELDS = {
    **{flag.replace("_", "-"): flag for flag in JOB_FLAGS},
    **{flag.replace("_", "-"): f"sampling.{flag}" for flag in SAMPLING_FLAGS},
    **{flag.replace("_", "-"): f"speculation.{key}" for key, flag in SPECULATION_FLAGS.items()},
    **{"pair": "pair", "model": "pair.target", "draft": "pair.draft"},
    **{"chat": "chat=True", "no-chat": "chat=False"},
}
_FLAG = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])(?: \(or BASS_[A-Z_]+\))?")
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
    """Draw samples 0 to n - 1 of every prompt and yield each as soon as it ends; its Completion
    has the prompt's id and the sample's number.

    prompts: texts, or mappings like the lines of a prompt file ({"id", "prompt"} or {"id",
    "messages"}; other fields come back as `meta`). They are taken one at a time, as rows become
    free, so they may be endless; of a list all are checked first.

    Seeds: a sample is fixed by the job's seed, the prompt's id, the sample's number and the
    prompt's tokens, at every call and whatever else is drawn (under shared coupling). A prompt
    without an id is called by its number, counted from 0 at each call: the first unnamed prompts
    of two calls have the same noise, and if they are equal, the same samples. For other samples
    of the same prompt raise n, change the seed or give the prompt another id.

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
    from bass_cli.run import engine as scheduler

    _check_kind(prompts, job)
    if isinstance(job, Job):
        with own_terms():
            prompts, plan, count = _planned(prompts, job, count)
    else:  # a command's, which speaks of flags
        plan = job
    drawn = scheduler.generate(
        plan,
        prompts_of(prompts, column=plan.job.prompt_column),
        done=done,
        count=count,
        on_round=on_round,
        on_phase=on_phase,
        on_bytes=on_bytes,
        on_note=on_note if plan is job else lambda note: on_note(in_own_terms(note)),
        loop=loop,
    )
    return drawn if plan is job else told_in_own_terms(drawn)


def in_own_terms(text: str) -> str:
    """A message with fields of a Job where it has flags of the command line."""
    return _FLAG.sub(lambda found: _FIELDS.get(found[1], found[0]), text)


@contextlib.contextmanager
def own_terms() -> Iterator[None]:
    """Have a UserError say what is wrong in the library's terms."""
    try:
        yield
    except UserError as error:
        error.args = tuple(map(in_own_terms, error.args))
        raise


def told_in_own_terms(drawn: Iterator[Completion]) -> Iterator[Completion]:
    """The samples, with what their lines and a UserError say in the library's terms."""
    with own_terms(), contextlib.closing(drawn):  # type: ignore[type-var]
        for one in drawn:
            if one.error is not None:
                one = dataclasses.replace(one, error=in_own_terms(one.error))
            yield one


def _planned(
    prompts: Iterable[Any], job: Job, count: int | None
) -> tuple[Iterable[Any], Plan, int | None]:
    """The prompts, of a list all of them checked, the job's plan, and how many prompts there are,
    if that is known."""
    configure_threads(job.threads, lambda note: _LOG.info(in_own_terms(note)))
    longest, prompts = "", _first(prompts, job.limit)
    if isinstance(prompts, Sequence):
        prompts = list(prompts_of(prompts, column=job.prompt_column))
        checked = check(prompts, chat=job.chat)
        count, longest = checked.count, checked.longest
    return prompts, _plan_of(job, longest, count), count


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
    from bass_cli.run.plan import make_plan

    plan = make_plan(job, longest_prompt=longest, prompts=count)
    for note in plan.notes:
        _LOG.info(in_own_terms(note))
    return plan
