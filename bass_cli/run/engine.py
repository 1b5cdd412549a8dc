"""Run a plan: load the weights once, build a loop, and yield Completions.

If memory runs out, a new loop with half the rows draws the unfinished samples. scheduler.py assigns
rows and lists unfinished samples; build.py builds loops; plan.py and memory.py plan the memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator

from bass_cli.config.job import Job
from bass_cli.engine.contracts import RoundResult
from bass_cli.engine.loop import Loop
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion
from bass_cli.lengths.costs import keep_learnt
from bass_cli.run.build import READING, Models, halved, load_models, ready_loop
from bass_cli.run.plan import Plan
from bass_cli.run.scheduler import Conductor, Unfinished, WholePrompts, with_copies
from bass_cli.system.host import is_refused_memory


def generate(
    plan: Plan,
    prompts: Iterator[Prompt | None],
    *,
    done: Container[tuple[str, int]] = (),
    count: int | None = None,
    on_round: Callable[[RoundResult], None] | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[int, int], None] = lambda done, whole: None,
    on_note: Callable[[str], None] = lambda note: None,
    loop: Loop | None = None,
) -> Iterator[Completion]:
    """Yield samples 0 to n - 1 of every prompt, except those in `done`, in the order they end.

    The models are loaded at the first step unless a `loop` is given. With a budget, kernels are
    compiled and graphs captured before the first prompt's clock starts. At temperature 0 sample 0
    is drawn, and the others are copies. A prompt that cannot run, or a sample with logits that are
    not finite, yields a Completion with finish_reason "error".

    If memory runs out, half the rows draw the samples in progress again, unless there is one
    row, maximal coupling, a given `loop` or a split model.

    Args:
        prompts: Taken as rows become free. A None means that no prompt is ready; the next one is
            read after the next round.
        done: Pairs (prompt id, sample), looked up when a prompt is taken. Under maximal coupling
            they are drawn again but not yielded (see _spared).
        count, on_round, on_phase, on_bytes, on_note, loop: See run/generate.py.

    Raises:
        MachineError: Memory ran out, and the job cannot continue with fewer rows.
    """
    if plan.job.draws_one:
        once = dataclasses.replace(plan, job=plan.job.model_copy(update={"n": 1}))
        whole = WholePrompts(done, plan.job.n)
        draw = functools.partial(generate, on_round=on_round, on_phase=on_phase, on_bytes=on_bytes)
        drawn = draw(once, prompts, done=whole, count=count, on_note=on_note, loop=loop)
        yield from with_copies(drawn, plan.job.n, done)
        return
    spared = _spared(plan.job, done)
    work, models = Unfinished(prompts, spared, n=plan.job.n, count=count), None
    with contextlib.ExitStack() as ending:
        if loop is None:
            on_phase("loading the weights")
            with plan.need.explained():
                models = load_models(plan, on_bytes)
            ending.callback(models.close)
        while True:
            with plan.need.explained():
                try:
                    for one in _attempt(plan, work, models, loop, on_round, on_phase):
                        if spared is done or (one.id, one.sample) not in done:
                            yield one
                    return
                except Exception as error:
                    if models is None or not is_refused_memory(error):
                        raise
                    if work.reading or not _may_halve(plan, models):
                        raise
            plan = halved(plan, on_note)


def _spared(job: Job, done: Container[tuple[str, int]]) -> Container[tuple[str, int]]:
    """Return the samples of `done` that need not be drawn.

    These are all, unless samples depend on each other. Then there are none, or with a budget, where
    prompts are independent, those of complete prompts.
    """
    if not job.draws_together:
        return done
    return () if job.budget is None else WholePrompts(done, job.n)


def _may_halve(plan: Plan, models: Models) -> bool:
    """Whether the job can be restarted with fewer rows and the same samples."""
    shared = plan.job.speculation.coupling == "shared"
    return shared and plan.rows > 1 and models.followers is None


def _attempt(
    plan: Plan,
    work: Unfinished,
    models: Models | None,
    loop: Loop | None,
    on_round: Callable[[RoundResult], None] | None,
    on_phase: Callable[[str], None],
) -> Iterator[Completion]:
    """Draw the unfinished samples with one loop: the given one, or a new one over `models`."""
    if loop is None:
        assert models
        loop = ready_loop(plan, models, on_phase)
    on_phase(READING[plan.device.type])  # the first round ends this phase
    conductor = Conductor(
        plan.job,
        plan.files.tokenizer,
        loop,
        context=plan.files.target.spec.context,
        eos_ids=plan.eos_ids,
        stop_ids=plan.stop_ids,
        count=work.count,
        on_round=on_round,
    )
    try:
        for completion in conductor.run(work.prompts(), work):
            work.end(completion)
            yield completion
    finally:
        keep_learnt(plan.profile, loop.lengths)
