"""Run a plan: load the weights once, build a loop, and yield Completions.

If memory runs out, a new loop with half the rows draws the unfinished samples. scheduler.py assigns
rows; build.py builds loops; plan.py and memory.py plan the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator

from bass_cli.engine.contracts import RoundResult
from bass_cli.engine.loop import Loop
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion
from bass_cli.lengths.costs import keep_learnt
from bass_cli.run.build import READING, Models, halved, load_models, ready_loop
from bass_cli.run.plan import Plan
from bass_cli.run.scheduler import Conductor
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
        prompts: Taken as rows become free. A None means that no prompt is ready yet.
        done: Pairs (prompt id, sample), looked up when a prompt is taken. Under maximal coupling
            they are drawn again but not yielded (see Conductor.run).
        count, on_round, on_phase, on_bytes, on_note, loop: See run/generate.py.

    Raises:
        MachineError: Memory ran out, and the job cannot continue with fewer rows.
    """
    models: Models | None = None
    conductor: Conductor | None = None
    with contextlib.ExitStack() as ending:
        if loop is None:
            on_phase("loading the weights")
            with plan.need.explained():
                models = load_models(plan, on_bytes)
            ending.callback(models.close)
        while True:
            with plan.need.explained():
                try:
                    conductor = _begun(conductor, plan, models, loop, count, on_round, on_phase)
                    for one in _learning(conductor, prompts, done, plan):
                        if not plan.draws_together or (one.id, one.sample) not in done:
                            yield one
                    return
                except Exception as error:
                    if not is_refused_memory(error) or not _may_halve(plan, models, conductor):
                        raise
            if conductor is not None:
                conductor.stop()
            plan = halved(plan, on_note)


def _may_halve(plan: Plan, models: Models | None, conductor: Conductor | None) -> bool:
    """Whether the job can be restarted with fewer rows and the same samples."""
    shared = plan.job.speculation.coupling == "shared"
    whole = models is not None and models.followers is None
    return shared and plan.rows > 1 and whole and not (conductor and conductor.reading)


def _begun(
    conductor: Conductor | None,
    plan: Plan,
    models: Models | None,
    loop: Loop | None,
    count: int | None,
    on_round: Callable[[RoundResult], None] | None,
    on_phase: Callable[[str], None],
) -> Conductor:
    """Give a conductor a loop: the given one, or a new one over `models`."""
    used = loop if models is None else ready_loop(plan, models, on_phase)
    assert used is not None
    on_phase(READING[plan.device.type])  # the first round ends this phase
    if conductor is not None:
        conductor.resume(used)
        return conductor
    return Conductor(
        plan.job,
        plan.files.tokenizer,
        used,
        context=plan.files.target.spec.context,
        eos_ids=plan.eos_ids,
        stop_ids=plan.stop_ids,
        count=count,
        limit=plan.new_tokens,
        tags=plan.tags,
        on_round=on_round,
    )


def _learning(
    conductor: Conductor,
    prompts: Iterator[Prompt | None],
    done: Container[tuple[str, int]],
    plan: Plan,
) -> Iterator[Completion]:
    """Yield the samples of a loop; keep what its controller has learnt when it ends."""
    try:
        yield from conductor.run(prompts, done, redraws=plan.draws_together)
    finally:
        keep_learnt(plan.profile, conductor.loop.lengths)
