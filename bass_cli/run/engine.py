"""A job from its plan to its Completions: weights are loaded once, a loop begun over them, and
where memory runs out another one with half the rows, which draws what the last one owes.

Not here: which rows are whose, and rounds (scheduler.py), building a loop (build.py), what is owed
(scheduler.py), how much memory a job should take (plan.py, memory.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator

from bass_cli.config.job import Job
from bass_cli.engine.contracts import RoundResult
from bass_cli.engine.loop import Loop
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.profiles import keep_learnt
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
    """Samples 0 to n - 1 of every prompt but those in `done`, in the order in which they end.

    `prompts` are taken as rows become free; a None among them says that there is none now, and they
    are asked again after the next round. `done` has (prompt id, sample), and is asked when a prompt
    is taken; under maximal coupling those are drawn again, but not given (see _spared). `count`:
    how many prompts there are, if that is known. At temperature 0 sample 0 is drawn, and the others
    are copies of it. A prompt that cannot run, or a sample that meets logits which are not finite,
    yields a Completion with finish_reason "error".

    The models are loaded at the first step, if no empty `loop` is given; with a budget, what would
    make the first prompts slow is done before the first clock starts. `on_round` is told of every
    round; `on_phase` of what is done before there are any; `on_bytes` how many bytes of the weights
    are read, and of how many.

    Where memory runs out, half the rows go on, and `on_note` is told so: what was under way is
    drawn again, as its seed fixes it. Not with a row alone, nor under maximal coupling, where
    samples depend on the rows, nor on a `loop` that others hold, nor with a split model: there
    MachineError is raised, as it is where the weights themselves do not fit.
    """
    if plan.job.draws_one:
        once = dataclasses.replace(plan, job=plan.job.model_copy(update={"n": 1}))
        whole = WholePrompts(done, plan.job.n)
        told = functools.partial(generate, on_round=on_round, on_phase=on_phase, on_bytes=on_bytes)
        drawn = told(once, prompts, done=whole, count=count, on_note=on_note, loop=loop)
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
    """What of `done` need not be drawn: all; but where samples depend on each other none, or with a
    budget, where each prompt begins anew, those of prompts that lack no sample."""
    if not job.draws_together:
        return done
    return () if job.budget is None else WholePrompts(done, job.n)


def _may_halve(plan: Plan, models: Models) -> bool:
    """Whether fewer rows draw the same samples, and every process of the target can begin anew."""
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
    """What is unfinished, by one loop: the one that is given, or a new one over `models`."""
    if loop is None:
        assert models
        loop = ready_loop(plan, models, on_phase)
    on_phase(READING[plan.device.type])  # until the first round is over
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
