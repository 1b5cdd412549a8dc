"""Assign rows of the batch to samples of the requests in progress.

tasks.py tokenises prompts and finds where samples end. engine/loop.py runs the rounds;
files are written in io/.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bass_cli.config.job import Job
from bass_cli.config.line import SettingError
from bass_cli.engine.batch import Row
from bass_cli.engine.clock import Forecast
from bass_cli.engine.contracts import DraftLength, PendingWork, RoundResult
from bass_cli.engine.loop import Loop
from bass_cli.errors import UserError
from bass_cli.formats.completion_text import ending_ids
from bass_cli.formats.grammars import Matcher, grammars_of
from bass_cli.io.prompts import Prompt
from bass_cli.io.results import Completion
from bass_cli.models.prefill import PASS
from bass_cli.run.requests import EngineCall, Piece, Request, VisibleText
from bass_cli.run.tasks import (
    Ending,
    EndRule,
    FinishedSample,
    Sample,
    Task,
    TaskBuilder,
    rows_to_check,
    with_echo,
)


class _Opened(NamedTuple):
    """Tokens of the prompts that were opened since the last round, and of the last of them."""

    tokens: int = 0
    last: int = 0


def _stops_of(job: Job) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop texts and the stop ids of a job."""
    return tuple(job.sampling.stop), tuple(job.sampling.stop_token_ids)


_MAX_RULES = 256  # kept of the rules below; prompts may have stop texts of their own


class Scheduler:
    """Admits prompts of requests to the rows of a loop, and takes finished rows.

    Requests share the batch, and their prompts are taken in turn. Under maximal coupling samples
    depend on the rows beside them, so there one request runs at a time, each with a fresh
    controller. `resume` gives it a loop. After a failure, `stop` and `resume` let the work continue
    on another one.

    Args:
        builder: Reads the prompts of the job, whose model, limit and batch hold for all requests.
        rule: What ends the samples of the job.
        on_round: Called after every round; `capacity` of its result is the rows of the batch.
        on_results: Called when requests have got results or ended.
    """

    def __init__(
        self,
        builder: TaskBuilder,
        rule: EndRule,
        *,
        on_round: Callable[[RoundResult], None] | None = None,
        on_results: Callable[[], None] | None = None,
    ):
        self._builder, self._on_round, self._on_results = builder, on_round, on_results
        self._job = job = builder.job
        self._eos, self._rules = rule.eos, {_stops_of(job): rule}  # by what ends a sample
        # With a budget, prompts run one at a time unless a batch size is given. Under maximal
        # coupling they always do, each with a fresh controller. Otherwise the clock would change
        # the draft lengths of later prompts, and with them their samples.
        self._maximal = job.speculation.coupling == "maximal"
        self._one_prompt_at_a_time = job.budget is not None and (
            job.batch_size == "auto" or self._maximal
        )
        self._loop: Loop | None = None
        self._initial_controller: DraftLength | None = None  # a controller that has learnt nothing
        self._controller_used = False  # whether the controller may have learnt something
        # Requests and calls that are not admitted yet, and requests that are and have not ended.
        self._arrivals = deque[Request | EngineCall]()
        self._requests = dict[Request, TaskBuilder]()
        # Prompts in progress, oldest first; those in progress when the loop was left; and the keys
        # of both.
        self._tasks: dict[Task, None] = {}
        self._interrupted = deque[Task]()
        self._open_keys = set[str]()
        self.reading = False  # a prompt is being read, and an error would lose it
        # Arguments with which `_open_prompts` continues; None unless it waits for a prompt.
        self._paused_opening: _Opened | None = None
        self._no_prompt_ready = False  # whether no request had a prompt that was ready
        self._waiting_tasks: deque[Task] = deque()  # tasks with samples that wait for a row
        self._num_waiting = 0  # the number of these samples
        self._preempted = False  # whether a row was preempted, and none has ended since
        self._live_samples: dict[Row, Sample] = {}
        self._ended_rows: list[int] = []  # indices of ended rows that are still in the batch
        self._undelivered = deque[FinishedSample | tuple[Request, Completion]]()
        self._forecast = Forecast(0)

    def results(self, request: Request, step: Callable[[], None]) -> Iterator[Any]:
        """Yield the results of an added request; call `step` while there are none.

        An exception or interruption is raised after the results that are there.
        """
        failed: BaseException | None = None
        while True:
            while request.results:
                yield request.results.popleft()
            if failed is not None:
                raise failed
            if request.finished:
                break
            try:
                step()
            except BaseException as error:
                self.deliver()
                failed = error
        if request.error is not None:
            raise request.error

    def add(self, request: Request | EngineCall) -> None:
        """Let a request begin as soon as it can share the batch, or call a function as soon as no
        request is in progress. Later ones do not overtake it."""
        self._arrivals.append(request)

    @property
    def loop(self) -> Loop:
        """The loop that `resume` set."""
        assert self._loop is not None
        return self._loop

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._requests or self._arrivals or self._ended_rows)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether nothing can be done before a request has a prompt that is ready."""
        requested = self._no_prompt_ready and any(not one.exhausted for one in self._requests)
        busy = self._tasks or self._interrupted or self._ended_rows
        return self._paused_opening is not None or (not busy and requested)

    def step(self) -> None:
        """Finish the round that was launched, and launch the next one.

        What has finished is delivered to the requests while the device runs the next round.
        """
        if self._paused_opening is None:
            if self._live_samples:
                self._run_round()
                self._end_finished_samples()
            self._admit_requests()
            self._swap_rows()  # before new prompts, to free the space of finished ones
        self._open_prompts()
        if self._paused_opening is not None:
            self.deliver()
            return
        self._swap_rows()
        self._expire_deadlines()
        self._grow_rows()
        if self._live_samples:
            self.loop.launch(self._earliest_deadline(), pending_work=self._pending_work())
        self.deliver()

    def cancel(self, request: Request) -> None:
        """End a request. Its rows leave the batch; those of others are not changed."""
        request.cancelled = True
        if request in self._arrivals:
            self._arrivals.remove(request)
        self._drop_request(request)

    def _drop_request(self, request: Request) -> None:
        """Forget a request, with its samples in progress."""
        for row, sample in list(self._live_samples.items()):
            if sample.task.owner is request:
                self._ended_rows.append(row.index)
                del self._live_samples[row]
                sample.task.num_live -= 1
        for task in [task for task in self._tasks if task.owner is request]:
            if task in self._waiting_tasks:
                self._waiting_tasks.remove(task)
                self._num_waiting -= len(task.waiting_samples)
            task.waiting_samples.clear()
            self._close_if_finished(task)
        self._open_keys -= {task.key for task in self._interrupted if task.owner is request}
        self._interrupted = deque(task for task in self._interrupted if task.owner is not request)
        self._requests.pop(request, None)
        self._paused_opening = None
        if not self._requests and self._ended_rows:
            self._swap_rows()

    def _admit_requests(self) -> None:
        """Admit requests that can share the batch, and make calls that need it alone."""
        while self._arrivals and not self._requests:
            first = self._arrivals[0]
            if isinstance(first, Request):
                self._begin_request(first)
            else:
                first.run()
                self._notify()
            self._arrivals.popleft()
        while self._arrivals and not self._maximal:
            following = self._arrivals[0]
            if isinstance(following, EngineCall):
                return
            self._begin_request(following)
            self._arrivals.popleft()

    def _begin_request(self, request: Request) -> None:
        if not self._requests:
            self._forecast = Forecast(0)
            if self._maximal and self._controller_used:
                self._restart()
        self._controller_used = True
        usual = 1 if request.job.draws_one else request.job.n
        self._forecast.expect(None if request.count is None else request.count * usual)
        self._requests[request] = self._builder.with_job(request.job)

    def _restart(self) -> None:
        """Use a controller that has learnt nothing, and forget what the drafter has learnt."""
        assert self._initial_controller is not None
        self.loop.restart(copy.deepcopy(self._initial_controller))

    def stop(self) -> None:
        """Leave the loop, which may hold much memory. Samples in progress will be drawn again."""
        for row, sample in self._live_samples.items():
            sample.task.waiting_samples.append(row.sample)
        for task in self._tasks:
            task.waiting_samples = deque(sorted(task.waiting_samples))
            task.num_live, task.started = 0, False
        self._interrupted.extendleft(reversed(self._tasks))
        self._tasks, self._live_samples, self._ended_rows = {}, {}, []
        self._waiting_tasks.clear()
        self._num_waiting, self._preempted = 0, False
        self._loop = None

    def resume(self, loop: Loop) -> None:
        """Continue on an empty loop. Prompts in progress are opened again, with new clocks."""
        self._loop = loop
        if self._maximal and self._initial_controller is None:
            self._initial_controller = copy.deepcopy(loop.controller)

    def _open_prompts(self) -> None:
        """Open prompts for free rows.

        Without a budget, further prompts that fit into the same prefill pass are opened early, up
        to twice the batch. Under maximal coupling samples depend on when a prompt is opened, so if
        one is not ready yet, the next round waits for it.
        """
        pass_tokens = PASS if self._job.budget is None else 0
        opened, self._paused_opening = self._paused_opening or _Opened(), None
        requests = deque(one for one in self._requests if not one.exhausted)
        while self._interrupted or requests:
            fits = 0 < opened.tokens <= pass_tokens - opened.last
            if not self._has_room_for_prompt(ahead=fits):
                break
            if self._interrupted:
                task = self._interrupted.popleft()
                task.restart(self.loop.clock.now())
                tokens = self._open_task(task)
            else:
                request = requests.popleft()  # in turn
                prompt = self._next_prompt(request)
                if prompt is None:
                    if self._maximal and request in self._requests and not request.exhausted:
                        self._paused_opening = opened
                    continue
                requests.append(request)
                tokens = self._begin_prompt(request, prompt)
                self.reading = False
            opened = _Opened(opened.tokens + tokens, tokens)
        self._no_prompt_ready = not requests

    def _next_prompt(self, request: Request) -> Prompt | None:
        """Return the next prompt of a request; None if none is ready, or after the last one."""
        self.reading = True
        try:
            for prompt in request.prompts:
                return prompt
            request.exhausted = True
        except Exception as error:  # of the caller's iterator
            self.deliver()
            request.error = error
            self._drop_request(request)
            self._notify()
        self.reading = False
        return None

    def _has_room_for_prompt(self, *, ahead: bool) -> bool:
        """Whether a prompt may be opened. `ahead`: also if its samples must wait for rows."""
        rows = self._free_rows() + (self.loop.batch.capacity if ahead else 0)
        return self._num_waiting < rows and not (self._one_prompt_at_a_time and self._tasks)

    def _begin_prompt(self, request: Request, prompt: Prompt) -> int:
        """Tokenise and open a prompt; return its number of tokens, 0 if it cannot be run."""
        job, builder = request.job, self._requests[request]
        usual = 1 if job.draws_one else job.n
        try:
            job = builder.job_of(prompt)
            waiting = _samples_to_draw(request, prompt, job)
            self._forecast.begin(1 if job.draws_one else job.n, expected=usual)
            if not waiting:
                return 0
            now, copies = self.loop.clock.now(), job.draws_one
            task = builder.build(prompt, waiting, now=now, copies=copies)
            self._end_rule_of(job)
            self._new_matcher(task)
        except UserError as error:
            seed = job.sampling.seed
            failed = Completion.failed(prompt.id, str(error), seed=seed, meta=prompt.meta)
            self._undelivered.append((request, with_echo(failed, prompt, job)))
            return 0
        task.request, task.key = request, self._new_key(prompt.id)
        request.num_in_progress += 1
        return self._open_task(task)

    def _new_key(self, id_: str) -> str:
        """Return a key for a prompt in the loop; two requests may have the same id."""
        others = (f"{id_}\0{number}" for number in itertools.count())
        keys = itertools.chain([id_], others)
        found = next(key for key in keys if key not in self._open_keys)
        self._open_keys.add(found)
        return found

    def _end_rule_of(self, job: Job) -> EndRule:
        """Return what ends the samples of a job. UserError if a stop cannot occur."""
        stops = _stops_of(job)
        if stops not in self._rules:
            if len(self._rules) >= _MAX_RULES:  # other prompts no longer need most of them
                used = {sample.rule for sample in self._live_samples.values()}
                self._rules = {key: rule for key, rule in self._rules.items() if rule in used}
            tokenizer = self._builder.tokenizer
            ids = ending_ids(tokenizer, *stops, vocab=tokenizer.rows or sys.maxsize)
            self._rules[stops] = EndRule(self._eos, stops[0], ids)
        return self._rules[stops]

    def _open_task(self, task: Task) -> int:
        """Open a prompt, and let its samples wait for rows; return its number of tokens."""
        self._tasks[task] = None  # an error of Loop.open loses no prompt
        self.reading = False
        if self._maximal and self._job.budget is not None:
            self._restart()
        if self.loop.open(
            task.key,
            task.tokens,
            task.reference,
            deadline=task.deadline,
            logprobs=task.prompt_logprobs,
        ):
            self._waiting_tasks.append(task)
            self._num_waiting += len(task.waiting_samples)
        else:
            self._end_waiting_samples(task)
            task.waiting_samples.clear()
            self._remove_task(task)
        return len(task.tokens)

    def _swap_rows(self) -> None:
        """Give free and ended rows to waiting samples, oldest prompt first."""
        rows, room = list[Row](), self._free_rows() if self._waiting_tasks else 0
        while self._waiting_tasks and len(rows) < room:
            task = self._waiting_tasks[0]
            count = min(len(task.waiting_samples), room - len(rows))
            rows += (self._make_row(task, task.waiting_samples.popleft()) for _ in range(count))
            if not task.waiting_samples:
                self._waiting_tasks.popleft()
        if rows or self._ended_rows:
            self.loop.swap_rows(self._ended_rows, rows)
        self._num_waiting -= len(rows)
        self._ended_rows = []

    def _free_rows(self) -> int:
        """The number of rows that can be admitted; 0 after a preemption until a row has ended."""
        batch, limit = self.loop.batch, self._builder.max_new_tokens
        if self._preempted and self._live_samples:
            return 0
        generated = int(batch.generated().sum())
        return batch.room(self._forecast.becomes(limit, generated), ended=self._ended_rows)

    def _grow_rows(self) -> None:
        """Grow the rows' cache. Preempted samples wait again, and are drawn from the start."""
        for row in self.loop.grow():
            sample = self._live_samples.pop(row)
            task = sample.task
            if not task.waiting_samples:
                self._waiting_tasks.appendleft(task)
            task.waiting_samples.appendleft(row.sample)
            task.num_live -= 1
            self._num_waiting += 1
            self._preempted = True

    def _new_matcher(self, task: Task) -> Matcher | None:
        """Return the state of a new sample in its grammar, which begins after the thinking part.
        None if any token may come at any position. UserError if the grammar does not fit."""
        sampling, thinking = task.job.sampling, task.thinking
        structure, limit = sampling.structure, sampling.max_thinking_tokens
        if thinking is not None and structure is not None:
            may_think = thinking.is_open or thinking.begin_id is not None
            thinking = thinking if may_think and task.job.thinking != "off" else None
        if structure is None and (thinking is None or limit is None):
            return None
        vocab = self.loop.batch.processors.vocab
        grammars = grammars_of(self._builder.tokenizer, vocab, self._eos)
        try:
            return grammars.matcher(structure, None if thinking is None else thinking.copy())
        except SettingError as error:
            raise UserError(f'{task.prompt.place}: field "{error.field}": {error}') from None

    def _make_row(self, task: Task, sample: int) -> Row:
        row, rule = task.row(sample), self._end_rule_of(task.job)
        row.matcher = self._new_matcher(task)
        thinking = None
        if task.thinking is not None and task.job.thinking != "keep":
            thinking = task.thinking.copy()
        copied = task.copies is not None and 0 not in task.copies
        visible = None
        if task.owner.streams and not copied:
            tags = self._builder.tags
            begin = () if thinking is None or tags is None else (tags.begin,)
            new = VisibleText((*task.job.sampling.stop, *begin))
            visible = task.visible.setdefault(sample, new)  # kept if it is drawn again
            visible.tokens = 0
        self._live_samples[row] = Sample(
            task, row, rule, rule.detector(task.text), thinking, visible
        )
        task.num_live += 1
        return row

    def _pending_work(self) -> PendingWork:
        waiting, typical = self._num_waiting, math.inf
        if not self._maximal or self._job.budget is None:
            ended = not self._arrivals and all(one.exhausted for one in self._requests)
            typical = self._forecast.length(float(self.loop.batch.generated().mean()))
            waiting = self._forecast.waiting(waiting, ended=ended)
        return PendingWork(waiting * min(typical, self._builder.max_new_tokens), typical)

    def _run_round(self) -> None:
        done = self.loop.round(
            self._earliest_deadline(), pending_work=self._pending_work(), ahead=True
        )
        if self._job.budget is not None and not all(task.started for task in self._tasks):
            for row, sample in self._live_samples.items():
                sample.task.started |= row.rounds > 0
        if self._on_round is not None:
            refills = bool(self._num_waiting or self._interrupted or not self._no_prompt_ready)
            self._on_round(done._replace(capacity=self.loop.batch.capacity, refills=refills))

    def _earliest_deadline(self) -> float | None:
        """The earliest deadline, before which the next round should end; None without one."""
        return min((t.deadline for t in self._tasks if t.deadline is not None), default=None)

    def _expire_deadlines(self) -> None:
        """End the samples of prompts whose deadline has passed or would pass in any round.

        The first round of a prompt always runs, because without it a wrong prediction could never
        be corrected. A round in flight is collected first: it was launched to end in time.
        """
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        if not deadlines or self.loop.in_flight:
            return
        now, live_rows = self.loop.clock.now(), self.loop.batch.live_rows
        soonest = now + (self.loop.least_seconds(min(deadlines)) if self._live_samples else 0.0)
        for task in [
            t
            for t in self._tasks
            if t.deadline is not None
            and (now >= t.deadline or (t.started and soonest > t.deadline))
        ]:
            for one in [sample for sample in map(self._live_samples.get, live_rows) if sample]:
                if one.task is task:
                    self._end_sample(one, Ending("budget"))
            if task.waiting_samples:
                self._end_waiting_samples(task)
                self._num_waiting -= len(task.waiting_samples)
                task.waiting_samples.clear()
                self._waiting_tasks.remove(task)
                self._close_if_finished(task)
        if self._ended_rows:
            self.loop.retire(*self._ended_rows)
            self._ended_rows = []

    def _end_finished_samples(self) -> None:
        """Truncate and end the samples that the last round finished."""
        live_rows, rules = self.loop.batch.live_rows, set(self._rules.values())
        if len(rules) > 1:
            rules = {sample.rule for sample in self._live_samples.values()}
        indices = rows_to_check(rules, self.loop.batch.host_state)
        if self.loop.batch.masked:
            indices += [row.index for row in live_rows if row.matcher and row.matcher.fault]
        for index in dict.fromkeys(indices):
            sample = self._live_samples.get(live_rows[index])  # None if its request was cancelled
            ending = None if sample is None else sample.check_end()
            if sample is not None and ending is not None:
                self._end_sample(sample, ending)

    def _end_sample(self, sample: Sample, ending: Ending) -> None:
        """Mark a sample as finished; its row leaves the batch with all that end in this round."""
        row, task = sample.row, sample.task
        self._ended_rows.append(row.index)
        self._preempted = False
        self._forecast.end(row.generated)
        del self._live_samples[row]
        task.num_live -= 1
        if row.sample == 0 and task.job.sampling.prompt_logprobs is not None:
            task.scores = self.loop.target.prompt_logprobs(task.key)
        self._close_if_finished(task)
        now = self.loop.clock.now()
        shown = 0 if sample.visible is None else sample.visible.shown
        done = FinishedSample(task, row.sample, row, ending, now, sample.thinking, shown)
        self._undelivered.append(done)

    def _end_waiting_samples(self, task: Task) -> None:
        """End its waiting samples without tokens, because their time is up."""
        now = self.loop.clock.now()
        self._undelivered += (
            FinishedSample(task, sample, None, Ending("budget"), now)
            for sample in task.waiting_samples
        )

    def _close_if_finished(self, task: Task) -> None:
        """Close a prompt if all its samples are finished."""
        if not task.waiting_samples and not task.num_live and task in self._tasks:
            self._remove_task(task)
            self.loop.close(task.key)

    def _remove_task(self, task: Task) -> None:
        del self._tasks[task]
        self._open_keys.discard(task.key)
        task.owner.num_in_progress -= 1

    def deliver(self) -> None:
        """Hand finished samples, in the order in which they ended, and new text to the requests."""
        queue, news = self._undelivered, False
        while queue:
            one = queue[0]  # an interruption before popleft loses nothing
            request = one.task.owner if isinstance(one, FinishedSample) else one[0]
            if not request.cancelled:
                request.results += _results_of(one, request)
                news = True
            queue.popleft()
        for sample in self._live_samples.values():
            if sample.visible is not None and (text := sample.new_text()):
                task = sample.task
                task.owner.results.append(Piece(task.prompt.id, sample.row.sample, text))
                news = True
        for request in [one for one in self._requests if one.exhausted and not one.num_in_progress]:
            request.delivered = news = True
            del self._requests[request]
        if news:
            self._notify()

    def _notify(self) -> None:
        if self._on_results is not None:
            self._on_results()


def _samples_to_draw(request: Request, prompt: Prompt, job: Job) -> list[int]:
    """Return the numbers of a prompt's samples that are drawn."""
    missing = [sample for sample in range(job.n) if (prompt.id, sample) not in request.done]
    if request.redraws and (missing or job.budget is None):
        return list(range(job.n))
    return missing


def _results_of(
    one: FinishedSample | tuple[Request, Completion], request: Request
) -> list[Completion] | list[Piece]:
    """Return what a request gets when a sample is finished."""
    if isinstance(one, FinishedSample):
        shown, finished = one.shown, one.completions()
    else:
        shown, finished = 0, [one[1]]
    if not request.streams:
        return finished
    return [
        Piece(done.id, done.sample, done.text[0 if done.copy_of is not None else shown :], done)
        for done in finished
    ]
