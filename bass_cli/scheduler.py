"""The conductor: admits prompts x n to a loop, yields Completions as rows end.

Not here: what a prompt becomes (intake.py), what ends a row (endings.py), building the loop
(build.py), a round (engine/step.py), files (io/results.py).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

from bass_cli.build import READING, Models, load_models, ready_loop
from bass_cli.config.job import Job
from bass_cli.endings import Ending, Sample, Watch, completed
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import Backlog, Round
from bass_cli.engine.forecast import Forecast
from bass_cli.engine.step import Loop
from bass_cli.errors import UserError
from bass_cli.intake import Intake, Task
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt
from bass_cli.lengths.store import keep_learnt
from bass_cli.model.tokenizer import Tokenizer
from bass_cli.plan import Plan
from bass_cli.system.host import give_back_memory, is_refused_memory
from bass_cli.unfinished import Unfinished


def generate(
    plan: Plan,
    prompts: Iterator[Prompt],
    *,
    done: Collection[tuple[str, int]] = (),
    count: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[int, int], None] = lambda done, whole: None,
    on_note: Callable[[str], None] = lambda note: None,
    loop: Loop | None = None,
) -> Iterator[Completion]:
    """Samples 0 to n - 1 of every prompt (`count` of them, if that is known), but those in `done`,
    in the order in which they end.

    At temperature 0 all samples of a prompt are equal: sample 0 is drawn, and the others are copies
    of it.

    Loads the models at the first step, if no empty `loop` is given; with a budget, what would
    make the first prompts slow is done before the first clock starts; `on_phase` is told what is
    done before rounds are, `on_bytes` how many bytes of the weights are read, of how many. A
    prompt that cannot run yields one Completion with finish_reason "error", and so does every
    sample that meets logits which are not finite.

    Where memory runs out, half the rows go on, and `on_note` is told so: what was under way is
    drawn again, and becomes the same, since its seed fixes it. Not under maximal coupling, where
    samples depend on the rows, nor on a `loop` that others hold: then, and where a single row is
    too much, it is a MachineError.
    """
    if plan.job.draws_one:
        once = dataclasses.replace(plan, job=plan.job.model_copy(update={"n": 1}))
        taken = Counter(id_ for id_, _ in done)
        whole = {(id_, 0) for id_, samples in taken.items() if samples == plan.job.n}
        told = functools.partial(generate, on_round=on_round, on_phase=on_phase, on_bytes=on_bytes)
        drawn = told(once, prompts, done=whole, count=count, on_note=on_note, loop=loop)
        yield from _with_copies(drawn, plan.job.n, done)
        return
    work, models = Unfinished(prompts, done, n=plan.job.n, count=count), None
    if loop is None:
        on_phase("loading the weights")
        with plan.need.explained():
            models = load_models(plan, on_bytes)
    while True:
        with plan.need.explained():
            try:
                yield from _attempt(plan, work, models, loop, on_round, on_phase)
                return
            except Exception as error:
                fixed = models is None or plan.job.speculation.coupling == "maximal"
                if fixed or plan.rows == 1 or work.reading or not is_refused_memory(error):
                    raise
        plan = _halved(plan, on_note)


def _halved(plan: Plan, on_note: Callable[[str], None]) -> Plan:
    """The plan with half the rows, after what the last attempt held has been let go of."""
    give_back_memory(plan.device)
    fewer = dataclasses.replace(plan, most_rows=plan.rows // 2)
    on_note(
        f"memory ran out with {plan.rows} rows; going on with {fewer.rows}, which draw again "
        "what was under way"
    )
    return fewer


def _attempt(
    plan: Plan,
    work: Unfinished,
    models: Models | None,
    loop: Loop | None,
    on_round: Callable[[Round], None] | None,
    on_phase: Callable[[str], None],
) -> Iterator[Completion]:
    """What is unfinished, by one loop: the one that is given, or a new one over `models`."""
    if loop is None:
        assert models is not None
        loop = ready_loop(plan, models, on_phase)
    on_phase(READING[plan.device.type])  # until the first round is over
    conductor = Conductor(
        plan.job,
        plan.tokenizer,
        loop,
        context=plan.target.spec.context,
        eos_ids=plan.eos_ids,
        count=work.count,
        on_round=on_round,
    )
    try:
        for completion in conductor.run(work.prompts(), work.done):
            work.end(completion)
            yield completion
    finally:
        keep_learnt(plan.profile, loop.lengths)


def _with_copies(
    drawn: Iterator[Completion], n: int, done: Collection[tuple[str, int]]
) -> Iterator[Completion]:
    """Samples 0 to n - 1 of every prompt, but those in `done`, where sample 0 was drawn. A
    failure stays one line."""
    for completion in drawn:
        if completion.is_of_prompt:
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
        self._intake = Intake(job, tokenizer, context=context)
        self._watch = Watch(eos_ids, job.sampling.stop)
        # With a budget, prompts run one at a time unless a batch size was asked for. Under
        # maximal coupling they always do, and each begins anew, or how far the clock let one
        # prompt come would reach the draft lengths of others, and so their samples.
        maximal = job.speculation.coupling == "maximal"
        self._alone = job.budget is not None and (job.batch_size == "auto" or maximal)
        self._fresh = copy.deepcopy(loop.lengths) if job.budget is not None and maximal else None
        self._tasks: dict[Task, None] = {}  # under way, in the order in which they came
        self._queue: deque[Task] = deque()  # those with samples that wait for a row
        self._waiting = 0  # so many samples
        self._live: dict[Row, Sample] = {}
        self._over: list[int] = []  # the places of rows that have ended, and are not given up yet
        self._forecast, self._ended = Forecast(None if count is None else count * job.n), False

    def run(
        self, prompts: Iterator[Prompt], done: Collection[tuple[str, int]]
    ) -> Iterator[Completion]:
        """Every sample of every prompt that is not done. Prompts are taken, and tokenised, as
        rows become free."""
        while not self._ended or self._live:
            self._exchange()  # before others are stored, so that prompts without rows make place
            while not self._ended and self._wants_prompt():
                prompt = next(prompts, None)
                self._ended = prompt is None
                if prompt is not None:
                    yield from self._begin(prompt, done)
            self._exchange()
            yield from self._expire()
            if self._live:
                self._round()
                yield from self._collect()
        self._exchange()

    def _wants_prompt(self) -> bool:
        room = self._loop.batch.capacity - len(self._loop.batch)
        return self._waiting < room and not (self._alone and self._tasks)

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
            self._tasks[task] = None
            self._queue.append(task)
            self._waiting += len(task.waiting)
        else:
            yield from self._without_rows(task)

    def _exchange(self) -> None:
        """Give free rows, and those of samples that are over, to waiting samples, oldest prompt
        first."""
        batch, rows, closed = self._loop.batch, list[Row](), list[Task]()
        room = batch.capacity - len(batch) + len(self._over)
        while self._queue and len(rows) < room:
            task = self._queue[0]
            count = min(len(task.waiting), room - len(rows))
            rows += (self._row(task, task.waiting.popleft()) for _ in range(count))
            if not task.waiting:
                closed.append(self._queue.popleft())
        if rows or self._over:
            self._loop.exchange(self._over, rows)
        self._waiting -= len(rows)
        self._over = []
        for task in closed:
            self._loop.close(task.prompt.id)

    def _row(self, task: Task, sample: int) -> Row:
        sampling = self._job.sampling
        row = Row(
            task.prompt.id,
            sample,
            sampling.seed,
            list(task.tokens),
            task.limit,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        self._live[row] = Sample(task, row, self._watch.detector(task.text))
        task.live += 1
        return row

    def _round(self) -> None:
        loop, waiting, typical = self._loop, self._waiting, math.inf
        if self._fresh is None:
            typical = self._forecast.length(float(loop.batch.generated().mean()))
            waiting = self._forecast.waiting(waiting, ended=self._ended)
        backlog = Backlog(waiting * min(typical, self._job.sampling.max_new_tokens), typical)
        done = loop.round(min(self._deadlines(), default=None), backlog=backlog, ahead=True)
        if self._on_round is not None:
            self._on_round(done._replace(capacity=loop.batch.capacity))

    def _deadlines(self) -> list[float]:
        if self._job.budget is None:
            return []
        for task in self._tasks:
            task.started |= task.live > 0
        return [task.deadline for task in self._tasks if task.deadline is not None]

    def _expire(self) -> Iterator[Completion]:
        """End all samples of prompts whose deadline has come, or would pass within even the
        shortest round; but the first round is not left out because of a prediction, for no other
        one might ever correct it."""
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        if not deadlines:
            return
        now, hosts = self._loop.clock.now(), self._loop.batch.hosts
        soonest = now + (self._loop.shortest(min(deadlines)) if self._live else 0.0)
        for task in [
            t
            for t in self._tasks
            if t.deadline is not None
            and (now >= t.deadline or (t.started and soonest > t.deadline))
        ]:
            live = [sample for sample in map(self._live.get, hosts) if sample]
            ended = [self._end(one, one.end("budget")) for one in live if one.task is task]
            if task.waiting:
                ended += self._without_rows(task)
                self._waiting -= len(task.waiting)
                task.waiting.clear()
                self._queue.remove(task)
                self._loop.close(task.prompt.id)
                self._forget(task)
            yield from ended
        if self._over:
            self._loop.retire(*self._over)
            self._over = []

    def _collect(self) -> Iterator[Completion]:
        """Look at the rows that the round may have ended; cut and end those that are done."""
        hosts, ended = self._loop.batch.hosts, []
        for place in self._watch.suspects(self._loop.batch.ledger):
            sample = self._live[hosts[place]]
            ending = sample.look(self._watch.eos)
            if ending is not None:
                ended.append(self._end(sample, ending))
        yield from ended

    def _end(self, sample: Sample, ending: Ending) -> Completion:
        """The row is given up with all others that end now."""
        row, task = sample.row, sample.task
        self._over.append(row.place)
        self._forecast.end(row.generated)
        del self._live[row]
        task.live -= 1
        self._forget(task)
        return self._completion(task, row.sample, row, ending)

    def _without_rows(self, task: Task) -> Iterator[Completion]:
        """Samples that had no time for a token."""
        for sample in task.waiting:
            yield self._completion(task, sample, None, Ending("budget", ""))

    def _forget(self, task: Task) -> None:
        if not task.waiting and not task.live:
            self._tasks.pop(task, None)

    def _completion(self, task: Task, sample: int, row: Row | None, ending: Ending) -> Completion:
        now, seed = self._loop.clock.now(), self._job.sampling.seed
        return completed(task, sample, row, ending, now=now, seed=seed, ids=self._job.token_ids)
