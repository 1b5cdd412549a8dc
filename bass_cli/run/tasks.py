"""Make Tasks of prompts: tokenise them, render their chats, and start their clocks.

scheduler.py gives a task's samples rows of the batch; samples.py finds where they end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bass_cli.config.job import Job
from bass_cli.config.line import SettingError
from bass_cli.engine.batch import Row
from bass_cli.engine.contracts import PromptLogprobs
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.completion_text import Continuation, Tags, Thinking, is_opened
from bass_cli.formats.tokenizer import Messages, Tokenizer
from bass_cli.io.prompts import SYSTEM_ROLES, Prompt
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
        waiting: The samples that wait for a row.
        copies: The samples that are copies of the one that is drawn; None if each is drawn.
        began: When it began, by the loop's clock.
        deadline: When it must end; None without a budget.
        thinking: The thinking part before the first token; None if it is not looked for.
        live: The number of samples that have a row.
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


_MOST_OWN = 1000  # the most different settings of prompts that are kept


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

    @classmethod
    def of(cls, plan: Plan, *, tags: Tags | None = None) -> RequestReader:
        """Return the reader of a plan's prompts."""
        context = plan.files.target.spec.context
        return cls(plan.job, plan.files.tokenizer, context=context, tags=tags)

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
            if len(self._own) >= _MOST_OWN:  # prompts may all have their own seed
                self._own.clear()
                self._samplings.clear()
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
