"""A prompt on its way into a job: its tokens, its limit, its deadline, what follows it.

Not here: files of prompts (io/prompts.py), rows and rounds (conductor.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from bass_cli.config.job import Job, Sampling
from bass_cli.engine.batch import Row
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt
from bass_cli.model.continuation import Continuation
from bass_cli.model.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Task:
    """A prompt under way: when it began, when it must end, the samples that still wait for a
    row, how many have one (`live`), and whether any has had a round. `reference`: tokens that
    drafts may be looked up in. `text`: decodes what follows the prompt. `limit`: tokens of a
    sample."""

    prompt: Prompt
    tokens: list[int]
    reference: list[int]
    text: Continuation
    limit: int
    waiting: deque[int]
    began: float
    deadline: float | None
    live: int = 0
    started: bool = False

    def row(self, sample: int, sampling: Sampling) -> Row:
        """A new row for one of its samples."""
        return Row(
            self.prompt.id,
            sample,
            sampling.seed,
            self.tokens,
            self.limit,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )


class Intake:
    """Makes Tasks of a job's prompts. `context`: the most positions the target knows."""

    def __init__(self, job: Job, tokenizer: Tokenizer, *, context: int):
        self._job, self._tokenizer, self._context = job, tokenizer, context

    def take(self, prompt: Prompt, samples: Iterable[int], *, now: float) -> Task:
        """The prompt's clock starts now; UserError if it cannot be run."""
        if prompt.fault is not None:
            raise UserError(prompt.fault)
        tokens, reference = self._encode(prompt), self._reference(prompt)
        if len(tokens) >= self._context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, the model's context {self._context}"
            )
        return Task(
            prompt,
            tokens,
            reference,
            Continuation(self._tokenizer, tokens),
            min(self._job.sampling.max_new_tokens, self._context - len(tokens)),
            deque(samples),
            now,
            None if self._job.budget is None else now + self._job.budget,
        )

    def _reference(self, prompt: Prompt) -> list[int]:
        """More than the context would take minutes to tokenise, and to index."""
        if not prompt.reference:
            return []
        try:
            return self._tokenizer.encode_part(prompt.reference, self._context)
        except UserError as error:
            raise UserError(f'field "reference": {error}') from None

    def _encode(self, prompt: Prompt) -> list[int]:
        messages = prompt.messages
        if messages is None and self._job.chat:
            messages = [{"role": "user", "content": prompt.text}]
        if messages is not None and self._job.chat is False:
            raise UserError(f"{prompt.place}: the prompt has messages, but --no-chat was given")
        tokens = (
            self._tokenizer.encode(prompt.text or "", self._context)
            if messages is None
            else self._tokenizer.encode_chat(messages, self._context)
        )
        if not tokens:
            raise UserError(f"{prompt.place}: the prompt has no tokens")
        return tokens
