"""Make the prompts of a bench, as token ids of unequal lengths.

Random weights get random ids. A real pair gets the prompts of a file, or built-in texts: passages
from run/profile.py, questions (chat), or texts to repeat with small changes (editing).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bass_cli.bench.settings import Settings
from bass_cli.engine.batch import Row
from bass_cli.errors import UserError
from bass_cli.io.prompts import Prompt, read_prompts
from bass_cli.io.readers import open_source
from bass_cli.run.plan import Plan
from bass_cli.run.profile import PASSAGES, joined
from bass_cli.run.sampling import row_sampling
from bass_cli.run.tasks import Task, TaskBuilder

CHAT, EDITING = "chat", "editing"  # kinds of text
QUESTIONS = (
    "Why does a bicycle stay upright? Explain it in a few sentences.",
    "Write a Python function that merges two sorted lists, and say how it works.",
    "Tell me a short story about an old lighthouse.",
    "How do I make a vegetable soup? List the steps.",
    "What should a town think about before it opens its library on Sundays?",
    "Where does rain come from?",
    "Suggest a plan for learning a language in one year.",
    "What is a bank account class in Python good for? Give an example.",
)
_EDIT = "Give this text back word for word, with spelling mistakes corrected:\n\n"
_GOLDEN = 0.6180339887498949  # multiples modulo 1 are spread evenly, for any number of them


def lengths_of(count: int, tokens: int) -> list[int]:
    """Return `count` lengths spread evenly from `tokens` to twice as many; always the same ones."""
    return [tokens + round(tokens * ((0.5 + i * _GOLDEN) % 1.0)) for i in range(count)]


def prompts_for(settings: Settings, plan: Plan | None) -> list[list[int]]:
    """Return the prompts that the largest batch needs.

    Args:
        plan: of a real pair; None for random weights.

    Raises:
        UserError: a prompt with its new tokens does not fit the model's context.
    """
    count = -(-max(settings.batch_sizes) // settings.samples_per_prompt)
    lengths = lengths_of(count, settings.prompt_tokens)
    if plan is None:
        assert settings.specs is not None
        spec = settings.specs[0]
        found = [_random_ids(i, length, spec.vocab) for i, length in enumerate(lengths)]
    else:
        spec = plan.files.target.spec
        found = _real_prompts(plan, settings.prompts, lengths)
    _check_room(max(map(len, found)), settings, spec.context)
    return found


class Text(NamedTuple):
    """Token ids of a prompt, and of a text that its answer may repeat."""

    tokens: list[int]
    reference: list[int]


def texts_for(settings: Settings, plan: Plan | None) -> dict[str, list[Text]]:
    """Return as many texts as the largest batch needs, by kind.

    The kind is "" if the settings name none, or if the model's context is too short for them.
    """
    count = -(-max(settings.batch_sizes) // settings.samples_per_prompt)
    found: dict[str, list[Text]] = {}
    try:
        for kind in settings.texts:
            assert plan is not None
            builder, chat = TaskBuilder.of(plan), plan.files.tokenizer.has_chat_template
            found[kind] = [_text(builder, kind, i, chat=chat) for i in range(count)]
            longest = max(len(text.tokens) for text in found[kind])
            _check_room(longest, settings, plan.files.target.spec.context)
    except UserError:
        found = {}
    return found or {"": [Text(tokens, []) for tokens in prompts_for(settings, plan)]}


def _text(builder: TaskBuilder, kind: str, number: int, *, chat: bool) -> Text:
    question, reference = QUESTIONS[number % len(QUESTIONS)], None
    if kind == EDITING:
        reference = PASSAGES[number % len(PASSAGES)].strip()
        question = _EDIT + reference
    messages = [{"role": "user", "content": question}] if chat else None
    text = None if chat else f"{question}\n\n"
    task = task_of(builder, Prompt("", text, messages, {}, reference, kind))
    return Text(task.tokens, task.reference)


def _check_room(longest: int, settings: Settings, context: int) -> None:
    needed = longest + settings.new_tokens + settings.longest + 1
    if needed > context:
        raise UserError(
            f"prompts, new tokens and drafts need {needed} positions, but the model's context has "
            f"{context}; give fewer `prompt_tokens` or `new_tokens`"
        )


def _real_prompts(plan: Plan, file: str | None, lengths: list[int]) -> list[list[int]]:
    if file is None:
        return [joined(plan.files.tokenizer, i, length) for i, length in enumerate(lengths)]
    builder, prompts = TaskBuilder.of(plan), read_prompts(open_source(file), limit=len(lengths))
    given = [task_of(builder, prompt).tokens for prompt in prompts]
    return [given[i % len(given)] for i in range(len(lengths))]


def rows_for(
    prompts: list[list[int]],
    count: int,
    settings: Settings,
    *,
    limit: int | None = None,
    temperature: float | None = None,
    repeat: int = 0,
    kind: str = "",
) -> list[Row]:
    """Return the first `count` rows, with the samples of a prompt side by side.

    Each repeat has its own seed.

    Args:
        limit, temperature: override those of the settings.
        kind: kind of the texts, if there are several.
    """
    sampling, samples = settings.job.sampling, settings.samples_per_prompt
    own = row_sampling(sampling, None)
    if temperature is not None:
        own = replace(own, temperature=temperature)
    return [
        Row(
            f"{kind}{i // samples}",
            i % samples,
            sampling.seed + repeat,
            list(prompts[i // samples]),
            limit or settings.new_tokens,
            own,
        )
        for i in range(count)
    ]


def _random_ids(prompt: int, length: int, vocab: int) -> list[int]:
    """Return ids without repetition that lookup could use; the same on every machine."""
    state, out = prompt + 1, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % vocab)
    return out


def task_of(builder: TaskBuilder, prompt: Prompt) -> Task:
    """Tokenise a prompt; UserError with its place if it cannot be run."""
    try:
        return builder.build(prompt, (), now=0.0)
    except UserError as error:
        reason = str(error)
        place = "" if reason.startswith(prompt.place) else f"{prompt.place}: "
        raise UserError(f"{place}{reason}") from None
