"""Assign rows of the batch to samples, and find where samples end.

`RequestReader` tokenises prompts, `Conductor` assigns rows to samples, and `suspects` finds the
rows that may have ended. engine/loop.py runs the rounds; files are written in io/.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy

from bass_cli.config.job import Job
from bass_cli.config.line import SettingError
from bass_cli.engine.batch import Row
from bass_cli.engine.clock import Forecast
from bass_cli.engine.contracts import DraftLength, PendingWork, PromptLogprobs, RoundResult
from bass_cli.engine.host_state import BROKEN, LENGTH, LIMIT, PROMPT, HostState
from bass_cli.engine.loop import Loop
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.continuation import Continuation, StopDetector, StopTokens, ending_ids
from bass_cli.formats.grammars import Matcher, grammars_of
from bass_cli.formats.thinking import NEWLINES, Tags, Thinking, is_opened
from bass_cli.formats.tokenizer import Messages, Tokenizer
from bass_cli.io.prompts import SYSTEM_ROLES, Prompt
from bass_cli.io.results import Completion, paired, reported, rounded
from bass_cli.models.prefill import PASS
from bass_cli.run.requests import Call, Piece, Request, VisibleText
from bass_cli.run.sampling import report_of, row_sampling


@dataclass(slots=True, eq=False)
class Task:
    """A prompt in progress.

    Args:
        job: The job with the prompt's own settings.
        tokens: Its token ids.
        sampling: How its tokens are sampled.
        reference: Token ids in which drafts may be looked up.
        text: Decodes the tokens that follow the prompt.
        limit: The most tokens of a sample.
        waiting: The samples that wait for a row.
        copies: The samples that are copies of the one that is drawn; None if each is drawn.
        began: When it began, by the loop's clock.
        deadline: When it must end; None without a budget.
        thinking: The thinking part before the first token; None if it is not looked for.
        live: The number of samples that have a row.
        started: Whether one of them has had a round.
        scores: The log-probabilities of its tokens, once sample 0 has ended, if they are wanted.
        request: The request that it belongs to.
        key: Its key in the loop.
    """

    prompt: Prompt
    job: Job
    tokens: list[int]
    sampling: RowSampling
    reference: list[int]
    text: Continuation
    limit: int
    waiting: deque[int]
    copies: tuple[int, ...] | None
    began: float
    deadline: float | None
    thinking: Thinking | None = None
    live: int = 0
    started: bool = False
    request: Request | None = None
    key: str = ""
    scores: PromptLogprobs | None = None

    @property
    def owner(self) -> Request:
        """The request that it belongs to."""
        assert self.request is not None
        return self.request

    @property
    def prompt_logprobs(self) -> int | None:
        """How many likeliest tokens the log-probabilities of the prompt have; None for none.

        Sample 0 carries them.
        """
        return self.job.sampling.prompt_logprobs if 0 in self.waiting else None

    def restart(self, now: float) -> None:
        """Start its clock again."""
        if self.deadline is not None:
            self.deadline += now - self.began
        self.began = now

    def row(self, sample: int) -> Row:
        """Make a row for one of its samples."""
        seed, report = self.job.sampling.seed, report_of(self.job.sampling)
        return Row(
            self.key or self.prompt.id,
            sample,
            seed,
            self.tokens,
            self.limit,
            self.sampling,
            report,
            noise_id=self.prompt.id,
        )


class RequestReader:
    """Makes Tasks of a job's prompts.

    Args:
        context: The target's context, in tokens.
        limit: The most new tokens of a sample that the batch has room for. Default: the job's.
        tags: The tags of thinking parts; None if they are not looked for.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        *,
        context: int,
        limit: int | None = None,
        tags: Tags | None = None,
    ):
        self._job, self._tokenizer, self._context = job, tokenizer, context
        self._limit = job.sampling.max_new_tokens if limit is None else limit
        self._tags = tags
        self._own: dict[str, Job] = {}  # by a prompt's own settings
        self._samplings: dict[int, RowSampling] = {}  # by id of a job, which is kept above

    def job_of(self, prompt: Prompt) -> Job:
        """Return the job with a prompt's own settings. UserError if it cannot have them."""
        if not prompt.settings:
            return self._job
        key = repr(prompt.settings)
        if key not in self._own:
            own = prompt.own_job(self._job)
            if (tokens := own.sampling.max_new_tokens) > self._limit:
                raise UserError(
                    f'{prompt.place}: field "max_new_tokens": {tokens} is more than the '
                    f"{self._limit} that the batch has room for; raise "
                    "`sampling.max_new_tokens` of the job"
                )
            self._own[key] = own
        return self._own[key]

    def _sampling_of(self, job: Job, prompt: Prompt) -> RowSampling:
        """Return how tokens of this job are sampled. UserError if the model has no such tokens."""
        if id(job) not in self._samplings:
            try:
                found = row_sampling(job.sampling, self._tokenizer)
            except SettingError as error:
                raise UserError(f'{prompt.place}: field "{error.field}": {error}') from None
            self._samplings[id(job)] = found
        return self._samplings[id(job)]

    def take(
        self, prompt: Prompt, samples: Iterable[int], *, now: float, copies: bool = False
    ) -> Task:
        """Tokenise a prompt and start its clock. UserError if it cannot be run.

        `copies`: draw sample 0, and copy it to `samples`.
        """
        if prompt.fault is not None:
            raise UserError(prompt.fault)
        job = self.job_of(prompt)
        messages = self._messages(prompt)
        tokens, reference = self._encode(prompt, messages), self._reference(prompt)
        if len(tokens) >= self._context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, and the model's context is {self._context}"
            )
        return Task(
            prompt,
            job,
            tokens,
            self._sampling_of(job, prompt),
            reference,
            Continuation(self._tokenizer, tokens),
            min(job.sampling.max_new_tokens, self._context - len(tokens)),
            deque((0,) if copies else samples),
            tuple(samples) if copies else None,
            now,
            None if job.budget is None else now + job.budget,
            self._thinking(job, prompt, tokens, messages),
        )

    def _thinking(
        self, job: Job, prompt: Prompt, tokens: list[int], messages: Messages | None
    ) -> Thinking | None:
        """Return the thinking part of a sample before its first token, if it is looked for."""
        limit = job.sampling.max_thinking_tokens
        if self._tags is None and limit is not None:
            raise UserError(
                f"{prompt.place}: `sampling.max_thinking_tokens`: the model has no thinking part "
                "that bass knows"
            )
        apart = job.thinking != "keep" or limit is not None or job.sampling.structure is not None
        if self._tags is None or not apart:
            return None
        opened = is_opened(self._tags, self._tokenizer, tokens, messages or ())
        return Thinking(self._tags, self._tokenizer, opened=opened, limit=limit)

    def _reference(self, prompt: Prompt) -> list[int]:
        """Tokenise the reference, up to the context; a longer one could take minutes."""
        if not prompt.reference:
            return []
        try:
            return self._tokenizer.encode_part(prompt.reference, self._context)
        except UserError as error:
            raise UserError(f'field "reference": {error}') from None

    def _messages(self, prompt: Prompt) -> Messages | None:
        """Return the conversation of a prompt; None if it is plain text."""
        messages = chat_of(prompt, self._job)
        if messages is not None and self._job.chat is False:
            raise UserError(f"{prompt.place}: the prompt has messages, but `chat=False` was given")
        return messages

    def _encode(self, prompt: Prompt, messages: Messages | None) -> list[int]:
        job, tags = self._job, self._tags
        if prompt.token_ids is not None:
            return self._tokenizer.embedded(list(prompt.token_ids))
        if messages is None:
            tokens = self._tokenizer.encode(prompt.text or "", self._context)
        else:
            off = ("", "") if tags is None else (tags.begin, tags.end)
            try:
                tokens = self._tokenizer.encode_chat(
                    messages,
                    self._context,
                    tools=job.tools if prompt.tools is None else prompt.tools,
                    args={**(job.template_args or {}), **(prompt.template_args or {})},
                    without_thinking=off if job.thinking == "off" else None,
                )
            except UserError as error:
                raise UserError(f"{prompt.place}: {error}") from None
        if not tokens:
            raise UserError(f"{prompt.place}: the prompt has no tokens")
        return tokens


def chat_of(prompt: Prompt, job: Job) -> Messages | None:
    """Return the messages that the chat template renders for a prompt; None if it is not used."""
    messages = prompt.messages
    if messages is None and job.chats and prompt.text is not None:
        messages = [{"role": "user", "content": prompt.text}]
    if messages and job.system is not None and messages[0]["role"] not in SYSTEM_ROLES:
        messages = [{"role": "system", "content": job.system}, *messages]
    return messages


def with_echo(completion: Completion, prompt: Prompt, job: Job) -> Completion:
    """Return a Completion with its prompt, if the job has `echo`."""
    if not job.echo:
        return completion
    ids = completion.prompt_token_ids if prompt.token_ids is None else list(prompt.token_ids)
    messages = chat_of(prompt, job)
    echoed = None if messages is None else [dict(one) for one in messages]
    return replace(completion, prompt=prompt.text, messages=echoed, prompt_token_ids=ids)


_NO_ENTRIES = numpy.zeros((0, 1), dtype=numpy.int64)
_NOT_FINITE = (
    "the target's logits for token {} are not finite: its weights are broken, or its values are "
    "too large for the dtype (bf16 and fp32 have a larger range than fp16)"
)


_FORBIDDEN = (
    "no token is left for token {}: `sampling.allowed_token_ids`, `sampling.bad_words` and the "
    "grammar together forbid all tokens"
)


def _stops_of(job: Job) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop texts and the stop ids of a job."""
    return tuple(job.sampling.stop), tuple(job.sampling.stop_token_ids)


_MOST_RULES = 256  # kept of the rules below; prompts may have stop texts of their own


class EndRule:
    """What ends the samples of a prompt, besides its limit.

    Args:
        eos: The model's end-of-sequence ids.
        stops: Stop texts.
        stop_ids: Other ids that end a sample (`ending_ids`).
    """

    def __init__(self, eos: Collection[int], stops: Sequence[str], stop_ids: Collection[int] = ()):
        self.eos, self._stops = frozenset(eos), stops
        self.stop_ids = frozenset(stop_ids) - self.eos
        self.tokens: StopTokens | None = None  # made for the first prompt

    def detector(self, text: Continuation) -> StopDetector | None:
        """Make a stop detector for one sample of a prompt; None if there are no stop texts."""
        if not self._stops:
            return None
        if self.tokens is None:
            self.tokens = StopTokens(text, self._stops)
        return StopDetector(text, self._stops, self.tokens)


def suspects(rules: Iterable[EndRule], host_state: HostState) -> list[int]:
    """Return the indices of live rows that may have ended in the last round.

    It takes a few operations on the round's tokens. `rules`: those of all live rows.
    """
    places, block, counts = host_state.news
    ends = numpy.zeros(block.shape, dtype=bool)
    rules = tuple(rules)
    for id_ in {id_ for rule in rules for id_ in rule.eos | rule.stop_ids}:
        ends |= block == id_
    for rule in rules:
        if rule.tokens is not None:
            ends |= rule.tokens.among(block)
    ends &= numpy.arange(block.shape[1]) < counts[:, None]
    of_row = host_state.numbers[places]
    full = of_row[:, LENGTH] - of_row[:, PROMPT] >= of_row[:, LIMIT]
    found: list[int] = places[ends.any(1) | full | (of_row[:, BROKEN] >= 0)].tolist()
    return found


class Ending(NamedTuple):
    """The finish reason of a sample, the text before a stop text and that stop text, if it ended
    there, and the error, if there is one, with {} for the number of its token."""

    reason: str
    text: str | None = None
    stop: str = ""
    error: str | None = None


@dataclass(slots=True, eq=False)
class Sample:
    """The sample of a live row.

    Args:
        thinking: Its thinking part; None if it is not looked for.
        visible: Its text that was shown; None if its request wants whole samples.
        seen: The number of generated tokens already checked for ends.
        searched: The number of generated tokens that the stop detector has passed.
    """

    task: Task
    row: Row
    rule: EndRule
    stops: StopDetector | None
    thinking: Thinking | None = None
    visible: VisibleText | None = None
    seen: int = 0
    searched: int = 0

    def new_text(self) -> str:
        """Return its text that may be shown and is new."""
        assert self.visible is not None
        if self.row.generated == self.visible.tokens:
            return ""
        tokens = self.row.generated_tokens
        self.visible.tokens = len(tokens)
        ending = Ending("length")
        so_far = FinishedSample(self.task, 0, self.row, ending, 0.0, self.thinking)
        return self.visible.new(so_far.parts(list(tokens))[0])

    def check_end(self) -> Ending | None:
        """Truncate a finished row to its sample and return the ending; None if it has not ended.

        The token that ends the sample is kept: the end-of-sequence token, a special token that is
        a stop text, or the token that completes a stop text.
        """
        row, eos, stop_ids = self.row, self.rule.eos, self.rule.stop_ids
        numbers, new = row.numbers(), row.since(self.seen)
        if row.matcher is not None and row.matcher.fault is not None:
            row.cut(row.matcher.seen)  # the tokens of this round follow no grammar
            return Ending("error", error=row.matcher.fault)
        limit, broken = numbers[LIMIT], numbers[BROKEN]
        sound, fault = len(new), _NOT_FINITE
        if broken >= 0:
            sound = broken - self.seen
            fault = _FORBIDDEN if row.log_probabilities[broken] == -math.inf else _NOT_FINITE
        keep, reason = min(sound, limit - self.seen), None if broken < 0 else "error"
        if self.seen + keep == limit:
            reason = "length"
        end = next((i for i, token in enumerate(new[:keep]) if token in eos), None)
        if end is not None:
            keep, reason = end + 1, "eos"
        first = self._answer_from(self.seen + keep)
        places = range(max(first - self.seen, 0), keep)
        end = next((i for i in places if new[i] in stop_ids and new[i] not in eos), None)
        if end is not None:
            keep, reason = end + 1, "stop"
        if self.stops is not None and first < self.seen + keep:
            found = self.stops.feed(row.since(self.searched)[: self.seen + keep - self.searched])
            self.searched = self.seen + keep
            if found is not None:
                row.cut(first + found.tokens)
                return Ending("stop", found.text, found.stop)
        if keep < len(new):
            row.cut(self.seen + keep)
        self.seen += keep
        error = fault if reason == "error" else None
        return None if reason is None else Ending(reason, error=error)

    def _answer_from(self, generated: int) -> int:
        """Return the number of generated tokens before the answer, in which stops count.

        It is `generated`, the number that counts, while the thinking part is open.
        """
        thinking = self.thinking
        if thinking is None:
            return 0
        thinking.feed(self.row.since(thinking.count)[: generated - thinking.count])
        if not thinking.answers:
            return generated
        if self.searched < thinking.answer:  # a new text begins there
            self.searched = thinking.answer
            before = self.row.generated_tokens[: thinking.answer]
            self.stops = self.rule.detector(self.task.text.after(before))
        return thinking.answer


class FinishedSample(NamedTuple):
    """A finished sample before its Completion is made.

    `row` is None if it has no tokens; `now` is when it ended, in seconds of the loop's clock.
    `shown` characters of its text were shown before.
    """

    task: Task
    sample: int
    row: Row | None
    ending: Ending
    now: float
    thinking: Thinking | None = None
    shown: int = 0

    def parts(self, tokens: list[int]) -> tuple[str, str | None, int]:
        """Return the text, the thinking part, and the number of its tokens (see Thinking.end)."""
        thinking, task = self.thinking, self.task
        if thinking is not None:
            thinking.feed(tokens[thinking.count :])
        if thinking is None or not (thinking.end or thinking.is_open):
            return self._text(tokens, task.text), None, 0
        reasoning, after = thinking.split(tokens, task.text)
        end = len(tokens) if thinking.end is None else thinking.end
        answer = self._text(tokens[end:], task.text.after(tokens[:end])) if thinking.end else ""
        return (after + answer).lstrip(NEWLINES), reasoning, end

    def _text(self, tokens: list[int], text: Continuation) -> str:
        """Return the text of the tokens, without or with the stop that ended it."""
        ending, include_stop = self.ending, self.task.job.sampling.include_stop
        if ending.text is not None:
            return ending.text + ending.stop if include_stop else ending.text
        if ending.reason == "stop":
            return text.before_last(tokens, include=include_stop)
        return text.decode(tokens)

    def completions(self) -> list[Completion]:
        """Make its Completion, or those of the samples that are copies of it."""
        drawn, copies = self._completion(), self.task.copies
        found = [drawn]
        if copies is not None:
            found = [drawn if sample == 0 else drawn.copied(sample) for sample in copies]
        return [with_echo(one, self.task.prompt, self.task.job) for one in found]

    def _completion(self) -> Completion:
        task, row, ending = self.task, self.row, self.ending
        sampling, ids = task.job.sampling, task.job.token_ids
        top, scored = sampling.logprobs, task.scores if self.sample == 0 else None
        tokens, scores = ([], []) if row is None else (row.generated_tokens, row.log_probabilities)
        text, reasoning, thought = self.parts(list(tokens))
        answer = scores[thought:]
        total = math.fsum(answer)
        entries = _NO_ENTRIES if row is None else row.entries()
        return Completion(
            id=task.prompt.id,
            sample=self.sample,
            text=text,
            finish_reason=ending.reason,
            tokens=len(scores),
            mean_logprob=total / len(answer) if answer else None,
            sum_logprob=total if answer else None,
            seconds=self.now - task.began,
            rounds=row.rounds if row else 0,
            drafted=row.drafted if row else 0,
            accepted=row.accepted if row else 0,
            seed=sampling.seed,
            prompt_tokens=len(task.tokens),
            meta=task.prompt.meta,
            token_ids=list(tokens) if ids or top is not None else None,
            prompt_token_ids=None if scored is None else list(task.tokens),
            prompt_logprobs=None if scored is None else [None, *rounded(scored[0])],
            prompt_top_logprobs=[None, *paired(scored[1])]
            if scored is not None and sampling.prompt_logprobs
            else None,
            reasoning=reasoning,
            reasoning_tokens=None if reasoning is None else thought,
            error=ending.error and ending.error.replace("{}", str(len(scores) + 1)),
            **reported(top, scores, entries, processed=sampling.logprobs_of == "processed"),
        )


class Conductor:
    """Admits prompts of requests to the rows of a loop, and takes finished rows.

    Requests share the batch, and their prompts are taken in turn. Under maximal coupling samples
    depend on the rows beside them, so there one request runs at a time, each with a fresh
    controller. After a failure, `stop` and `resume` let the work continue on another loop.

    Args:
        loop: An empty loop; None if `resume` gives it.
        context: The target's context, in tokens.
        eos_ids: The model's end-of-sequence ids.
        stop_ids: Other ids that end the job's samples (`ending_ids`).
        count: See `run`.
        limit, tags: See RequestReader.
        on_round: Called after every round; `capacity` of its result is the rows of the batch.
        on_results: Called when requests have got results or ended.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        loop: Loop | None = None,
        *,
        context: int,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        count: int | None = None,
        limit: int | None = None,
        tags: Tags | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
        on_results: Callable[[], None] | None = None,
    ):
        self._job, self._on_round, self._count = job, on_round, count
        self._on_results = on_results
        self._limit = job.sampling.max_new_tokens if limit is None else limit
        self._tokenizer, self._eos, self._context = tokenizer, eos_ids, context
        self._tags = tags
        rule = EndRule(eos_ids, job.sampling.stop, stop_ids)
        self._rules = {_stops_of(job): rule}  # by what ends a sample
        # With a budget, prompts run one at a time unless a batch size is given. Under maximal
        # coupling they always do, each with a fresh controller. Otherwise the clock would change
        # the draft lengths of later prompts, and with them their samples.
        self._maximal = job.speculation.coupling == "maximal"
        self._alone = job.budget is not None and (job.batch_size == "auto" or self._maximal)
        self._fresh: DraftLength | None = None  # a controller that has learnt nothing
        self._used = False  # whether the controller may have learnt something
        self._arrivals = deque[Request | Call]()  # not admitted yet
        self._requests = dict[Request, RequestReader]()  # admitted, and not finished
        self._tasks: dict[Task, None] = {}  # in progress, oldest first
        self._stopped = deque[Task]()  # in progress when the loop was left
        self.reading = False  # a prompt is being read, and an error would lose it
        self._queue: deque[Task] = deque()  # tasks with samples that wait for a row
        self._waiting = 0  # the number of samples that wait
        self._crowded = False  # a row was preempted, and none has ended since
        self._live: dict[Row, Sample] = {}
        self._ended_rows: list[int] = []  # indices of ended rows that are still in the batch
        # finished, and not delivered yet
        self._finished_queue = deque[FinishedSample | tuple[Request, Completion]]()
        self._forecast = Forecast(0)
        if loop is not None:
            self.resume(loop)

    def run(
        self,
        prompts: Iterator[Prompt | None],
        done: Container[tuple[str, int]],
        *,
        redraws: bool = False,
    ) -> Iterator[Completion]:
        """Yield every sample that is not in `done`, in the order in which they end.

        Completions are taken by the caller while the device runs the next round. An exception or
        interruption is raised after the finished samples. After `stop` and `resume`, a second call
        with the same prompts continues.

        Args:
            prompts, done, redraws: See Request.
        """
        admitted = (one for one in self._requests if one.prompts is prompts)
        request = next(admitted, None)
        if request is None:
            request = Request(self._job, prompts, done, redraws=redraws, count=self._count)
            self.add(request)
        try:
            yield from self.results(request, self.step)
        except GeneratorExit:
            self.cancel(request)
            raise

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

    def add(self, request: Request | Call) -> None:
        """Let a request begin as soon as it can share the batch, or call a function as soon as no
        request is in progress. Later ones do not overtake it."""
        self._arrivals.append(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._requests or self._arrivals or self._ended_rows)

    @property
    def waits(self) -> bool:
        """Whether nothing can be done before a request has a prompt that is ready."""
        asked = (one for one in self._requests if not one.ended)
        return not self._tasks and not self._stopped and not self._ended_rows and any(asked)

    def step(self) -> None:
        """Finish the round that was launched, and launch the next one.

        What has finished is delivered to the requests while the device runs the next round.
        """
        if self._live:
            self._round()
            self._collect()
        self._admit()
        self._swap_rows()  # before new prompts, to free the space of finished ones
        self._take()
        self._swap_rows()
        self._expire()
        self._grow()
        if self._live:
            self.loop.launch(self._soonest(), pending_work=self._pending_work())
        self.deliver()

    def cancel(self, request: Request) -> None:
        """End a request. Its rows leave the batch; those of others are not changed."""
        request.cancelled = True
        if request in self._arrivals:
            self._arrivals.remove(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget a request, with its samples in progress."""
        for row, sample in list(self._live.items()):
            if sample.task.owner is request:
                self._ended_rows.append(row.place)
                del self._live[row]
                sample.task.live -= 1
        for task in [task for task in self._tasks if task.owner is request]:
            if task in self._queue:
                self._queue.remove(task)
                self._waiting -= len(task.waiting)
            task.waiting.clear()
            self._forget(task)
        self._stopped = deque(task for task in self._stopped if task.owner is not request)
        self._requests.pop(request, None)
        if not self._requests and self._ended_rows:
            self._swap_rows()

    def _admit(self) -> None:
        """Admit requests that can share the batch, and make calls that need it alone."""
        while self._arrivals and not self._requests:
            first = self._arrivals[0]
            if isinstance(first, Request):
                self._begin_request(first)
            else:
                first.run()
                self._tell()
            self._arrivals.popleft()
        while self._arrivals and not self._maximal:
            following = self._arrivals[0]
            if isinstance(following, Call):
                return
            self._begin_request(following)
            self._arrivals.popleft()

    def _begin_request(self, request: Request) -> None:
        if not self._requests:
            self._forecast = Forecast(0)
            if self._maximal and self._used:
                self._restart()
        self._used = True
        usual = 1 if request.job.draws_one else request.job.n
        self._forecast.expect(None if request.count is None else request.count * usual)
        self._requests[request] = RequestReader(
            request.job, self._tokenizer, context=self._context, limit=self._limit, tags=self._tags
        )

    def _restart(self) -> None:
        """Use a controller that has learnt nothing, and forget what the drafter has learnt."""
        assert self._fresh is not None
        self.loop.restart(copy.deepcopy(self._fresh))

    def stop(self) -> None:
        """Leave the loop, which may hold much memory. Samples in progress will be drawn again."""
        for row, sample in self._live.items():
            sample.task.waiting.append(row.sample)
        for task in self._tasks:
            task.waiting = deque(sorted(task.waiting))
            task.live, task.started = 0, False
        self._stopped.extendleft(reversed(self._tasks))
        self._tasks, self._live, self._ended_rows = {}, {}, []
        self._queue.clear()
        self._waiting, self._crowded = 0, False
        self.__dict__.pop("loop", None)  # it may have been left before

    def resume(self, loop: Loop) -> None:
        """Continue on an empty loop. Prompts in progress are opened again, with new clocks."""
        self.loop = loop
        if self._maximal and self._fresh is None:
            self._fresh = copy.deepcopy(loop.lengths)

    def _take(self) -> None:
        """Open prompts for free rows.

        Without a budget, further prompts that fit into the same prefill pass are opened early, up
        to twice the batch.
        """
        tokens, last, most = 0, 0, PASS if self._job.budget is None else 0
        asked = deque(one for one in self._requests if not one.ended)
        while (self._stopped or asked) and self._wants_prompt(more=0 < tokens <= most - last):
            if self._stopped:
                task = self._stopped.popleft()
                task.restart(self.loop.clock.now())
                last = self._open(task)
            else:
                request = asked.popleft()  # in turn
                prompt = self._next_prompt(request)
                if prompt is None:
                    continue
                asked.append(request)
                last = self._begin(request, prompt)
                self.reading = False
            tokens += last

    def _next_prompt(self, request: Request) -> Prompt | None:
        """Return the next prompt of a request; None if none is ready, or after the last one."""
        self.reading = True
        try:
            for prompt in request.prompts:
                return prompt
            request.ended = True
        except Exception as error:  # of the caller's iterator
            self.deliver()
            request.error = error
            self._drop(request)
        self.reading = False
        return None

    def _wants_prompt(self, *, more: bool) -> bool:
        room = self._room() + (self.loop.batch.capacity if more else 0)
        return self._waiting < room and not (self._alone and self._tasks)

    def _begin(self, request: Request, prompt: Prompt) -> int:
        """Tokenise and open a prompt; return its number of tokens, 0 if it cannot be run."""
        job, reader = request.job, self._requests[request]
        usual = 1 if job.draws_one else job.n
        try:
            job = reader.job_of(prompt)
            waiting = _waiting_of(request, prompt, job)
            self._forecast.begin(1 if job.draws_one else job.n, expected=usual)
            if not waiting:
                return 0
            now, copies = self.loop.clock.now(), job.draws_one
            task = reader.take(prompt, waiting, now=now, copies=copies)
            self._rule_of(job)
            self._matcher_of(task)
        except UserError as error:
            seed = job.sampling.seed
            failed = Completion.failed(prompt.id, str(error), seed=seed, meta=prompt.meta)
            self._finished_queue.append((request, with_echo(failed, prompt, job)))
            return 0
        task.request, task.key = request, self._key_of(prompt.id)
        request.left += 1
        return self._open(task)

    def _key_of(self, id_: str) -> str:
        """Return a key for a prompt in the loop; two requests may have the same id."""
        open_ = {task.key for task in (*self._tasks, *self._stopped)}
        keys = (f"{id_}\0{number}" for number in itertools.count())
        return id_ if id_ not in open_ else next(key for key in keys if key not in open_)

    def _rule_of(self, job: Job) -> EndRule:
        """Return what ends the samples of a job. UserError if a stop cannot occur."""
        stops = _stops_of(job)
        if stops not in self._rules:
            if len(self._rules) >= _MOST_RULES:  # other prompts no longer need most of them
                used = {sample.rule for sample in self._live.values()}
                self._rules = {key: rule for key, rule in self._rules.items() if rule in used}
            ids = ending_ids(self._tokenizer, *stops, vocab=self._tokenizer.rows or sys.maxsize)
            self._rules[stops] = EndRule(self._eos, stops[0], ids)
        return self._rules[stops]

    def _open(self, task: Task) -> int:
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
            self._queue.append(task)
            self._waiting += len(task.waiting)
        else:
            self._leave_out(task)
            task.waiting.clear()
            del self._tasks[task]
            task.owner.left -= 1
        return len(task.tokens)

    def _swap_rows(self) -> None:
        """Give free and ended rows to waiting samples, oldest prompt first."""
        rows, room = list[Row](), self._room() if self._queue else 0
        while self._queue and len(rows) < room:
            task = self._queue[0]
            count = min(len(task.waiting), room - len(rows))
            rows += (self._row(task, task.waiting.popleft()) for _ in range(count))
            if not task.waiting:
                self._queue.popleft()
        if rows or self._ended_rows:
            self.loop.swap_rows(self._ended_rows, rows)
        self._waiting -= len(rows)
        self._ended_rows = []

    def _room(self) -> int:
        """The number of rows that can be admitted; 0 after a preemption until a row has ended."""
        batch, limit = self.loop.batch, self._limit
        if self._crowded and self._live:
            return 0
        generated = int(batch.generated().sum())
        return batch.room(self._forecast.becomes(limit, generated), ended=self._ended_rows)

    def _grow(self) -> None:
        """Grow the rows' cache. Preempted samples wait again, and are drawn from the start."""
        for row in self.loop.grow():
            sample = self._live.pop(row)
            task = sample.task
            if not task.waiting:
                self._queue.appendleft(task)
            task.waiting.appendleft(row.sample)
            task.live -= 1
            self._waiting += 1
            self._crowded = True

    def _matcher_of(self, task: Task) -> Matcher | None:
        """Return the state of a new sample in its grammar, which begins after the thinking part.
        None if any token may come at any place. UserError if the grammar does not fit."""
        sampling, thinking = task.job.sampling, task.thinking
        structure, limit = sampling.structure, sampling.max_thinking_tokens
        if thinking is not None and structure is not None:
            may_think = thinking.is_open or thinking.begin_id is not None
            thinking = thinking if may_think and task.job.thinking != "off" else None
        if structure is None and (thinking is None or limit is None):
            return None
        vocab = self.loop.batch.processors.vocab
        grammars = grammars_of(self._tokenizer, vocab, frozenset(self._eos))
        return grammars.matcher(structure, None if thinking is None else thinking.copy())

    def _row(self, task: Task, sample: int) -> Row:
        row, rule = task.row(sample), self._rule_of(task.job)
        row.matcher = self._matcher_of(task)
        thinking = None
        if task.thinking is not None and task.job.thinking != "keep":
            thinking = task.thinking.copy()
        copied = task.copies is not None and 0 not in task.copies
        visible = None
        if task.owner.streams and not copied:
            begin = () if thinking is None or self._tags is None else (self._tags.begin,)
            visible = VisibleText((*task.job.sampling.stop, *begin))
        self._live[row] = Sample(task, row, rule, rule.detector(task.text), thinking, visible)
        task.live += 1
        return row

    def _pending_work(self) -> PendingWork:
        waiting, typical = self._waiting, math.inf
        if not self._maximal or self._job.budget is None:
            ended = not self._arrivals and all(one.ended for one in self._requests)
            typical = self._forecast.length(float(self.loop.batch.generated().mean()))
            waiting = self._forecast.waiting(waiting, ended=ended)
        return PendingWork(waiting * min(typical, self._limit), typical)

    def _round(self) -> None:
        done = self.loop.round(self._soonest(), pending_work=self._pending_work(), ahead=True)
        if self._job.budget is not None and not all(task.started for task in self._tasks):
            for row, sample in self._live.items():
                sample.task.started |= row.rounds > 0
        if self._on_round is not None:
            self._on_round(done._replace(capacity=self.loop.batch.capacity))

    def _soonest(self) -> float | None:
        """The earliest deadline, before which the next round should end; None without one."""
        deadlines = (task.deadline for task in self._tasks if task.deadline is not None)
        return min(deadlines, default=None)

    def _expire(self) -> None:
        """End the samples of prompts whose deadline has passed or would pass in any round.

        The first round of a prompt always runs, because without it a wrong prediction could never
        be corrected. A round in flight is collected first: it was launched to end in time.
        """
        deadlines = [task.deadline for task in self._tasks if task.deadline is not None]
        if not deadlines or self.loop.under_way:
            return
        now, hosts = self.loop.clock.now(), self.loop.batch.hosts
        soonest = now + (self.loop.shortest(min(deadlines)) if self._live else 0.0)
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
        if self._ended_rows:
            self.loop.retire(*self._ended_rows)
            self._ended_rows = []

    def _collect(self) -> None:
        """Truncate and end the samples that the last round finished."""
        hosts, rules = self.loop.batch.hosts, set(self._rules.values())
        if len(rules) > 1:
            rules = {sample.rule for sample in self._live.values()}
        places = suspects(rules, self.loop.batch.host_state)
        if self.loop.batch.masked:
            places += [row.place for row in hosts if row.matcher and row.matcher.fault]
        for place in dict.fromkeys(places):
            sample = self._live.get(hosts[place])  # None if its request was cancelled
            ending = None if sample is None else sample.check_end()
            if sample is not None and ending is not None:
                self._end(sample, ending)

    def _end(self, sample: Sample, ending: Ending) -> None:
        """Mark a sample as finished; its row leaves the batch with all that end in this round."""
        row, task = sample.row, sample.task
        self._ended_rows.append(row.place)
        self._crowded = False
        self._forecast.end(row.generated)
        del self._live[row]
        task.live -= 1
        if row.sample == 0 and task.job.sampling.prompt_logprobs is not None:
            task.scores = self.loop.target.prompt_logprobs(task.key)
        self._forget(task)
        now = self.loop.clock.now()
        shown = 0 if sample.visible is None else sample.visible.shown
        done = FinishedSample(task, row.sample, row, ending, now, sample.thinking, shown)
        self._finished_queue.append(done)

    def _leave_out(self, task: Task) -> None:
        """End its waiting samples without tokens, because their time is up."""
        now = self.loop.clock.now()
        self._finished_queue += (
            FinishedSample(task, sample, None, Ending("budget"), now) for sample in task.waiting
        )

    def _forget(self, task: Task) -> None:
        """Close a prompt if all its samples are finished."""
        if not task.waiting and not task.live and task in self._tasks:
            del self._tasks[task]
            task.owner.left -= 1
            self.loop.close(task.key)

    def deliver(self) -> None:
        """Hand finished samples, in the order in which they ended, and new text to the requests."""
        queue, news = self._finished_queue, False
        while queue:
            one = queue[0]  # an interruption before popleft loses nothing
            request = one.task.owner if isinstance(one, FinishedSample) else one[0]
            if not request.cancelled:
                request.results += _results_of(one, request)
                news = True
            queue.popleft()
        for sample in self._live.values():
            if sample.visible is not None and (text := sample.new_text()):
                task = sample.task
                task.owner.results.append(Piece(task.prompt.id, sample.row.sample, text))
                news = True
        for request in [one for one in self._requests if one.ended and not one.left]:
            request.over = news = True
            del self._requests[request]
        if news:
            self._tell()

    def _tell(self) -> None:
        if self._on_results is not None:
            self._on_results()


def _waiting_of(request: Request, prompt: Prompt, job: Job) -> list[int]:
    """Return the numbers of a prompt's samples that are drawn."""
    missing = [sample for sample in range(job.n) if (prompt.id, sample) not in request.done]
    if request.redraws and (missing or job.budget is None):
        return list(range(job.n))
    return missing


def _results_of(
    one: FinishedSample | tuple[Request, Completion], request: Request
) -> list[Completion] | list[Piece]:
    """Return what a request gets when a sample is finished."""
    shown, finished = 0, list[Completion]()
    if isinstance(one, FinishedSample):
        shown, finished = one.shown, one.completions()
    else:
        finished = [one[1]]
    if not request.streams:
        return finished
    return [
        Piece(done.id, done.sample, done.text[0 if done.copy_of is not None else shown :], done)
        for done in finished
    ]
