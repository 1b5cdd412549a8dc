"""The conductor: admits prompts x n to a loop, yields Completions as rows end.

Not here: what a prompt becomes (intake.py), what ends a row (endings.py), building the loop
(build.py), a round (engine/step.py), files (io/results.py).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from bass_cli.build import ready_loop
from bass_cli.config.job import Job
from bass_cli.endings import Ending, Sample, completed
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import Backlog, Round
from bass_cli.engine.forecast import Forecast
from bass_cli.engine.step import Loop
from bass_cli.errors import UserError
from bass_cli.intake import Intake, Task
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.store import keep_learnt
from bass_cli.model.continuation import StopDetector
from bass_cli.model.tokenizer import Tokenizer
from bass_cli.plan import Plan


def generate(
    plan: Plan,
    prompts: Iterator[Prompt],
    *,
    done: Collection[tuple[str, int]] = (),
    count: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
    loop: Loop | None = None,
) -> Iterator[Completion]:
    """Samples 0 to n - 1 of every prompt (`count` of them, if that is known), but those in `done`,
    in the order in which they end.

    At temperature 0 all samples of a prompt are equal: sample 0 is drawn, and the others are copies
    of it.

    Loads the models at the first step, if no empty `loop` is given; with a budget, what would
    make the first prompts slow is done before the first clock starts; `on_phase` is told what is
    done before rounds are. A prompt that cannot run yields one Completion with finish_reason
    "error", and so does every sample that meets logits which are not finite.
    """
    if plan.job.draws_one:
        once = dataclasses.replace(plan, job=plan.job.model_copy(update={"n": 1}))
        whole = {
            (id_, 0)
            for id_, taken in Counter(id_ for id_, _ in done).items()
            if taken == plan.job.n
        }
        drawn = generate(
            once, prompts, done=whole, count=count, on_round=on_round, on_phase=on_phase, loop=loop
        )
        yield from _with_copies(drawn, plan.job.n, done)
        return
    with plan.need.explained():
        loop = ready_loop(plan, loop, on_phase)
        try:
            yield from Conductor(
                plan.job,
                plan.tokenizer,
                loop,
                context=plan.target.spec.context,
                eos_ids=plan.eos_ids,
                count=count,
                on_round=on_round,
            ).run(prompts, done)
        finally:
            keep_learnt(plan.profile, loop.lengths)


def _with_copies(
    drawn: Iterator[Completion], n: int, done: Collection[tuple[str, int]]
) -> Iterator[Completion]:
    """Samples 0 to n - 1 of every prompt, but those in `done`, where sample 0 was drawn. A
    failure stays one line."""
    for completion in drawn:
        if (
            completion.finish_reason == "error" and not completion.prompt_tokens
        ):  # of the prompt, not of its sample
            yield completion
            continue
        for sample in range(n):
            if (completion.id, sample) not in done:
                yield completion if sample == 0 else completion.copied(sample)


class Conductor:
    """Feeds prompts to a loop and takes finished rows from it. `context`: the most positions the
    target knows."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        loop: Loop,
        *,
        context: int,
        eos_ids: Collection[int],
        count: int | None = None,
        on_round: Callable[[Round], None] | None = None,
    ):
        self._job, self._loop, self._on_round = job, loop, on_round
        self._intake, self._eos = Intake(job, tokenizer, context=context), frozenset(eos_ids)
        # With a budget, prompts run one at a time unless a batch size was asked for. Under
        # maximal coupling they always do, and each begins anew, or how far the clock let one
        # prompt come would reach the draft lengths of others, and so their samples.
        maximal = job.speculation.coupling == "maximal"
        self._alone = job.budget is not None and (job.batch_size == "auto" or maximal)
        self._fresh = copy.deepcopy(loop.lengths) if job.budget is not None and maximal else None
        self._tasks: list[Task] = []
        self._live: dict[Row, Sample] = {}
        self._forecast, self._ended = Forecast(None if count is None else count * job.n), False

    def run(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]]
    ) -> Iterator[Completion]:
        """Every sample of every prompt that is not done. Prompts are taken, and tokenised, as
        rows become free."""
        while not self._ended or self._live:
            while not self._ended and self._wants_prompt():
                prompt = next(prompts, None)
                self._ended = prompt is None
                if prompt is not None:
                    yield from self._begin(prompt, done)
            self._admit()
            yield from self._expire()
            if self._live:
                self._round()
                yield from self._collect()

    def _wants_prompt(self) -> bool:
        waiting = sum(len(task.waiting) for task in self._tasks)
        room = self._loop.batch.capacity - len(self._loop.batch)
        return waiting < room and not (self._alone and self._tasks)

    def _begin(self, prompt: Prompt, done: Collection[tuple[str, int]]) -> Iterator[Completion]:
        """Tokenise a prompt and store its keys and values; an unusable one ends here, with an
        error."""
        waiting = [i for i in range(self._job.n) if (prompt.id, i) not in done]
        self._forecast.begin(self._job.n)
        if not waiting:
            return
        try:
            task = self._intake.take(prompt, waiting, now=self._loop.clock.now())
        except UserError as error:
            seed = self._job.sampling.seed
            yield Completion.failed(prompt.id, str(error), seed=seed, meta=prompt.meta)
            return
        if self._fresh is not None:
            self._loop.restart(copy.deepcopy(self._fresh))
        if self._loop.open(prompt.id, task.tokens, task.reference, deadline=task.deadline):
            self._tasks.append(task)
        else:
            yield from self._without_rows(task)

    def _admit(self) -> None:
        """Give free rows to waiting samples, oldest prompt first."""
        batch, sampling = self._loop.batch, self._job.sampling
        for task in self._tasks:
            if not task.waiting:
                continue
            samples = [
                task.waiting.popleft()
                for _ in range(min(len(task.waiting), batch.capacity - len(batch)))
            ]
            rows = [
                Row(
                    task.prompt.id,
                    sample,
                    sampling.seed,
                    list(task.tokens),
                    task.limit,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                )
                for sample in samples
            ]
            self._loop.admit(*rows)
            for row in rows:
                stops = StopDetector(task.text, sampling.stop) if sampling.stop else None
                self._live[row] = Sample(task, row, stops)
            if not task.waiting:
                self._loop.close(task.prompt.id)

    def _round(self) -> None:
        loop, rows = self._loop, self._loop.batch.hosts
        waiting, typical = sum(len(task.waiting) for task in self._tasks), math.inf
        if self._fresh is None:
            typical = self._forecast.length(sum(row.generated for row in rows) / len(rows))
            waiting = self._forecast.waiting(waiting, ended=self._ended)
        backlog = Backlog(waiting * min(typical, self._job.sampling.max_new_tokens), typical)
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        for live in self._live.values():
            live.task.started = True
        done = loop.round(min(deadlines, default=None), backlog=backlog, ahead=True)
        if self._on_round is not None:
            self._on_round(done)

    def _expire(self) -> Iterator[Completion]:
        """End all samples of prompts whose deadline has come, or would pass within even the
        shortest round; but the first round is not left out because of a prediction, for no other
        one might ever correct it."""
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        if not deadlines:
            return
        now = self._loop.clock.now()
        soonest = now + (self._loop.shortest(min(deadlines)) if self._live else 0.0)
        for task in [
            t
            for t in self._tasks
            if t.deadline is not None
            and (now >= t.deadline or (t.started and soonest > t.deadline))
        ]:
            for index in reversed(range(len(self._loop.batch))):
                row = self._loop.batch.hosts[index]
                if self._live[row].task is task:
                    yield self._retire(index, self._live[row].end("budget"))
            if task.waiting:
                yield from self._without_rows(task)
                task.waiting.clear()
                self._loop.close(task.prompt.id)
                self._forget(task)

    def _collect(self) -> Iterator[Completion]:
        """Look at what the round added to each row; cut and end those that are done."""
        for index in reversed(range(len(self._loop.batch))):
            ending = self._live[self._loop.batch.hosts[index]].look(self._eos)
            if ending is not None:
                yield self._retire(index, ending)

    def _retire(self, index: int, ending: Ending) -> Completion:
        row = self._loop.batch.hosts[index]
        self._loop.retire(index)
        self._forecast.end(row.generated)
        task = self._live.pop(row).task
        self._forget(task)
        return self._completion(task, row.sample, row, ending)

    def _without_rows(self, task: Task) -> Iterator[Completion]:
        """Samples that had no time for a token."""
        for sample in task.waiting:
            yield self._completion(task, sample, None, Ending("budget", ""))

    def _forget(self, task: Task) -> None:
        if not task.waiting and not any(live.task is task for live in self._live.values()):
            self._tasks.remove(task)

    def _completion(self, task: Task, sample: int, row: Row | None, ending: Ending) -> Completion:
        now, seed = self._loop.clock.now(), self._job.sampling.seed
        return completed(task, sample, row, ending, now=now, seed=seed, ids=self._job.token_ids)
