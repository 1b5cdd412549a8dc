"""The conductor: gives the rows of a loop to samples of prompts, yields Completions as rows end.

Not here: what a prompt becomes (intake.py), what ends a row (endings.py), which loop it is and what
happens when that one breaks off (scheduler.py), a round (engine/loop.py), files (io/results.py).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator

from bass_cli.config.job import Job
from bass_cli.endings import Due, Ending, Sample, Watch
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import PendingWork, RoundResult
from bass_cli.engine.forecast import Forecast
from bass_cli.engine.loop import Loop
from bass_cli.errors import UserError
from bass_cli.intake import Intake, Task
from bass_cli.io.completion import Completion
from bass_cli.io.prompts import Prompt
from bass_cli.model.prefill import PASS
from bass_cli.model.tokenizer import Tokenizer


class Conductor:
    """Feeds prompts to a loop and takes finished rows from it: for one job, on one loop.

    `context`: the most positions the target knows; `eos_ids`, `stop_ids`: the tokens that end a
    sample, as the model's end and as a stop;
    `count`: prompts, if that is known, by which the end of the job is foreseen; `on_round` is
    told of every round, with the rows that there are places for as its `capacity`.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        loop: Loop,
        *,
        context: int,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        count: int | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
    ):
        self._job, self._loop, self._on_round = job, loop, on_round
        self._intake = Intake(job, tokenizer, context=context)
        self._watch = Watch(eos_ids, job.sampling.stop, stop_ids)
        # With a budget, prompts run one at a time unless a batch size was asked for. Under
        # maximal coupling they always do, and each begins anew, or how far the clock let one
        # prompt come would reach the draft lengths of others, and so their samples.
        maximal = job.speculation.coupling == "maximal"
        self._alone = job.budget is not None and (job.batch_size == "auto" or maximal)
        self._fresh = copy.deepcopy(loop.lengths) if job.budget is not None and maximal else None
        self._tasks: dict[Task, None] = {}  # under way, in the order in which they came
        self._queue: deque[Task] = deque()  # those with samples that wait for a row
        self._waiting = 0  # so many samples
        self._crowded = False  # a row was put back, and none has ended since
        self._live: dict[Row, Sample] = {}
        self._over: list[int] = []  # the places of rows that have ended, and are not given up yet
        self._due = deque[Due | Completion]()  # what is over and was not yielded
        self._forecast, self._ended = Forecast(None if count is None else count * job.n), False

    def run(
        self, prompts: Iterator[Prompt | None], done: Container[tuple[str, int]]
    ) -> Iterator[Completion]:
        """Every sample of every prompt that is not in `done`, in the order in which they end.

        Prompts are taken as rows become free; a None among them says that there is none now, and
        they are asked again after the next round. One that cannot be used yields a Completion with
        finish_reason "error". Lines of samples that are over are made, and the caller writes them,
        while the device runs the next round. What breaks a job off, an interruption too, is
        raised after them.
        """
        try:
            while not self._ended or self._queue or self._live:
                self._exchange()  # before others come, so that prompts without rows make place
                self._take(prompts, done)
                self._exchange()
                self._expire()
                self._grow()
                if self._live:
                    self._loop.launch(self._soonest(), pending_work=self._pending_work())
                yield from self._finished()
                if self._live:
                    self._round()
                    self._collect()
            self._exchange()
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._finished()
            raise
        yield from self._finished()

    def _take(self, prompts: Iterator[Prompt | None], done: Container[tuple[str, int]]) -> None:
        """Open prompts for free rows; and where nobody's clock runs, those that go into a pass
        that has to be made anyway, if they are as long as the last one, for as many rows more as
        there are."""
        tokens, last, most = 0, 0, PASS if self._job.budget is None else 0
        while not self._ended and self._wants_prompt(more=0 < tokens <= most - last):
            prompt, self._ended = next(((one, False) for one in prompts), (None, True))
            if prompt is None:
                return
            last = self._begin(prompt, done)
            tokens += last

    def _wants_prompt(self, *, more: bool) -> bool:
        room = self._room() + (self._loop.batch.capacity if more else 0)
        return self._waiting < room and not (self._alone and self._tasks)

    def _begin(self, prompt: Prompt, done: Container[tuple[str, int]]) -> int:
        """Tokenise a prompt and open it; its tokens. An unusable one ends here, with an error."""
        waiting = [i for i in range(self._job.n) if (prompt.id, i) not in done]
        self._forecast.begin(self._job.n)
        if not waiting:
            return 0
        try:
            task = self._intake.take(prompt, waiting, now=self._loop.clock.now())
        except UserError as error:
            seed = self._job.sampling.seed
            self._due.append(Completion.failed(prompt.id, str(error), seed=seed, meta=prompt.meta))
            return 0
        if self._fresh is not None:
            self._loop.restart(copy.deepcopy(self._fresh))
        if self._loop.open(prompt.id, task.tokens, task.reference, deadline=task.deadline):
            self._tasks[task] = None
            self._queue.append(task)
            self._waiting += len(task.waiting)
        else:
            self._leave_out(task)
        return len(task.tokens)

    def _exchange(self) -> None:
        """Give free rows, and those of samples that are over, to waiting samples, oldest prompt
        first."""
        rows, room = list[Row](), self._room() if self._queue else 0
        while self._queue and len(rows) < room:
            task = self._queue[0]
            count = min(len(task.waiting), room - len(rows))
            rows += (self._row(task, task.waiting.popleft()) for _ in range(count))
            if not task.waiting:
                self._queue.popleft()
        if rows or self._over:
            self._loop.swap_rows(self._over, rows)
        self._waiting -= len(rows)
        self._over = []

    def _room(self) -> int:
        """How many rows more there is place for: none after a row was put back, until another
        one has ended."""
        batch, limit = self._loop.batch, self._job.sampling.max_new_tokens
        if self._crowded and self._live:
            return 0
        generated = int(batch.generated().sum())
        return batch.room(self._forecast.becomes(limit, generated), ended=self._over)

    def _grow(self) -> None:
        """Rows that are put back wait again, before all others, and are drawn from the
        beginning."""
        for row in self._loop.grow():
            sample = self._live.pop(row)
            task = sample.task
            if not task.waiting:
                self._queue.appendleft(task)
            task.waiting.appendleft(row.sample)
            task.live -= 1
            self._waiting += 1
            self._crowded = True

    def _row(self, task: Task, sample: int) -> Row:
        row = task.row(sample, self._job.sampling)
        self._live[row] = Sample(task, row, self._watch.detector(task.text))
        task.live += 1
        return row

    def _pending_work(self) -> PendingWork:
        waiting, typical = self._waiting, math.inf
        if self._fresh is None:
            typical = self._forecast.length(float(self._loop.batch.generated().mean()))
            waiting = self._forecast.waiting(waiting, ended=self._ended)
        return PendingWork(waiting * min(typical, self._job.sampling.max_new_tokens), typical)

    def _round(self) -> None:
        done = self._loop.round(self._soonest(), pending_work=self._pending_work(), ahead=True)
        if self._job.budget is not None and not all(task.started for task in self._tasks):
            for row, sample in self._live.items():
                sample.task.started |= row.rounds > 0
        if self._on_round is not None:
            self._on_round(done._replace(capacity=self._loop.batch.capacity))

    def _soonest(self) -> float | None:
        """The deadline that comes first, by which the next round is to end."""
        deadlines = (task.deadline for task in self._tasks if task.deadline is not None)
        return min(deadlines, default=None)

    def _expire(self) -> None:
        """End all samples of prompts whose deadline has come, or would pass within even the
        shortest round; but the first round is not left out because of a prediction, for no other
        one might ever correct it. A round that is under way is taken in before: it was launched
        to be over in time."""
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        if not deadlines or self._loop.under_way:
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
            for one in live:
                if one.task is task:
                    self._end(one, Ending("budget"))
            if task.waiting:
                self._leave_out(task)
                self._waiting -= len(task.waiting)
                task.waiting.clear()
                self._queue.remove(task)
                self._forget(task)
        if self._over:
            self._loop.retire(*self._over)
            self._over = []

    def _collect(self) -> None:
        """Look at the rows that the round may have ended; cut and end those that are done."""
        hosts = self._loop.batch.hosts
        for place in self._watch.suspects(self._loop.batch.host_state):
            sample = self._live[hosts[place]]
            ending = sample.look(self._watch.eos, self._watch.stop_ids)
            if ending is not None:
                self._end(sample, ending)

    def _end(self, sample: Sample, ending: Ending) -> None:
        """The row is given up with all others that end now."""
        row, task = sample.row, sample.task
        self._over.append(row.place)
        self._crowded = False
        self._forecast.end(row.generated)
        del self._live[row]
        task.live -= 1
        self._forget(task)
        self._due.append(Due(task, row.sample, row, ending, self._loop.clock.now()))

    def _leave_out(self, task: Task) -> None:
        """Its waiting samples had no time for a token."""
        now = self._loop.clock.now()
        self._due += (Due(task, sample, None, Ending("budget"), now) for sample in task.waiting)

    def _forget(self, task: Task) -> None:
        """Until all its samples are over a prompt may need another row."""
        if not task.waiting and not task.live and task in self._tasks:
            del self._tasks[task]
            self._loop.close(task.prompt.id)

    def _finished(self) -> Iterator[Completion]:
        """What is over, in the order in which it ended."""
        seed, ids = self._job.sampling.seed, self._job.token_ids
        while self._due:
            one = self._due[0]  # until it is there: an interruption may come in between
            done = one if isinstance(one, Completion) else one.completion(seed=seed, ids=ids)
            self._due.popleft()
            yield done
