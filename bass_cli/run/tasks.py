"""Tasks and their samples: tokenise prompts, render their chats and start their clocks; find where
samples end, and make Completions of those that have ended.

`rows_to_check` finds the rows that may have ended in a round, with a few operations on its tokens.
A Sample decides. Not here: which sample has which row of the batch (scheduler.py).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy

from bass_cli.config.job import Job
from bass_cli.config.line import SettingError
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import PromptLogprobs
from bass_cli.engine.host_state import BROKEN, LENGTH, LIMIT, PROMPT, HostState
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.completion_text import (
    NEWLINES,
    Continuation,
    StopDetector,
    StopTokens,
    Tags,
    Thinking,
    is_opened,
)
from bass_cli.formats.tokenizer import Messages, Tokenizer
from bass_cli.io.prompts import SYSTEM_ROLES, Prompt
from bass_cli.io.results import Completion, paired, reported, rounded
from bass_cli.run.requests import Request, VisibleText
from bass_cli.run.sampling import report_of, row_sampling

if TYPE_CHECKING:
    from bass_cli.run.plan import Plan


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
        waiting_samples: The samples that wait for a row.
        copies: The samples that are copies of the one that is drawn; None if each is drawn.
        began: When it began, by the loop's clock.
        deadline: When it must end; None without a budget.
        thinking: The thinking part before the first token; None if it is not looked for.
        num_live: The number of samples that have a row.
        started: Whether one of them has had a round.
        scores: The log-probabilities of its tokens, once sample 0 has ended, if they are wanted.
        visible: The text of streamed samples that was shown, by sample.
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
    waiting_samples: deque[int]
    copies: tuple[int, ...] | None
    began: float
    deadline: float | None
    thinking: Thinking | None = None
    num_live: int = 0
    started: bool = False
    request: Request | None = None
    key: str = ""
    scores: PromptLogprobs | None = None
    visible: dict[int, VisibleText] = field(default_factory=dict)

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
        return self.job.sampling.prompt_logprobs if 0 in self.waiting_samples else None

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


_MAX_CACHED_JOBS = 1000  # the most different settings of prompts that are kept


class TaskBuilder:
    """Makes Tasks of a job's prompts.

    Args:
        context: The target's context, in tokens.
        max_new_tokens: The most new tokens of a sample that fit into the batch. Default: the job's.
        tags: The tags of thinking parts; None if they are not looked for.
        on_note: Called once with each note to the user.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        *,
        context: int,
        max_new_tokens: int | None = None,
        tags: Tags | None = None,
        on_note: Callable[[str], None] = lambda note: None,
    ):
        self.job, self.tokenizer, self.context, self.tags = job, tokenizer, context, tags
        self._note = functools.cache(on_note)  # builders for further jobs share it
        self.max_new_tokens = (
            job.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        )
        self._job_by_settings: dict[str, Job] = {}  # by a prompt's own settings
        self._samplings: dict[int, RowSampling] = {}  # by id of a job, which is kept above

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        max_new_tokens: int | None = None,
        tags: Tags | None = None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> TaskBuilder:
        """Return the builder for a plan's prompts."""
        return cls(
            plan.job,
            plan.files.tokenizer,
            context=plan.files.target.spec.context,
            max_new_tokens=max_new_tokens,
            tags=tags,
            on_note=on_note,
        )

    def with_job(self, job: Job) -> TaskBuilder:
        """Return a builder for another job for the same model and batch."""
        return TaskBuilder(
            job,
            self.tokenizer,
            context=self.context,
            max_new_tokens=self.max_new_tokens,
            tags=self.tags,
            on_note=self._note,
        )

    def job_of(self, prompt: Prompt) -> Job:
        """Return the job with a prompt's own settings. UserError if it cannot have them."""
        if not prompt.settings:
            return self.job
        key = repr(prompt.settings)
        if key not in self._job_by_settings:
            own = prompt.own_job(self.job)
            if (tokens := own.sampling.max_new_tokens) > self.max_new_tokens:
                raise UserError(
                    f'{prompt.place}: field "max_new_tokens": {tokens} is more than the '
                    f"{self.max_new_tokens} that the batch has room for; raise "
                    "`sampling.max_new_tokens` of the job"
                )
            # Prompts may all have their own seed.
            if len(self._job_by_settings) >= _MAX_CACHED_JOBS:
                self._job_by_settings.clear()
                self._samplings.clear()
            self._job_by_settings[key] = own
        return self._job_by_settings[key]

    def _sampling_of(self, job: Job, prompt: Prompt) -> RowSampling:
        """Return how tokens of this job are sampled. UserError if the model has no such tokens."""
        if id(job) not in self._samplings:
            try:
                found = row_sampling(job.sampling, self.tokenizer)
            except SettingError as error:
                raise UserError(f'{prompt.place}: field "{error.field}": {error}') from None
            self._samplings[id(job)] = found
        return self._samplings[id(job)]

    def build(
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
        if len(tokens) >= self.context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, and the model's context is {self.context}"
            )
        return Task(
            prompt,
            job,
            tokens,
            self._sampling_of(job, prompt),
            reference,
            Continuation(self.tokenizer, tokens),
            min(job.sampling.max_new_tokens, self.context - len(tokens)),
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
        if self.tags is None and limit is not None:
            raise UserError(
                f"{prompt.place}: `sampling.max_thinking_tokens`: the model has no thinking part "
                "that bass knows"
            )
        apart = job.thinking != "keep" or limit is not None or job.sampling.structure is not None
        if self.tags is None or not apart:
            return None
        opened = is_opened(self.tags, self.tokenizer, tokens, messages or ())
        return Thinking(self.tags, self.tokenizer, opened=opened, limit=limit)

    def _reference(self, prompt: Prompt) -> list[int]:
        """Tokenise the reference, up to the context; a longer one could take minutes."""
        if not prompt.reference:
            return []
        try:
            return self.tokenizer.encode_part(prompt.reference, self.context)
        except UserError as error:
            raise UserError(f'field "reference": {error}') from None

    def _messages(self, prompt: Prompt) -> Messages | None:
        """Return the conversation of a prompt; None if it is plain text."""
        messages = chat_of(prompt, self.job)
        if messages is not None and self.job.chat is False:
            raise UserError(f"{prompt.place}: the prompt has messages, but `chat=False` was given")
        return messages

    def _encode(self, prompt: Prompt, messages: Messages | None) -> list[int]:
        job, tags = self.job, self.tags
        if prompt.token_ids is not None:
            return self.tokenizer.embedded(list(prompt.token_ids))
        if messages is None:
            text = prompt.text or ""
            tokens = self.tokenizer.encode(text, self.context)
            twice = tokens[:1] == tokens[1:2] and (first := self.tokenizer.special_start(text))
            if twice and tokens != self.tokenizer.encode_part(text, self.context):
                self._note(
                    f'prompts that begin with "{first}" have it twice, because the tokenizer adds '
                    "it too; leave it out of the text, or give messages or token ids"
                )
        else:
            off = ("", "") if tags is None else (tags.begin, tags.end)
            try:
                tokens = self.tokenizer.encode_chat(
                    messages,
                    self.context,
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


_NO_ENTRIES = numpy.zeros((0, 1), dtype=numpy.int64)
_NOT_FINITE = (
    "the target's logits for token {} are not finite: its weights are broken, or its values are "
    "too large for the dtype (bf16 and fp32 have a larger range than fp16), or with "
    "`tensor_parallel` on GPUs a process was stopped for minutes (then draw again)"
)


_FORBIDDEN = (
    "no token is left for token {}: `sampling.allowed_token_ids`, `sampling.bad_words` and the "
    "grammar together forbid all tokens"
)


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
        self.stop_tokens: StopTokens | None = None  # made for the first prompt

    def detector(self, text: Continuation, *, skipped: str = "") -> StopDetector | None:
        """Make a stop detector for one sample of a prompt; None if there are no stop texts.

        `skipped`: see StopDetector.
        """
        if not self._stops:
            return None
        if self.stop_tokens is None:
            self.stop_tokens = StopTokens(text, self._stops)
        return StopDetector(text, self._stops, self.stop_tokens, skipped=skipped)


def rows_to_check(rules: Iterable[EndRule], host_state: HostState) -> list[int]:
    """Return the indices of live rows that may have ended in the last round.

    It takes a few operations on the round's tokens. `rules`: those of all live rows.
    """
    indices, block, counts = host_state.new_tokens
    ends = numpy.zeros(block.shape, dtype=bool)
    rules = tuple(rules)
    for id_ in {id_ for rule in rules for id_ in rule.eos | rule.stop_ids}:
        ends |= block == id_
    for rule in rules:
        if rule.stop_tokens is not None:
            ends |= rule.stop_tokens.among(block)
    ends &= numpy.arange(block.shape[1]) < counts[:, None]
    of_row = host_state.numbers[indices]
    full = of_row[:, LENGTH] - of_row[:, PROMPT] >= of_row[:, LIMIT]
    found: list[int] = indices[ends.any(1) | full | (of_row[:, BROKEN] >= 0)].tolist()
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
        tokens, thinking = self.row.generated_tokens, self.thinking
        self.visible.tokens = len(tokens)
        if thinking is not None:
            thinking.feed(tokens[thinking.count :])
            if thinking.is_open:
                return ""
        ending = Ending("length")
        so_far = FinishedSample(self.task, 0, self.row, ending, 0.0, self.thinking)
        return self.visible.new(so_far.text_and_thinking(list(tokens))[0])

    def check_end(self) -> Ending | None:
        """Truncate a finished row to its sample and return the ending; None if it has not ended.

        The token that ends the sample is kept: the end-of-sequence token, a special token that is
        a stop text, or the token that completes a stop text.
        """
        row, eos, stop_ids = self.row, self.rule.eos, self.rule.stop_ids
        numbers, new, matcher = row.numbers(), row.generated_since(self.seen), row.matcher
        limit, broken = numbers[LIMIT], numbers[BROKEN]
        sound, fault = len(new), cast("str | None", None)
        if broken >= 0:
            sound = broken - self.seen
            fault = _FORBIDDEN if row.log_probabilities[broken] == -math.inf else _NOT_FINITE
        # Tokens after the fault follow no grammar. The tokens before it may end the sample: a round
        # that was launched early has followed them beyond its end.
        if matcher is not None and matcher.fault is not None and matcher.seen - self.seen <= sound:
            sound, fault = matcher.seen - self.seen, matcher.fault
        keep, reason = min(sound, limit - self.seen), None if fault is None else "error"
        if self.seen + keep == limit:
            reason = "length"
        end = next((i for i, token in enumerate(new[:keep]) if token in eos), None)
        if end is not None:
            keep, reason = end + 1, "eos"
        first = self._answer_from(self.seen + keep)
        answer = range(max(first - self.seen, 0), keep)
        end = next((i for i in answer if new[i] in stop_ids and new[i] not in eos), None)
        if end is not None:
            keep, reason = end + 1, "stop"
        if self.stops is not None and first < self.seen + keep:
            found = self.stops.feed(
                row.generated_since(self.searched)[: self.seen + keep - self.searched]
            )
            self.searched = self.seen + keep
            if found is not None:
                row.truncate(first + found.tokens)
                return Ending("stop", found.text, found.stop)
        if keep < len(new):
            row.truncate(self.seen + keep)
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
        thinking.feed(self.row.generated_since(thinking.count)[: generated - thinking.count])
        if not thinking.answers:
            return generated
        if self.searched < thinking.answer:  # a new text begins there
            self.searched = thinking.answer
            before = self.row.generated_tokens[: thinking.answer]
            self.stops = self.rule.detector(self.task.text.after(before), skipped=NEWLINES)
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

    def text_and_thinking(self, tokens: list[int]) -> tuple[str, str | None, int]:
        """Return the text, the thinking part, and the number of its tokens (see Thinking.end)."""
        thinking, task = self.thinking, self.task
        if thinking is not None:
            thinking.feed(tokens[thinking.count :])
        # some tokenizers do not call their end-of-sequence token special: it would be in the text
        shown_tokens = tokens[:-1] if self.ending.reason == "eos" else tokens
        if thinking is None or not (thinking.end or thinking.is_open):
            return self._text(shown_tokens, task.text), None, 0
        reasoning, after = thinking.split(shown_tokens, task.text)
        end = len(tokens) if thinking.end is None else thinking.end
        answer = (
            self._text(shown_tokens[end:], task.text.after(tokens[:end])) if thinking.end else ""
        )
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
        text, reasoning, num_thinking = self.text_and_thinking(list(tokens))
        answer = scores[num_thinking:]
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
            token_drafted=self._drafted() if task.job.token_drafted else None,
            prompt_token_ids=None if scored is None else list(task.tokens),
            prompt_logprobs=None if scored is None else [None, *rounded(scored[0])],
            prompt_top_logprobs=[None, *paired(scored[1])]
            if scored is not None and sampling.prompt_logprobs
            else None,
            reasoning=reasoning,
            reasoning_tokens=None if reasoning is None else num_thinking,
            error=ending.error and ending.error.replace("{}", str(len(scores) + 1)),
            **reported(top, scores, entries, processed=sampling.logprobs_of == "processed"),
        )

    def _drafted(self) -> list[int]:
        return [] if self.row is None else self.row.from_draft().astype(int).tolist()


def with_echo(completion: Completion, prompt: Prompt, job: Job) -> Completion:
    """Return a Completion with its prompt, if the job has `echo`."""
    if not job.echo:
        return completion
    ids = completion.prompt_token_ids if prompt.token_ids is None else list(prompt.token_ids)
    messages = chat_of(prompt, job)
    echoed = None if messages is None else [dict(one) for one in messages]
    return replace(completion, prompt=prompt.text, messages=echoed, prompt_token_ids=ids)
